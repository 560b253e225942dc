"""What a checkpoint's generation_config.json says: the ids that end a text, and how its publisher recommends to draw tokens."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from manyhands.checkpoint.folder import MAX_CONFIG_BYTES
from manyhands.checkpoint.plain_file import read_small
from manyhands.checkpoint.text_part import text_config
from manyhands.core import RECOMMENDED, SamplingParams
from manyhands.errors import BadRequest, ModelError
from manyhands.text.prompt import Tokenizer

NAME: Final = "generation_config.json"


def eos_ids(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None,
    tokenizer: Tokenizer,
    folder: Path = Path(),
) -> frozenset[int]:
    """Return every id that ends a text.

    The tokenizer's own, and those of generation_config.json or, where it names none, of config.json (the precedence of
    transformers' `generate`). Empty if none is named. Raises ModelError naming the file, which is of `folder`.
    """
    stated = _read_eos(generation_config or {}, folder / NAME) or _read_eos(config, folder / "config.json")
    own = tokenizer.eos_token_id
    return stated if own is None else stated | {int(own)}


def load_eos_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Return `eos_ids` of a checkpoint folder. Raises ModelError if one of its two config files is damaged."""
    return eos_ids(text_config(_read_json(folder / "config.json")), _read_json(folder / NAME), tokenizer, folder)


def load_recommended(folder: Path) -> dict[str, float]:
    """How its publisher recommends to draw: those fields of SamplingParams that the folder names. Raises ModelError.

    Empty where `do_sample` is false: transformers then reads none of them. A `top_k` of -1 is none, as in vLLM.
    """
    config = _read_json(folder / NAME)
    stated = {name: config[name] for name in RECOMMENDED if config.get(name) is not None}
    if stated.get("top_k") == -1:
        stated["top_k"] = 0
    if config.get("do_sample") is False:
        stated = {}
    try:
        SamplingParams(**stated)
    except BadRequest as error:
        raise ModelError(f"{folder / NAME}: {error}") from error
    return stated


def _read_eos(config: Mapping[str, Any], path: Path) -> frozenset[int]:
    """Read "eos_token_id": absent, null, one id, or a list of ids. Raises ModelError, naming `path`, for anything else."""
    stated = config.get("eos_token_id")
    if stated is None:
        return frozenset()
    ids = stated if isinstance(stated, list) else [stated]
    if not all(type(each) is int for each in ids):
        raise ModelError(
            f"{path}: eos_token_id is {stated!r:.40}; it must be an id or a list of ids: fetch the file again"
        )
    return frozenset(ids)


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, {} if there is no such file. Raises ModelError."""
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(read_small(path, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON ({error}): fetch it again") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{path} holds a {type(loaded).__name__}, not an object: fetch it again")
    return loaded
