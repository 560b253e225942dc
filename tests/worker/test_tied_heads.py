"""Checkpoints with a head although their config ties it: transformers uses it where it differs from the embedding."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from manyhands.checkpoint.folder import read_entries
from manyhands.checkpoint.manifest import build_manifest
from manyhands.checkpoint.split import split_model
from manyhands.core import Precision, Span
from manyhands.engine.span import EndsRunner
from manyhands.program.ops import Program
from manyhands.testing.tiny import make_tiny
from manyhands.worker import runner
from manyhands.worker.runner import describe, load_ends
from tests.worker.pipeline import Loader

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PROMPT = [(37 * i * i + 11 * i) % 256 for i in range(40)]

Change = Callable[[torch.Tensor], torch.Tensor]
OWN: dict[str, Change] = {
    "other": lambda embedding: embedding.flip(0),
    "last row": lambda embedding: torch.cat([embedding[:-1], -embedding[-1:]]),
    "copy": torch.clone,
}


def make(folder: Path, family: str, change: Change | None) -> Path:
    """A tied checkpoint, with a head of its own that `change` makes of the embedding."""
    make_tiny(family, folder, layers=2, dtype="fp32")
    tensors = load_file(folder / "model.safetensors")
    assert HEAD not in tensors
    if change is not None:
        tensors[HEAD] = change(tensors[EMBED]).contiguous()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def logits(ends: EndsRunner, rows: np.ndarray) -> np.ndarray:
    return ends.logits(rows, len(rows), 1)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("family", ["llama_tied", "gemma"])
def test_a_head_of_its_own_computes_what_transformers_computes(family: str, own: str, tmp_path: Path) -> None:
    folder = make(tmp_path, family, OWN[own])
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert is_tied == (own == "copy")
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPT]), use_cache=False).logits[0].numpy()
    ours = Loader(folder, "fp32").cut(0, 1, 2).run(PROMPT, [33, 7])
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < 2e-5


@pytest.mark.parametrize("precision", ["bf16", "w4"])
@pytest.mark.parametrize("own", OWN)
def test_nodes_with_one_end_and_with_both_agree(own: str, precision: Precision, tmp_path: Path, home: Path) -> None:
    folder = make(tmp_path / "whole", "llama_tied", OWN[own])
    manifest = build_manifest(folder)
    both = load_ends(folder, precision, 1, manifest)
    head = load_ends(folder, precision, 1, manifest, embed=False)
    parts = split_model(folder, [Span(0, 1), Span(1, 2)], tmp_path / "parts")
    assert {entry.name for entry in read_entries(parts[1])} & {EMBED, HEAD} == {HEAD}
    alone = load_ends(parts[1], precision, 1, build_manifest(parts[1]), embed=False)
    first = load_ends(parts[0], precision, 1, build_manifest(parts[0]), head=False)
    rows = both.embed(PROMPT)
    assert np.array_equal(rows, first.embed(PROMPT))
    wanted = logits(both, rows)
    assert np.array_equal(wanted, logits(head, rows)) and np.array_equal(wanted, logits(alone, rows))
    assert describe(folder, precision).arithmetic == describe(parts[1], precision).arithmetic


def test_a_copy_is_held_once_and_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [make(tmp_path / name, "llama_tied", OWN.get(name)) for name in ("plain", "copy", "last row")]
    plain, copy, other = (load_ends(folder, "bf16", 1) for folder in folders)
    rows = plain.embed(PROMPT)
    assert np.array_equal(logits(plain, rows), logits(copy, rows))
    assert not np.array_equal(logits(plain, rows), logits(other, rows))
    programs: list[Program] = []
    monkeypatch.setattr(runner, "ends_of", lambda program, *_, **__: programs.append(program))
    for folder in folders:
        load_ends(folder, "bf16", 1)
    assert [program.head.product.parts[0].weight.name for program in programs] == [EMBED, EMBED, HEAD]
