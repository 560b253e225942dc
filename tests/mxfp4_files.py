"""Tiny checkpoints with experts in MXFP4 as compressed-tensors stores them, packed here by the format's description."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from manyhands.testing.tiny import make_tiny
from tests.quantised_files import E2M1, Floats, copy_with, float8, write_tensors

PACKED_MXFP4: Final[dict[str, Any]] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                **{"actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4},
                **{"observer": "minmax", "observer_kwargs": {}, "scale_dtype": "torch.uint8", "strategy": "group"},
                **{"symmetric": True, "type": "float", "zp_dtype": None},
            },
        }
    },
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
    ],
    "kv_cache_scheme": None,
    "quantization_status": "compressed",
}


def packed_mxfp4(codes: NDArray[np.uint8], powers: NDArray[np.uint8]) -> tuple[dict[str, torch.Tensor], Floats]:
    """A matrix of compressed-tensors in MXFP4 by its parts' endings, and its numbers.

    codes: [outputs, inputs], E2M1 from 0 to 15; powers: [outputs, inputs / 32], 2^(power - 127) of 32 inputs.
    """
    parts = {"weight_packed": torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)}
    parts |= {"weight_scale": torch.from_numpy(powers), "weight_shape": torch.tensor(codes.shape)}
    numbers = E2M1.astype(np.float64)[codes] * np.repeat(np.exp2(powers.astype(np.float64) - 127), 32, 1)
    return parts, numbers.astype(np.float32)


def packed_mxfp4_tiny(
    out: Path, config: dict[str, Any] = PACKED_MXFP4, *, family: str = "kimi_linear", in_fp8: str = "-", **sizes: Any
) -> tuple[Path, Path]:
    """A tiny model with experts in MXFP4, and the folder of the same numbers in fp32: see pack_experts."""
    plain = make_tiny(family, out.with_name(f"{out.name}-plain"), dtype="fp32", **sizes)
    pack_experts(plain, out, config, in_fp8=in_fp8)
    return out, plain


def pack_experts(plain: Path, out: Path, config: dict[str, Any] = PACKED_MXFP4, *, in_fp8: str = "-") -> None:
    """Makes `out` of `plain`, a model in fp32, with experts in MXFP4 as compressed-tensors stores them; their numbers replace
    those in `plain`.

    Other matrices are as they are; those with `in_fp8` in their names are in FP8.
    """
    tensors, draw = load_file(plain / "model.safetensors"), np.random.default_rng(11)
    stored = {name: torch.from_numpy(array) for name, array in tensors.items()}
    for name, array in tensors.items():
        if in_fp8 in name and array.ndim == 2:
            codes, scales, tensors[name] = float8(array, 0, 0, torch.float32)
            stored |= {name: codes, f"{name}_scale": scales[0, 0]}
        elif ".experts." in name:
            outputs, inputs = array.shape
            pairs = (
                draw.integers(0, 16, array.shape, np.uint8),
                draw.integers(119, 125, (outputs, inputs // 32), np.uint8),
            )
            parts, tensors[name] = packed_mxfp4(*pairs)
            del stored[name]
            stored |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
    write_tensors(plain, {name: torch.from_numpy(array) for name, array in tensors.items()})
    copy_with(plain, out, config)
    write_tensors(out, stored)
