"""What people read of an answer: what happened to its route, and its exactness class, in words."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from manyhands.cli.client import GatewayError
from manyhands.cli.exactness import explained
from manyhands.cli.infer_gateway import Telling
from manyhands.cli.show import show_answer, told_of
from manyhands.core import NodeAddr, Span
from manyhands.errors import ShardUnavailable
from manyhands.origin.repair_plan import Event


@pytest.mark.parametrize(
    ("kind", "detail", "said"),
    [
        ("shard_status", "degraded: is gone: link to ca3e976db9d361cb: closed by the peer", "nas: is gone"),
        ("shard_status", "degraded: hop 1 lost its link to the next", "nas: hop 1 lost its link to the next"),
        ("shard_failover", "laptop -> nas", "nas goes on in place of laptop"),
        ("reshard", "laptop, desk -> nas", "the layers are cut anew: laptop, desk -> nas"),
        ("pipeline_aborted", "no node holds layers 3-5", "given up: no node holds layers 3-5"),
    ],
)
def test_what_happens_to_a_route_is_said_without_ids(
    kind: Literal["shard_status", "shard_failover", "reshard", "pipeline_aborted"], detail: str, said: str
) -> None:
    assert told_of(Event(kind, ("nas", "nas"), 7, detail)) == f"[at token 7: {said}]", "of two hops on one node"


def test_the_class_is_explained_and_one_that_is_not_known_is_named() -> None:
    assert explained("E0") == "exactness E0 (the same bits on any nodes)"
    assert explained("E2").startswith("exactness E2 (equal up to rounding") and explained("E9") == "exactness E9"


def test_the_route_is_shown_again_after_a_repair(capsys: pytest.CaptureFixture[str]) -> None:
    def offer(name: str, span: str) -> Any:
        return SimpleNamespace(
            info=SimpleNamespace(span=Span.parse(span)), name=name, addr=NodeAddr("h", 1), node="n" * 8
        )

    def hops(*offers: Any) -> Any:
        return SimpleNamespace(route=SimpleNamespace(hops=[SimpleNamespace(offer=each) for each in offers]))

    desk, laptop, nas = offer("desk", "0-3"), offer("laptop", "4-7"), offer("nas", "4-7")
    answer: Any = SimpleNamespace(token_ids=[], events=[], route=(desk, laptop), session=hops(desk, laptop))

    class Origin:
        async def stream(self, answer: Any) -> AsyncIterator[Any]:
            for index in range(3):
                answer.token_ids.append(index)
                if index == 2:
                    answer.events.append(Event("shard_failover", ("nas",), 2, "laptop -> nas"))
                    answer.session = hops(desk, nas)
                yield SimpleNamespace(text=f" {index}")

    asyncio.run(show_answer(Origin(), answer, as_json=False))  # type: ignore[arg-type]
    told = capsys.readouterr()
    assert told.out == " 0 1 2\n"
    lines = [line for line in told.err.splitlines() if line]
    assert [line.split()[4] for line in lines if line.startswith("hop")] == ["desk", "laptop", "desk", "nas"]
    assert lines[2] == "[at token 2: nas goes on in place of laptop]"


def test_what_breaks_off_ends_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Seen on a terminal: "and a great many people, andmanyhands: no other node holds layers 0-11"."""
    answer: Any = SimpleNamespace(token_ids=[], events=[], route=(), session=None)

    class Origin:
        async def stream(self, answer: Any) -> AsyncIterator[Any]:
            answer.token_ids.append(0)
            yield SimpleNamespace(text="and")
            raise ShardUnavailable("no other node holds layers 0-11")

    with pytest.raises(ShardUnavailable):
        asyncio.run(show_answer(Origin(), answer, as_json=False))  # type: ignore[arg-type]
    assert capsys.readouterr().out == "and\n"
    telling = Telling("")
    telling.take({"token_text": "and"})
    with pytest.raises(GatewayError):
        telling.take({"detail": "no other node holds layers 0-11", "code": "shard_unavailable"})
    assert capsys.readouterr().out == "and\n"
