"""Quantised safetensors: what `quantization_config` says of how matrices are stored.

Read are AWQ (gemm), GPTQ, compressed-tensors, MXFP4 (gpt_oss, compressed-tensors), FP8, MXFP8, NVFP4 (modelopt,
compressed-tensors) and bitnet. A stored number is (code - zero) * scale, with a scale and perhaps a zero for each group of
a row's inputs; of FP8 a float of 8 bit times a scale (of deepseek_v4 its power of two, ".scale"; of MXFP8 one of 32
inputs); of MXFP4 a float of 4 bit times a power of two of 32 inputs (also deepseek_v4's experts); of NVFP4 one times a
scale in FP8 of 16 inputs and one of the matrix; of bitnet -1, 0 or 1 times a scale of the matrix. folded.py says which
tensors make such a matrix, engine/quantised.py makes blocks of dtypes.py of them that store the same numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from manyhands.errors import ModelError

Method = Literal["awq", "gptq", "compressed-tensors", "mxfp4", "fp8", "fbgemm_fp8", "modelopt", "bitnet"]
# What a matrix's scale is: stored ("times"), stored to be divided by ("over"), or the mean size of its unquantised numbers.
Ternary = Literal["", "times", "over", "mean"]
READ: Final = ("awq", "gptq", "compressed-tensors", "mxfp4", "fp8", "mxfp8", "fbgemm_fp8", "modelopt", "bitnet", "gguf")
STEP: Final = 32  # inputs of a block: a group is a multiple of it
WORD: Final = 32  # bits of the integers that codes are packed in
MAX_EXPERTS: Final = 4096
MXFP4_BYTES: Final = 16  # of the codes of a block
FLOAT8: Final = "F8_E4M3"
PAIRS: Final = "U8"  # bytes of two codes of NVFP4 or MXFP4, the low half of a byte first
TERNARY_EACH: Final = 4  # outputs in a byte of bitnet, which is U8 too: those a quarter of all outputs apart
BYTES: Final = ("I8", FLOAT8, PAIRS)  # of matrices that go by their unquantised name
POWERS: Final = (PAIRS, "F8_E8M0")  # of the powers of two of MXFP4
FLOAT4_GROUP: Final = 16  # inputs that share a scale of NVFP4

INSTEAD: Final = "take the model's checkpoint in bf16 with --dtype w8 or w4, or a GGUF file of it"
_LOSSES: Final = {
    "bitsandbytes": "its 4-bit codes (NF4, FP4) are no multiples of a scale, so integer products would change every number",
}
_FLOAT_PARTS: Final = {"fp8": ("_scale_inv", "activation_scale"), "fbgemm_fp8": ("_scale", "input_scale_ub")}
_PACKED = "pack-quantized"
_FORMS: Final = {
    "int": (_PACKED, "int-quantized", "naive-quantized"),
    "float": ("float-quantized", "naive-quantized"),
    "tensor_group": ("nvfp4-pack-quantized",),
    "group": ("mxfp4-pack-quantized",),
    "floats": ("mixed-precision",),
}
_FLOAT4_GROUPS: Final = {"tensor_group": FLOAT4_GROUP, "group": STEP}  # inputs of a scale of NVFP4 and of MXFP4
_FLOAT4_FIELDS: Final = frozenset(
    """
    actorder block_structure dynamic group_size num_bits observer observer_kwargs scale_dtype strategy symmetric type
    zp_dtype
    """.split()
)
_FLOAT4_ALGORITHMS: Final = ("NVFP4", "W4A16_NVFP4")
_ALGORITHMS: Final = (*_FLOAT4_ALGORITHMS, "FP8", "MXFP8")  # of modelopt
_MIXED: Final = "MIXED_PRECISION"


@dataclass(frozen=True, slots=True)
class Quantised:
    """How matrices are stored. `group`: inputs that share a scale, 0: a whole row, or as the tensors tell.

    `symmetric`: all zeros are in the middle of the codes. `is_next`: GPTQ's zeros are stored as they are ("gptq_v2"), not
    less 1. `tile`: outputs and inputs of a matrix in FP8 that share a scale, where it is not a whole row's or matrix's.
    `has_float4`: some matrices are in NVFP4, or with a `group` of 32 in MXFP4; which of them, and which in FP8, their
    tensors tell. `ternary`: of bitnet.
    """

    method: Method
    bits: int
    group: int = 0
    symmetric: bool = False
    is_next: bool = False
    tile: tuple[int, int] | None = None
    has_float4: bool = False
    ternary: Ternary = ""

    @property
    def is_partial(self) -> bool:
        """Whether matrices of layers are stored unquantised too, or may be: those of attention beside MXFP4 or NVFP4."""
        return self.method == "mxfp4" or self.has_float4

    def parts(self, name: str) -> dict[str, str]:
        """What the tensors of the matrix `name` are called, by their role; not all need to be there."""
        stem = name.removesuffix(".weight")
        if self.method == "mxfp4":
            path, _, matrix = stem.rpartition(".")
            if not path.rpartition(".")[2].isdecimal():  # of no expert
                return {}
            stack = f"{path.rpartition('.')[0]}.{matrix}"
            return {"codes": f"{stack}_blocks", "scales": f"{stack}_scales"}
        if self.method in _FLOAT_PARTS:
            scales, rows = _FLOAT_PARTS[self.method]
            powers = {"powers": f"{stem}.scale"} if self.method == "fp8" else {}
            return {"bytes": name, "scales": name + scales, "rows": f"{stem}.{rows}", **powers}
        if self.method == "bitnet":
            bias = {"bias": f"{stem}.bias"} if self.ternary == "times" else {}
            return {"bytes": name, "scales": f"{name}_scale", **bias}
        if self.method == "modelopt":
            parts = {"bytes": name, "scales": f"{name}_scale", "global": f"{name}_scale_2"}
            return {**parts, "rows": f"{stem}.input_scale", "smooth": f"{stem}.pre_quant_scale"}
        if self.method == "compressed-tensors":
            endings = {"scales": "_scale", "zeros": "_zero_point", "order": "_g_idx", "shape": "_shape"}
            parts = {"codes": f"{name}_packed", "bytes": name, "rows": f"{stem}.input_scale"}
            parts |= {"global": f"{name}_global_scale", "global rows": f"{stem}.input_global_scale"}
            return {**parts, **{role: name + end for role, end in endings.items()}}
        order = {"order": f"{stem}.g_idx"} if self.method == "gptq" else {}
        return {"codes": f"{stem}.qweight", "zeros": f"{stem}.qzeros", "scales": f"{stem}.scales", **order}


def read_quantised(config: Mapping[str, Any]) -> Quantised | None:
    """What a parsed config.json says; None if nothing, or that it stands for a GGUF file. Raises ModelError."""
    given = _given(config)
    method = "gguf" if given is None else given.get("quant_method")
    if given is None or method == "gguf":
        return None
    if method not in READ:
        why = _LOSSES.get(str(method), f"read are {', '.join(READ)}")
        raise _refused("quant_method", method, f"{why}: {INSTEAD}")
    if method == "mxfp4":
        return Quantised("mxfp4", 4, STEP, symmetric=True)
    if method == "fbgemm_fp8":
        return Quantised("fbgemm_fp8", 8)
    if method == "bitnet":
        return _bitnet(given, config)
    if method == "mxfp8":
        return _fp8({"weight_block_size": [1, STEP], **given})
    return {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "modelopt": _modelopt}.get(method, _compressed)(given)


def _given(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`quantization_config`. (compressed-tensors once wrote `compression_config`.)"""
    for key in ("quantization_config", "compression_config"):
        found = config.get(key)
        if isinstance(found, dict):
            return found
        if found is not None:
            raise ModelError(f"config.json: {key} is {str(found)[:60]!r}; it must be an object")
    return None


