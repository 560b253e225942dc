"""The model that is hosted: its name and id in the swarm, its sizes, and its files for any span.

`up MODEL` has a name; `join` has the records. A folder or "tales" on this disk is used as it is, if it is the same
model; else the tensors of the span come from peers, and from the hub what no peer has.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from manyhands.aside import aside
from manyhands.checkpoint.config_fields import parse_config
from manyhands.checkpoint.folder import MANIFEST
from manyhands.checkpoint.manifest import HashProgress, Manifest, build_manifest, config_digest
from manyhands.core import ModelId, NodeId, Precision, Span, SpanInfo
from manyhands.errors import ModelError, ShardUnavailable, WeightsMismatch
from manyhands.place.shape import Checkpoint, ModelShape, look_up, shape_of, stored_precision
from manyhands.swarm.record import Record
from manyhands.weights import names
from manyhands.weights.asking import first_answer
from manyhands.weights.catalogue import SHORT_NAMES
from manyhands.weights.disk import DiskProvider, find_complete, folders_of, layers_here
from manyhands.weights.download import Need, pull
from manyhands.weights.fetch import bring_short, resolve_model
from manyhands.weights.hub_provider import HubProvider
from manyhands.weights.provider import Provider, ProviderError
from manyhands.weights.reading import read_aside
from manyhands.weights.workers import Blame
from manyhands.worker.runner import arithmetic_class

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What records must agree on to be one model: two machines with equal kinds serve one route."""

    model: ModelId
    name: str
    precision: Precision

    def is_of(self, record: Record) -> bool:
        info = record.info
        return info is not None and (info.model, info.precision) == (self.model, self.precision)


@dataclass(frozen=True, slots=True)
class Weights:
    """A model and where its files come from. `id` None: not known before the first fetch (a hub model new to the swarm).

    `folder`: it is here whole; `part`: here in part. `hub`: its hub id, if it has one. `here`: layers that lie in `part`, or
    that an earlier fetch left on this disk.
    """

    name: str
    precision: Precision
    shape: ModelShape
    config: bytes
    id: ModelId | None
    folder: Path | None
    hub: str | None
    part: Path | None = None
    here: Span | None = None

    @property
    def kind(self) -> ServedModel | None:
        return None if self.id is None else ServedModel(self.id, self.name, self.precision)

    def claim(self, span: Span) -> SpanInfo | None:
        """How this node says that it will host `span`: a span without room for sessions. None while the id is not known."""
        if self.id is None:
            return None
        item = 4 if self.precision == "fp32" else 2
        return SpanInfo(
            model=self.id,
            model_name=self.name,
            span=span,
            num_layers=self.shape.num_layers,
            precision=self.precision,
            arithmetic=arithmetic_class(self.config, self.precision),
            hidden_size=self.shape.hidden_bytes // item,
            context_length=self.shape.context,
            has_ends=False,
            free_tokens=0,
            max_sessions=0,
        )

    def folders(self, home: Path) -> list[Path]:
        """What holds some of it on this disk. Blocking."""
        found = [] if self.id is None else folders_of(self.id, home)
        return [*([] if self.part is None else [self.part]), *found]

    def checkpoint(self) -> Checkpoint:
        """For measuring this machine."""
        return Checkpoint(self.shape, self.config, self.folder)

    async def fetch(
        self,
        span: Span,
        home: Path,
        providers: Sequence[Provider],
        progress: HashProgress,
        *,
        with_ends: bool,
        on_blame: Callable[[Blame], None] | None = None,
    ) -> tuple[Path, "Weights"]:
        """A folder with the layers of `span`, and these weights with their id. This disk first, then peers, then the hub.

        Raises ModelError, ShardUnavailable, DiskFull, CutError.
        """
        if self.folder is not None:
            return self.folder, self
        folders = await asyncio.to_thread(self.folders, home)
        if (found := await asyncio.to_thread(find_complete, folders, span, with_ends)) is not None:
            return found, self
        is_pulled = any(folder.name == self.id for folder in folders)
        if self.hub is not None and (self.id is None or not (providers or is_pulled)):
            name = self.hub
            folder = await read_aside(lambda told: resolve_model(name, span, with_ends, home, told), progress)
            model = (await read_aside(lambda told: build_manifest(folder, told, called=self.name), progress)).id
            if self.id not in (None, model):
                raise WeightsMismatch(
                    f"the hub's {self.hub} is {model[:12]} now, the swarm has {self.id[:12]}: name its revision"
                )
            return folder, replace(self, id=model)
        assert self.id is not None, "without a folder and a hub id, the swarm says which model it is"
        need = Need(self.id, span, with_ends=with_ends, with_files=True, name=self.name)
        hub = None if self.hub is None else HubProvider(self.hub)
        here = [DiskProvider(folder) for folder in folders if folder.name != self.id]
        pulled = await pull(need, providers, home, here=here, hub=hub, progress=progress, on_blame=on_blame)
        return pulled.folder, self


