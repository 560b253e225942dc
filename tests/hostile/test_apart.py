"""Tokenizers and chat templates of unknown people where no gateway is: a process of its own bears what they cost."""

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers

from manyhands.errors import BadRequest
from manyhands.origin.model import OriginModel
from manyhands.testing.tiny import make_tiny
from manyhands.text import apart, template
from manyhands.text.apart import SMALL_TEMPLATE, bounded, read_templates
from manyhands.text.prompt import find_template, is_template_read, learn_templates
from manyhands.text.template import MAX_KEPT, MAX_NODES, RenderBudget, compile_template, find_variables, is_read
from manyhands.text.tokenizer import load_tokenizer
from tests.hostile.test_false_models import bloating, hostile, slow

LARGE = "{{ a }}" * 1000


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """No template is kept from other tests."""
    monkeypatch.setattr(template, "_kept", {})


@pytest.mark.parametrize("change", [slow, bloating])
def test_an_origin_of_its_own_is_not_ended_by_a_tokenizer(change: Callable[[Any], None], tmp_path: Path) -> None:
    """It was, by SIGABRT: of 8,000 letters 8 GB; or it was held for ever. In a process, which must outlive it."""
    folder = hostile(make_tiny("llama", tmp_path / "tiny", layers=1), change)
    code = f"""
import resource
from pathlib import Path
from manyhands.errors import BadRequest
from manyhands.origin.model import OriginModel
from manyhands.text import apart
apart.DEADLINE_S = 1.0
model = OriginModel(Path({str(folder)!r}), "fp32", num_threads=1)
resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30))
for prompt in ("a" * 8000, [{{"role": "user", "content": "a" * 8000}}]):
    try:
        print(len(model.encode(prompt)))
    except BadRequest as error:
        print("refused:", error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    said = done.stdout.splitlines()
    assert len(said) == 2 and all(
        line.startswith("refused: this model's tokenizer cannot read the text (") for line in said
    )


def test_a_tokenizer_that_is_not_known_gives_the_same_ids(tmp_path: Path) -> None:
    def harmless(backend: Any) -> None:
        backend.normalizer = normalizers.Replace("Q", "q" * 17)

    folder = hostile(make_tiny("llama", tmp_path / "tiny", layers=1), harmless)
    tokenizer = load_tokenizer(folder)
    assert bounded(tokenizer) is not tokenizer
    assert bounded(tokenizer).encode("Quick\n\u00e9") == tokenizer.encode("Quick\n\u00e9")
    model = OriginModel(folder, "fp32", num_threads=1)
    messages = [{"role": "user", "content": "Quick"}]
    plain = load_tokenizer(make_tiny("llama", tmp_path / "plain", layers=1))
    assert bounded(plain) is plain
    assert model.encode("Quick") == tuple(tokenizer.encode("Quick"))
    assert len(model.encode(messages)) > 17
    with pytest.raises(BadRequest, match="no Unicode at character 1"):
        bounded(tokenizer).encode("a\ud800")


def test_a_large_template_is_compiled_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the event loop it took a second or two at the limits, half of it with the interpreter's lock."""
    with monkeypatch.context() as patched:
        patched.setattr(apart, "compile_code", lambda _: pytest.fail("compiled here"))
        patched.setattr(template, "compile_code", lambda _: pytest.fail("compiled here"))
        sources = [LARGE, "{{ b }}" * 1000 + "{% if %}", "{{a-b}}" * (MAX_NODES // 3 + 1)]
        read_templates(sources)
        assert all(map(is_read, sources))
        assert compile_template(LARGE).render([], {"a": "x"}, RenderBudget()) == "x" * 1000
        assert find_variables(LARGE) == {"a"} and compile_template(LARGE).is_simple
        with pytest.raises(BadRequest, match="cannot be read"):
            compile_template(sources[1])
        with pytest.raises(BadRequest, match=f"more than {MAX_NODES} names"):
            compile_template(sources[2])
    small = "{{ a }}" * (SMALL_TEMPLATE // 7)
    monkeypatch.setattr(apart, "_ask", lambda _: pytest.fail("a process for a small one"))
    read_templates([small, LARGE])
    assert not is_read(small) and compile_template(small).variables == {"a"}


def test_what_a_process_does_not_survive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_ask", lambda _: None)
    read_templates([LARGE])
    with pytest.raises(BadRequest, match="takes too much memory or time"):
        compile_template(LARGE)


def test_a_process_is_held_to_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor's time first: a template at the limits takes more than a hundredth of a second."""
    assert resource.getrlimit(resource.RLIMIT_DATA) != (apart.MEMORY_BYTES, apart.MEMORY_BYTES)
    monkeypatch.setattr(apart, "DEADLINE_S", 0.01)
    read_templates([LARGE * 15])
    with pytest.raises(BadRequest, match="takes too much memory or time"):
        compile_template(LARGE * 15)


def test_a_bounded_number_of_templates_is_kept() -> None:
    for number in range(MAX_KEPT):
        compile_template(f"{number}")
    compile_template("0")  # asked for again: the next is the one that goes
    compile_template("one more")
    assert is_read("0") and not is_read("1") and is_read("one more")
    assert len(template._kept) == MAX_KEPT


def test_a_gateway_compiles_no_template_while_it_prepares(tmp_path: Path) -> None:
    """What is not read is prepared in a process, however small."""
    from manyhands.api.openai.conversation import Conversation
    from manyhands.api.preparation.desk import NeedsProcess, PreparationDesk, Speaker
    from manyhands.api.preparation.talk import render

    tokenizer = load_tokenizer(make_tiny("llama", tmp_path / "tiny", layers=1))
    speaker = Speaker("m", tokenizer, 1024, 264, 8, "bf16", None, None, {}, has_levels=False)
    desk = PreparationDesk({"m": speaker}, 1, None, lambda _: None, is_inline=True)
    said = Conversation([{"role": "user", "content": "x"}])
    assert not is_template_read(tokenizer, has_tools=False)
    with pytest.raises(NeedsProcess):
        render(said, speaker, desk)
    learn_templates(tokenizer)
    assert render(said, speaker, desk)
    assert find_template(tokenizer, has_tools=False) is find_template(tokenizer, has_tools=True)


def test_templates_that_are_not_used_are_not_read(tmp_path: Path) -> None:
    """A config may name thousands: each was parsed for each request."""
    import json

    folder = make_tiny("llama", tmp_path / "tiny", layers=1)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    names = ["default", "tool_use", *map(str, range(1000))]
    config["chat_template"] = [{"name": name, "template": f"of {name}"} for name in names]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).chat_template == {"default": "of default", "tool_use": "of tool_use"}
