"""A hop of a running session that blames its neighbours without cause, and one whose rows make honest hops look at fault."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.config import RequestConfig
from manyhands.core import NodeId, PathKind, Span
from manyhands.errors import AnsweredEarly, Corruption, LinkClosed, PipelineAborted, ProtocolError
from manyhands.net.transport import Link
from manyhands.origin.node import FullNode
from manyhands.origin.probe import lose_beside
from manyhands.origin.repair import RepairExecutor
from manyhands.origin.route import Lease
from manyhands.origin.session import Session
from manyhands.origin.standby_search import RouteServices
from manyhands.testing.tiny import make_tiny
from manyhands.testing.trouble import Phase
from manyhands.wire.message import Fault, Step
from manyhands.worker.bounds import MAX_NORM, norms
from manyhands.worker.execute import Result, SpanModel, Work
from manyhands.worker.session import HopSession
from tests.kill import Bench, Scene, kept_models
from tests.origin.test_session import ORIGIN, star_hop
from tests.worker.hop import MODEL, Notes

CUT = "0,1,2,3,4-5"  # more hops than a request has repairs without progress


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(make_tiny("qwen3", tmp_path_factory.mktemp("blame") / "qwen3", seed=21), models)


class Accuser:
    """Blames the hop `side` of its own for each `every`-th step that comes to `node`, once it `is_on`."""

    def __init__(self, node: FullNode, code: str, side: int, every: int) -> None:
        self._node, self._code, self._side, self._every = node.transport.node, code, side, every
        self._num_steps, self.is_on = 0, False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = HopSession.step

        def step(session: HopSession, step: Step, link: Link, now: float) -> None:
            if self.is_on and session.opened.to == self._node:
                self._num_steps += 1
                if self._num_steps % self._every == 0:
                    return session.fault(self._code, "no cause", session.opened.hop + self._side)
            return plain(session, step, link, now)

        monkeypatch.setattr(HopSession, "step", step)

    def begin(self) -> None:
        self.is_on = True


def check(bench: Bench, scene: Scene, got: Sequence[int], most: int) -> None:
    """The text is right, after `most` repairs at most."""
    assert list(got) == bench.wanted["hot", 1] and len(scene.answers[0].repairs) <= most


@pytest.mark.parametrize("path", ["ring", "star"])
@pytest.mark.parametrize("code", [Corruption.code, ProtocolError.code, LinkClosed.code, AnsweredEarly.code])
@pytest.mark.parametrize(("phase", "victim", "side"), [("prefill", 1, -1), ("decode", 3, 1), ("decode", 3, -1)])
def test_a_hop_that_blames_one_after_the_other_loses_its_own_place(
    bench: Bench, phase: Phase, victim: int, side: int, code: str, path: PathKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node that took the place of the blamed one was blamed as well, until the request was given up after three repairs,
    with nodes left to serve it. With the second the accuser goes, and those that it blamed may be used again."""

    async def main() -> None:
        async with bench.scene(CUT, spares=["0-5"]) as scene:
            node = scene.hops[victim]
            accuser = Accuser(node, code, side, every=1)
            accuser.install(monkeypatch)
            scene.faults.at(phase, node, accuser.begin, 2)
            check(bench, scene, await scene.ask("hot", 1, path=path), 3)
            session = scene.answers[0].session
            assert session is not None and f"n{victim}" in scene.answers[0].repairs[-1].lost
            assert session.untrusted_nodes <= {node.transport.node}

    bench.play(main)


