"""The swarm as a gateway sees it that is no member: by its links."""

from dataclasses import replace
from typing import Any

from manyhands.api.native.swarm import MAX_SPEEDS, SAMPLED, HopSpeeds, _holdings, _runs, _warnings
from manyhands.api.native.workers import WorkerView
from manyhands.api.run import Job
from manyhands.api.waterfall import TokenTime
from manyhands.core import NodeAddr, NodeId, Span, SpanInfo
from manyhands.origin import Token
from manyhands.place.strategy import coverage, gaps
from manyhands.route.search import Offer
from manyhands.wire.timings import HopTiming

INFO = SpanInfo("id", "m", Span(0, 4), 8, "bf16", "bf16/x", 64, 128, False, 1000, 4)  # type: ignore[arg-type]


def offer(node: str, start: int, end: int, **facts: Any) -> Offer:
    return Offer(NodeAddr("127.0.0.1", 1), NodeId(node), node, replace(INFO, span=Span(start, end), **facts))


def worker(node: str, start: int, end: int, **facts: Any) -> WorkerView:
    return WorkerView(NodeId(node), node, offers=[("m", offer(node, start, end, **facts))])


def test_layers_that_one_node_alone_could_serve_are_named() -> None:
    both = [worker("a", 0, 4), worker("b", 3, 8)]
    assert _warnings("m", both) == [
        "m: layers 0-2 are held once: losing a stops the model",
        "m: layers 4-7 are held once: losing b stops the model",
    ]
    assert _warnings("m", [*both, worker("c", 0, 8, is_spare=True)]) == []
    both[1].is_evicted = True
    assert _warnings("m", both) == ["m: layers 0-3 are held once: losing a stops the model"]


def test_a_spare_is_no_copy_and_leaves_nothing_missing() -> None:
    workers = [worker("a", 0, 4), worker("c", 2, 8, is_spare=True)]
    assert coverage(_holdings("m", workers), 8) == [1, 1, 1, 1, 0, 0, 0, 0]
    assert gaps(coverage(_holdings("m", workers, with_spares=True), 8)) == []
    workers[1].is_evicted = True
    assert [str(span) for span in gaps(coverage(_holdings("m", workers, with_spares=True), 8))] == ["4-7"]


def test_runs_of_layers() -> None:
    assert [str(span) for span in _runs([0, 1, 2, 5, 7, 8])] == ["0-2", "5", "7-8"]


def test_speeds_are_of_decode_steps_smoothed_and_bounded() -> None:
    speeds = HopSpeeds()
    job = Job("1", "m", "chat", None, 0.0, 4, 9, hops=(offer("a", 0, 4),))

    def come(compute_us: int) -> None:
        job.completion_tokens += 1
        job.waterfall.last = TokenTime((HopTiming(0, compute_us),), 1.0, 1.0)
        speeds.token(job, Token(1, "x", None, ()))

    come(99_000)  # the prompt's step
    assert speeds.layer_ms(NodeId("a")) is None
    come(4000)
    assert speeds.layer_ms(NodeId("a")) == 1.0
    for _ in range(SAMPLED):
        come(8000)
    assert speeds.layer_ms(NodeId("a")) == 1.25
    for index in range(2 * MAX_SPEEDS):
        job.hops = (offer(f"n{index}", 0, 4),)
        for _ in range(SAMPLED):
            come(4000)
    assert len(speeds._layer_ms) == MAX_SPEEDS and speeds.layer_ms(NodeId("a")) is None
