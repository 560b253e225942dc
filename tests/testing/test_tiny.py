"""Tiny checkpoints of every family: the same bytes each time, loadable by transformers, covered by the partition."""

import hashlib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from manyhands.checkpoint.config_fields import parse_config
from manyhands.checkpoint.folder import INDEX, SINGLE, read_config, read_entries
from manyhands.checkpoint.partition import ModelFacts, ends_tensors, is_tied, needed_tensors, span_tensors
from manyhands.core import Span
from manyhands.errors import BadRequest
from manyhands.testing.tiny import FAMILIES, MIN_VOCAB, SPECIALS, make_tiny

TEXT = "Hé \n  wörld 🙂\x00\x7f  a.b , 'quoted' it 's <|eos|> \r\n\t 中文"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3"])
def test_family_is_deterministic_loads_and_is_covered(family: str, tmp_path: Path) -> None:
    one, two = (make_tiny(family, tmp_path / name, layers=4) for name in "ab")
    assert digests(one) == digests(two)
    names = [entry.name for entry in read_entries(one)]
    facts = ModelFacts.from_config(parse_config(read_config(one)))
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size, facts.context) == (4, 64, MIN_VOCAB, 1024)
    parts = [span_tensors(names, span) for span in (Span(0, 1), Span(1, 4))] + [ends_tensors(names)]
    assert sorted(name for part in parts for name in part) == sorted(names) == needed_tensors(names, 4, None, True)
    model = AutoModelForCausalLM.from_pretrained(one)
    assert model.dtype == torch.bfloat16
    assert is_tied(names) == bool(model.config.tie_word_embeddings)
    ids = torch.tensor([[72, 101, 108, 108, 111]])
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        logits = model(ids).logits.float()
    assert out.shape == (1, 9)
    assert logits.std() > 0.5
    assert logits.argmax(-1).unique().numel() > 1


def test_bytes_are_those_of_every_other_machine(folder: Path) -> None:
    """The weights are the draws of a counter-based generator, so this hash holds everywhere."""
    norm = next(entry for entry in read_entries(folder) if entry.name == "model.norm.weight")
    raw = (folder / SINGLE).read_bytes()[norm.start : norm.end]
    assert hashlib.sha256(raw).hexdigest()[:16] == "2034f79ad4efa05d"


def test_seed_and_layers_change_what_they_should(folder: Path, tmp_path: Path) -> None:
    other = make_tiny("llama", tmp_path / "other", seed=1)
    assert digests(other)[SINGLE] != digests(folder)[SINGLE]
    assert digests(other)["tokenizer.json"] == digests(folder)["tokenizer.json"]


def test_the_callers_random_state_is_untouched(tmp_path: Path) -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    make_tiny("llama", tmp_path / "x", layers=1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_shards_and_overrides(tmp_path: Path) -> None:
    out = make_tiny("qwen3", tmp_path / "x", max_shard_bytes=100_000, vocab=512, hidden=128, head_dim=16, dtype="fp32")
    assert (out / INDEX).exists() and len(list(out.glob("*.safetensors"))) > 3
    config = parse_config(read_config(out))
    assert (config["head_dim"], config["vocab_size"], config["hidden_size"]) == (16, 512, 128)
    assert {entry.dtype for entry in read_entries(out)} == {"F32"}


def test_every_text_round_trips(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    every_byte = bytes(range(128)).decode()
    ids = tokenizer(every_byte).input_ids
    assert ids == list(range(128))
    assert tokenizer.decode(ids) == every_byte
    assert tokenizer.convert_tokens_to_ids(list(SPECIALS)) == list(range(256, 256 + len(SPECIALS)))


def test_chat_template_and_special_ids(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|system|>be<|end|><|user|>hi<|end|><|assistant|>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"family": "nope"}, "family 'nope' is unknown; there are llama"),
        ({"family": "llama", "hidden": 40}, "hidden is 40"),
        ({"family": "llama", "vocab": 100}, "vocab is 100"),
        ({"family": "llama", "dtype": "w8"}, "not w8"),
    ],
)
def test_impossible_requests_are_refused(arguments: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=message):
        make_tiny(out=tmp_path / "x", **arguments)  # type: ignore[arg-type]
