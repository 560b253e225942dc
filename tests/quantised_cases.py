"""The ways to store a quantised model that are read, and those of which only the numbers can be had."""

from typing import Any, NamedTuple

from tests.quantised_files import Pack, awq, compressed, gptq, integers


class Case(NamedTuple):
    """A way to store a model: its config, how its parts are packed, of what, and the block type that holds it."""

    config: dict[str, Any]
    pack: Pack
    held: str
    facts: dict[str, Any]


def facts(bits: int, group: int, *, symmetric: bool = True, order: bool = False) -> dict[str, Any]:
    """What the matrices are, as Quantised takes it."""
    return {"bits": bits, "group": group, "symmetric": symmetric, "order": order}


def scheme(bits: int, group: int, *, form: str = "pack-quantized") -> dict[str, Any]:
    """A config of compressed-tensors."""
    strategy = "group" if group else "channel"
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group or None, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
GPTQ = {"quant_method": "gptq", "desc_act": False, "sym": True, "damp_percent": 0.01, "true_sequential": True}
CASES = {
    "awq": Case({**AWQ, "group_size": 32}, awq, "Q4_Z", facts(4, 32, symmetric=False)),
    "awq 64": Case({**AWQ, "group_size": 64}, awq, "Q4_Z", facts(4, 64, symmetric=False)),
    "gptq": Case({**GPTQ, "bits": 4, "group_size": 32}, gptq, "Q4_0", facts(4, 32)),
    "gptq row": Case({**GPTQ, "bits": 4, "group_size": -1}, gptq, "Q4_0", facts(4, 0)),
    "gptq 8": Case({**GPTQ, "bits": 8, "group_size": 64}, gptq, "Q8_0", facts(8, 64)),
    "gptq zeros": Case(
        {**GPTQ, "bits": 4, "group_size": 64, "sym": False}, gptq, "Q4_Z", facts(4, 64, symmetric=False)
    ),
    "gptq v2": Case(
        {**GPTQ, "bits": 4, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"},
        lambda q: gptq(q, is_next=True),
        "Q4_Z",
        facts(4, 64, symmetric=False),
    ),
    "int4": Case(scheme(4, 32), lambda q: compressed(q, has_zeros=False), "Q4_0", facts(4, 32)),
    "int4 zeros": Case(scheme(4, 64), lambda q: compressed(q, has_zeros=True), "Q4_Z", facts(4, 64, symmetric=False)),
    "int4 byte zeros": Case(
        scheme(4, 32),
        lambda q: compressed(q, has_zeros=True, packed_zeros=False),
        "Q4_Z",
        facts(4, 32, symmetric=False),
    ),
    "int8 packed": Case(scheme(8, 64), lambda q: compressed(q, has_zeros=False), "Q8_0", facts(8, 64)),
    "act-order": Case({**GPTQ, "bits": 4, "group_size": 32, "desc_act": True}, gptq, "Q4_0", facts(4, 32, order=True)),
    "act-order zeros": Case(
        {**GPTQ, "bits": 4, "group_size": 64, "desc_act": True, "sym": False},
        gptq,
        "Q4_Z",
        facts(4, 64, symmetric=False, order=True),
    ),
    "act-order 8": Case(
        {**GPTQ, "bits": 8, "group_size": 32, "desc_act": True}, gptq, "Q8_0", facts(8, 32, order=True)
    ),
    "int8": Case(scheme(8, 0, form="int-quantized"), integers, "Q8_0", facts(8, 0)),
}
# What no blocks hold exactly: only its numbers are given.
LOOSE = {
    "gptq 8 zeros": Case(
        {**GPTQ, "bits": 8, "group_size": 64, "sym": False}, gptq, "F32", facts(8, 64, symmetric=False)
    ),
    "groups of 16": Case({**AWQ, "group_size": 16}, awq, "Q4_Z", facts(4, 16, symmetric=False)),
}
