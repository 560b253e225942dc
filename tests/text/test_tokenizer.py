"""manyhands.text.tokenizer: the ids, texts and special tokens that transformers reads from the same folder, without it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, processors
from transformers import AutoTokenizer

from manyhands.errors import ModelError
from manyhands.testing.tiny import make_tiny
from manyhands.text.prompt import render_text
from manyhands.text.render_budget import RenderBudget
from manyhands.text.tokenizer import TextTokenizer, load_tokenizer
from tests.text.test_detokenize import BEGIN, END, byte_fallback, byte_level, metaspace

TEXTS = [
    "",
    "the cat",
    "  two  spaces ",
    "é🙂\u0301",
    f"{BEGIN}the{END} cat<unk>",
    "<tool>x</tool>",
    "line\nbreak\t",
    "\ud7ff\u0000",
]
DIALOGPT = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
FORM = ("lstrip", "rstrip", "normalized", "special", "single_word")
# Made anew: other tests share the cached ones and give them templates.
KINDS = {made.__name__: made.__wrapped__ for made in (byte_level, metaspace, byte_fallback)}


def rewrite(folder: Path, **changes: Any) -> None:
    """Change fields of tokenizer_config.json; None removes one."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def compare(folder: Path) -> TextTokenizer:
    """Ours, which agrees with transformers' of the same folder."""
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), (text, special)
            for skip in (True, False):
                wanted = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(ids, skip_special_tokens=skip) == wanted
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    skipped = {id: text for text, id in ours.special_ids.items()}
    assert skipped == {id: token.content for id, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.chat_template == theirs.chat_template
    return ours


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_transformers_tokenizer(kind: str, tmp_path: Path) -> None:
    KINDS[kind]().save_pretrained(tmp_path)
    compare(tmp_path)


def test_of_a_tiny_checkpoint(tmp_path: Path) -> None:
    assert "<|assistant|>" in str(compare(make_tiny("llama", tmp_path)).chat_template)


@pytest.mark.parametrize("bos", [None, True, False])
@pytest.mark.parametrize("eos", [None, True])
def test_begin_and_end_are_added_as_tokenizer_json_says(bos: bool | None, eos: bool | None, tmp_path: Path) -> None:
    """Whatever the switches of its config, which transformers does not read beside a tokenizer.json."""
    KINDS["byte_level"]().save_pretrained(tmp_path)
    backend = load_tokenizer(tmp_path).backend_tokenizer
    begin = backend.token_to_id(BEGIN)
    backend.post_processor = processors.TemplateProcessing(f"{BEGIN} $A", None, [(BEGIN, begin)])
    backend.save(str(tmp_path / "tokenizer.json"))
    rewrite(tmp_path, add_bos_token=bos, add_eos_token=eos)
    assert compare(tmp_path).encode("the")[0] == begin


def test_tokens_that_only_the_config_has_are_added(tmp_path: Path) -> None:
    KINDS["byte_level"]().save_pretrained(tmp_path)
    size = load_tokenizer(tmp_path).backend_tokenizer.get_vocab_size()
    tool = {
        "content": "<tool>",
        "special": False,
        "lstrip": True,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
    }
    special = {**tool, "content": "</tool>", "special": True}
    rewrite(
        tmp_path,
        added_tokens_decoder={str(size + 1): special, str(size): tool},
        pad_token={"__type": "AddedToken", "content": "<pad>", "special": True},
        additional_special_tokens=["<one>", "<two>"],
    )
    ours = compare(tmp_path)
    assert ours.get_added_vocab()["<tool>"] == size
    assert ours.special_tokens_map["pad_token"] == "<pad>"
    assert {"<one>", "<two>"} <= ours.special_ids.keys()


@pytest.mark.parametrize("change", FORM)
@pytest.mark.parametrize("token", ["<tool>", END])
def test_the_config_says_how_a_token_is_matched(token: str, change: str, tmp_path: Path) -> None:
    """Where it says otherwise than tokenizer.json, as transformers reads the two."""
    KINDS["byte_level"]().save_pretrained(tmp_path)
    backend = load_tokenizer(tmp_path).backend_tokenizer
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    added = backend.get_added_tokens_decoder()
    form = {name: {key: getattr(each, key) for key in FORM} | {"content": each.content} for name, each in added.items()}
    changed = form[backend.token_to_id(token)]
    changed[change] = not changed[change]
    rewrite(tmp_path, added_tokens_decoder={str(id): each for id, each in form.items()})
    ours = compare(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    for text in (f"the {token} cat", f"the{token}cat", f"  {token}\n\n{token.upper()} "):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text), skip_special_tokens=True) == theirs.decode(
            theirs.encode(text), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@pytest.mark.parametrize("normalized", [True, False])
def test_a_named_token_is_special_whatever_tokenizer_json_says(normalized: bool, tmp_path: Path) -> None:
    """An added token that tokenizer.json does not mark as special, and tokenizer_config.json calls eos_token."""
    KINDS["byte_level"]().save_pretrained(tmp_path)
    backend = load_tokenizer(tmp_path).backend_tokenizer
    backend.add_tokens([AddedToken("<tool>", normalized=normalized)])
    backend.save(str(tmp_path / "tokenizer.json"))
    rewrite(tmp_path, eos_token="<tool>")
    ours = compare(tmp_path)
    assert ours.decode(ours.encode("the<tool>"), skip_special_tokens=True) == "the"


def test_special_tokens_of_an_older_file(tmp_path: Path) -> None:
    KINDS["byte_level"]().save_pretrained(tmp_path)
    rewrite(tmp_path, bos_token=None, eos_token=None)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": BEGIN, "eos_token": {"content": END}}))
    ours = load_tokenizer(tmp_path)
    assert ours.decode([ours.bos_token_id or 0, ours.eos_token_id or 0]) == BEGIN + END


@pytest.mark.parametrize("where", ["config", "named", "file", "files", "processor"])
def test_chat_templates_wherever_they_stand(where: str, tmp_path: Path) -> None:
    KINDS["byte_level"]().save_pretrained(tmp_path)
    match where:
        case "config":
            rewrite(tmp_path, chat_template="one")
        case "named":
            named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
            rewrite(tmp_path, chat_template=named)
        case "file" | "files":
            rewrite(tmp_path, chat_template="older")
            (tmp_path / "chat_template.jinja").write_text("one")
        case "processor":
            (tmp_path / "chat_template.json").write_text('{"chat_template": "one"}')
            assert load_tokenizer(tmp_path).chat_template == "one"
            return
    if where == "files":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("two")
    several = {"default": "one", "tool_use": "two"}
    assert compare(tmp_path).chat_template == (several if where in ("named", "files") else "one")


@pytest.mark.parametrize("tokenizer_class", [None, "GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("stated", [{}, {"eos_token": "<|eos|>"}, {"bos_token": None}])
@pytest.mark.parametrize("has_it", [True, False])
def test_gpt2_has_a_token_that_begins_and_ends_where_no_file_names_one(
    tokenizer_class: str | None, stated: dict[str, str | None], has_it: bool, tmp_path: Path
) -> None:
    """As its class in transformers: an empty prompt was refused, and turns of DialoGPT's template ran into each other."""
    tokenizer = KINDS["byte_level"]()
    if has_it:
        tokenizer.backend_tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"model_max_length": 1024, "chat_template": DIALOGPT, **stated}
    config |= {} if tokenizer_class is None else {"tokenizer_class": tokenizer_class}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    ours = load_tokenizer(tmp_path)
    is_taken = has_it and tokenizer_class != "PreTrainedTokenizerFast"
    end = stated.get("eos_token", "<|endoftext|>" if is_taken else None)
    assert ours.special_tokens_map.get("eos_token") == end
    assert ("bos_token" in ours.special_tokens_map) == (is_taken and "bos_token" not in stated)
    if is_taken:
        compare(tmp_path)
        talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
        assert render_text(ours, talk, (), RenderBudget()) == f"hi{end}yo{end}"


def test_limits_of_length_in_the_file_do_not_cut_prompts(tmp_path: Path) -> None:
    KINDS["byte_level"]().save_pretrained(tmp_path)
    backend = load_tokenizer(tmp_path).backend_tokenizer
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("x" * 100)) == 100


@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken", "vocab.json"])
def test_other_vocabularies_are_refused_with_the_remedy(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=rf"only {name}: convert it once where transformers is installed"):
        load_tokenizer(tmp_path)


def test_of_biogpt_no_remedy_is_named_that_does_not_work(tmp_path: Path) -> None:
    """transformers' class writes no tokenizer.json."""
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "biogpt"}')
    with pytest.raises(ModelError, match=r"only vocab.json: transformers makes none for biogpt") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", '{"extra_special_tokens": 3}'),
        ("special_tokens_map.json", "[1]"),
        ("tokenizer.json", "\ud800".encode("utf-8", "surrogatepass")),
    ],
)
def test_damaged_files_are_one_line(name: str, content: str | bytes, tmp_path: Path) -> None:
    KINDS["byte_level"]().save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_an_oversized_file_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match=r"1099511627776 bytes; the limit is 268435456"):
        load_tokenizer(tmp_path)


def test_text_needs_no_transformers(tmp_path: Path) -> None:
    """Prompts, chats, grammars and pieces of text of a checkpoint, in a process that never loads transformers or torch."""
    make_tiny("llama", tmp_path)
    code = f"""
import importlib, sys
from pathlib import Path
import manyhands.text
for path in Path(manyhands.text.__path__[0]).glob("*.py"):
    importlib.import_module(f"manyhands.text.{{path.stem}}")
from manyhands.text.detokenize import Detokenizer
from manyhands.text.grammar import Grammars, json_grammar
from manyhands.text.generation_config import load_eos_ids
from manyhands.text.prompt import encode_prompt, render_chat
from manyhands.text.tokenizer import load_tokenizer
folder = Path({str(tmp_path)!r})
tokenizer = load_tokenizer(folder)
ids = render_chat(tokenizer, [{{"role": "user", "content": "hi"}}]) + encode_prompt(tokenizer, "hi")
eos = load_eos_ids(folder, tokenizer)
Grammars(tokenizer, 264, eos).compile(json_grammar(None))
print(len(ids), Detokenizer(tokenizer, (), (), eos, ids).feed(104).text, *{{"torch", "transformers"}} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["8", "h"]