def _refused(key: str, value: object, why: str) -> ModelError:
    return ModelError(f"config.json: quantization_config.{key} is {ascii(value)[:60]}; {why}")


def _one_of(given: Mapping[str, Any], key: str, default: object, *allowed: object) -> Any:
    value = given.get(key, default)
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise _refused(key, value, f"read is {' or '.join(map(repr, allowed))}: {INSTEAD}")
    return value


def _group(given: Mapping[str, Any]) -> int:
    """0 stands for a whole row."""
    value = given.get("group_size")
    if value in (None, -1):
        return 0
    if type(value) is not int or not 0 < value < 1 << 20:
        raise _refused("group_size", value, "-1 or a whole number from 1 is needed")
    return value


def _awq(given: Mapping[str, Any]) -> Quantised:
    _one_of(given, "version", "gemm", "gemm", "GEMM")
    _one_of(given, "backend", "autoawq", "autoawq", "AUTOAWQ")
    _one_of(given, "zero_point", True, True)
    bits = _one_of(given, "bits", given.get("w_bit"), 4)
    return Quantised("awq", bits, _group({"group_size": given.get("group_size", given.get("q_group_size", -1))}))


def _gptq(given: Mapping[str, Any]) -> Quantised:
    bits = _one_of(given, "bits", None, 4, 8)
    form = _one_of(given, "checkpoint_format", "gptq", "gptq", "gptq_v2", "")
    _one_of(given, "is_marlin_format", False, False)
    if given.get("dynamic"):
        raise _refused("dynamic", given["dynamic"], f"modules with rules of their own are not read: {INSTEAD}")
    symmetric = given.get("sym", True)
    if type(symmetric) is not bool:
        raise _refused("sym", symmetric, "true or false is needed")
    return Quantised("gptq", bits, _group(given), symmetric, form == "gptq_v2")


