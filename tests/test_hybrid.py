"""Models with states (linear attention, short convolutions), or with entries, in swarms: hops cannot go back to every position,
and the text is the same. Under the virtual clock.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from manyhands.config import RequestConfig
from manyhands.core import Span
from manyhands.engine.states import MARGIN
from manyhands.errors import ManyhandsError, StateGone
from manyhands.origin import Answer
from manyhands.origin.adoption import Adoption
from manyhands.origin.conversations import Conversations
from manyhands.origin.draft_model import DraftModel, _Line
from manyhands.origin.fault import MAX_STUCK
from manyhands.origin.route import Hop
from manyhands.origin.sampler import Sampler
from manyhands.place.measure import stepping
from manyhands.testing.faulty_device import SlowDevice
from manyhands.testing.swarm import MemorySwarm
from manyhands.testing.tiny import make_tiny
from manyhands.testing.trouble import PHASES, Phase
from manyhands.text.received import ReceivedText
from manyhands.text.tokenizer import load_tokenizer
from manyhands.wire.message import Opened
from manyhands.worker.execute import Device
from manyhands.worker.runner import load_span
from manyhands.worker.session import HopSession
from tests.kill import REQUEST, Bench, Scene, kept_models
from tests.origin.scenes import GREEDY, HOT, drafters, expected, ids_of, play, swarm_of
from tests.worker.pipeline import random_ids

FAMILIES = ("qwen3_next", "lfm2", "deepseek_v4")
# Far longer than what can always be gone back: blocks in the middle of them are not kept.
LONG = [tuple(random_ids(420 + 75 * number, seed=number)) for number in range(3)]
SKIP: dict[Phase, int] = {"opening": 0, "prefill": 24, "decode": 7, "window": 2, "replay": 1}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 192}
    more: dict[str, Any] = {"compress_rates": rates} if family == "deepseek_v4" else {}
    return make_tiny(family, tmp_path_factory.mktemp("hybrid") / family, seed=21, **more)


@pytest.fixture(scope="module")
def bench(folder: Path) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(folder, models, LONG)


def short_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(asked for, answered) of every place that is here and cannot go on from where its origin would like."""
    seen: list[tuple[int, int]] = []
    plain = HopSession.answer_open

    def noting(self: HopSession, arithmetic: str, *, has_log: bool, cached: int = 0) -> None:
        if self.opened.resume is None and cached < self.opened.resume_until:
            seen.append((self.opened.resume_until, cached))
        plain(self, arithmetic, has_log=has_log, cached=cached)

    monkeypatch.setattr(HopSession, "answer_open", noting)
    return seen


