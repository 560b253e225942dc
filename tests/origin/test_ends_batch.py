"""manyhands.origin.ends_batch: what requests need of the ends runs in batches, and each gets its own or its own error."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.engine.span import EndsRunner
from manyhands.errors import Corruption
from manyhands.origin.ends_batch import MAX_ROWS, EndsBatcher
from manyhands.wire.message import Payload
from manyhands.wire.rows import Rows, read_rows, store
from manyhands.worker.execute import Device
from manyhands.worker.runner import load_ends
from tests.origin.scenes import play

Logits = NDArray[np.float32]
GUARD_S = 30.0


@pytest.fixture(scope="module")
def ends(folder: Path) -> EndsRunner:
    return load_ends(folder, "bf16", 1)


@asynccontextmanager
async def host_of(ends: EndsRunner) -> AsyncIterator[EndsBatcher]:
    device = Device.start(1)
    host = EndsBatcher(ends, "bf16", device)
    task = asyncio.create_task(host.run())
    try:
        yield host
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        device.close()


def rows_of(numbers_TD: Logits) -> Rows:
    """As rows of bf16."""
    return read_rows(store(numbers_TD, "bf16"), len(numbers_TD))


def normal(count: int, seed: int) -> Logits:
    return np.random.default_rng(seed).standard_normal((count, 64), np.float32)


def hidden(count: int, seed: int) -> Rows:
    return rows_of(normal(count, seed))


def embeds(ends: EndsRunner, got: object, ids: list[int]) -> bool:
    """Whether a turn gave the embeddings of `ids`."""
    return isinstance(got, Payload) and np.array_equal(read_rows(got, len(ids)), ends.embed(ids))


def test_turns_of_one_moment_are_one_batch(ends: EndsRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight requests cost one pass over the head, and get the very logits and embeddings of a pass alone."""
    calls: list[int] = []
    logits = ends.logits
    alone = [logits(hidden(n + 1, n), n + 1, 1) for n in range(8)]

    def counted(rows: bytes, count: int, threads: int) -> Logits:
        calls.append(count)
        return logits(rows, count, threads)

    monkeypatch.setattr(ends, "logits", counted)

    async def main() -> None:
        seen: dict[int, Logits] = {}

        def decide(number: int, rows: Logits) -> list[int]:
            seen[number] = rows.copy()
            return [number] * number

        async with host_of(ends) as host:
            turns = [host.turn(hidden(n + 1, n), lambda rows, n=n: decide(n, rows)) for n in range(8)]  # type: ignore[misc]
            embedded = await asyncio.gather(*turns)
        assert calls == [sum(range(1, 9))]
        for n, rows in enumerate(embedded):
            assert np.array_equal(seen[n], alone[n])
            assert (rows is None) == (n == 0)
            if rows is not None:
                assert embeds(ends, rows, [n] * n)

    play(main)