def kinds_of(records: Sequence[Record]) -> list[ServedModel]:
    """The models of a swarm, those that most nodes host first."""
    found: dict[ServedModel, int] = {}
    for record in records:
        if (info := record.info) is not None:
            kind = ServedModel(info.model, info.model_name, info.precision)
            found[kind] = found.get(kind, 0) + 1
    return sorted(found, key=lambda kind: (-found[kind], kind.name, kind.model))


# Nodes that are asked at once what a model is, and how long each has before the next is asked too: a member can make records
# of nodes that there are not, or that say nothing.
MAX_ASKED: Final = 8
NEXT_S: Final = 2.0
# How long a joiner waits for a node that loads the model, and how often it asks.
LOADING_S: Final = 60.0
AGAIN_S: Final = 1.0
# Models of a swarm that a member looks at: of more, each false record would cost it work.
MAX_KINDS: Final = 64


def known_kinds(records: Sequence[Record], is_linked: Callable[[NodeId], bool]) -> dict[ServedModel, list[Record]]:
    """At most MAX_KINDS models of a swarm with their records: those that linked nodes host first, then those of most nodes.

    A member can make records of nodes that there are not, but no links to them.
    """
    found: dict[tuple[ModelId, str, Precision], list[Record]] = {}
    for record in records:
        if (info := record.info) is not None:
            found.setdefault((info.model, info.model_name, info.precision), []).append(record)
    linked = {kind: sum(is_linked(record.node) for record in held) for kind, held in found.items()}
    first = sorted(found, key=lambda kind: (-linked[kind], -len(found[kind]), kind[1], kind[0]))
    return {ServedModel(*kind): found[kind] for kind in first[:MAX_KINDS]}


async def weights_of(
    name: str,
    dtype: Precision | None,
    records: Sequence[Record],
    home: Path,
    progress: HashProgress,
    ask: Callable[[ServedModel], Sequence[Provider]] = lambda kind: (),
    is_linked: Callable[[NodeId], bool] = lambda node: True,
) -> Weights:
    """The model that `up` names. `dtype` None: the swarm's, else as it is stored (place/shape.py). `ask`: which nodes hold a
    model of the swarm. Of several that it serves under this name those of linked nodes come first.

    Raises ModelError; WeightsMismatch if the swarm serves only other weights or another precision under this name.
    """
    label = names.label(name)
    if label != names.own_name(name):
        logger.warning("the swarm calls the model %s: its name is longer than 255 bytes, or not printable", label)
    same = [kind for kind in known_kinds(records, is_linked) if kind.name == label]
    precision: Precision
    if dtype is not None:
        precision = dtype
    elif same:
        precision = same[0].precision
    else:
        await read_aside(lambda told: bring_short(name, home, told), progress)
        precision = await aside(stored_precision, name, home)
    alike = [kind for kind in same if kind.precision == precision]
    if same and not alike:
        raise WeightsMismatch(
            f"the swarm serves {label} in {same[0].precision}, not {precision}: leave --dtype out (and --cache-dtype), or "
            "found another swarm"
        )
    local = names.model_folder(name) or names.gguf_file(name, home)
    if local is None and name != "tales" and alike and (providers := ask(alike[0])):
        with contextlib.suppress(ShardUnavailable):
            return await weights_in(alike[0], providers, home, progress)
    await read_aside(lambda told: bring_short(name, home, told), progress)
    checkpoint = await aside(look_up, name, precision, home)
    if local is None and checkpoint.folder is None:
        found = _weights(label, checkpoint, alike[0].model if alike else checkpoint.model, name)
        return await _placed(found, home)
    folder = checkpoint.folder or names.model_folder(name)
    assert folder is not None, "a GGUF file holds its model whole"
    manifest = await read_aside(lambda told: build_manifest(folder, told, called=label), progress)
    if alike and all(kind.model != manifest.id for kind in alike):
        raise WeightsMismatch(await _told_apart(alike[0], manifest, ask(alike[0])))
    found = _weights(label, checkpoint, manifest.id, None)
    return found if checkpoint.folder else await _placed(replace(found, part=folder), home)


async def _placed(weights: Weights, home: Path) -> Weights:
    """With the layers that lie here."""
    folders = await asyncio.to_thread(weights.folders, home)
    return replace(weights, here=await asyncio.to_thread(layers_here, folders))


