"""F5 in a whole swarm: members on loopback TLS, all of whose doors are flooded. A join and a repair go through."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from manyhands.core import SamplingParams, Span
from manyhands.member.member import Member
from manyhands.net.admission import PendingLimits
from manyhands.net.tls import TlsTransport
from manyhands.net.transport import Transport
from manyhands.swarm.identity import NodeKey
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import Hello, Lane
from tests.hostile.test_door import HALF_HELLO
from tests.member.members import Town, spans
from tests.waiting import GUARD_S, until

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPT = tuple(range(3, 40))
LIMITS = PendingLimits(128, 64, 3.0)
CALLERS = 90  # of one source, more than may be pending: the door always drops some for others


class TlsTown(Town):
    """Members that dial each other over TLS on loopback, in real time."""

    def transport(self, key: NodeKey, hello: Callable[[Lane], Hello]) -> Transport:
        return TlsTransport(key.private_key, self.ticket.secret, hello)


@asynccontextmanager
async def flooded(member: Member, number: int) -> AsyncIterator[list[int]]:
    """Callers from a source of their own that send half a hello and wait, and dial again as soon as they are dropped.

    Gives how many dials ended so far.
    """
    dropped = [0]

    async def pester() -> None:
        while True:
            with contextlib.suppress(OSError):
                local = (f"127.0.2.{1 + number}", 0)
                addr = member.addresses[0]
                reader, writer = await asyncio.open_connection(addr.host, addr.port, local_addr=local)
                try:
                    writer.write(HALF_HELLO)
                    await reader.read()
                finally:
                    dropped[0] += 1
                    writer.close()
            await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(pester()) for _ in range(CALLERS)]
    try:
        await asyncio.sleep(0.3)
        yield dropped
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.1)  # what was closed goes


def test_a_join_and_a_repair_go_through_while_every_door_is_flooded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    monkeypatch.setattr("manyhands.net.tls.pending_limits", lambda *_: LIMITS)
    folder = make_tiny("llama", tmp_path / "tiny", layers=6, seed=3)

    async def main() -> None:
        async with AsyncExitStack() as stack, asyncio.timeout(2 * GUARD_S):
            place = TlsTown(folder, tmp_path, stack)
            first, second = [(await place.host(i, span=Span(3 * i, 3 * i + 3))).member for i in range(2)]
            await until(lambda: len(spans(first)) == 2)
            origin = place.origin(first)
            wanted = await origin.complete(origin.request_ids(PROMPT, PARAMS))
            assert not wanted.repairs
            floods = [await stack.enter_async_context(flooded(member, i)) for i, member in enumerate((first, second))]
            third = await place.open(2, span=Span(3, 6))
            floods.append(await stack.enter_async_context(flooded(third, 2)))
            await place.hosting(third)
            await until(lambda: len(spans(first)) == 3)
            died: list[Member] = []

            def die(member: Member) -> None:
                if not died:
                    died.append(member)
                    place.faults.die(member.node)

            for member in (second, third):  # whichever of the two the route takes: a flooded one may answer more slowly
                place.faults.at("decode", member.node, partial(die, member), 2)
            answer = await origin.complete(origin.request_ids(PROMPT, PARAMS))
            assert answer.token_ids == wanted.token_ids
            lost, spare = ("n1", "n2") if died == [second] else ("n2", "n1")
            assert [(repair.lost, repair.replacement) for repair in answer.repairs] == [((lost,), (spare,))]
            assert all(flood[0] > 0 for flood in floods), "the doors dropped callers all the while"

    asyncio.run(main())