def test_logits_of_many_requests_are_made_a_part_at_a_time(ends: EndsRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway has died, and all its streams are drawn again from 32 rows each at another one: 64 of them made 1.2 GB."""
    calls: list[int] = []
    logits = ends.logits

    def counted(rows: bytes, count: int, threads: int) -> Logits:
        calls.append(count)
        return logits(rows, count, threads)

    monkeypatch.setattr(ends, "logits", counted)

    async def main() -> None:
        async with host_of(ends) as host:
            turns = [host.turn(hidden(32, n), lambda rows: [int(rows[0].argmax())]) for n in range(64)]
            only_embed = host.turn(None, lambda rows: [5])
            *drawn, embedded = await asyncio.gather(*turns, only_embed)
        assert sum(calls) == 64 * 32 and max(calls) <= MAX_ROWS
        assert embeds(ends, embedded, [5])
        for n, rows in enumerate(drawn):
            assert embeds(ends, rows, [int(logits(hidden(32, n), 32, 1)[0].argmax())])

    play(main)


def test_a_turn_without_rows_only_embeds(ends: EndsRunner) -> None:
    """A prefill has nothing to decide."""

    async def main() -> None:
        async with host_of(ends) as host:
            got = await host.turn(None, lambda rows: [1, 2, 3] if rows.shape[0] == 0 else [])
            assert embeds(ends, got, [1, 2, 3])

    play(main)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2e6])
def test_rows_that_are_no_numbers_are_that_requests_error(ends: EndsRunner, value: float) -> None:
    """Its company in the batch gets what it would have got."""
    wrong = normal(2, 1)
    wrong[1, 3] = value
    bad = rows_of(wrong)

    async def main() -> None:
        async with host_of(ends) as host:
            outcomes = await asyncio.gather(
                host.turn(hidden(1, 5), lambda rows: [int(rows[0].argmax())]),
                host.turn(bad, lambda rows: [0]),
                host.turn(hidden(3, 6), lambda rows: [7]),
                return_exceptions=True,
            )
        want = int(ends.logits(hidden(1, 5), 1, 1)[0].argmax())
        assert embeds(ends, outcomes[0], [want])
        assert isinstance(outcomes[1], Corruption)
        assert embeds(ends, outcomes[2], [7])

    play(main)


def test_an_error_of_one_request_is_its_own(ends: EndsRunner) -> None:
    """What `decide` raises reaches its caller; the others and later turns are served."""

    def refuse(_: Logits) -> Sequence[int]:
        raise KeyError("mine")

    async def main() -> None:
        async with host_of(ends) as host:
            bad, good = await asyncio.gather(
                host.turn(hidden(1, 1), refuse), host.turn(hidden(1, 2), lambda _: [4]), return_exceptions=True
            )
            assert isinstance(bad, KeyError) and embeds(ends, good, [4])
            assert await host.turn(hidden(1, 3), lambda _: []) is None

    play(main)


@pytest.mark.parametrize("fails", [False, True])
def test_an_ended_request_leaves_nothing_behind(ends: EndsRunner, fails: bool) -> None:
    """The last batch before a pause kept its requests: of one with a large grammar, 12 MB."""

    class Grammar:
        def decide(self, _: Logits) -> Sequence[int]:
            if fails:
                raise KeyError("mine")
            return [4]

    async def main() -> None:
        async with host_of(ends) as host:
            grammar = Grammar()
            left = weakref.ref(grammar)
            await asyncio.gather(host.turn(hidden(1, 1), grammar.decide), return_exceptions=True)
            del grammar
            async with asyncio.timeout(GUARD_S):
                while left() is not None:
                    gc.collect()
                    await asyncio.sleep(0.01)

    play(main)


def test_a_failure_of_the_whole_batch_ends_its_requests_and_not_the_host(
    ends: EndsRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory in the head: these requests fail, the next is served. (It stopped the node.)"""

    async def main() -> None:
        async with host_of(ends) as host:
            with monkeypatch.context() as patch:

                def fail(*_: object) -> Logits:
                    raise MemoryError("no room for logits")

                patch.setattr(ends, "logits", fail)
                outcomes = await asyncio.gather(
                    *(host.turn(hidden(1, n), lambda _: [1]) for n in range(3)), return_exceptions=True
                )
            assert [type(outcome) for outcome in outcomes] == [MemoryError] * 3
            assert await host.turn(hidden(1, 1), lambda _: [1]) is not None

    play(main)


def test_a_cancelled_turn_is_not_computed(ends: EndsRunner) -> None:
    """A client that left costs nothing, and its turn does not delay the others."""
    decided: list[str] = []

    def note(name: str) -> list[int]:
        decided.append(name)
        return [1]

    async def main() -> None:
        async with host_of(ends) as host:
            gone = asyncio.ensure_future(host.turn(hidden(1, 1), lambda _: note("gone")))
            await asyncio.sleep(0)
            gone.cancel()
            await host.turn(hidden(1, 2), lambda _: note("here"))
            assert gone.cancelled() and decided == ["here"]

    play(main)