def note_stuck(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What hops say that cannot go back to where a step begins."""
    told: list[str] = []
    plain = HopSession.fault

    def noting(self: HopSession, code: str, detail: str, blame: int | None) -> None:
        told.extend([detail] if code == StateGone.code else [])
        plain(self, code, detail, blame)

    monkeypatch.setattr(HopSession, "fault", noting)
    return told


async def ask_all(bench: Bench, scene: Scene, kind: str, count: int, **options: Any) -> None:
    got = await asyncio.gather(*(scene.ask(kind, number, **options) for number in range(count)))
    assert got == [bench.wanted[kind, number] for number in range(count)]


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("phase", PHASES)
def test_any_hop_may_die_in_any_phase(bench: Bench, phase: Phase, victim: int) -> None:
    """The slow hop behind lets those before it run ahead of what is committed."""

    async def main() -> None:
        for count, kind, path in ((1, "greedy", "ring"), (3, "hot", "star")):
            async with bench.scene(spares=["0-5"] * 2) as scene:
                node = scene.hops[victim]
                scene.faults.slow(scene.hops[2], 0.02)
                first: Phase = "decode" if phase == "replay" else phase
                scene.faults.at(first, node, partial(scene.faults.die, node), SKIP[first])
                if phase == "replay":
                    second = scene.hops[(victim + 1) % 3]
                    scene.faults.at("replay", second, partial(scene.faults.die, second), SKIP["replay"])
                draft = {"drafter": bench.half_right(kind, 0)} if phase == "window" and count == 1 else {}
                await ask_all(bench, scene, kind, count, path=path, **draft)
                assert scene.faults.trouble.fired or phase == "window"

    bench.play(main)


@pytest.mark.parametrize("log_bytes", [0, 1 << 24])
def test_survivors_say_from_where_they_can_go_on(bench: Bench, log_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last hop dies in a long prompt; those before it have computed far more than is committed. One repair, no more."""
    short = short_of(monkeypatch)

    async def main() -> None:
        for skip in (20, 22, 24, 26, 28):
            async with bench.scene() as scene:
                for node in scene.hops:
                    node.worker.logs.limit_bytes = log_bytes
                scene.faults.slow(scene.hops[2], 0.05)
                scene.faults.at("prefill", scene.hops[2], partial(scene.faults.die, scene.hops[2]), skip)
                assert await scene.ask("hot", 2) == bench.wanted["hot", 2]
                assert len(scene.answers[0].repairs) == 1

    bench.play(main)
    assert short and all(0 <= answered < asked for asked, answered in short)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_standbys_follow_and_take_over(bench: Bench, victim: int) -> None:
    """While the prompt is computed and after; one spare follows all three hops."""

    async def main() -> None:
        cases: list[tuple[Phase, int]] = [("decode", 20), ("decode", 3), ("prefill", 24)]
        for phase, skip in cases:
            async with bench.scene(request=replace(REQUEST, standby=True)) as scene:
                node = scene.hops[victim]
                scene.faults.slow(scene.hops[0], 0.01)
                scene.faults.at(phase, node, partial(scene.faults.die, node), skip)
                assert await scene.ask("hot", 1) == bench.wanted["hot", 1]
                assert len(scene.answers[0].repairs) == 1

    bench.play(main)


@pytest.mark.parametrize("cut", ["0-5", "0,1,2,3,4,5", "0-1,2-5"])
def test_cuts_chunks_and_drafts_change_no_token(folder: Path, cut: str) -> None:
    """Drafts of every character, wrong ones in streams too, behind prompts in chunks of several sizes."""
    wanted = {name: expected(folder, LONG[0], params) for name, params in (("greedy", GREEDY), ("hot", HOT))}

    async def main() -> None:
        for chunk in (7, 64, 256):
            async with swarm_of(folder, cut, request=RequestConfig(prefill_chunk=chunk)) as swarm:
                for name, drafter in drafters([*LONG[0], *wanted["hot"]]).items():
                    assert await ids_of(swarm, LONG[0], HOT, drafter=drafter) == wanted["hot"], (chunk, name)
                both = ids_of(swarm, LONG[0], GREEDY), ids_of(swarm, LONG[1], HOT), ids_of(swarm, LONG[0], HOT)
                greedy, _, hot = await asyncio.gather(*both)
                assert (greedy, hot) == (wanted["greedy"], wanted["hot"])

    play(main)


async def ask(swarm: MemorySwarm, prompt: Sequence[int], params: Any = GREEDY) -> Answer:
    return await swarm.origin.complete(swarm.origin.request_ids(prompt, params), tenant="me")


@pytest.mark.parametrize("cut", ["0-2,3-5", "0,1,2-3,4,5"])
def test_a_parked_session_is_gone_on_with(folder: Path, cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its full end, at the end of its prompt, where templates end prompts otherwise, and somewhere: as far as hops can."""
    prompt, told = LONG[2], note_stuck(monkeypatch)

    async def main() -> None:
        async with swarm_of(folder, cut) as swarm:
            first = await ask(swarm, prompt)
            whole = [*prompt, *first.token_ids][:-1]
            tail = [*range(100, 120)]
            least = {len(whole): len(whole), len(whole) - 9: len(whole) - 9, len(prompt): len(prompt) - MARGIN}
            least |= {len(prompt) - MARGIN: len(prompt) - MARGIN, 300: 160, 40: 0}
            for same, reached in least.items():
                swarm.origin.reuse.conversations = Conversations()  # only the first is found
                await ask(swarm, prompt)
                wanted = await ids_of(swarm, [*whole[:same], *tail], HOT)
                answer = await ask(swarm, [*whole[:same], *tail], HOT)
                assert answer.token_ids == wanted
                assert reached <= answer.cached_tokens <= same, same

    play(main)
    assert not told, "forks begin where they can"


@pytest.mark.parametrize("lost", range(1, 8))
def test_hops_that_have_lost_what_was_parked_are_rebuilt(folder: Path, lost: int) -> None:
    """Any set of hops; the others cannot go back everywhere, and what was computed of it differs from hop to hop."""
    prompt, tail = LONG[0], [*range(100, 140)]

    async def main() -> None:
        async with swarm_of(folder, "0-1,2-3,4-5") as swarm:
            for same in (len(prompt), 260):
                swarm.origin.reuse.conversations = Conversations()
                await ask(swarm, prompt)
                for index, node in enumerate(swarm.hops):
                    if lost & 1 << index:
                        node.hosts[0].parking.clear()
                wanted = await ids_of(swarm, [*prompt[:same], *tail], HOT)
                assert (await ask(swarm, [*prompt[:same], *tail], HOT)).token_ids == wanted

    play(main)


@pytest.mark.parametrize("wrong", [3, 40])  # no position whose states are kept, whatever the chunks
def test_a_guess_that_was_wrong_long_ago(folder: Path, wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client says it has of an answer is computed like a prompt. Hops say from where they can go on; none is lost.

    The last hop takes its time: the others have computed all of it before the origin sees what is wrong.
    """
    told, params = note_stuck(monkeypatch), replace(HOT, max_tokens=240)

    async def main() -> None:
        async with swarm_of(folder, "0-1,2-3,4-5") as swarm:
            wanted = await ids_of(swarm, LONG[0], params)
            last = swarm.hops[-1].hosts[0].engine
            last.device = cast(Device, SlowDevice(last.device, 0.05))
            ids = [*wanted[:wrong], (wanted[wrong] + 1) % 200, *wanted[wrong + 1 :]]
            text = ReceivedText("?" * len(ids), tuple(ids), tuple(range(len(ids))))
            request, adoption = swarm.origin.request_ids(LONG[0], params), Adoption(b"h" * 16, (), 240, received=text)
            answer = await swarm.origin.complete(request, adoption=adoption, draft="off")
            assert answer.token_ids == wanted and not answer.repairs
            assert not [event for event in answer.events if event.nodes]

    play(main)
    assert told


def test_a_hop_that_can_never_go_back_comes_to_an_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that answers with fewer positions each time counts as empty, and is asked no more."""
    answers = list[int]()
    plain = Hop.opened

    def less(self: Hop, message: Opened) -> None:
        cached = message.cached
        if message.hop == 0 and cached:
            answers.append(cached := max(1, cached - 1))
        plain(self, replace(message, cached=cached))

    async def main() -> None:
        async with bench.scene() as scene:
            scene.faults.at("decode", scene.hops[1], lambda: scene.faults.die(scene.hops[1]), 5)
            monkeypatch.setattr(Hop, "opened", less)
            assert await scene.ask("hot", 0) == bench.wanted["hot", 0]

    bench.play(main)
    assert 1 <= len(answers) <= 4


@pytest.mark.parametrize("spares", [["0-5"], []])
def test_a_hop_that_says_again_and_again_that_it_cannot_go_back_is_lost(bench: Bench, spares: list[str]) -> None:
    """Once it is believed; then another takes its place. Without another, patience ends as with any hop that cannot go on."""

    async def main() -> None:
        async with bench.scene(spares=spares) as scene:
            short, lies = scene.hops[1], set[int]()

            def lie() -> None:
                for place in [place for host in short.hosts for place in host._places.values()]:
                    lies.add(place.opened.epoch)
                    place.fault(StateGone.code, "cannot go back", place.opened.hop)
                scene.faults.at("replay", short, lie, 1)  # its Open is one

            scene.faults.at("decode", short, lie, 2)
            if spares:
                assert await scene.ask("hot", 0) == bench.wanted["hot", 0]
                assert [repair.lost for repair in scene.answers[0].repairs] == [("n1",)] and len(lies) <= 3
            else:
                with pytest.raises(ManyhandsError):
                    await asyncio.wait_for(scene.ask("hot", 0), 60.0)
                got = scene.answers[0].token_ids
                assert got == bench.wanted["hot", 0][: len(got)]

    bench.play(main)


def test_one_that_lies_at_every_position_is_lost_in_the_end(bench: Bench) -> None:
    """Each time a new position has come back before."""

    async def main() -> None:
        async with bench.scene() as scene:
            short, lies = scene.hops[1], set[int]()

            def lie() -> None:
                for place in [place for host in short.hosts for place in host._places.values()]:
                    lies.add(place.opened.epoch)
                    place.fault(StateGone.code, "cannot go back", place.opened.hop)
                scene.faults.at("replay", short, lie, 4)

            scene.faults.at("decode", short, lie, 2)
            assert await scene.ask("hot", 0) == bench.wanted["hot", 0]
            assert [repair.lost for repair in scene.answers[0].repairs] == [("n1",)] and 2 < len(
                lies
            ) <= MAX_STUCK + 2  # the last one as a standby

    bench.play(main)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_ends_at_the_edges_and_a_lease_that_grows(bench: Bench, victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that the last hop draws, drafts that are wrong, and a hop that dies while the lease is extended."""
    monkeypatch.setattr("manyhands.origin.growth.LEASE_TOKENS", 8)

    async def main() -> None:
        for ends in ("edges", "origin"):
            async with bench.scene(ends=ends) as scene:
                node, drafter = scene.hops[victim], bench.half_right("hot", 1)
                scene.faults.at("window", node, partial(scene.faults.die, node), 4)
                assert await scene.ask("hot", 1, drafter=drafter) == bench.wanted["hot", 1]
                assert len(scene.answers[0].repairs) == 1

    bench.play(main)


def test_a_drafter_with_states_goes_back_to_where_texts_part(folder: Path) -> None:
    """Its drafts are those of one that reads the text anew."""
    model = DraftModel(folder, "tiny", load_tokenizer(folder))
    sampler, never = Sampler(GREEDY, model.vocab_size, frozenset(), None), lambda: False

    def drafts(line: _Line, ids: Sequence[int]) -> list[int]:
        while (found := line.turn(ids, 4, never)) is None:
            pass
        return found

    try:
        line = _Line(model, sampler, 400)
        for ids in (LONG[0], LONG[0][:130], [*LONG[0][:60], *LONG[1][60:300]], LONG[0][:400], [*LONG[0][:399], 7]):
            assert drafts(line, list(ids)) == drafts(_Line(model, sampler, 400), list(ids))
    finally:
        model.close()


def test_steps_are_measured_at_the_same_position_each_time(folder: Path) -> None:
    """Chunks that reach far beyond what can always be gone back, too."""
    span = load_span(folder, Span(0, 6), "bf16", 1)
    for rows in (1, 256):
        run = stepping(span, Span(0, 6), rows, 1, "bf16")
        first, second = np.array(run()), np.array(run())
        assert np.array_equal(first, second)
