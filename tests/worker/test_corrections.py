"""Checkpoints of axk1 that lack the correction of ranks, as A.X-K1's: those of transformers, which counts it as zeros."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from manyhands.core import Span
from manyhands.engine.span import Piece
from manyhands.errors import ModelError
from manyhands.testing.tiny import make_tiny
from manyhands.worker.runner import load_ends, load_span
from tests.engine.oracle import stock_model

LAYERS, IDS = 3, [(37 * i * i + 11 * i) % 256 for i in range(40)]
CORRECTION = "mlp.gate.e_score_correction_bias"


def without(folder: Path, out: Path) -> Path:
    """A copy of a tiny checkpoint without corrections."""
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if not name.endswith(CORRECTION)},
        out / "model.safetensors",
        {"format": "pt"},
    )
    return out


def logits(folder: Path) -> np.ndarray:
    ends = load_ends(folder, "fp32", 1)
    span = load_span(folder, Span(0, LAYERS), "fp32", 1)
    rows = span.step(ends.embed(IDS).tobytes(), [Piece(span.new_cache(40), 0, 40)], 1)
    return ends.logits(rows, 40, 1)


def test_a_checkpoint_without_corrections_computes_what_transformers_computes(tmp_path: Path) -> None:
    whole = make_tiny("axk1", tmp_path / "whole", layers=LAYERS, dtype="fp32", first_k_dense_replace=0)
    bare = without(whole, tmp_path / "bare")
    with torch.inference_mode():
        theirs = stock_model(bare, experts_implementation="eager")(torch.tensor([IDS])).logits[0].numpy()
    found = logits(bare)
    assert np.abs(found - theirs).max() < 2e-5 * np.abs(theirs).max()
    assert np.abs(found - logits(whole)).max() > 1e-2 * np.abs(theirs).max()


def test_other_families_need_their_corrections(tmp_path: Path) -> None:
    bare = without(make_tiny("deepseek_v3", tmp_path / "whole", layers=LAYERS), tmp_path / "bare")
    with pytest.raises(ModelError, match=f"the checkpoint lacks model.layers.2.{CORRECTION}"):
        load_span(bare, Span(0, LAYERS), "bf16", 1)