async def _told_apart(kind: ServedModel, manifest: Manifest, providers: Sequence[Provider]) -> str:
    """One line on how the model here differs from the one of the swarm, as far as that is known."""
    what, verb = "weights", "differ"
    with contextlib.suppress(ShardUnavailable):
        theirs, _ = await _described(kind, providers)
        what, verb = manifest.unlike(theirs), "differs"
    return (
        f"the swarm serves another {kind.name}: its {what} {verb} ({kind.model[:12]} there, {manifest.id[:12]} here); copy it "
        "from there, rename the folder, or found another swarm"
    )


def _weights(label: str, checkpoint: Checkpoint, model: ModelId | None, hub: str | None) -> Weights:
    shape = replace(checkpoint.shape, name=label)
    return Weights(label, shape.precision, shape, checkpoint.config, model, checkpoint.folder, hub)


async def weights_in(kind: ServedModel, providers: Sequence[Provider], home: Path, progress: HashProgress) -> Weights:
    """The model that a swarm hosts, as its records name it: from this disk if it is here, else as peers describe it.

    Raises ShardUnavailable if no peer answers, ModelError.
    """
    if kind.name == "tales" or (kind.name in SHORT_NAMES and names.gguf_file(kind.name, home) is not None):
        found = await weights_of(kind.name, kind.precision, (), home, progress)
        if found.id == kind.model:
            return found
    here = [DiskProvider(folder) for folder in await aside(folders_of, kind.model, home)]
    manifest, config = await _described(kind, [*here, *providers])
    facts = parse_config(config)
    # Aside: of half a million tensors it takes seconds.
    shape = await aside(shape_of, kind.name, facts, manifest.tensors, kind.precision)
    found = Weights(kind.name, kind.precision, shape, config, kind.model, None, _hub_id(kind.name))
    return await _placed(found, home)


async def weights_soon(
    kind: ServedModel,
    holders: Callable[[ServedModel], Sequence[Provider]],
    home: Path,
    progress: HashProgress,
) -> Weights:
    """As `weights_in`, again and again while a node answers that does not have it, for LOADING_S at most: one that loads it yet
    cannot say what it is, as where all nodes of a swarm start at once. Raises as weights_in."""
    ends_at = asyncio.get_running_loop().time() + LOADING_S
    while True:
        try:
            return await weights_in(kind, holders(kind), home, progress)
        except NotLoaded:
            if asyncio.get_running_loop().time() > ends_at:
                raise
        await asyncio.sleep(AGAIN_S)


def _hub_id(name: str) -> str | None:
    """`name` if it is a hub id. It comes from a record, so it may be anything."""
    try:
        names.parse_hub_id(name)
    except ModelError:
        return None
    return name


class NotLoaded(ShardUnavailable):
    """A node took the call that does not have the model (yet)."""


async def _described(kind: ServedModel, providers: Sequence[Provider]) -> tuple[Manifest, bytes]:
    """Manifest and config.json from a provider whose bytes are proven by the model's id."""
    failures: list[str] = []
    found = await first_answer(providers, partial(_ask, kind, failures), NEXT_S, MAX_ASKED)
    if found is None:
        why = f": {'; '.join(failures[:3])}" if failures else ""
        kind_of_error = NotLoaded if len(failures) < len(providers) else ShardUnavailable
        raise kind_of_error(
            f"no node of the swarm has the manifest of {kind.name} {kind.model[:12]} ({len(providers)} asked{why}): is "
            "the one that holds it up?"
        )
    return found


async def _ask(kind: ServedModel, failures: list[str], provider: Provider) -> tuple[Manifest, bytes] | None:
    """What one provider says of a model; None if that is nothing, or not proven. Raises ModelError for a model that is none."""
    try:
        raw = await provider.file(kind.model, MANIFEST)
        config = await provider.file(kind.model, "config.json")
    except ProviderError as error:
        failures.append(f"{provider.name} ({provider.node[:8]}): {error}")
        return None
    return None if raw is None or config is None else await asyncio.to_thread(_proven, kind.model, raw, config)


def _proven(model: ModelId, raw: bytes, config: bytes) -> tuple[Manifest, bytes] | None:
    """Blocking: a second for the tables of 100,000 tensors. What is no config at all says nothing of the model."""
    if hashlib.sha256(raw).hexdigest() != model:
        return None
    manifest = Manifest.decode(raw)
    with contextlib.suppress(ModelError):
        return (manifest, config) if config_digest(config) == manifest.config_sha256 else None
    return None
