"""Steps that a hop sends twice, or leaves out: the next one, which is honest, keeps its place, and the text is the same."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from manyhands.core import PathKind
from manyhands.testing.tiny import make_tiny
from manyhands.wire.message import Step
from manyhands.worker.session import HopSession
from tests.kill import Bench, kept_models


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(make_tiny("qwen3", tmp_path_factory.mktemp("twice") / "qwen3", seed=21), models)


def lost_by(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, send: Callable[[HopSession, Step], None], **ask: Any
) -> set[str]:
    """The hops that are lost where hops send their steps by `send`, of an answer that is what it would be anyway."""
    plain, lost = HopSession._send_on, set[str]()

    async def main() -> None:
        for kind in ("greedy", "hot"):
            async with bench.scene(spares=["0-5"] * 2) as scene:
                monkeypatch.setattr(HopSession, "_send_on", send)
                drafter = {"drafter": bench.half_right(kind, 0)} if ask.get("drafts") else {}
                assert await scene.ask(kind, 0, path=ask["path"], **drafter) == bench.wanted[kind, 0]
                monkeypatch.setattr(HopSession, "_send_on", plain)
                lost.update(name for repair in scene.answers[0].repairs for name in repair.lost)

    bench.play(main)
    return lost


@pytest.mark.parametrize("path", ["ring", "star"])
@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("again", [1, 2, 5])
def test_a_step_that_is_sent_again_costs_no_hop_its_place(
    bench: Bench, sender: int, again: int, drafts: bool, path: PathKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one, or one before it, of the prompt and of decode. (The origin got rows twice, of the honest last hop.)"""
    send_on, sent = HopSession._send_on, list[Step]()

    def send(session: HopSession, step: Step) -> None:
        send_on(session, step)
        if session.opened.hop == sender:
            sent.append(step)
            if len(sent) >= again and len(sent) % 3 == 0:
                send_on(session, sent[-again])

    assert not lost_by(bench, monkeypatch, send, drafts=drafts, path=path)
    assert len(sent) >= 16


@pytest.mark.parametrize("path", ["ring", "star"])
@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_step_that_is_left_out_costs_its_sender_its_place(
    bench: Bench, sender: int, drafts: bool, path: PathKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of a prompt: the next hop noticed it with the third, and had to go itself. (Where no other follows, whose
    word is true cannot be known: test_progress.py.)"""
    send_on, counts = HopSession._send_on, dict[bytes, int]()

    def send(session: HopSession, step: Step) -> None:
        count = counts.setdefault(session.opened.session, 0)
        if (session.opened.hop, session.opened.epoch) == (sender, 1):
            counts[session.opened.session] += 1
            if count == 1:
                return
        send_on(session, step)

    assert lost_by(bench, monkeypatch, send, drafts=drafts, path=path) == {f"n{sender}"}
    assert counts and all(count > 1 for count in counts.values())
