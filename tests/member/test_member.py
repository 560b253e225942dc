"""A running member: coming in, choosing layers, filling gaps, leaving without a trace. In one process, in virtual time."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from manyhands.checkpoint.manifest import Silent
from manyhands.cli.reporter import Reporter, tell_serving
from manyhands.config import BalanceConfig
from manyhands.core import NodeAddr, SamplingParams, Span
from manyhands.errors import BadRequest, Conflict, LinkClosed, ShardUnavailable, WeightsMismatch
from manyhands.member.hosting import Hosting
from manyhands.member.providers import provider_of
from manyhands.member.view import missing_spans
from manyhands.member.weights import ServedModel, kinds_of, weights_in, weights_of, weights_soon
from manyhands.place.measure import Speed
from manyhands.place.shape import PROCESS_BYTES, look_up
from manyhands.plain import size_of
from manyhands.testing.clock import run_virtual
from manyhands.testing.tiny import make_tiny
from manyhands.weights.provider import Provider
from manyhands.worker.execute import Device
from tests.member.members import TOKENS, Town, room_for, spans, town
from tests.member.requests import until

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPT = tuple(range(3, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("member") / "tiny", layers=6, seed=3)


class Stage:
    """Plays scenes in virtual time."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder, self.home = folder, home

    def play(self, scene: "Any") -> Any:
        async def main() -> Any:
            async with town(self.folder, self.home) as place:
                return await scene(place)

        return run_virtual(main())


