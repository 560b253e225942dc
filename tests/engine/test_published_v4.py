"""Checkpoints of deepseek_v4 as its publisher stores them: matrices in FP8 with powers of two of tiles, experts in MXFP4."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from manyhands.checkpoint.folder import read_config
from manyhands.checkpoint.manifest import build_manifest
from manyhands.core import Precision
from manyhands.errors import ModelError
from manyhands.place.shape import shape_of
from manyhands.testing.tiny import make_tiny
from tests.worker.pipeline import Loader, random_ids

TILE = (32, 16)
FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic"}
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FLOATS = ("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "indexer.wq_b", "s.w1", "s.w2", "s.w3")
Tensors = dict[str, torch.Tensor]


def pair(folder: Path) -> tuple[Path, Path]:
    """A checkpoint as it is published, and one of the same numbers in fp32."""
    plain, published = make_tiny("deepseek_v4", folder / "plain", layers=3, dtype="fp32"), folder / "published"
    shutil.copytree(plain, published)
    codes: Tensors = {}
    numbers: Tensors = {}
    draw = torch.Generator().manual_seed(3)
    for name, tensor in load_file(plain / "model.safetensors").items():
        codes[name] = numbers[name] = tensor
        stem = name.removesuffix(".weight")
        if ".experts." in name:
            codes[name], codes[f"{stem}.scale"], numbers[name] = in_fp4(tensor, draw)
        elif stem.endswith(FLOATS):
            codes[name], codes[f"{stem}.scale"], numbers[name] = in_fp8(tensor, draw)
    save_file(codes, published / "model.safetensors", {"format": "pt"})
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    said = json.loads((plain / "config.json").read_text())
    said |= {"expert_dtype": "fp4", "quantization_config": {**FP8, "weight_block_size": list(TILE)}}
    (published / "config.json").write_text(json.dumps(said))
    return published, plain


def powers(shape: tuple[int, int], draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Powers of two as they are stored, and as numbers."""
    stored = torch.randint(120, 127, shape, generator=draw)
    return stored.to(torch.uint8).view(torch.float8_e8m0fnu), 2.0 ** (stored - 127)


def in_fp4(tensor: torch.Tensor, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes of two neighbours each, powers of 32 inputs, numbers."""
    outputs, inputs = tensor.shape
    codes = torch.randint(0, 16, (outputs, inputs), generator=draw)
    stored, scales = powers((outputs, inputs // 32), draw)
    pairs = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    return pairs, stored, FP4[codes] * scales.repeat_interleave(32, 1)


def in_fp8(tensor: torch.Tensor, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Floats of 8 bit, powers of tiles, numbers."""
    outputs, inputs = tensor.shape
    floats = (tensor * 8).to(torch.float8_e4m3fn)
    stored, scales = powers((-(-outputs // TILE[0]), -(-inputs // TILE[1])), draw)
    scales = scales.repeat_interleave(TILE[0], 0)[:outputs].repeat_interleave(TILE[1], 1)[:, :inputs]
    return floats, stored, floats.float() * scales


def logits(folder: Path, precision: Precision) -> Any:
    return Loader(folder, precision, None).cut(0, 2, 3).run(random_ids(50, seed=1), [30, 1, 19])


def test_it_has_the_numbers_of_its_floats_and_powers(tmp_path: Path) -> None:
    """As an unquantised model of these numbers; with small weights experts are held as they are stored."""
    published, plain = pair(tmp_path)
    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    for precision in precisions:
        assert np.array_equal(logits(published, precision), logits(plain, precision))
    exact = logits(plain, "fp32")
    wrong = {kind: np.abs(logits(published, kind) - exact).mean() / np.abs(exact).mean() for kind in ("w8", "w4")}
    assert wrong["w8"] < wrong["w4"] < 1


def test_plans_count_experts_as_they_are_stored(tmp_path: Path) -> None:
    published, plain = pair(tmp_path)

    def layer(folder: Path) -> int:
        config = json.loads(read_config(folder))
        return shape_of("tiny", config, build_manifest(folder).tensors, "w8").layer_bytes[1]

    assert 0.55 < layer(published) / layer(plain) < 0.95


@pytest.mark.parametrize("damage", ["no powers", "powers of others", "inputs of no group", "no type of ours"])
def test_what_is_no_such_matrix_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    published, _ = pair(tmp_path)
    tensors, stem = load_file(published / "model.safetensors"), "layers.1.ffn.experts.2.w1"
    if damage == "no powers":
        del tensors[f"{stem}.scale"]
    elif damage == "powers of others":
        tensors[f"{stem}.scale"] = tensors[f"{stem}.scale"][:, :1].contiguous()
    elif damage == "inputs of no group":
        tensors[f"{stem}.weight"] = tensors[f"{stem}.weight"][:, :5].contiguous()
    else:
        tensors[f"{stem}.weight"] = tensors[f"{stem}.weight"].view(torch.uint8)
    save_file(tensors, published / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.ffn\.experts\.2\.w1"):
        logits(published, "fp32")
