"""What a config.json may say. It comes from unknown people, and its numbers decide how much is allocated.

Every number has a limit, well above any published model, that is checked before a library sees it; sizes that are not known
here are held to limits by how their names end. Errors name the field, the value and the limit in one line.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from manyhands.checkpoint.folder import MAX_CONFIG_BYTES, read_config
from manyhands.checkpoint.partition import ModelFacts
from manyhands.checkpoint.text_part import text_config
from manyhands.errors import ModelError

MAX_DEPTH: Final = 16
MAX_ITEMS: Final = 100_000  # values in all
MAX_LAYERS: Final = 4096
_TOKENS: Final = 1 << 27  # positions: 134 million
_WIDTH: Final = 1 << 17
_HEADS: Final = 4096

Range = tuple[float, float]

_INTEGERS: Final[Mapping[str, Range]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), (1, MAX_LAYERS)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), (1, _WIDTH)),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), (1, _HEADS)),
    **dict.fromkeys(("num_key_value_heads", "n_head_kv"), (1, _HEADS)),
    **dict.fromkeys(("head_dim", "global_head_dim"), (1, 8192)),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), (1, 1 << 20)),
    **dict.fromkeys(("max_position_embeddings", "model_max_length", "n_positions", "n_ctx"), (1, _TOKENS)),
    "original_max_position_embeddings": (1, _TOKENS),
    "vocab_size": (1, 1 << 22),
    "sliding_window": (-1, 1 << 31),
}
_NUMBERS: Final[Mapping[str, Range]] = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), (0, 1)),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "global_rope_theta", "local_rope_theta"), (1e-3, 1e15)),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (0, 1)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (1e-3, 1e6)),
}
_FACTORS: Final[Range] = (1e-6, 1e6)
_SCALINGS: Final[Mapping[str, Range]] = {
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow"), _FACTORS),
    **dict.fromkeys(("short_factor", "long_factor", "short_mscale", "long_mscale"), _FACTORS),
    **dict.fromkeys(("mscale", "mscale_all_dim"), (0, 1e6)),
}  # fmt: skip
_TEXTS: Final = ("model_type", "rope_type", "type", "hidden_act", "hidden_activation", "architectures")
_OBJECTS: Final = ("text_config", "rope_scaling", "rope_parameters")
_LAYERS: Final = "layers_block_type"  # a list with an item for each layer
_UNBOUNDED: Final = ("time_step_limit", "mamba_dt_limit")  # lists of two numbers; the second may be infinite
# Sizes by any other name.
_COUNTS: Final = re.compile(r"(?:layers|blocks|heads|experts|depth)$")
_SIZES: Final = re.compile(r"(?:size|dim|rank|width)$")


def parse_config(raw: bytes, where: str = "config.json") -> dict[str, Any]:
    """Parsed config.json, every number within its limit; a multimodal one as its text part (text_part.py).

    Raises ModelError naming the field, the value and the limit.
    """
    if len(raw) > MAX_CONFIG_BYTES:
        raise ModelError(f"{where} has {len(raw)} bytes; the limit is {MAX_CONFIG_BYTES}")
    try:
        config = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is corrupt: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{where} is corrupt: it is not an object")
    for count, (path, value) in enumerate(_walk(config, "", 1)):
        problem = f"more than {MAX_ITEMS} values" if count >= MAX_ITEMS else _problem(path, value)
        if problem:
            raise ModelError(f"{where} cannot be used: {problem}")
    return text_config(config)


def read_facts(folder: Path) -> ModelFacts:
    """What the config.json of a checkpoint folder says. Raises ModelError."""
    return ModelFacts.from_config(parse_config(read_config(folder), str(folder / "config.json")))


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{_shown(key)} occurs twice")
        found[key] = value
    return found


def _walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Every value below `value` with the path of its keys; items of lists go by the list's name."""
    items = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    for key, item in items:
        below = path if key is None else f"{path}.{key}" if path else key
        yield below, _TooDeep() if depth > MAX_DEPTH else item
        if isinstance(item, dict | list) and depth <= MAX_DEPTH:
            yield from _walk(item, below, depth + 1)


class _TooDeep:
    """Stands for what lies below MAX_DEPTH."""


def _problem(path: str, value: Any) -> str:
    """What is wrong with a value; "" if nothing is."""
    name = path.rsplit(".", 1)[-1]
    if isinstance(value, _TooDeep):
        return f"{_shown(path)} is nested more than {MAX_DEPTH} deep"
    if isinstance(value, float) and not math.isfinite(value) and not (name in _UNBOUNDED and value > 0):
        return f"{_shown(path)} is {value}; it must be finite"
    if name == _LAYERS and isinstance(value, list) and len(value) > MAX_LAYERS:
        return f"{_shown(path)} lists {len(value)} layers; the limit is {MAX_LAYERS}"
    if value is None or isinstance(value, list):
        return ""  # a default; or each item is looked at by itself
    if name in _OBJECTS:
        return "" if isinstance(value, dict) else f"{_shown(path)} is {_shown(value)}; it must be an object"
    if name in _TEXTS:
        return (
            ""
            if isinstance(value, str) and len(value) <= 64
            else f"{_shown(path)} is {_shown(value)}; it must be a name"
        )
    if isinstance(value, dict):
        return f"{_shown(path)} is an object; it must be a number" if name in _INTEGERS or name in _NUMBERS else ""
    is_scaling = "rope_" in path.partition(".")[0] or ".rope_" in path
    limits = _NUMBERS.get(name) or (_SCALINGS.get(name) if is_scaling else None)
    if limits is not None:
        return _outside(path, value, limits, "a number", type(value) in (int, float))
    if (limits := _INTEGERS.get(name)) is not None:
        return _outside(path, value, limits, "an integer", type(value) is int)
    return _unheard_of(path, value)


def _unheard_of(path: str, value: Any) -> str:
    if type(value) is not int:
        return ""
    limits: Range = (-(1 << 53), 1 << 53)
    if _COUNTS.search(path):
        limits = (-1, 1 << 16)
    elif _SIZES.search(path) and "window" not in path:
        limits = (-1, 1 << 24)
    return _outside(path, value, limits, "an integer", is_kind=True)


def _outside(path: str, value: Any, limits: Range, kind: str, is_kind: bool) -> str:
    low, high = limits
    if is_kind and low <= value <= high:
        return ""
    return f"{_shown(path)} is {_shown(value)}; it must be {kind} from {low:g} to {high:g}"


def _shown(value: object) -> str:
    """On one line, and not long; names go unquoted."""
    text = value if isinstance(value, str) and re.fullmatch(r"[\w.]{1,80}", value) else ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