@pytest.fixture
def stage(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    return Stage(folder, tmp_path)


async def answer(place: Town, member: Any) -> list[int]:
    origin = place.origin(member)
    await until(lambda: not any(missing_spans(kind, member.records()) for kind in kinds_of(member.records())))
    return (await origin.complete(origin.request_ids(PROMPT, PARAMS))).token_ids


# -- coming in --------------------------------------------------------------------------------------------------------


def test_the_first_one_takes_the_whole_model_if_it_fits(stage: Stage) -> None:
    async def scene(place: Town) -> None:
        hosting = await place.host(0)
        assert spans(hosting.member) == {"n0": ["0-5"]}
        assert "no node holds layers 0-5" in (hosting.choice.why if hosting.choice else "")

    stage.play(scene)


def test_members_find_each_other_and_take_what_is_missing(stage: Stage) -> None:
    """Three with room for two layers each: they cover the model, and every view says so."""

    async def scene(place: Town) -> None:
        weights = await weights_of(str(stage.folder), "bf16", (), stage.home, Silent())
        members = [(await place.host(i, memory_bytes=room_for(weights, 2))).member for i in range(3)]
        wanted = {"n0": ["0-1"], "n1": ["2-3"], "n2": ["4-5"]}
        await until(lambda: all(spans(member) == wanted for member in members))
        assert len(await answer(place, members[0])) == PARAMS.max_tokens

    stage.play(scene)


@pytest.mark.parametrize(
    ("max_pipes", "third", "why"),
    [
        (1, "0-5", "least throughput"),
        (2, "2-5", "only 1 node holds"),
        (3, "0-5", "only 1 node holds layers 2-5; with room"),
    ],
)
def test_a_joiner_completes_as_many_copies_as_it_is_told(stage: Stage, max_pipes: int, third: str, why: str) -> None:
    """LP-13, F10: one member holds the model, another 0-1: the third completes the second copy, or goes on with a third."""

    async def scene(place: Town) -> None:
        first = (await place.host(0)).member
        await place.host(1, span=Span.parse("0-1"))
        hosting = await place.host(2, max_pipes=max_pipes)
        await until(lambda: spans(first).get("n2") == [third])
        assert hosting.choice is not None and why in hosting.choice.why

    stage.play(scene)


@pytest.mark.parametrize(("strategy", "num_layers"), [("cover", 6), ("uniform", 3), ("capacity", 4), ("measured", 3)])
def test_a_joiner_takes_its_share_by_the_strategy(
    stage: Stage, strategy: Any, num_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F23, F09, HN-53, L9-18: it has room for the model, three times the cores, and is much slower than the first, which holds
    the model, or (measured) four layers, of which the plan leaves it three beside the ends."""
    slow = Speed(0.5, 0.0, 0.0, 0.001, 1.0, 0.0, "layers")
    monkeypatch.setattr("manyhands.member.claim.measured_speed", lambda *_: slow)

    async def scene(place: Town) -> None:
        weights = await weights_of(str(stage.folder), "bf16", (), stage.home, Silent())
        room = room_for(weights, 4) if strategy == "measured" else PROCESS_BYTES + (1 << 30)
        first = (await place.host(0, memory_bytes=room)).member
        hosting = await place.host(1, strategy=strategy, cores=3)
        assert hosting.choice is not None and len(hosting.choice.span) == num_layers
        await until(lambda: spans(first).get("n1") == [str(hosting.held[0])])
        assert strategy == "cover" or strategy in hosting.choice.why or "plan" in hosting.choice.why

    stage.play(scene)


def test_two_that_join_at_the_same_moment_choose_different_layers(stage: Stage) -> None:
    async def scene(place: Town) -> None:
        weights = await weights_of(str(stage.folder), "bf16", (), stage.home, Silent())
        budget = room_for(weights, 3)
        first = await place.open(0)
        others = [await place.open(i, memory_bytes=budget) for i in (1, 2)]
        await asyncio.gather(*map(place.hosting, others))
        await until(lambda: sorted(spans(first).values()) == [["0-2"], ["3-5"]])

    stage.play(scene)


def test_every_cut_gives_the_same_answer(stage: Stage) -> None:
    async def scene_of(place: Town, cut: list[str]) -> list[int]:
        hosts = [await place.host(i, span=Span.parse(layers)) for i, layers in enumerate(cut)]
        return await answer(place, hosts[0].member)

    alone = stage.play(lambda place: scene_of(place, ["0-5"]))
    assert stage.play(lambda place: scene_of(place, ["3-5", "0-2"])) == alone
    assert stage.play(lambda place: scene_of(place, ["0-3", "2-5"])) == alone


def test_no_address_answers(stage: Stage) -> None:
    async def scene(place: Town) -> None:
        place.ticket = place.ticket.with_address(NodeAddr("127.0.0.1", 99))
        with pytest.raises(ShardUnavailable, match=r"no node of swarm town answers.*nothing listens there"):
            await place.open(0)

    stage.play(scene)


def test_a_member_with_this_nodes_key_is_named(stage: Stage) -> None:
    async def scene(place: Town) -> None:
        first = await place.open(0)
        place.ticket = place.ticket.with_address(NodeAddr("127.0.0.1", first.addresses[0].port))
        with pytest.raises(BadRequest, match="has the same key as this one"):
            await place.open(0)

    stage.play(scene)


def test_a_twin_elsewhere_is_complained_of(stage: Stage) -> None:
    """Two nodes with one key that meet only by way of a third."""

    async def scene(place: Town) -> None:
        third = await place.host(7)
        ticket = place.ticket
        one = await place.host(1)
        place.ticket = ticket
        two = await place.host(1)
        await until(lambda: any(m.complaints() for m in (one.member, two.member, third.member)))

    stage.play(scene)


# -- what is hosted ---------------------------------------------------------------------------------------------------


def test_layers_beyond_the_model_or_the_budget_are_refused(stage: Stage) -> None:
    async def scene(place: Town) -> None:
        with pytest.raises(BadRequest, match="has layers 0-5"):
            await place.host(0, span=Span(4, 9))
        with pytest.raises(BadRequest, match="give more, or fewer layers"):
            room = look_up(str(place.folder), "bf16", place.home).shape.process_bytes + 100_000
            await place.host(1, span=Span(0, 6), memory_bytes=room)
        with pytest.raises(BadRequest, match="holds no layer"):
            await place.host(2, memory_bytes=1000)

    stage.play(scene)


def test_other_weights_under_the_same_name_are_refused(stage: Stage, tmp_path: Path) -> None:
    other = make_tiny("llama", tmp_path / "tiny", layers=6, seed=4)

    async def scene(place: Town) -> None:
        hosting = await place.host(0)
        with pytest.raises(WeightsMismatch, match="another tiny: its weights differ"):
            await weights_of(str(other), None, hosting.member.records(), stage.home, Silent())
        with pytest.raises(WeightsMismatch, match="in bf16, not fp32"):
            await weights_of(str(stage.folder), "fp32", hosting.member.records(), stage.home, Silent())

    stage.play(scene)


def test_a_joiner_without_files_gets_them_from_a_peer(stage: Stage) -> None:
    """`join` knows only the records: what the model is, and its tensors, come from who has it."""

    async def scene(place: Town) -> None:
        await place.host(0, span=Span(0, 3))
        member = await place.open(1)
        (kind,) = kinds_of(member.records())
        holders = [r for r in member.records() if r.node != member.id]
        weights = await weights_in(kind, [provider_of(member, r) for r in holders], stage.home, Silent())
        assert (weights.name, weights.id, weights.shape.num_layers, weights.folder) == ("tiny", kind.model, 6, None)
        folder, _ = await weights.fetch(
            Span(3, 6), stage.home, [provider_of(member, r) for r in holders], Silent(), with_ends=False
        )
        assert folder == stage.home / "models" / kind.model
        again = await weights_in(kind, [], stage.home, Silent())
        assert (again.id, again.here) == (kind.model, Span(3, 6)), "what lies here says what the model is"

    stage.play(scene)


def test_a_joiner_waits_for_a_node_that_loads_the_model(stage: Stage) -> None:
    """Both start at once, as after a power cut: what is claimed there has been loaded four seconds later."""

    async def scene(place: Town) -> None:
        first = await place.open(0)
        weights = await weights_of(str(stage.folder), "bf16", (), stage.home, Silent())
        claim = weights.claim(Span(0, 6))
        assert claim is not None
        first.claims = [claim]
        first.directory.announce()
        member = await place.open(1)
        (kind,) = kinds_of(member.records())

        def holders(kind: ServedModel) -> list[Provider]:
            return [provider_of(member, r) for r in member.records() if kind.is_of(r) and r.node != member.id]

        waiting = asyncio.ensure_future(weights_soon(kind, holders, stage.home / "other", Silent()))
        await asyncio.sleep(4.0)
        assert not waiting.done()
        await first.node.seed.add(stage.folder)
        assert (await waiting).id == kind.model
        with pytest.raises(ShardUnavailable, match="no node of the swarm has the manifest"):
            await weights_soon(kind, lambda kind: [], stage.home / "third", Silent())

    stage.play(scene)


def test_a_joiner_serves_what_it_got_from_a_peer(stage: Stage) -> None:
    async def scene(place: Town) -> None:
        first = (await place.host(0, span=Span(0, 3))).member
        member = await place.open(1)
        (kind,) = kinds_of(member.records())
        holders = [provider_of(member, r) for r in member.records() if r.node != member.id]
        device = Device.start(1)
        place.stack.callback(device.close)
        weights = await weights_in(kind, holders, stage.home, Silent())
        hosting = Hosting(member, weights, device, stage.home, Silent(), place.said.append, with_ends=False)
        await hosting.start()
        assert hosting.folder == stage.home / "models" / kind.model
        assert len(await answer(place, first)) == PARAMS.max_tokens

    stage.play(scene)


def test_no_member_left_to_tell_what_the_model_is(stage: Stage) -> None:
    async def scene(place: Town) -> None:
        await place.host(0)
        member = await place.open(1)
        (kind,) = kinds_of(member.records())
        with pytest.raises(ShardUnavailable, match=r"no node of the swarm has the manifest of tiny .* \(0 asked\)"):
            await weights_in(kind, [], stage.home, Silent())

    stage.play(scene)


def test_why_no_node_answers_is_said_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that the ticket names directly and by a relay was told with both reasons, twice."""
    why = ["10.0.0.1:7700 cannot be reached: refused", "the relay at 10.0.0.2:7700 cannot be reached: refused"]

    async def unreachable(addr: NodeAddr) -> None:
        raise LinkClosed("; ".join(why))

    async def scene(place: Town) -> None:
        place.ticket = place.ticket.with_address(NodeAddr("10.0.0.1", 7700)).with_address(NodeAddr("10.0.0.2", 7700))
        member = await place.stack.enter_async_context(place.member(0))
        monkeypatch.setattr(member.bootstrap, "dial", unreachable)
        with pytest.raises(ShardUnavailable, match=rf"answers \({'; '.join(why)}\): is it up there"):
            await member.call()

    stage.play(scene)


# -- with whom --------------------------------------------------------------------------------------------------------


def test_a_clock_that_is_off_is_complained_of_and_shared_with(stage: Stage) -> None:
    async def scene(place: Town) -> None:
        first = (await place.host(0)).member
        place.clock_off_s[1] = 5400.0
        late = await place.stack.enter_async_context(place.member(1))
        await late.meet()
        await until(lambda: first.complaints() and late.complaints())
        assert "hours ahead of this machine's: set one of them by NTP" in first.complaints()[0]
        assert "n1" in {record.name for record in first.records()}

    stage.play(scene)


def test_who_is_beyond_the_scope_is_not_used_and_named(stage: Stage) -> None:
    async def scene(place: Town) -> None:
        first = (await place.host(0)).member
        far = await place.open(1, listen=NodeAddr("198.51.100.7", 0), scope="public")
        await until(lambda: bool(first.complaints()))
        assert first.complaints() == [
            f"n1 at 198.51.100.7:{far.addresses[0].port} is not used: scope lan does not admit it; start with "
            f"--allow {far.id} or --scope public"
        ]
        assert {record.name for record in far.records()} == {"n0", "n1"}

    stage.play(scene)


def test_a_node_that_is_denied_is_not_complained_of(stage: Stage) -> None:
    """It was said that the scope does not admit it, and to start with --allow, which the deny list beats."""

    async def scene(place: Town) -> None:
        first = (await place.host(0)).member
        second = await place.open(1, deny=frozenset({first.id}))
        third = await place.open(2)
        await until(lambda: {record.name for record in third.records()} == {"n0", "n1", "n2"})
        await until(lambda: bool(second.directory.not_admitted()))
        assert second.complaints() == [] and {record.name for record in second.records()} == {"n1", "n2"}

    stage.play(scene)


def test_on_one_machine_a_public_address_is_local(stage: Stage) -> None:
    async def scene(place: Town) -> None:
        members = [await place.open(i, listen=NodeAddr("198.51.100.7", 0)) for i in range(2)]
        await until(lambda: all(len({r.node for r in member.records()}) == 2 for member in members))

    stage.play(scene)


# -- leaving, crashing ------------------------------------------------------------------------------------------------


def test_leaving_withdraws_the_records_at_once(stage: Stage) -> None:
    async def scene(place: Town) -> None:
        stays = (await place.host(0, span=Span(0, 6))).member
        leaver = place.member(1, span=Span(0, 6))
        async with leaver:
            await leaver.meet()
            await place.hosting(leaver)
            await until(lambda: "n1" in spans(stays))
        began = asyncio.get_running_loop().time()
        await until(lambda: all(record.name != "n1" for record in stays.records()))
        assert asyncio.get_running_loop().time() - began < 1

    stage.play(scene)


def test_a_stream_survives_a_leave_and_a_crash(stage: Stage) -> None:
    """Each hop has a twin; one leaves and one dies while a stream runs: its tokens are those of an undisturbed one."""

    async def scene(place: Town, is_disturbed: bool) -> list[int]:
        cut = ["0-5", "0-2", "3-5", "0-2", "3-5"]
        hosts = [await place.host(i, span=Span.parse(layers)) for i, layers in enumerate(cut[1:], 1)]
        origin = place.origin(await place.open(0))
        answer = origin.answer(origin.request_ids(PROMPT, PARAMS))
        async for _ in origin.stream(answer):
            if is_disturbed and len(answer.token_ids) in (5, 12):
                hop = answer.session.route.hops[len(answer.token_ids) == 5] if answer.session else None
                victim = next(h.member for h in hosts if hop is not None and h.member.id == hop.offer.node)
                if len(answer.token_ids) == 5:
                    victim.node.start(victim.leave())
                else:
                    place.faults.die(victim.node)
        assert bool(answer.repairs) == is_disturbed
        return answer.token_ids

    calm = stage.play(lambda place: scene(place, False))
    assert stage.play(lambda place: scene(place, True)) == calm


def test_the_layers_of_the_dead_are_taken_by_who_has_room(stage: Stage) -> None:
    """No other member holds them: after gap_s the survivor loads them beside its own, and the model is whole again."""

    async def scene(place: Town) -> None:
        first = await place.host(0, span=Span(0, 3))
        second = await place.host(1)
        assert second.hosts[0].info.span == Span(0, 6)
        await second.move(Span(3, 6), "for this test", is_forced=True)
        assert spans(second.member) == {"n0": ["0-2"], "n1": ["3-5"]}
        place.faults.die(first.member.node)
        await until(lambda: spans(second.member) == {"n1": ["0-2", "3-5"]})
        assert len(await answer(place, second.member)) == PARAMS.max_tokens

    stage.play(scene)


def test_who_was_lost_is_not_offered_and_comes_back_when_it_speaks(stage: Stage) -> None:
    async def scene(place: Town) -> None:
        first = (await place.host(0, span=Span(0, 3))).member
        second = (await place.host(1, span=Span(3, 6))).member
        link = first.node.pool.find(second.id, "control")
        assert link is not None
        first.directory.lost(second.id)
        assert "n1" not in spans(first)
        await until(lambda: "n1" in spans(first))

    stage.play(scene)


# -- moving -----------------------------------------------------------------------------------------------------------


def test_a_move_makes_before_it_breaks(stage: Stage) -> None:
    """While a member moves, every layer is on offer at every moment."""

    async def scene(place: Town) -> None:
        watcher = (await place.host(0, span=Span(0, 6))).member
        mover = await place.host(1, span=Span(0, 3))
        holes = []

        async def watch() -> None:
            while True:
                held = spans(watcher)
                if not any(layers in ("0-2", "3-5") for layers in held.get("n1", [])):
                    holes.append(held)
                await asyncio.sleep(0.01)

        await until(lambda: "n1" in spans(watcher))
        watching = asyncio.ensure_future(watch())
        await mover.move(Span(3, 6), "for this test")
        await until(lambda: spans(watcher) == {"n0": ["0-5"], "n1": ["3-5"]})
        watching.cancel()
        assert not holes

    stage.play(scene)


def test_the_last_holder_does_not_leave(stage: Stage) -> None:
    async def scene(place: Town) -> None:
        mover = await place.host(0, span=Span(0, 3))
        await mover.move(Span(3, 6), "for this test")
        assert spans(mover.member) == {"n0": ["0-2", "3-5"]}

    stage.play(scene)


def test_the_balance_moves_a_node_to_where_it_helps(stage: Stage) -> None:
    """Three hold the first half, one the second; told nothing, one of the three goes over."""

    async def scene(place: Town) -> None:
        weights = await weights_of(str(stage.folder), "bf16", (), stage.home, Silent())
        rules = BalanceConfig(patience=1, cool_down_s=0, period_s=5.0)
        options = {"memory_bytes": room_for(weights, 3), "balance": rules}
        whole = await place.host(9, span=Span(3, 6))
        for i in range(3):
            member = await place.open(i, **options)
            hosting = await place.hosting(member)
            await hosting.move(Span(0, 3), "for this test", is_forced=True)
        await until(lambda: sorted(v[0] for v in spans(whole.member).values()) == ["0-2", "0-2", "3-5", "3-5"], 60)

    stage.play(scene)


async def order(asker: Hosting, asked: Hosting, layers: str, *, is_forced: bool = False) -> str:
    """What `asked` answers to an order of `asker`'s operator. A second of virtual time lies between two orders."""
    await asyncio.sleep(1.1)
    link = await asker.member.node.pool.get(asked.member.addresses[0], "control")
    model, precision = asker.kind.model, asker.kind.precision
    return await asker.member.node.orders.ask(link, model, precision, Span.parse(layers), is_forced=is_forced)


def test_an_operator_moves_another_node_while_its_session_goes_on(stage: Stage) -> None:
    """The text is that of an undisturbed request."""

    async def scene(place: Town, is_disturbed: bool) -> list[int]:
        first = await place.host(0, span=Span(0, 3))
        mover = await place.host(1)
        await mover.move(Span(3, 6), "for this test", is_forced=True)
        other = await place.host(2)
        await other.move(Span(3, 6), "for this test", is_forced=True)
        origin = place.origin(first.member)
        await until(lambda: sorted(spans(first.member)) == ["n0", "n1", "n2"])
        answer = origin.answer(origin.request_ids(PROMPT, PARAMS))
        async for _ in origin.stream(answer):
            if is_disturbed and len(answer.token_ids) == 5:
                busy = next(h for h in (mover, other) if h.member.id == answer.session.route.hops[1].offer.node)  # type: ignore[union-attr]
                assert await order(first, busy, "0-2") == "moves to layers 0-2"
                moved = busy.member.config.name
            if is_disturbed and len(answer.token_ids) == 8:
                await until(lambda: "0-2" in spans(first.member)[moved])  # noqa: B023
        if is_disturbed:
            await until(lambda: spans(first.member)[moved] == ["0-2"])
            assert answer.repairs
        return answer.token_ids

    calm = stage.play(lambda place: scene(place, False))
    assert stage.play(lambda place: scene(place, True)) == calm


def test_an_asked_node_decides_by_its_own_rules(stage: Stage) -> None:
    async def scene(place: Town) -> None:
        first = await place.host(0, span=Span(0, 3))
        second = await place.host(1)
        unwilling = await place.host(2, balance=BalanceConfig(obey=False))
        await until(lambda: len(spans(second.member)) == 3)
        await second.move(Span(3, 6), "for this test", is_forced=True)
        await unwilling.move(Span(0, 3), "for this test", is_forced=True)
        await until(lambda: spans(first.member) == {"n0": ["0-2"], "n1": ["3-5"], "n2": ["0-2"]})
        with pytest.raises(Conflict, match="n0 was started with --layers 0-2: only its own gateway moves it"):
            await order(second, first, "3-5")
        with pytest.raises(Conflict, match="its owner has set"):
            await order(second, unwilling, "3-5")
        with pytest.raises(BadRequest, match="the model has layers 0-5"):
            await order(first, second, "4-9")
        with pytest.raises(Conflict, match="no other node serves all of layers 3-5"):
            await order(first, second, "0-2")
        assert await order(first, second, "3-5") == "serves layers 3-5 already"
        assert await order(first, second, "0-2", is_forced=True) == "moves to layers 0-2"
        await until(lambda: spans(first.member)["n1"] == ["0-2"])
        with pytest.raises(Conflict, match="has moved just now: ask again in"):
            await order(first, second, "3-5")
        assert await order(first, first, "3-5", is_forced=True) == "moves to layers 3-5"
        await until(lambda: spans(first.member)["n0"] == ["3-5"])

    stage.play(scene)


def test_an_order_that_cannot_be_kept_leaves_the_old_layers_in_place(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(place: Town) -> None:
        await place.host(0, span=Span(0, 6))
        second = await place.host(1)

        async def fail(*_: object, **__: object) -> None:
            raise BadRequest("disk full")

        monkeypatch.setattr(second.member.node.worker, "host", fail)
        await order(second, second, "0-2")
        await until(lambda: "layers could not be moved: disk full" in place.said)
        assert spans(second.member)["n1"] == ["0-5"] and not second.member.claims and not second.is_moving

    stage.play(scene)


# -- what people see --------------------------------------------------------------------------------------------------


def test_what_a_spare_holds_is_neither_missing_nor_held_once(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen: "losing n0 stops the model" beside a spare of all layers, and "held by no node" when that served them."""

    async def scene(place: Town) -> None:
        first = await place.host(0, span=Span(0, 6))
        spare = await place.host(1, span=Span(0, 6), is_spare=True)
        await until(lambda: len(spare.records()) == 2)
        assert not spare.view()["warnings"] and not spare.view()["missing"]
        first.member.notes.append("not reachable by way of the relay")
        for hosting in (first, spare):
            tell_serving(hosting.member, hosting, Reporter(as_json=False), "told to", 1.0)
        told = capsys.readouterr().out.splitlines()
        assert told.count("not reachable by way of the relay") == 1
        said = [line for line in told if line.startswith("serving")]
        assert said[0] == "serving layers 0-5 of tiny in bf16: told to"
        assert said[1] == "serving layers 0-5 of tiny in bf16 as a spare, where no other node does: told to"
        await first.member.leave()
        await until(lambda: len(spare.records()) == 1)
        view = spare.view()
        assert not view["missing"] and view["models"][0]["coverage"] == [0] * 6, "it serves only in need"
        assert view["warnings"] == ["tiny: layers 0-5 are held once: losing n1 stops the model"]

    stage.play(scene)


def test_the_view_tells_what_is_missing_and_what_is_held_once(stage: Stage) -> None:
    async def scene(place: Town) -> None:
        hosting = await place.host(0, span=Span(0, 3))
        view = hosting.view()
        line = str(view["missing"])
        needed = hosting.weights.shape.process_bytes + hosting.weights.shape.span_bytes(Span(3, 6), TOKENS)
        named = size_of(needed, is_limit=True)
        assert f"tiny: layers 3-5 are held by no node: one more machine with {named} would" in line
        await place.host(1, span=Span(2, 6))
        await until(lambda: not hosting.view()["missing"])
        view = hosting.view()
        assert view["models"][0]["coverage"] == [1, 1, 2, 1, 1, 1]
        assert view["warnings"] == [
            "tiny: layers 0-1 are held once: losing n0 stops the model",
            "tiny: layers 3-5 are held once: losing n1 stops the model",
        ]
        here, other = view["nodes"][0], view["nodes"][1]
        assert (here["path"], other["path"], other["spans"][0]["state"]) == ("self", "direct", "serving")

    stage.play(scene)


def test_the_invitation_names_this_node_first_and_then_others(stage: Stage) -> None:
    async def scene(place: Town) -> None:
        members = [await place.open(i) for i in range(3)]
        await until(lambda: len({r.node for r in members[2].records()}) == 3)
        ticket = members[2].invitation()
        assert ticket.secret == place.ticket.secret
        assert ticket.addresses[0].node == members[2].id
        assert {addr.node for addr in ticket.addresses} == {m.id for m in members}

    stage.play(scene)
