"""Which tensors of quantised safetensors are parts of one matrix, and what block type holds it. Reads no weights.

A matrix goes by the name that it has unquantised ("model.layers.0.mlp.up_proj.weight"); quantised.py says what its parts
are called. What has no blocks that store the same numbers, as FP8, has the type F32 here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from manyhands.checkpoint.dtypes import BLOCKS, Described
from manyhands.checkpoint.partition import NGRAMS, layer_of
from manyhands.checkpoint.quantised import (
    BYTES,
    FLOAT4_GROUP,
    FLOAT8,
    INSTEAD,
    MAX_EXPERTS,
    MXFP4_BYTES,
    PAIRS,
    POWERS,
    STEP,
    TERNARY_EACH,
    WORD,
    Quantised,
    read_quantised,
)
from manyhands.errors import ModelError

TERNARY_BLOCK: Final = BLOCKS["TQ2_0"][0]
_FLOATS: Final = ("BF16", "F16", "F32")
MAX_MATRICES: Final = 1 << 19  # of a checkpoint: the largest that is known, of 2.8T parameters, has 250,000


@dataclass(frozen=True, slots=True)
class Folded:
    """A matrix that is stored in several tensors: its unquantised name, the block type that holds it, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def folded(tensors: Sequence[Described], config: Mapping[str, Any]) -> Sequence[Described]:
    """`tensors` (Described) with the parts of each quantised matrix replaced by one Folded; others as they are.

    Raises ModelError.
    """
    how = read_quantised(config)
    if how is None and (
        stray := next((tensor.name for tensor in tensors if tensor.name.endswith(".weight_scale_2")), "")
    ):
        raise ModelError(
            f"{stray} is a part of a matrix in NVFP4, but config.json has no quantization_config: put what "
            'hf_quant_config.json says there, with "quant_method": "modelopt"'
        )
    return tensors if how is None else [*_fold({tensor.name: tensor for tensor in tensors}, how)]


def _fold(by_name: Mapping[str, Described], how: Quantised) -> Iterable[Described]:
    parts: set[str] = set()
    found: list[Described] = []
    for name in by_name:
        wholes = _wholes(name, by_name, how)
        if len(found) + len(wholes) > MAX_MATRICES:
            raise ModelError(
                f"with {name} more than {MAX_MATRICES} quantised matrices are stored; at most so many are read"
            )
        for whole in wholes:
            roles = how.parts(whole)
            matrix = describe(whole, {role: by_name[part] for role, part in roles.items() if part in by_name}, how)
            found.append(matrix)
            parts.update(roles.values())
    return [*(tensor for name, tensor in by_name.items() if name not in parts), *found]


def _wholes(name: str, by_name: Mapping[str, Described], how: Quantised) -> Sequence[str]:
    """The matrices whose codes the tensor `name` holds."""
    if how.method == "mxfp4":
        if not name.endswith("_blocks"):
            return []
        path, _, matrix = name.removesuffix("_blocks").rpartition(".")
        experts = max((*by_name[name].shape[:1], 1))  # one, whose shape is refused, where there are none
        if experts > MAX_EXPERTS:
            raise ModelError(f"{name} has {experts} experts; at most {MAX_EXPERTS} are read")
        return [f"{path}.{expert}.{matrix}" for expert in range(experts)]
    if how.method == "compressed-tensors":
        if name.endswith(".weight_packed"):
            return [name.removesuffix("_packed")]
    if how.method == "bitnet":
        return [name] if is_ternary(name, by_name[name].dtype, how, has_scale=f"{name}_scale" in by_name) else []
    if "bytes" in how.parts(name):
        return [name] if name.endswith(".weight") and by_name[name].dtype in BYTES else []
    return [f"{name.removesuffix('.qweight')}.weight"] if name.endswith(".qweight") else []


def is_ternary(name: str, dtype: str, how: Quantised, *, has_scale: bool) -> bool:
    """Whether the tensor `name` is a matrix of bitnet, as all products of layers are where weights are rounded when read."""
    if how.ternary == "mean":
        return layer_of(name) is not None and name.endswith("_proj.weight")
    return name.endswith(".weight") and (dtype in BYTES or has_scale)


