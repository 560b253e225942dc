"""Which small model drafts for a model: the one named at start, else the one that the model's own config.json names.

    "manyhands": {"drafter": "drafter"}            a folder inside the checkpoint's own
    "manyhands": {"drafter": "org/small-model"}    of the hub: used if it is on this machine, never fetched for that

A config.json comes from unknown people: what it names is used only where it is far smaller than the model itself. With `auto` a
drafter that cannot be used is left out with a line that says why; where `model` was asked for, that is an error.
"""

import asyncio
import logging
from pathlib import Path
from typing import Final

from manyhands import tales
from manyhands.checkpoint.config_fields import parse_config, read_facts
from manyhands.checkpoint.folder import read_config
from manyhands.checkpoint.manifest import HashProgress, Silent
from manyhands.cli.progress import doing
from manyhands.config import home_from_env
from manyhands.errors import BadRequest, ModelError
from manyhands.origin import OriginModel
from manyhands.origin.draft_model import DraftModel
from manyhands.weights.reading import read_aside

logger = logging.getLogger(__name__)
MAX_NAME: Final = 200  # characters of a drafter's name in a config
MAX_SHARE: Final = (
    0.5  # of the model's layers x width^2: a larger drafter would take more memory and time than it can win
)


def fetch_named(draft: str) -> None:
    """Fetch the drafter that `draft` names, if it names one, before other nodes count on this one. Raises as resolve_model.

    Blocking, for the main thread before its loop runs, where Ctrl-C ends it at once.
    """
    _, _, named = draft.partition(":")
    if named:
        with doing(f"reading {named}, which drafts") as bar:
            _fetch_whole(named, bar)


async def load_drafter(model: OriginModel, draft: str) -> DraftModel | None:
    """The model that drafts for `model`, as `draft` says (config.check_draft).

    Raises BadRequest where "model" is asked and none is known, ModelError if it cannot be used or its tokenizer is another.
    """
    kind, _, named = draft.partition(":")
    if kind not in ("auto", "model"):
        return None
    if named:
        folder = await read_aside(lambda told: _fetch_whole(named, told), Silent())
        return await asyncio.to_thread(DraftModel, folder, named, model.tokenizer)
    try:
        drafter = await asyncio.to_thread(_load_own, model)
    except ModelError as error:
        if kind == "model":
            raise
        logger.warning("no model drafts: %s", error)
        return None
    if drafter is None and kind == "model":
        raise BadRequest("this model has no drafter of its own: name one with the same tokenizer, --draft model:MODEL")
    return drafter


def _load_own(model: OriginModel) -> DraftModel | None:
    if model.folder.resolve() == tales.model_path().resolve():
        return DraftModel(tales.drafter_path(), "the drafter of tales", tales.model_path())
    name = drafter_name(model.folder)
    if name is None:
        return None
    folder = find_drafter(model.folder, name, home_from_env())
    _check_size(model.folder, name, folder)
    return DraftModel(folder, name, model.tokenizer)


def _check_size(target: Path, name: str, drafter: Path) -> None:
    ours, theirs = read_facts(target), read_facts(drafter)
    share = theirs.num_layers * theirs.hidden_size**2 / (ours.num_layers * ours.hidden_size**2)
    if share > MAX_SHARE:
        raise ModelError(
            f"the drafter {name} that config.json names has {theirs.num_layers} layers of width {theirs.hidden_size}, "
            f"{share:.2f} times the model's own {ours.num_layers} of {ours.hidden_size}; the limit is {MAX_SHARE}: name a "
            "smaller one with --draft model:MODEL"
        )


def drafter_name(folder: Path) -> str | None:
    """What the config.json in `folder` names as drafter; None: nothing. Raises ModelError for what cannot be a name."""
    own = parse_config(read_config(folder), str(folder / "config.json")).get("manyhands")
    name = own.get("drafter") if isinstance(own, dict) else None
    if name is None:
        return None
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise ModelError(
            f'"drafter" in config.json is {name!r:.80}; it must be a folder inside the model, or org/name: printable text of '
            f"1 to {MAX_NAME} characters"
        )
    return name


def find_drafter(folder: Path, name: str, home: Path) -> Path:
    """The weights of the drafter `name` of the model in `folder`: inside it, or fetched from the hub earlier.

    Raises ModelError if they are not on this machine, and for paths that lead out of the folder.
    """
    inside = (folder / name).resolve()
    if inside.is_relative_to(folder.resolve()) and inside != folder.resolve() and inside.is_dir():
        return inside
    if "/" not in name:
        raise ModelError(f"config.json names the drafter {name!r}: {folder} has no folder of that name")
    if (fetched := _fetched(home, name)) is None:
        raise ModelError(f"the drafter {name} that config.json names is not here: fetch it with --draft model:{name}")
    return fetched


def _fetched(home: Path, name: str) -> Path | None:
    from manyhands.weights.fetched import find_local
    from manyhands.weights.names import parse_hub_id

    return find_local(home, parse_hub_id(name), None, True)


def _fetch_whole(model: str, bar: HashProgress) -> Path:
    from manyhands.weights.fetch import resolve_model  # with the hub's client, which most nodes never need

    return resolve_model(model, None, True, home_from_env(), bar)
