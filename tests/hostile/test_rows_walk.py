"""Random walks over what a hop may make of the steps that it sends on: the text may be another, as numbers that might be right
go unnoticed, and no request ends while other nodes hold the layers."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.core import ORIGIN_HOP
from manyhands.origin.node import FullNode
from manyhands.testing.tiny import make_tiny
from manyhands.wire.codec import plain
from manyhands.wire.message import Payload, Step
from manyhands.wire.rows import numbers, read_rows, store
from manyhands.worker.bounds import MAX_DRIFT, MAX_NORM
from manyhands.worker.session import HopSession
from tests.kill import PROMPTS, REQUEST, Bench, kept_models
from tests.nightly import daily

U32: Final = (1 << 32) - 1
Rows = NDArray[np.float32]
Draw = random.Random


@pytest.fixture(scope="module", params=daily(["qwen3"], ["olmo_hybrid"]))
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(make_tiny(request.param, tmp_path_factory.mktemp("rows") / "model", seed=21), models)


def normed(rows: Rows, draw: Draw) -> Rows:
    unit: Rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
    return unit * np.float32(draw.choice([MAX_NORM, 1.0, 1e-6]))


def spoiled(rows: Rows, draw: Draw) -> Rows:
    rows[draw.randrange(len(rows)), 0] = draw.choice([np.nan, np.inf])
    return rows


# Numbers, and what says which they are.
CHANGED: Final[tuple[Callable[[Rows, Draw], Rows], ...]] = (
    lambda rows, draw: rows * draw.choice([1 / 70, 1 / 60, 0.5, 1.01, 2, MAX_DRIFT - 0.1, 70, 1000]),
    normed,
    spoiled,
    lambda rows, draw: rows * np.float32(0),
    lambda rows, draw: rows[::-1],
    lambda rows, draw: rows + np.float32(draw.choice([0.01, 1, 10])),
)
NAMED: Final[tuple[Callable[[Step, Draw], Step], ...]] = (
    lambda step, draw: step._replace(position=max(0, step.position + draw.choice([-5, -1, 1, 100]))),
    lambda step, draw: step._replace(reply_from=draw.choice([0, step.position, step.position + 1, U32])),
    lambda step, draw: step._replace(committed=draw.choice([0, U32])),
    lambda step, draw: step._replace(guess=draw.choice([max(0, step.guess - 1), step.guess + 1, U32])),
    lambda step, draw: step._replace(epoch=step.epoch + draw.choice([1, 2])),
    lambda step, draw: step._replace(hop=draw.choice([0, 1, 2, ORIGIN_HOP])),
    lambda step, draw: step._replace(content=draw.choice(["ids", "logits"])),
    lambda step, draw: step._replace(ids=tuple(draw.randrange(U32) for _ in range(step.count))),
)


def coded(payload: Payload, count: int, draw: Draw) -> Payload:
    """Bytes that are no rows, or of another shape."""
    width = payload.width
    return draw.choice(
        [
            Payload("fp32", width, bytes(4 * width * count)),
            Payload(payload.dtype, 2 * width, bytes(4 * width * count)),
            Payload(payload.dtype, width, draw.randbytes(width * count * 3 // 2), "planes"),
            Payload(payload.dtype, width, draw.randbytes(count * (width + -(-width // 32))), "int8"),
        ]
    )


def changed(step: Step, how: object, draw: Draw) -> Step:
    if how in NAMED:
        return NAMED[NAMED.index(how)](step, draw)
    if step.payload is None or not step.count:
        return step
    if how is coded:
        return step._replace(payload=coded(step.payload, step.count, draw))
    rows = numbers(read_rows(plain(step.payload, step.count), step.count), step.payload.dtype).copy()
    rows = CHANGED[CHANGED.index(how)](rows, draw)
    return step._replace(payload=store(np.ascontiguousarray(rows, dtype=np.float32), step.payload.dtype))


def install(node: FullNode, draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `node` change some of what it sends on, in ways that are drawn once."""
    ways = draw.sample([*CHANGED, *NAMED, coded], draw.choice([1, 1, 2, 4]))
    rate, send_on = draw.choice([0.02, 0.1, 0.5, 1.0]), HopSession._send_on

    def send(session: HopSession, step: Step) -> None:
        is_meant = session.opened.to == node.transport.node and draw.random() < rate
        send_on(session, changed(step, draw.choice(ways), draw) if is_meant else step)

    monkeypatch.setattr(HopSession, "_send_on", send)


@pytest.mark.parametrize("seed", daily(range(30), range(100, 700)))
def test_a_hop_that_sends_anything_ends_no_request(bench: Bench, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rows are wanted, and steps that do not arrive, were laid to the last hop, or the next, each time anew."""

    async def main() -> None:
        draw, number = random.Random(seed), seed % len(PROMPTS)
        request = replace(REQUEST, patience_s=20.0, stall_timeout_s=60.0)
        async with bench.scene("0,1,2,3,4-5", spares=["0-5", "0-5"], request=request) as scene:
            install(scene.hops[draw.randrange(5)], draw, monkeypatch)
            tokens = await scene.ask("hot", number, path=draw.choice(["ring", "star"]))
            assert len(tokens) == len(bench.wanted["hot", number])

    bench.play(main)