def describe(name: str, parts: Mapping[str, Described], how: Quantised) -> Folded:
    """The matrix `name` of the tensors `parts` (Described, by role). Raises ModelError for shapes that cannot be its own."""
    codes = parts.get("codes", parts.get("bytes"))
    if codes is None:
        raise ModelError(f"the checkpoint lacks {how.parts(name)['codes']}")
    if NGRAMS.search(name):
        raise ModelError(
            f"{name} is stored as {codes.dtype}: bf16, fp16 or fp32 is needed of a table that stays in its file"
        )
    shape, needed = codes.shape, 4 if how.method == "mxfp4" else 2
    if len(shape) != needed or 0 in shape or (needed == 4 and shape[3] != MXFP4_BYTES):
        raise ModelError(f"{codes.name} has the shape {list(shape)}, which is none of {how.method}")
    if "smooth" in parts:
        raise ModelError(f"{parts['smooth'].name} changes the arithmetic and is not read: {INSTEAD}")
    if how.method == "mxfp4":
        return Folded(name, "MXFP4", (shape[1], shape[2] * STEP))
    if how.method == "bitnet":
        return _ternary(name, codes, parts, how)
    if how.has_float4 and codes.dtype != PAIRS and ("codes" in parts or codes.dtype != FLOAT8):
        raise ModelError(f"{codes.name} is stored as {codes.dtype}; bytes of two floats of 4 bit ({PAIRS}) are needed")
    if codes.dtype == FLOAT8:
        return Folded(name, "F32", (shape[0], shape[1]))
    if how.method == "fp8":
        if codes.dtype != "I8" or "powers" not in parts or 2 * shape[1] % STEP:
            raise ModelError(
                f"{codes.name} is stored as {codes.dtype} {list(shape)}: no matrix in FP8, nor in FP4 of {STEP}"
            )
        return Folded(name, "MXFP4", (shape[0], 2 * shape[1]))
    if codes.dtype == PAIRS:
        if not how.has_float4:
            raise ModelError(f"{codes.name} is stored as {PAIRS}, as NVFP4 is, which config.json does not name")
        return _float4(name, parts, how, shape[0], 2 * shape[1])
    bits = how.bits if "codes" in parts else 8
    each = WORD // bits if "codes" in parts else 1
    if how.method == "awq":
        return _folded(name, bits, False, shape[1] * each, shape[0])
    if how.method == "gptq":
        return _folded(name, bits, how.symmetric, shape[1], shape[0] * each)
    return _folded(name, bits, "zeros" not in parts, shape[0], shape[1] * each)


def _float4(name: str, parts: Mapping[str, Described], how: Quantised, outputs: int, inputs: int) -> Folded:
    """A matrix in NVFP4 (F32 where no whole blocks hold it), or of MXFP4 as compressed-tensors stores it."""
    if how.group == FLOAT4_GROUP:
        return Folded(name, "F32" if inputs % STEP else "NVFP4_32", (outputs, inputs))
    if inputs % STEP:
        raise ModelError(f"{name} is no matrix in MXFP4: {inputs} inputs are no multiple of {STEP}")
    for role in ("zeros", "order", "global"):
        if role in parts:
            raise ModelError(f"{parts[role].name} is no part of a matrix in MXFP4 and is not read: {INSTEAD}")
    if "scales" in parts and parts["scales"].dtype not in POWERS:
        raise ModelError(f"{parts['scales'].name} is stored as {parts['scales'].dtype}; read is {' or '.join(POWERS)}")
    return Folded(name, "MXFP4", (outputs, inputs))


def _ternary(name: str, codes: Described, parts: Mapping[str, Described], how: Quantised) -> Folded:
    """A matrix of bitnet, in blocks of as many numbers as its rows have a multiple of."""
    is_mean, (outputs, inputs) = how.ternary == "mean", codes.shape
    if is_mean and (codes.dtype not in _FLOATS or "scales" in parts):
        raise ModelError(f"{name} is stored as {codes.dtype}, or has a scale; {', '.join(_FLOATS)} alone is needed")
    if not is_mean and codes.dtype != PAIRS:
        raise ModelError(
            f"{name} is stored as {codes.dtype} beside a scale; {TERNARY_EACH} outputs to a byte are needed"
        )
    if "bias" in parts:  # which transformers multiplies with the matrix's scale too
        raise ModelError(f"{parts['bias'].name} beside a matrix with a scale of autobitlinear is not read: {INSTEAD}")
    form = "F32" if inputs % STEP else "TQ2_0" if inputs % TERNARY_BLOCK == 0 else "Q4_0"
    return Folded(name, form, (outputs if is_mean else outputs * TERNARY_EACH, inputs))


def _folded(name: str, bits: int, is_symmetric: bool, outputs: int, inputs: int) -> Folded:
    return Folded(name, _form(bits, is_symmetric, inputs), (outputs, inputs))


def _form(bits: int, is_symmetric: bool, inputs: int) -> str:
    """The block type that holds codes of `bits` less a zero, which may be its own in each group."""
    if inputs % STEP or (bits == 8 and not is_symmetric):
        return "F32"
    return "Q8_0" if bits == 8 else "Q4_0" if is_symmetric else "Q4_Z"
