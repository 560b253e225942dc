"""Random walks over what a hop of a running route may say to its origin and its neighbours, beside right rows: with other nodes
for its layers every request goes on to its end, with the right text."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import pytest

from manyhands.core import ORIGIN_HOP
from manyhands.net.transport import Link, try_send
from manyhands.testing.tiny import make_tiny
from manyhands.wire.attest_message import Attested
from manyhands.wire.message import Credit, Extended, Fault, Message, Opened, Progress, Step
from manyhands.wire.signed import UNSIGNED
from manyhands.worker.execute import Result
from manyhands.worker.session import HopSession, Taken
from tests.kill import PROMPTS, REQUEST, Bench, Scene, kept_models
from tests.nightly import daily

U32: Final = (1 << 32) - 1
CODES: Final = (
    *("bad_request", "bad_model", "weights_mismatch", "shard_unavailable", "busy", "draining", "apart", "detour"),
    *("answered_early", "state_gone", "pipeline_stalled", "pipeline_aborted", "protocol_error", "link_closed"),
    *("internal", "unheard-of", ""),
)
KINDS: Final = (Fault, Progress, Opened, Extended, Credit, Step, Attested)


@pytest.fixture(scope="module", params=daily(["qwen3"], ["olmo_hybrid"]))
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(make_tiny(request.param, tmp_path_factory.mktemp("walk") / "model", seed=21), models)


class Talker:
    """What the node of one hop says without cause; which kinds of it, and how often, is drawn once."""

    def __init__(self, draw: random.Random, scene: Scene, index: int) -> None:
        self._draw, self._node = draw, scene.hops[index].transport.node
        self._rate = draw.choice([0.02, 0.1, 0.5])
        self._kinds = draw.sample(KINDS, draw.choice([1, 2, 4, len(KINDS)]))
        self._codes = draw.sample(CODES, draw.choice([1, 3, len(CODES)]))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain_step, plain_deliver = HopSession.step, HopSession.deliver

        def step(session: HopSession, step: Step, link: Link, now: float) -> None:
            fate = self._say(session)
            for _ in range(fate):
                plain_step(session, step, link, now)

        def deliver(session: HopSession, taken: Taken, result: Result, timing: bytes) -> bool:
            self._say(session)
            return plain_deliver(session, taken, result, timing)

        monkeypatch.setattr(HopSession, "step", step)
        monkeypatch.setattr(HopSession, "deliver", deliver)

    def _say(self, session: HopSession) -> int:
        """How often the step that came is to be taken."""
        if session.opened.to != self._node or self._draw.random() >= self._rate:
            return 1
        message = self._drawn(session, self._draw.choice(self._kinds))
        to = session.successor if isinstance(message, Step | Credit) else session.origin
        try_send(to, message)
        return self._draw.choice([1, 1, 1, 1, 0, 2])

    def _near(self, number: int) -> int:
        return self._draw.choice([0, 1, max(0, number - 1), number, number + 1, number + 16, U32])

    def _drawn(self, session: HopSession, kind: type[Message]) -> Message:
        draw, opened, near = self._draw, session.opened, self._near
        epoch = opened.epoch if draw.random() < 0.9 else near(opened.epoch)
        hop = opened.hop if draw.random() < 0.9 else draw.choice([0, 1, 2, 254, ORIGIN_HOP])
        where = opened.session, epoch, hop
        if kind is Fault:
            blame = draw.choice([None, None, 0, 1, 2, ORIGIN_HOP, max(0, opened.hop - 1), opened.hop + 1])
            return Fault(*where, draw.choice(self._codes), "no cause", blame)
        if kind is Progress:
            return Progress(*where, near(session.received), near(session.computed), near(0))
        if kind is Opened:
            return Opened(*where, draw.choice(["class", ""]), draw.random() < 0.5, near(session.computed))
        if kind is Extended:
            return Extended(*where, near(session.capacity))
        if kind is Credit:
            return Credit(opened.session, epoch, draw.choice([opened.hop, opened.hop + 1, ORIGIN_HOP]), near(3))
        if kind is Step:
            to = draw.choice([ORIGIN_HOP, opened.hop + 1])
            return Step(opened.session, epoch, to, near(session.computed), 0, near(5), near(0), "hidden", None, None)
        return Attested(*where, 0, near(5), opened.model, opened.precision, opened.span, None, None, UNSIGNED)


@pytest.mark.parametrize("seed", daily([*range(20), 155, 289, 412, 430], range(500, 900)))
def test_a_hop_that_says_anything_ends_no_request(bench: Bench, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may blame and be blamed, repeat and leave out; whatever it costs is time."""

    async def main() -> None:
        draw, number = random.Random(seed), seed % len(PROMPTS)
        async with bench.scene(spares=["0-5", "0-5"], request=replace(REQUEST, patience_s=20.0)) as scene:
            Talker(draw, scene, draw.randrange(3)).install(monkeypatch)
            path = draw.choice(["ring", "star"])
            assert await scene.ask("hot", number, path=path) == bench.wanted["hot", number]

    bench.play(main)