@pytest.mark.parametrize("side", [-1, 1])
def test_a_hop_that_blames_now_and_then_uses_up_no_nodes(
    bench: Bench, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tokens between, so that no repair is without progress: each cost a node its place for good, as long as there were
    any."""

    async def main() -> None:
        async with bench.scene(CUT, spares=["0-5", "0-5"]) as scene:
            node = scene.hops[2]
            accuser = Accuser(node, Corruption.code, side, every=4)
            accuser.install(monkeypatch)
            scene.faults.at("decode", node, accuser.begin)
            check(bench, scene, await scene.ask("hot", 1), 2)

    bench.play(main)


def running(num_hops: int) -> tuple[Session, list[Notes]]:
    """A session over nodes of one layer each, and our links to them."""
    links = [Notes(NodeId(f"{number:064x}")) for number in range(num_hops)]
    hops = [star_hop(link, Span(number, number + 1)) for number, link in enumerate(links)]
    session = Session(ORIGIN, hops, Lease(MODEL, "bf16", 64, 1, "ring", "origin", None), RequestConfig())
    session.route.renew(hops)
    session._is_running = True
    for hop in hops:
        hop.epoch = session.route.epoch
    return session, links


def tell_lost(session: Session, hop: int) -> None:
    """Hop `hop` says that the next one is gone."""
    session.on_fault(Fault(session.id, session.route.epoch, hop, LinkClosed.code, "gone", hop + 1))


def test_nodes_that_are_gone_cost_those_that_tell_nothing() -> None:
    """Two that die at once, or one after the other: our own links to them close as well, sooner or later."""
    session, links = running(6)
    tell_lost(session, 0)
    tell_lost(session, 3)
    lose_beside(session)
    assert sorted(session.losses) == [1, 4] and not session.untrusted_nodes
    links[1].is_closed = links[4].is_closed = True
    session.losses.clear()
    tell_lost(session, 1)
    lose_beside(session)
    assert list(session.losses) == [2] and not session.untrusted_nodes


def test_of_nodes_that_this_origin_reaches_the_second_costs_more() -> None:
    session, links = running(6)
    for hop in (2, 1, 4):
        tell_lost(session, hop)
        lose_beside(session)
        lost = sorted(session.losses)
        session.losses.clear()
        if hop == 2:
            assert lost == [3]
        elif hop == 1:
            assert lost == [1, 2, 3]
        else:
            assert lost == [0, 1, 2, 3, 4], "all but the one that is blamed"
    assert not session.untrusted_nodes and not any(link.is_closed for link in links)
    session.told.forgive(session.untrusted_nodes)
    tell_lost(session, 2)
    lose_beside(session)
    assert sorted(session.losses) == [3], "a new position came back meanwhile"


def test_layers_that_a_spare_gives_back_are_no_failure() -> None:
    """A node that was lost may have them back, and failed anew at the same position: with two moves before that the third
    repair was one too many."""
    session, links = running(4)
    healer = RepairExecutor(session, cast(RouteServices, None), RequestConfig(max_repairs=1))
    healer._back._gave = {links[0].peer, links[1].peer}
    for index in (0, 1):
        session.lose(index, "is a spare")
        healer._count(9, "")
        session.losses.clear()
    for _ in range(2):
        session.lose(2, "is gone")
        healer._count(9, "")
        session.losses.clear()
    session.lose(2, "is gone")
    session.lose(0, "is a spare")
    with pytest.raises(PipelineAborted, match="after 1 repairs"):
        healer._count(9, "")


# -- rows that are not too large yet ----------------------------------------------------------------------------------


def are_admitted(row: NDArray[np.float32]) -> bool:
    try:
        norms((row.view(np.uint32) >> 16).astype(np.uint16).tobytes(), 1, "bf16", "a row")
    except Corruption:
        return False
    return True


def largest(width: int) -> NDArray[np.float32]:
    """A row of bf16 than which hardly any is larger that is admitted."""

    def row(squares: float) -> NDArray[np.float32]:
        numbers = np.zeros(width, np.float32)
        for i in range(16):
            numbers[i : i + 1].view(np.uint32)[:] = np.float32(max(0.0, squares) ** 0.5).view(np.uint32) & 0xFFFF0000
            squares -= float(numbers[i]) ** 2
        return numbers

    low, high = 0.9 * MAX_NORM**2, 1.1 * MAX_NORM**2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if are_admitted(row(middle)) else (low, middle)
    return row(low)


class AtTheEdge:
    """A SpanModel whose rows are as large as rows may be: what a layer adds is too much for the next hop but one."""

    def __init__(self, plain_model: SpanModel, width: int) -> None:
        self._plain, self._row = plain_model, (largest(width).view(np.uint32) >> 16).astype(np.uint16).tobytes()

    def run(self, works: Sequence[Work]) -> list[Result | Exception]:
        return [self._changed(result) for result in self._plain.run(works)]

    def _changed(self, result: Result | Exception) -> Result | Exception:
        if not isinstance(result, Result) or result.payload is None:
            return result
        return result._replace(payload=result.payload._replace(data=self._row * result.count))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


@pytest.mark.parametrize("path", ["ring", "star"])
def test_rows_that_honest_hops_make_too_large_are_laid_to_their_maker(bench: Bench, path: PathKind) -> None:
    """Each node in the next place was at fault for them, and the one that made them kept its own."""

    async def main() -> None:
        async with bench.scene(CUT, spares=["0-5", "0-5"]) as scene:
            node = scene.hops[0]
            (host,) = node.hosts
            scene.faults.at(
                "opening",
                node,
                lambda: setattr(
                    host.engine, "model", cast(SpanModel, AtTheEdge(cast(SpanModel, host.engine.model), 64))
                ),
            )
            check(bench, scene, await scene.ask("hot", 1, path=path), 3)
            assert "n0" in scene.answers[0].repairs[-1].lost

    bench.play(main)
