"""One random life of a small swarm: requests of one or two origins, and what befalls nodes and lines meanwhile.

fuzz_requests.py runs them. Swarm and requests are drawn before they begin (request_draws.py), what befalls them as it happens
(request_faults.py). Time is virtual and devices compute on the event loop, so the same seed gives the same life, but for ids of
sessions, which are the operating system's.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final, cast
from unittest.mock import patch

from manyhands.config import RequestConfig
from manyhands.core import EndsAt, NodeAddr, NodeId, Span
from manyhands.errors import ManyhandsError
from manyhands.net.memory import MemoryNetwork
from manyhands.net.transport import Transport
from manyhands.origin import Answer, Origin
from manyhands.origin.adoption import Adoption, HopMark
from manyhands.origin.node import FullNode
from manyhands.testing.swarm import memory_node
from manyhands.testing.wan import WanProfile, WanTransport
from manyhands.worker.execute import Device
from tests.kill import Models
from tests.origin.scenes import Restless
from tools.request_checks import Logged, left_by, wrong_with
from tools.request_draws import Asked, Place, TurnDevice, drawn_places, drawn_requests, drawn_span
from tools.request_faults import LAYERS, Misfortune

MOST_PROMPT: Final = 500  # ids, of the 1,024 positions of a tiny model
END_S: Final = 1500.0  # virtual, within which every request has ended


class Life:
    """The life of `seed` on the checkpoint in `folder`, whose layers `models` keeps. `live` has it happen; then `problems` has
    what must not be, and `told` what befell it."""

    def __init__(self, seed: int, folder: Path, models: Models) -> None:
        self.seed, self._folder, self._models = seed, folder, models
        self.draw = draw = Random(seed)
        self.told, self.problems, self.tally = list[str](), list[str](), Counter[str]()
        self.is_over, self.num_faults, self.poisoned = False, 0, set[NodeId]()
        self.is_small = draw.random() < 0.35
        self.places = drawn_places(draw, is_small=self.is_small)
        self.request = RequestConfig(
            prefill_chunk=draw.choice([16, 64, 256]),
            credits=draw.choice([16, 16, 4, 2, 1]),
            standby=draw.random() < 0.35,
            reuse=draw.random() < 0.85,
            sticky=draw.random() < 0.2,
            fallback=draw.random() < 0.15,
        )
        self._own = draw.choice([None, None, None, drawn_span(draw)])
        self.ends: list[EndsAt] = [draw.choice(["origin", "origin", "edges"]) for _ in range(draw.choice([1, 2]))]
        self.asked = drawn_requests(draw, len(self.ends), is_small=self.is_small)
        self.origins: list[Origin] = []
        self.misfortune = Misfortune(self)
        self._network, self._works = MemoryNetwork(), set[asyncio.Task[None]]()
        self._wan = draw.choice([None, None, (0.002, 0.003), (0.02, 0.03)])
        self._growth = draw.choice([(1024, 256), (24, 8), (48, 24), (8, 4)])

    async def live(self) -> None:
        """All of it. Raises what is no error of a request."""
        lease, ahead = self._growth
        with (
            patch("manyhands.origin.growth.LEASE_TOKENS", lease),
            patch("manyhands.origin.growth.AHEAD", ahead),
            virtual_clocks(),
        ):
            await self._answer_alone()
            with Logged() as logged:
                async with self._swarm():
                    await self._ask_all()
                    self.is_over = True
                    self.misfortune.end()
                    self.problems += await left_by(self)
                if others := asyncio.all_tasks() - {asyncio.current_task()}:
                    self.problems.append(f"tasks are left: {others}")
            expected = "a device step failed" if self.tally["fail"] else "\0"
            self.problems += [line for line in logged.lines if expected not in line]

    # -- what a lone node answers -------------------------------------------------------------------------------------

    async def _answer_alone(self) -> None:
        """One node that holds all layers answers, one request after another. Follow-ups of a tenant go on with its text."""
        self._models.give_back()
        network, device = MemoryNetwork(), cast(Device, TurnDevice(Random(0), 0.0))
        async with memory_node(network, "alone") as node, memory_node(network, "asker") as home:
            await node.worker.host(self._folder, Span(0, LAYERS), "bf16", device, model_name="test")
            addr = await node.listen(NodeAddr("mem", 0))
            origin = Origin(home, self._models.origin(self._folder, "bf16", "origin", 1), device, [addr])
            for one in self.asked:
                await self._answer_one(origin, one)

    async def _answer_one(self, origin: Origin, one: Asked) -> None:
        draw, before = self.draw, one.after
        if before is not None and before.wanted is not None and one.adopts:
            one.prompt, one.params, one.wanted = before.prompt, before.params, before.wanted
            return
        if before is not None and before.wanted is not None and draw.random() < 0.6:
            told = before.prompt + tuple(before.wanted.token_ids)
            one.prompt = (told[: draw.choice([len(told), len(told) // 2])] + one.prompt[-9:])[-MOST_PROMPT:]
            one.options["tenant"], one.origin = before.options["tenant"], before.origin
        one.wanted = await origin.complete(origin.request_ids(one.prompt, one.params), draft="off")
        if draw.random() < 0.15 and len(text := one.wanted.text) > 8:
            at = draw.randrange(len(text) - 2)
            one.params = replace(one.params, stop=(text[at : at + draw.choice([1, 2])],))
            one.wanted = await origin.complete(origin.request_ids(one.prompt, one.params), draft="off")

    # -- nodes --------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _swarm(self) -> AsyncIterator[None]:
        """Nodes and origins, until the block ends."""
        self._models.give_back()
        try:
            async with contextlib.AsyncExitStack() as stack:
                for place in self.places:
                    await self.start(place)
                for number, ends in enumerate(self.ends):
                    node = memory_node(self._network, f"origin{number}", self._wrap, request=self.request)
                    self.origins.append(await self._origin(await stack.enter_async_context(node), ends))
                yield
        finally:
            for place in self.places:
                await self.stop(place)

    async def _origin(self, home: FullNode, ends: EndsAt) -> Origin:
        """An origin, which may serve layers too, and may have the whole model at hand."""
        device, addrs = cast(Device, TurnDevice(self.draw, 0.0005)), [place.addr for place in self.places]
        origin = Origin(home, self._models.origin(self._folder, "bf16", ends, 1), device, addrs)
        if self._own is not None or self.request.fallback:
            await home.listen(NodeAddr("mem", 0))
        if self._own is not None:
            await home.worker.host(self._folder, self._own, "bf16", device, model_name="test", has_ends=True)
        if self.request.fallback:
            await origin.add_fallback(self._folder, device)
        return origin

    def _wrap(self, transport: Transport) -> Transport:
        if self._wan is not None:
            line = WanProfile(*self._wan, seed=self.draw.randrange(1 << 20))
            transport = cast(Transport, WanTransport(transport, line))
        return cast(Transport, self.misfortune.faults.wrap(transport))

    async def start(self, place: Place) -> None:
        """Start a process of the node, as a task: it listens, at the address that it had."""
        serving = asyncio.Event()
        place.stop = asyncio.Event()
        place.task = asyncio.create_task(self._serve(place, serving), name=f"node {place.name}")
        place.task.add_done_callback(lambda _: serving.set())
        await serving.wait()

    async def _serve(self, place: Place, serving: asyncio.Event) -> None:
        place.device = TurnDevice(self.draw, place.step_s)
        device = cast(Device, place.device)
        async with memory_node(self._network, place.name, self._wrap, worker=place.worker) as node:
            is_spare = place.is_spare
            for span in place.spans:
                named: dict[str, Any] = {"model_name": "test", "has_ends": True, "is_spare": is_spare}
                await node.worker.host(self._folder, span, "bf16", device, **named)
            if place.can_load:
                named = {"model_name": "test", "max_layers": place.can_load, "has_ends": True}
                await node.worker.offer_to_load(self._folder, Span(0, LAYERS), "bf16", device, **named)
            place.addr = await node.listen(NodeAddr(place.addr.host, place.addr.port))
            place.node, place.is_up, place.is_leaving = node, True, False
            serving.set()
            await place.stop.wait()

    async def stop(self, place: Place) -> None:
        """End the process of a node, dead or alive."""
        if (task := place.task) is not None:
            place.stop.set()
            await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()) is not None:
                self.problems.append(f"{place.name} has failed: {error!r}")

    def work(self, what: Coroutine[Any, Any, None]) -> None:
        """Run `what` beside the requests."""
        task = asyncio.create_task(what, name="work")
        self._works.add(task)
        task.add_done_callback(self._works.discard)

    # -- requests -----------------------------------------------------------------------------------------------------

    async def _ask_all(self) -> None:
        self.misfortune.begin()
        tasks = {asyncio.create_task(self._ask(one), name=f"request {one.number}"): one for one in self.asked}
        _, hanging = await asyncio.wait(tasks, timeout=END_S)
        for task in hanging:
            self.problems.append(f"does not end: {tasks[task]}")
            task.cancel()
        await asyncio.wait(tasks)
        for one in self.asked:
            self.problems += [f"{what}: {one}" for what in wrong_with(self, one)]
            self.tally[one.outcome.partition(":")[0]] += 1
            if one.got is not None:
                self.tally += Counter(repairs=len(one.got.repairs), tokens=len(one.got.token_ids))
                self.tally += Counter(cached=int(one.got.cached_tokens > 0), redrawn=int(one.got.redrawn > 0))

    async def _ask(self, one: Asked) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        if one.after is not None:
            await one.after.ended.wait()
        await asyncio.sleep(one.begins_s)
        leaves_at = None if one.cancel_s is None else loop.time() + one.cancel_s
        timer = None if leaves_at is None else loop.call_at(leaves_at, task.cancel)
        try:
            one.outcome = await self._stream(one)
        except asyncio.CancelledError:
            if leaves_at is None or loop.time() < leaves_at:
                raise
            one.outcome = "left"
        except ManyhandsError as error:
            one.outcome, one.error = f"{type(error).__name__}: {error}", error
        finally:
            if timer is not None:
                timer.cancel()
            one.ended.set()

    async def _stream(self, one: Asked) -> str:
        """How it ended; nothing that is told here is an error."""
        assert one.wanted is not None
        origin, options = self.origins[one.origin], dict(one.options)
        answer = one.got = origin.answer(origin.request_ids(one.prompt, one.params))
        if one.drafts == "restless":
            options["drafter"] = Restless([*one.prompt, *one.wanted.token_ids], self.seed + one.number)
        else:
            options["draft"] = one.drafts
        if one.handle is not None:
            before = one.after.got if one.after is not None and one.adopts else None
            options["adoption"] = Adoption(one.handle, *marked(before))
        async with contextlib.aclosing(origin.stream(answer, **options)) as tokens:
            async for _ in tokens:
                if len(answer.token_ids) == one.cancel_at:
                    return "cut"
                if one.pauses:
                    await asyncio.sleep(one.pauses[len(answer.token_ids) % len(one.pauses)])
        return "ok"


def marked(answer: Answer | None) -> tuple[tuple[HopMark, ...], int]:
    """The hops that an answer came from, and how many tokens it had."""
    if answer is None or answer.session is None:
        return (), 0
    hops = [(hop.offer.node[:12], hop.offer.info.span) for hop in answer.session.route.hops]
    return tuple([HopMark(node, span.start, span.end) for node, span in hops]), len(answer.token_ids)


@contextlib.contextmanager
def virtual_clocks() -> Iterator[None]:
    """The process's clocks show the time of the running loop."""
    now = asyncio.get_running_loop().time
    with patch("time.monotonic", now), patch("time.perf_counter", now):
        yield
