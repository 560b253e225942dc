"""Tokenizers and chat templates of unknown people where no gateway is: a process of its own bears what they cost."""

import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers

import manyhands
from manyhands.errors import BadRequest
from manyhands.origin.model import OriginModel
from manyhands.testing.tiny import make_tiny
from manyhands.text import apart, template
from manyhands.text.apart import SMALL_TEMPLATE, bounded, read_templates
from manyhands.text.prompt import are_templates_read, find_template, learn_templates
from manyhands.text.render_budget import RenderBudget
from manyhands.text.template import MAX_KEPT, MAX_NODES, compile_template, find_variables, is_read
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
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    *said, peak = done.stdout.splitlines()
    assert int(peak) < apart.MEMORY_BYTES + (256 << 20), "beside what it maps"
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
    speaker = Speaker("m", tokenizer, 1024, 264, 8, "bf16", None, None, {}, level=None)
    desk = PreparationDesk({"m": speaker}, 1, None, lambda _: 0, is_inline=True)
    said = Conversation([{"role": "user", "content": "x"}])
    assert not are_templates_read(tokenizer)
    with pytest.raises(NeedsProcess):
        render(said, speaker, desk)
    learn_templates(tokenizer)
    assert render(said, speaker, desk)
    assert find_template(tokenizer, has_tools=False) is find_template(tokenizer, has_tools=True)


def test_a_gateway_runs_no_template_of_which_no_budget_holds_the_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """{{ "x" | center(900000000) }} took 900 MB of the process that serves as soon as its model was offered."""
    monkeypatch.setattr(template.ChatTemplate, "render", lambda *_: pytest.fail("run here"))
    tokenizer = load_tokenizer(make_tiny("llama", tmp_path / "tiny", layers=1))
    tokenizer.chat_template = "{{ messages }}{{ 'x' | center(900000000) }}"
    learn_templates(tokenizer)
    assert are_templates_read(tokenizer) and not find_template(tokenizer, has_tools=False).is_simple


def test_all_of_the_templates_are_kept_or_the_request_goes_to_a_process(tmp_path: Path) -> None:
    """What a render looks up in all of them (variables) would compile the other one on the event loop."""
    tokenizer = load_tokenizer(make_tiny("llama", tmp_path / "tiny", layers=1))
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    learn_templates(tokenizer)
    assert are_templates_read(tokenizer)
    del template._kept["{{ tools }}"]
    assert not are_templates_read(tokenizer)


def test_a_process_runs_nothing_out_of_the_folder_that_it_is_started_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`cd MODEL; manyhands chat .` would have run MODEL/pickle.py."""
    (tmp_path / "pickle.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(manyhands.__file__).parents[1]))  # not "."
    read_templates([LARGE])
    assert compile_template(LARGE).variables == {"a"}
    assert not Path("ran").exists()


def test_no_process_of_ours_looks_for_modules_where_it_is_started() -> None:
    """Without -P, `python -m` does so first."""
    source = "".join(path.read_text() for path in Path(manyhands.__file__).parent.rglob("*.py"))
    calls = re.findall(r"sys\.executable\b(?! -m pip install)(,\s*\"-P\",\s*\"-m\")?", source.replace("}", ""))
    assert len(calls) > 5 and all(calls), calls


def test_ctrl_c_ends_no_process_that_compiles() -> None:
    """It stops an answer of `chat`, and goes to all processes of the terminal: the template was then refused for good."""
    code = f"""
import os, signal, sys
from manyhands.text import apart
from manyhands.text.template import compile_template
signal.signal(signal.SIGINT, lambda *_: None)
plain = apart.subprocess.Popen.communicate
def communicate(*args, **more):
    os.killpg(0, signal.SIGINT)
    return plain(*args, **more)
apart.subprocess.Popen.communicate = communicate
apart.read_templates([{LARGE!r}])
print(sorted(compile_template({LARGE!r}).variables))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True)
    assert done.stdout == "['a']\n", done.stderr[-2000:]


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
