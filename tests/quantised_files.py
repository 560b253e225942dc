"""Tiny checkpoints as AWQ, GPTQ, compressed-tensors, MXFP4, FP8 and NVFP4 store them, packed here by the formats' descriptions.

The packers place each code by its bit position; what is expected of a matrix is computed beside them from codes, zeros and
scales.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from safetensors.torch import save_file

from manyhands.testing.tiny import make_tiny

Floats = NDArray[np.float32]
Parts = dict[str, NDArray[Any]]
AWQ_PLACES: Final = (0, 2, 4, 6, 1, 3, 5, 7)  # the output whose code lies in nibble 0, 1, ... of a word
E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def words(codes: NDArray[np.integer[Any]], bits: int, places: Iterable[int] | None = None) -> NDArray[np.int32]:
    """[n, codes] -> [n, words]: the code of place i of a word in its bits [i bits, (i + 1) bits)."""
    each = 32 // bits
    out = np.zeros((codes.shape[0], codes.shape[1] // each), np.uint64)
    for nibble, place in enumerate(places or range(each)):
        out |= codes[:, place::each].astype(np.uint64) << np.uint64(bits * nibble)
    return out.astype(np.uint32).view(np.int32)


class Quantised:
    """One matrix in groups: codes [outputs, inputs], zeros and fp16 scales [outputs, groups], the group of each input."""

    def __init__(
        self, weight: Floats, bits: int, group: int, *, symmetric: bool, order: bool = False, seed: int = 0
    ) -> None:
        outputs, inputs = weight.shape
        group = group or inputs
        draw = np.random.default_rng(seed + outputs * inputs)
        self.groups = np.arange(inputs) // group
        if order:
            self.groups = draw.permutation(self.groups)
        count, top = -(-inputs // group), (1 << bits) - 1
        self.codes = np.zeros((outputs, inputs), np.int64)
        self.zeros = np.full((outputs, count), (top + 1) // 2, np.int64)
        self.scales = np.zeros((outputs, count), np.float16)
        for g in range(count):
            part = weight[:, self.groups == g]
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            span = np.maximum(-low, high) * 2 if symmetric else high - low
            scale = np.maximum(span / top, 1e-3).astype(np.float16)
            if not symmetric:
                self.zeros[:, g] = np.clip(np.round(-low / scale.astype(np.float32)), 1, top)
            found = np.round(part / scale.astype(np.float32)[:, None]) + self.zeros[:, g : g + 1]
            self.codes[:, self.groups == g] = np.clip(found, 0, top)
            self.scales[:, g] = scale
        self.bits, self.middle = bits, (top + 1) // 2

    @property
    def numbers(self) -> Floats:
        """(code - zero) * scale, in double: exact."""
        return np.asarray(
            (self.codes - self.zeros[:, self.groups]) * self.scales[:, self.groups].astype(np.float64), np.float32
        )


def awq(q: Quantised) -> Parts:
    return {
        "qweight": words(q.codes.T, 4, AWQ_PLACES),
        "qzeros": words(q.zeros.T, 4, AWQ_PLACES),
        "scales": q.scales.T,
    }


def gptq(q: Quantised, *, is_next: bool = False) -> Parts:
    stored = words(q.zeros.T, q.bits).view(np.uint32)
    less = 0 if is_next else sum(1 << at for at in range(0, 32, q.bits))  # of whole words: a zero of 0 borrows
    return {
        "qweight": words(q.codes, q.bits).T,
        "qzeros": ((stored.astype(np.int64) - less) % (1 << 32)).astype(np.uint32).view(np.int32),
        "scales": q.scales.T,
        "g_idx": q.groups.astype(np.int32),
    }


def compressed(q: Quantised, *, has_zeros: bool, packed_zeros: bool = True) -> Parts:
    found: Parts = {"weight_scale": q.scales, "weight_shape": np.array(q.codes.shape, np.int64)}
    found["weight_packed"] = words(q.codes, q.bits)
    if has_zeros:
        signed = (q.zeros - q.middle).astype(np.int8)
        pad = np.pad(q.zeros, ((0, -len(q.zeros) % (32 // q.bits)), (0, 0)))
        found["weight_zero_point"] = words(pad.T, q.bits).T if packed_zeros else signed
    return found


def integers(q: Quantised) -> Parts:
    return {"weight": (q.codes - q.middle).astype(np.int8), "weight_scale": q.scales}


Pack = Callable[[Quantised], Parts]


def quantised_tiny(
    out: Path,
    config: dict[str, Any],
    pack: Pack,
    *,
    family: str = "llama",
    scale_type: torch.dtype = torch.float16,
    **sizes: Any,
) -> tuple[Path, Path]:
    """A tiny model whose layers' matrices are quantised, and the folder of the same numbers in fp32.

    sizes: of make_tiny; `bits`, `group`, `symmetric`, `order` of Quantised.
    """
    kinds = {key: sizes.pop(key) for key in ("bits", "group", "symmetric", "order") if key in sizes}
    plain = make_tiny(family, out.with_name(f"{out.name}-plain"), dtype="fp32", **sizes)
    tensors = load_file(plain / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, array in tensors.items():
        if not re.search(r"\.(?:layers|h)\.", name) or array.ndim != 2:
            stored[name] = torch.from_numpy(array).to(scale_type if array.ndim == 2 else torch.float32)
            tensors[name] = stored[name].float().numpy()
            continue
        is_turned = family == "gpt2"  # whose checkpoint has [inputs, outputs]
        q = Quantised(array.T if is_turned else array, **kinds)
        if scale_type == torch.bfloat16:
            q.scales = torch.from_numpy(q.scales).bfloat16().float().numpy().astype(np.float16)
        for part, value in pack(q).items():
            tensor = torch.from_numpy(np.array(value, order="C"))
            stored[f"{name.removesuffix('.weight')}.{part}"] = (
                tensor.to(scale_type) if tensor.dtype == torch.float16 else tensor
            )
        tensors[name] = q.numbers.T if is_turned else q.numbers
    write_tensors(plain, {name: torch.from_numpy(array) for name, array in tensors.items()})
    copy_with(plain, out, config)
    write_tensors(out, stored)
    return out, plain


def mxfp4_tiny(out: Path, **sizes: Any) -> tuple[Path, Path]:
    """A tiny gpt_oss with its experts in MXFP4, and the folder of the same numbers in fp32."""
    plain = make_tiny("gpt_oss", out.with_name(f"{out.name}-plain"), dtype="fp32", **sizes)
    tensors = load_file(plain / "model.safetensors")
    stored, draw = dict(tensors), np.random.default_rng(7)
    for name, array in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = array.shape
            blocks = draw.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
            scales = draw.integers(118, 124, blocks.shape[:-1], np.uint8)
            codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*scales.shape, 32)
            numbers = E2M1[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
            tensors[name] = np.ascontiguousarray(numbers.reshape(experts, outputs, inputs).transpose(0, 2, 1))
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    write_tensors(plain, {name: torch.from_numpy(array) for name, array in tensors.items()})
    copy_with(plain, out, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
    write_tensors(out, {name: torch.from_numpy(array) for name, array in stored.items()})
    return out, plain


def float8(weight: Floats, high: int, wide: int, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, Floats]:
    """A matrix in E4M3: its floats, a scale for each tile of `high` outputs and `wide` inputs, and the numbers in fp32."""
    outputs, inputs = weight.shape
    high, wide = high or outputs, wide or inputs
    scales = torch.zeros(-(-outputs // high), -(-inputs // wide), dtype=kind)
    codes, numbers = torch.zeros(outputs, inputs, dtype=torch.float8_e4m3fn), np.zeros_like(weight)
    for i, j in np.ndindex(*scales.shape):
        at = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
        scales[i, j] = float(np.abs(weight[at]).max() / (220 if kind == torch.float8_e8m0fnu else 440))
        codes[at] = torch.from_numpy(weight[at] / scales[i, j].float().numpy()).to(torch.float8_e4m3fn)
        numbers[at] = (codes[at].double() * scales[i, j].double()).float().numpy()
    return codes, scales, numbers


def fp8_tiny(
    out: Path, config: dict[str, Any], tile: tuple[int, int], *, family: str = "llama", **sizes: Any
) -> tuple[Path, Path]:
    """A tiny model whose layers' matrices are in FP8, and the folder of the same numbers in fp32. A tile of 0: a whole
    dimension. Scales of "fp8" are fp32, of "mxfp8" and "modelopt" powers of two in a byte, others bf16."""
    is_mx = config["quant_method"] in ("mxfp8", "modelopt")
    ending, rows = {
        "fp8": ("_scale_inv", "activation_scale"),
        "mxfp8": ("_scale_inv", "activation_scale"),
        "modelopt": ("_scale", "input_scale"),
        "fbgemm_fp8": ("_scale", "input_scale_ub"),
        "compressed-tensors": ("_scale", "input_scale"),
    }[config["quant_method"]]
    plain = make_tiny(family, out.with_name(f"{out.name}-plain"), dtype="fp32", **sizes)
    tensors = load_file(plain / "model.safetensors")
    stored = {name: torch.from_numpy(array) for name, array in tensors.items()}
    for name, array in tensors.items():
        if ".layers." in name and array.ndim == 2:
            held = torch.float8_e8m0fnu if is_mx else torch.float32 if ending == "_scale_inv" else torch.bfloat16
            codes, scales, numbers = float8(array, *tile, held)
            scales = scales.view(torch.uint8) if is_mx else scales
            stored |= {name: codes, name + ending: scales[0, 0] if tile == (0, 0) else scales}
            stored[f"{name.removesuffix('.weight')}.{rows}"] = torch.tensor(0.5)
            tensors[name] = numbers
    write_tensors(plain, {name: torch.from_numpy(array) for name, array in tensors.items()})
    copy_with(plain, out, config)
    write_tensors(out, stored)
    return out, plain


def float4(weight: Floats, *, is_divided: bool) -> tuple[dict[str, torch.Tensor], Floats]:
    """A matrix in NVFP4 by its parts' endings, as modelopt stores it or (is_divided) compressed-tensors, and its numbers."""
    groups = weight.reshape(len(weight), -1, 16)
    most = np.abs(groups).max(-1)
    whole = np.float32(448 * 6 / most.max() if is_divided else most.max() / (448 * 6))
    factor = np.float32(1) / whole if is_divided else whole
    scales = torch.from_numpy(most / 6 / factor).to(torch.float8_e4m3fn)
    by = scales.float().numpy() * factor
    codes = np.abs(groups[..., None] / np.maximum(by, 1e-30)[..., None, None] - E2M1).argmin(-1).astype(np.uint8)
    flat = codes.reshape(weight.shape)
    packed = torch.from_numpy(flat[:, ::2] | flat[:, 1::2] << 4)
    names = ("weight_packed", "weight_global_scale") if is_divided else ("weight", "weight_scale_2")
    whole_shape = (1,) if is_divided else ()
    parts = {names[0]: packed, "weight_scale": scales, names[1]: torch.tensor(float(whole)).reshape(whole_shape)}
    parts["input_global_scale" if is_divided else "input_scale"] = torch.tensor(0.5).reshape(whole_shape)
    return parts, np.asarray((E2M1[codes] * by[..., None]).reshape(weight.shape), np.float32)