def _fp8(given: Mapping[str, Any]) -> Quantised:
    _one_of(given, "fmt", "e4m3", "e4m3")
    return Quantised("fp8", 8, tile=_tile(given, "weight_block_size"))


def _tile(given: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    value = given.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 0 < n < 1 << 20 for n in value):
        raise _refused(key, value, "two whole numbers from 1 are needed")
    return value[0], value[1]


def _compressed(given: Mapping[str, Any]) -> Quantised:
    for key, allowed in (("transform_config", ()), ("sparsity_config", ("dense",))):
        found = given.get(key)
        if found and not (isinstance(found, dict) and found.get("format") in allowed):
            raise _refused(key, found, f"it changes the arithmetic and is not read: {INSTEAD}")
    weights = _schemes(given.get("config_groups"))
    kinds = {each.get("type", "int") for each in weights}
    bits = {each.get("num_bits", 8) for each in weights}
    if len(kinds) > 1 or (len(bits) > 1 and "int" in kinds):
        raise _refused("config_groups", sorted(bits), f"groups of different num_bits or types are not read: {INSTEAD}")
    fours = {each["strategy"] for each in weights if kinds == {"float"} and each.get("num_bits", 8) == 4}
    if len(fours) > 1:
        raise _refused("config_groups", sorted(fours), f"NVFP4 and MXFP4 beside each other are not read: {INSTEAD}")
    form = (fours or kinds).pop()
    forms = _FORMS["floats" if len(bits) > 1 else form]
    _one_of(given, "format", forms[0], *forms)
    sizes = {_FLOAT4_GROUPS.get(form, _size(each)) for each in weights}
    tiles = {tile for each in weights if (tile := _tile(each, "block_structure"))}
    tile = tiles.pop() if len(tiles) == 1 else None
    size = sizes.pop() if len(sizes) == 1 else 0
    return Quantised("compressed-tensors", min(bits), size, tile=tile, has_float4=form in _FLOAT4_GROUPS)


def _size(weights: Mapping[str, Any]) -> int:
    return _group(weights) if weights.get("strategy", "group") == "group" else 0


