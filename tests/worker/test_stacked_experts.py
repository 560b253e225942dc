"""Experts that a checkpoint has stacked, gates above ups, as Qwen3.5's, or transposed: the same bits as one tensor for each."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from manyhands.core import Span
from manyhands.engine.span import Piece
from manyhands.testing.tiny import make_tiny
from manyhands.worker.runner import load_span

FAMILY, EXPERTS, LAYERS = "qwen3_5_moe_text", 8, 4


def stacked(folder: Path, out: Path, *, transposed: bool = False) -> Path:
    """A copy of a tiny checkpoint whose experts are stacked in all layers but the first."""
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for layer in range(1, LAYERS):
        path = f"model.layers.{layer}.mlp.experts"
        parts = [
            {part: tensors.pop(f"{path}.{expert}.{part}_proj.weight") for part in ("gate", "up", "down")}
            for expert in range(EXPERTS)
        ]
        tensors[f"{path}.gate_up_proj"] = torch.stack([torch.cat((part["gate"], part["up"])) for part in parts])
        tensors[f"{path}.down_proj"] = torch.stack([part["down"] for part in parts])
        for name in (f"{path}.gate_up_proj", f"{path}.down_proj") if transposed else ():
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, out / "model.safetensors")
    return out


def test_stacked_experts_compute_the_same(tmp_path: Path) -> None:
    each = make_tiny(FAMILY, tmp_path / "each", layers=LAYERS)
    found = []
    others = stacked(each, tmp_path / "stacked"), stacked(each, tmp_path / "transposed", transposed=True)
    for folder in (each, *others):
        span = load_span(folder, Span(0, LAYERS), "bf16", 1)
        rows = np.arange(40 * span.hidden_size, dtype=np.uint16) % 300 + 0x3E00
        found.append(span.step(rows.tobytes(), [Piece(span.new_cache(40), 0, 40)], 1))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
