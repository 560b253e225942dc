"""The models of a swarm on one of its members: all that the records name, each an origin here once it is asked for.

A member that answers an API serves every model of its swarm, also those of which it holds no layer: what it needs for that
is the tokenizer and the ends, which members have. They are fetched and loaded with the first request, where --memory
leaves room for them.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from manyhands.api.gateway import OfferedModel
from manyhands.checkpoint.manifest import HashProgress
from manyhands.core import Span
from manyhands.errors import BadRequest, ExperimentalDisabled, ShardUnavailable
from manyhands.member.hosting import Hosting
from manyhands.member.providers import providers_of
from manyhands.member.room import has_room_for_ends, hold_ends, kept, own_bytes
from manyhands.member.view import missing_spans
from manyhands.member.weights import ServedModel, Weights, known_kinds, weights_in
from manyhands.origin import Origin, OriginModel
from manyhands.plain import one_line, size_of
from manyhands.swarm.record import Record
from manyhands.weights.provider import Provider
from manyhands.weights.refetch import use_fetched
from manyhands.worker.execute import Device
from manyhands.worker.loading import Loading

MOST_LOOKED_AT: Final = 1024  # records of which it is made up what is offered: of nodes that were linked first
OFFERED_S: Final = 0.1  # for so long what was offered is, for all who ask
Fetch = Callable[[Span], Awaitable[Path]]  # a folder with the layers of a span, and the ends
Make = Callable[[OriginModel, Fetch], Awaitable[Origin]]


class SwarmModels:
    """What a gateway asks (api/gateway.py: OtherModels). `progress` is told of what is fetched and loaded.

    `make` is given what is loaded of a model, and what fetches layers of it.
    """

    def __init__(
        self, hosting: Hosting, device: Device, home: Path, progress: Callable[[], HashProgress], make: Make
    ) -> None:
        self._hosting, self._member = hosting, hosting.member
        self._device, self._home, self._progress = device, home, progress
        self._make = make
        self._offered: dict[str, OfferedModel] = {}
        self._offered_until = -math.inf

    @property
    def own(self) -> str:
        """The model that is hosted here."""
        return self._hosting.weights.name

    def offered(self) -> Mapping[str, OfferedModel]:
        """By the name that `status` shows. Of very many records MOST_LOOKED_AT are looked at, once in OFFERED_S."""
        now = asyncio.get_running_loop().time()
        if now >= self._offered_until:
            self._offered, self._offered_until = self._look(), now + OFFERED_S
        return self._offered

    def _look(self) -> dict[str, OfferedModel]:
        return {
            kind.name: OfferedModel(
                kind.model,
                kind.precision,
                infos[0].num_layers,
                infos[0].context_length,
                is_covered=not missing_spans(kind, records),
            )
            for kind, records in self._kinds().values()
            if (infos := [record.info for record in records if record.info is not None])
        }

    def _kinds(self) -> dict[str, tuple[ServedModel, list[Record]]]:
        """The models of the swarm by name, with their records. Of two of one name the one that is hosted here, else the one
        that more linked nodes hold."""
        ours, find = self._hosting.weights.kind, self._member.node.pool.find
        records = list(islice(self._member.directory.in_turn(), MOST_LOOKED_AT))
        known = known_kinds(records, lambda node: find(node, "control") is not None)
        found = {ours.name: (ours, known.get(ours) or self._hosting.records())} if ours is not None else {}
        for kind, records in known.items():
            found.setdefault(kind.name, (kind, records))
        return found

    async def load(self, name: str) -> Origin:
        """Become an origin of a model. Raises ModelError, ShardUnavailable, BadRequest where memory does not hold its ends, and
        ExperimentalDisabled while this node is switched off: it would ask others for what it lacks."""
        if self._member.node.worker.is_off:
            raise ExperimentalDisabled(f"{self._member.node.name} is switched off: `manyhands switch on`")
        if name not in (kinds := self._kinds()):
            raise ShardUnavailable(f"no node of the swarm holds {one_line(name)} any more")
        kind, _ = kinds[name]
        if kind == self._hosting.weights.kind:
            return await self.load_hosted()
        weights = await weights_in(kind, self._providers(kind), self._home, self._progress())
        needed = weights.shape.ends_bytes + own_bytes(self._member.node.request, weights.shape)
        self._check(needed, name)

        async def fetch(span: Span) -> Path:
            folder, _ = await weights.fetch(span, self._home, self._providers(kind), self._progress(), with_ends=True)
            return folder

        hold_ends(self._hosting, name, needed)  # others may be loaded meanwhile
        try:
            # Layer 0 comes along: a folder without any layer is no checkpoint.
            return await self._origin(weights, Span(0, 1), fetch)
        except BaseException:
            hold_ends(self._hosting, name, 0)
            raise

    async def load_hosted(self) -> Origin:
        """An origin of the model that is hosted here. Raises as `load`."""
        hosting = self._hosting
        if not hosting.with_ends:
            self._check(hosting.weights.shape.ends_bytes, hosting.weights.name)
            hosting.with_ends = True
        # Layer 0 where no layer is served, as while it moves: a folder without any layer is no checkpoint.
        span = next(iter(hosting.held), Span(0, 1))
        return await self._origin(hosting.weights, span, hosting.fetch)

    async def _origin(self, weights: Weights, span: Span, fetch: Fetch) -> Origin:
        device, precision = self._device, weights.precision

        async def load(folder: Path) -> OriginModel:
            loading = Loading(self._progress(), weights.name)
            return await device.run(lambda: OriginModel(folder, precision, "origin", device.num_threads, loading))

        return await self._make(await use_fetched(await fetch(span), lambda: fetch(span), load), fetch)

    def _providers(self, kind: ServedModel) -> Sequence[Provider]:
        return providers_of(self._member, [record for record in self._member.records() if kind.is_of(record)])

    def _check(self, ends_bytes: int, name: str) -> None:
        """Raise BadRequest unless the ends fit beside what is hosted."""
        hosting, caches = self._hosting, self._member.node.worker.caches
        more = ends_bytes - hosting.other_ends.get(name, 0)  # it may be loaded again
        if not has_room_for_ends(self._member.node.worker, hosting.budget, more, kept(hosting)):
            budget = hosting.budget
            request = self._member.node.request
            layers = " and own layers" if request.own_first or request.own_last else ""
            left = max(0, budget.left_bytes(kept(hosting)) + ends_bytes - more)
            raise BadRequest(
                f"to answer for {name}, its embedding and head{layers} take {size_of(ends_bytes)} here, and --memory "
                f"({size_of(budget.memory_bytes)}) leaves {size_of(left)}, with {size_of(caches.leased_bytes)} of caches in "
                "use: ask another member (--api), or give more"
            )