def _bitnet(given: Mapping[str, Any], config: Mapping[str, Any]) -> Quantised:
    """Stored packed, or as the weights that were trained, which the model rounds whenever it reads them ("online")."""
    is_divided = _one_of(given, "linear_class", "bitlinear", "bitlinear", "autobitlinear") == "bitlinear"
    is_packed = _one_of(given, "quantization_mode", "offline", "offline", "online") == "offline"
    _one_of(given, "use_rms_norm", False, False)
    if is_divided or is_packed:
        return Quantised("bitnet", 2, ternary="over" if is_divided else "times")
    if config.get("model_type") != "bitnet":
        raise _refused("quantization_mode", "online", f"which is read of the family bitnet alone: {INSTEAD}")
    if (plain := given.get("modules_to_not_convert")) not in (None, ["lm_head"]):
        raise _refused(
            "modules_to_not_convert", plain, "read is ['lm_head'] where weights are rounded when they are read"
        )
    return Quantised("bitnet", 2, ternary="mean")


def _modelopt(given: Mapping[str, Any]) -> Quantised:
    """`quantization_config`, or what hf_quant_config.json says put there."""
    inner = given.get("quantization", given)
    if not isinstance(inner, dict):
        raise _refused("quantization", inner, "an object is needed")
    is_mixed = _one_of(inner, "quant_algo", None, *_ALGORITHMS, _MIXED) == _MIXED
    schemes = _layers_of(inner) if is_mixed else [inner, *_weights_of(inner.get("config_groups"))]
    algorithms = [_one_of(each, "quant_algo", inner["quant_algo"], *_ALGORITHMS) for each in schemes]
    has_float4 = False
    for each, algorithm in zip(schemes, algorithms, strict=True):
        if algorithm in _FLOAT4_ALGORITHMS:
            has_float4, _ = True, _one_of(each, "group_size", FLOAT4_GROUP, FLOAT4_GROUP)
    tile = (1, STEP) if "MXFP8" in algorithms else None  # one scale of a whole matrix in FP8 is told by its shape
    group = FLOAT4_GROUP if has_float4 else 0
    return Quantised("modelopt", 4 if has_float4 else 8, group, tile=tile, has_float4=has_float4)


def _layers_of(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What is said of each layer, where they are stored in several ways."""
    layers = given.get("quantized_layers")
    listed = list(layers.values()) if isinstance(layers, dict) else []
    if not listed or not all(isinstance(each, dict) for each in listed):
        raise _refused("quantized_layers", layers, "an object of objects, which names the layers, is needed")
    return listed


def _schemes(groups: object) -> list[Mapping[str, Any]]:
    """How the weights of each group are stored."""
    weights = _weights_of(groups)
    if not weights:
        raise _refused("config_groups", groups, "a group with weights is needed")
    for each in weights:
        if _one_of(each, "type", "int", "int", "float") == "float":
            if _one_of(each, "num_bits", 8, 8, 4) == 4:
                _check_float4(each)
            else:
                _one_of(each, "strategy", "tensor", "tensor", "channel", "block")
            continue
        _one_of(each, "num_bits", 8, 4, 8)
        _one_of(each, "strategy", "group", "group", "channel", "tensor")
    return weights


def _check_float4(weights: Mapping[str, Any]) -> None:
    """Raises ModelError unless they are in NVFP4 or MXFP4: what else may be said of them could change their numbers."""
    _one_of(weights, "group_size", None, _FLOAT4_GROUPS[_one_of(weights, "strategy", None, *_FLOAT4_GROUPS)])
    _one_of(weights, "symmetric", True, True)
    if unknown := sorted(weights.keys() - _FLOAT4_FIELDS):
        raise _refused("config_groups", unknown, f"fields of weights that are not known: {INSTEAD}")


def _weights_of(groups: object) -> list[Mapping[str, Any]]:
    listed = list(groups.values())[:64] if isinstance(groups, dict) else []
    schemes = [each.get("weights") for each in listed if isinstance(each, dict)]
    return [each for each in schemes if isinstance(each, dict)]
