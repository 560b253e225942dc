"""The fields of a deepseek_v4's config that say of each layer what it is: kinds, rates, rotary tables."""

from typing import Any, Final

from manyhands.program.fields import Fields
from manyhands.program.ops import Rope
from manyhands.program.rope import RopeReader

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_KINDS: Final = (SLIDING, SPARSE, HEAVY)
_RATIOS: Final = {0: SLIDING, 4: SPARSE, 128: HEAVY}  # of published configs: the kind of layer that a number stands for
_MOST_RATE: Final = 512  # positions of an entry, as native/compressed.h has it
_BLOCK: Final = 64  # positions of a block of a cache


def layer_kinds(f: Fields, layers: int) -> list[str]:
    """By layer_types, or by the numbers that published configs have; longer lists are cut, as in transformers."""
    if not f.has("layer_types") and f.has("compress_ratios"):
        ratios = f.whole_numbers("compress_ratios")
        if not set(ratios) <= _RATIOS.keys() or len(ratios) < layers:
            raise f.refuse("compress_ratios", f"0, 4 or 128 for each of the {layers} layers is needed")
        return [_RATIOS[ratio] for ratio in ratios[:layers]]
    f.ignore("compress_ratios")
    default = [HEAVY] * min(layers, 2) + [SPARSE if i % 2 else HEAVY for i in range(max(layers - 2, 0))]
    return _of_layers(f, "layer_types", layers, default, _KINDS)


def _of_layers(f: Fields, name: str, layers: int, default: list[str], allowed: tuple[str, ...]) -> list[str]:
    given = f.raw(name, default)
    if not isinstance(given, list) or len(given) < layers or not set(map(str, given[:layers])) <= set(allowed):
        raise f.refuse(name, f"one of {', '.join(allowed)} for each of the {layers} layers is needed")
    return [str(kind) for kind in given[:layers]]


def hash_layers(f: Fields, layers: int) -> list[bool]:
    """Which layers choose experts by the token's id."""
    first = f.count("num_hash_layers", 3, low=0)
    default = ["hash_moe" if i < first else "moe" for i in range(layers)]
    return [kind == "hash_moe" for kind in _of_layers(f, "mlp_layer_types", layers, default, ("hash_moe", "moe"))]


def rates_of(f: Fields, kinds: list[str]) -> dict[str, int]:
    """Positions of an entry, of the kinds that layers have."""
    given = f.raw("compress_rates", {SPARSE: 4, HEAVY: 128})
    if not isinstance(given, dict) or not set(given) <= set(_KINDS):
        raise f.refuse("compress_rates", f"a number for each of {SPARSE} and {HEAVY} is needed")
    rates: dict[str, Any] = dict(given)
    for name, kind in (("compress_rate_csa", SPARSE), ("compress_rate_hca", HEAVY)):
        if f.has(name):
            rates[kind] = f.count(name)
    if not all(_is_rate(rates.get(kind)) for kind in {SPARSE, HEAVY} & set(kinds)):
        needed = f"a divisor of {_BLOCK}, or a multiple up to {_MOST_RATE}, is needed for each kind of layer, not"
        raise f.refuse("compress_rates", f"{needed} {rates}"[:160])
    return rates


def _is_rate(rate: Any) -> bool:
    good = isinstance(rate, int) and not isinstance(rate, bool) and 1 <= rate <= _MOST_RATE
    return good and (_BLOCK % rate == 0 or rate % _BLOCK == 0)


def label_of(kind: str) -> str:
    """The table of a kind of layer."""
    return "main" if kind == SLIDING else "compress"


def tables_of(f: Fields, head: int, kinds: list[str]) -> tuple[dict[str, Rope], int]:
    """Rotary tables that layers use, and the positions that may be used. A config has one for each label, or fields that layers
    with entries read with a base frequency of their own; what these scale does not scale cosines and sines then."""
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(f.raw(name, {}), dict):
            raise f.refuse(name, "an object is needed")
    given: dict[str, Any] = f.raw("rope_scaling") or f.raw("rope_parameters") or {}
    part = _part(f, head)
    bases = f.number("rope_theta", 10000.0), f.number("compress_rope_theta", 160000.0)
    if not all(isinstance(given.get(label), dict) for label in ("main", "compress")):
        inner = {name: value for name, value in given.items() if name not in ("main", "compress")}
        kind = inner.pop("type", "default")
        compress = {"rope_type": kind, **inner, "rope_theta": bases[1], "partial_rotary_factor": part}
        if compress["rope_type"] == "yarn":
            compress.setdefault("attention_factor", 1.0)
        given = {"main": {"rope_theta": bases[0], "partial_rotary_factor": part}, "compress": compress}
    context = f.count("max_position_embeddings", 1048576)
    reader = RopeReader(Fields({"max_position_embeddings": context, "rope_parameters": given}, f.where))
    wanted = [label for label in ("main", "compress") if label in map(label_of, kinds)]
    tables = {label: reader.by_type(label, head, theta=10000.0, scaled=False, partial=True) for label in wanted}
    if len({table.width for table in tables.values()}) > 1:
        raise f.refuse("rope_parameters", "tables of main and compress as wide as each other are needed")
    return tables, reader.context


def _part(f: Fields, head: int) -> float:
    """How much of a head turns."""
    turned = f.count("qk_rope_head_dim", None if f.has("qk_rope_head_dim") else 64, high=1 << 14)
    default = turned / head if f.has("qk_rope_head_dim") else 64 / 512
    part = f.number("partial_rotary_factor", default)
    if f.has("qk_rope_head_dim") and int(head * part) != turned:
        raise f.refuse("qk_rope_head_dim", f"head_dim times partial_rotary_factor, {int(head * part)}, is needed")
    return part