MODELOPT: Final[dict[str, Any]] = {
    "config_groups": {"group_0": {"weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}}},
    "ignore": ["lm_head"],
    "quant_algo": "NVFP4",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.41.0"},
    "quant_method": "modelopt",
}
_FLOAT4_WEIGHTS: Final = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
}
PACKED_FLOAT4: Final[dict[str, Any]] = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _FLOAT4_WEIGHTS, "format": "nvfp4-pack-quantized"}},
}


def nvfp4_tiny(
    out: Path, config: dict[str, Any], *, family: str = "llama", in_fp8: str = "-", plain_in: str = "-", **sizes: Any
) -> tuple[Path, Path]:
    """A tiny model whose layers' matrices are in NVFP4, and the folder of the same numbers in fp32.

    Those with `in_fp8` in their names are in FP8, those with `plain_in` as they are, and so are routers.
    """
    is_divided = config["quant_method"] == "compressed-tensors"
    plain = make_tiny(family, out.with_name(f"{out.name}-plain"), dtype="fp32", **sizes)
    tensors = load_file(plain / "model.safetensors")
    stored = {name: torch.from_numpy(array) for name, array in tensors.items()}
    for name, array in tensors.items():
        if ".layers." not in name or array.ndim != 2 or plain_in in name or name.endswith(".gate.weight"):
            continue
        stem, is_fp8 = name.removesuffix(".weight"), in_fp8 in name
        del stored[name]
        if is_fp8:
            codes, scales, tensors[name] = float8(array, 0, 0, torch.float32)
            parts = {"weight": codes, "weight_scale": scales[0, 0], "input_scale": torch.tensor(0.5)}
        else:
            parts, tensors[name] = float4(array, is_divided=is_divided)
        stored |= {f"{stem}.{part}": tensor for part, tensor in parts.items()}
        if name.endswith((".k_proj.weight", ".v_proj.weight")):
            stored[f"{stem}.{stem[-6]}_scale"] = torch.tensor(0.5)
    write_tensors(plain, {name: torch.from_numpy(array) for name, array in tensors.items()})
    copy_with(plain, out, config)
    write_tensors(out, stored)
    return out, plain


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes them as the one file of weights of `folder`."""
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def copy_with(plain: Path, out: Path, quantisation: dict[str, Any]) -> None:
    """Makes the folder `out` of all but the weights of `plain`, with this quantization_config."""
    out.mkdir(parents=True)
    for path in plain.iterdir():
        if path.name not in ("model.safetensors", "config.json"):
            (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((plain / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
