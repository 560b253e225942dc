"""manyhands.origin.depth: over acceptance, round trip, row cost and load, never under 0.98 of plain."""

import random
from collections.abc import Callable, Sequence
from itertools import count, cycle, product

import pytest

from manyhands.origin.depth import MAX_AHEAD, Acceptance, Depth, copied, modelled
from manyhands.origin.draft import AutoDrafter, Drafter, NoDrafter, SuffixIndex
from manyhands.origin.route_costs import MAX_ROUTES, CostsOfRoutes, RouteCosts, SharedRounds
from manyhands.origin.step_costs import DeviceStep, Timing
from tests.origin.routes_in_time import Fixed, LateModel, Line, ReadyModel, Simulation, Stream, rate, rates
from tests.route.test_policies import offer

CHANCES, TRIPS_S, ROWS_S, STREAMS = (0.0, 0.3, 0.6, 0.8, 0.98), (0.0, 0.02, 0.3), (0.001, 0.01, 0.02), (1, 2, 4, 8)
NEAR = 0.85  # of the best fixed depth
FAR = (4, 4, 0.98, 0.0, 0.01)  # where the most for all leaves the others 0.4 of what they had
CORNERS = list(product((0.0, 0.98), (0.0, 0.3), (0.001, 0.02), (1, 4)))


class Route:
    """A route in virtual time, and what its `origins` learn of it from run to run. A step takes 20 ms of compute.

    The `streams` are of one origin, or of several with as many each; `says`: what hops tell of their steps.
    """

    def __init__(
        self,
        chance: float,
        trip_s: float,
        row_s: float,
        streams: int,
        seed: int = 1,
        others: int = 0,
        *,
        origins: int = 1,
        says: Callable[[DeviceStep], DeviceStep] = lambda company: company,
    ) -> None:
        self._line, self._chance, self._streams = Line(trip_s, 0.02, row_s), chance, streams
        self._others, self._seed, self._says = others, seed, says
        self._known, self._seeds = [(Acceptance(), RouteCosts()) for _ in range(origins)], count(2)

    def ours(self) -> float:
        """Tokens per second of all streams of ours."""
        return self.drafted()[0]

    def fixed(self, depth: int) -> float:
        """The same with always as many drafts, none with 0."""
        return self.drafted(depth)[0]

    def drafted(self, depth: int | None = None) -> tuple[float, float]:
        """Tokens per second of all streams of ours, and of all others; `depth`: always as many drafts."""
        make = self._decided() if depth is None else self._fixed(depth)
        about = {"streams": self._streams, "others": self._others, "seed": self._seed}
        return rates(self._line, make, tokens=300, says=self._says, **about)

    def _decided(self) -> Callable[[Sequence[int]], Drafter]:
        own, known = self._streams // len(self._known), cycle(self._known)

        def drafter(truth: Sequence[int]) -> Drafter:
            acceptance, costs = next(known)
            model = ReadyModel(truth, self._chance, next(self._seeds))
            ours = AutoDrafter(acceptance, model=model, copies=False, streams=lambda: own)
            ours.share(costs)
            return ours

        return drafter

    def _fixed(self, depth: int) -> Callable[[Sequence[int]], Drafter]:
        seeds = count(2)

        def drafter(truth: Sequence[int]) -> Drafter:
            return Fixed(ReadyModel(truth, self._chance, next(seeds)), depth)

        return drafter


@pytest.mark.parametrize(("chance", "trip_s", "row_s", "streams"), CORNERS)
def test_never_slower_than_plain(chance: float, trip_s: float, row_s: float, streams: int) -> None:
    """Not even the first request on a route, which learns what rows cost. A row of 20 ms costs as much as a step."""
    route = Route(chance, trip_s, row_s, streams)
    assert route.ours() >= 0.98 * route.fixed(0)


@pytest.mark.nightly
@pytest.mark.parametrize(("chance", "trip_s", "row_s", "streams"), list(product(CHANCES, TRIPS_S, ROWS_S, STREAMS)))
def test_never_slower_than_plain_and_near_the_best_fixed_depth(
    chance: float, trip_s: float, row_s: float, streams: int
) -> None:
    """All streams together; the best is compared with a second run, after 300 tokens. Which of several streams share the steps
    of hops hangs on chance: plain runs of eight differ by up to 3 %, so of more than one the sum of three runs counts."""
    routes = [Route(chance, trip_s, row_s, streams, seed) for seed in range(1, 4 if streams > 1 else 2)]
    plain, *fixed = [sum(route.fixed(depth) for route in routes) for depth in (0, 1, 2, 4, 8, 15)]
    first, second = sum(map(Route.ours, routes)), sum(map(Route.ours, routes))
    assert first >= 0.98 * plain and second >= 0.98 * plain
    assert second >= NEAR * max(plain, *fixed)


@pytest.mark.nightly
@pytest.mark.parametrize(("chance", "trip_s", "row_s"), list(product(CHANCES, TRIPS_S, ROWS_S)))
def test_never_slower_than_plain_beside_streams_of_other_origins(chance: float, trip_s: float, row_s: float) -> None:
    """Which are not known to be there: seven that are not drafted, on the same hops."""
    routes = [Route(chance, trip_s, row_s, 1, seed, others=7) for seed in range(1, 7)]
    plain, ours = sum(route.fixed(0) for route in routes), [sum(map(Route.ours, routes)) for _ in range(2)]
    assert min(ours) >= 0.98 * plain


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("shared", "chance", "trip_s", "row_s"), list(product(((1, 3), (1, 7), (4, 4)), CHANCES[1:], TRIPS_S, ROWS_S))
)
def test_all_streams_of_a_route_together_are_near_the_best_fixed_depth(
    shared: tuple[int, int], chance: float, trip_s: float, row_s: float
) -> None:
    """Ours and those of another origin, which are not drafted. Their sum is what is raised; ours alone lose nothing."""
    streams, others = shared
    route = Route(chance, trip_s, row_s, streams, others=others)
    plain, first, second = route.drafted(0), route.drafted(), route.drafted()
    assert min(first[0], second[0]) >= 0.98 * plain[0]
    assert min(sum(first), sum(second)) >= 0.94 * sum(plain)
    best = max(sum(route.drafted(depth)) for depth in (0, 1, 2, 4, 8, 15))
    assert sum(second) >= (0.79 if (*shared, chance, trip_s, row_s) == FAR else NEAR) * best


def test_origins_with_a_stream_each_are_no_slower_than_plain_together() -> None:
    """Rows cost half a step, and hops that eight streams fill have no room for them: 0.74 of plain if none knew of others."""
    route = Route(0.8, 0.0, 0.01, 8, origins=8)
    plain = route.fixed(0)
    assert route.ours() >= 0.95 * plain and route.ours() >= 0.98 * plain


@pytest.mark.nightly
@pytest.mark.parametrize(("chance", "trip_s", "row_s"), list(product(CHANCES, TRIPS_S, ROWS_S)))
def test_eight_origins_are_no_slower_than_plain_and_near_the_best_fixed_depth_together(
    chance: float, trip_s: float, row_s: float
) -> None:
    """A stream each, all drafted; none knows of others but by what hops say. In the first answers each learns for itself what
    one origin of eight streams learns once."""
    routes = [Route(chance, trip_s, row_s, 8, seed, origins=8) for seed in range(1, 4)]
    plain, *fixed = [sum(route.fixed(depth) for route in routes) for depth in (0, 1, 2, 4, 8, 15)]
    first, second = sum(map(Route.ours, routes)), sum(map(Route.ours, routes))
    assert first >= 0.98 * plain and second >= 0.99 * plain
    assert second >= NEAR * max(plain, *fixed)


@pytest.mark.parametrize(
    ("said", "least"),
    [
        (lambda company: DeviceStep(0, 0, 0), 0.75),
        (lambda company: DeviceStep(65535, 255, 255), 0.75),
        (lambda company: company._replace(streams=255), 0.95),
        (lambda company: company._replace(rows=1, windows=1, streams=1), 0.95),
    ],
    ids=["nothing", "the most", "a crowd", "no company"],
)
def test_what_a_hop_states_falsely_costs_time_and_no_more(
    said: Callable[[DeviceStep], DeviceStep], least: float
) -> None:
    """Where each row costs as much as a step, of four streams."""
    route = Route(0.3, 0.0, 0.02, 4, says=said)
    plain = route.fixed(0)
    assert route.ours() >= least * plain and route.ours() >= least * plain


def test_repeated_text_over_a_long_route_fills_it() -> None:
    """Text that repeats is guessed further ahead than one window holds; far more than that is not on its way in vain."""
    line, truth = Line(0.3, 0.02, 0.001), [i % 40 for i in range(1200)]

    def run(drafter: Drafter) -> tuple[float, Simulation]:
        simulation = Simulation(line, [Stream(truth, drafter)])
        return simulation.play(), simulation

    plain, _ = run(NoDrafter())
    took, simulation = run(AutoDrafter(Acceptance()))
    assert plain / took > 8
    assert simulation.stale <= 0.03 * simulation.steps


@pytest.mark.parametrize("chance", [0.57, 0.7])
def test_prose_over_a_long_route_yields_what_its_drafts_allow(chance: float) -> None:
    """Six hops, 315 ms of flight, 13 ms of compute, a draft takes 2 ms and is made after the token that was wrong is known: a
    chain cannot exceed 1 / (1 - a) tokens a round."""
    line, truth, took = Line(0.315, 0.013, 0.001, hops=6), range(1500), list[float]()
    plain = rate(line, lambda truth: NoDrafter(), tokens=1400)
    for seed in range(1, 5):  # how soon the first draft shows what a row costs is chance
        model = LateModel(truth, chance, 0.002, seed + 1)
        simulation = Simulation(line, [Stream(truth, AutoDrafter(Acceptance(), model=model, copies=False))], seed)
        model.after = simulation.after
        took.append(simulation.play())
        assert simulation.stale <= 0.03 * simulation.steps
    wins = len(took) * (len(truth) - 32) / sum(took) / plain
    assert 0.9 / (1 - chance) < wins < 1.05 / (1 - chance)


@pytest.mark.parametrize(("trip_s", "looks_rarely"), [(0.001, True), (0.1, False)])
def test_short_rounds_without_drafts_rarely_look_for_any(
    trip_s: float, looks_rarely: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four streams of a text that says nothing of its next token, on one hop: to look costs up to 3 % of a round of 2 ms, and
    nothing of one of 100 ms. Rows cost what they do for tales."""
    line, rng, looks, drafters = Line(trip_s, 0.001, 0.0002, hops=1), random.Random(4), [0], list[AutoDrafter]()
    find = SuffixIndex.find

    def counted(index: SuffixIndex, ids: Sequence[int]) -> tuple[int, int]:
        looks[0] += 1
        return find(index, ids)

    monkeypatch.setattr(SuffixIndex, "find", counted)
    texts = [[rng.randrange(12) for _ in range(1000)] for _ in range(4)]

    def play(make: Callable[[], Drafter]) -> float:
        return Simulation(line, [Stream(text, make()) for text in texts]).play()

    acceptance, costs = Acceptance(), RouteCosts()

    def drafter() -> Drafter:
        drafters.append(AutoDrafter(acceptance, streams=lambda: 4))
        drafters[-1].share(costs)
        return drafters[-1]

    assert play(NoDrafter) / play(drafter) >= 0.98
    drafted = sum(tally.drafted for ours in drafters for tally in ours.tallies.values())
    assert (looks[0] < 1000 and drafted < 100) if looks_rarely else looks[0] > 3000


def test_a_text_that_begins_to_repeat_is_noticed_in_short_rounds_too() -> None:
    rng, line = random.Random(5), Line(0.001, 0.001, 0.0002, hops=1)
    text = [rng.randrange(5000) for _ in range(200)] + [i % 40 for i in range(432)]
    plain, ours = Simulation(line, [Stream(text, NoDrafter())]), AutoDrafter(Acceptance())
    assert plain.play() / Simulation(line, [Stream(text, ours)]).play() > 1.4
    assert ours.tallies["suffix"].accepted > 300


def test_rounds_that_streams_share() -> None:
    """Alone, or with hops to spare: a row costs itself. With more streams than hops the next step has the rows of all that
    wait; beside 8 streams on 3 hops those are 2.67."""
    alone = SharedRounds(0.02, 0.01, 0.01, 1.0)
    assert [alone.seconds(rows) for rows in (1, 2, 5)] == pytest.approx([0.04, 0.05, 0.08])
    full = SharedRounds(0.0, 0.01, 0.01, 8 / 3)
    assert [full.seconds(rows) for rows in (1, 2, 5)] == pytest.approx([0.01 + 0.08 / 3 * rows for rows in (1, 2, 5)])
    between = SharedRounds(0.02, 0.01, 0.01, 4 / 3)
    assert between.seconds(1) == pytest.approx(0.04)
    assert all(between.seconds(rows) >= max(0.03 + 0.01 * rows, 4 / 3 * 0.01 * rows) for rows in range(1, 20))
    assert SharedRounds(0.1, 0.01, 0.0, 8.0).seconds(9) == pytest.approx(0.11)


def test_rounds_beside_streams_of_other_origins() -> None:
    """Those have few rows: they share steps with ours, and no round of ours is shorter than one alone. As many as ours, of as
    many rows, are like streams of ours."""
    alone, full = SharedRounds(0.0, 0.01, 0.01, 1.0), SharedRounds(0.0, 0.01, 0.01, 8 / 3)
    beside = full._replace(own=1, others=7.0, others_rows=1.0)
    assert beside.seconds(9) == pytest.approx(alone.seconds(9)) and beside.seconds(1) == pytest.approx(full.seconds(1))
    assert full.seconds(1) < beside.others_seconds(9) < full.seconds(9)
    like = full._replace(own=4, others=4.0, others_rows=5.0)
    assert like.seconds(5) == like.others_seconds(5) == pytest.approx(full.seconds(5))


def test_a_row_costs_its_origin_what_it_takes_though_others_have_more() -> None:
    """Where hops mostly rest, others' longer windows are seldom in the way. To them a row more seemed to cost nothing: a draft
    that was never right was sent in each round."""
    beside = SharedRounds(0.3, 0.0, 0.02, 8 / 3, own=1, others=7.0, others_rows=2.0)
    assert 0.32 < beside.seconds(1) < 0.327 and beside.seconds(2) == pytest.approx(0.34)
    full = SharedRounds(0.0, 0.01, 0.01, 8 / 3, own=1, others=7.0, others_rows=2.0)
    assert full.seconds(1) == pytest.approx(0.01 + 0.01 * 8 / 3 * 15 / 8), "steps are served in turn"


def test_what_drafts_cost_streams_of_other_origins_counts() -> None:
    """On three hops that compute all the time. Told of seven more streams, a draft must win more than they lose."""

    def drafts(streams: int) -> int:
        depth = Depth()
        for rows in (1, 2) * 8:
            company = (DeviceStep(rows, 1, streams),) * 3
            depth.learn(Timing(rows, 0.01 + 0.01 * rows, (0.01 * (1 + rows) / 3,) * 3, (0.0,) * 3, company))
        return depth.choose((), [0.8] * 8, is_apart=False)

    assert drafts(1) > 1 and drafts(8) == 0


def depth_with(token_s: float, row_s: float, step_s: float = 0.0) -> Depth:
    depth = Depth()
    depth.learn(Timing(1, token_s, (step_s,)))
    depth.learn(Timing(5, token_s + 4 * row_s, (step_s + 4 * row_s,)))
    assert depth.begin()
    return depth


def test_nothing_is_drafted_before_a_plain_window_was_timed() -> None:
    depth = Depth()
    assert not depth.begin() and depth.choose((), [0.9] * 8, is_apart=False) == 0
    depth.note(1, None)  # disturbed: no time
    assert not depth.begin()
    depth.learn(Timing(1, 0.1))
    assert depth.begin() and depth.choose((), [0.9] * 8, is_apart=False) > 0


def test_what_a_row_costs_is_found_out_by_one_window_of_one_request() -> None:
    """All requests on the route go by it; if nothing comes of it, another is sent later."""
    costs = RouteCosts()
    one, other = Depth(costs), Depth(costs)
    one.learn(Timing(1, 0.1, (0.02,)))
    assert one.begin() and other.begin()
    assert one.choose((), [0.9] * 8, is_apart=False) == 2 == other.choose((), [0.9] * 8, is_apart=False)
    one.sent()
    assert other.choose((), [0.9] * 8, is_apart=False) == 0
    for _ in range(32):
        other.note(1, 0.1)
    assert other.begin() and other.choose((), [0.9] * 8, is_apart=False) == 2
    one.learn(Timing(3, 0.102, (0.022,)))
    assert costs.row_s == pytest.approx(0.001)
    assert one.choose((), [0.9] * 8, is_apart=False) == other.choose((), [0.9] * 8, is_apart=False) == 8


def test_a_draft_that_is_not_known_to_pay_is_tried_within_a_budget() -> None:
    """0.3 % of the time of rounds without drafts."""
    depth, tried = depth_with(0.1, 0.1), 0
    for _ in range(1000):
        depth.begin()
        if depth.choose((), [0.1] * 8, is_apart=False):
            tried += 1
            depth.sent()
        depth.note(1, 0.1)
    assert 2 <= tried <= 4


def test_drafts_that_take_longer_to_make_than_they_win_are_not_made() -> None:
    """On one machine a step is short, and the drafter takes its time from the same cores."""
    depth = depth_with(0.005, 0.0001)
    assert depth.choose((), [0.6] * 8, is_apart=False) > 0
    assert depth.choose((), [0.6] * 8, is_apart=False, draft_s=0.004) == 0
    assert depth_with(0.3, 0.001).choose((), [0.6] * 8, is_apart=False, draft_s=0.004) > 0


def test_routes_are_told_apart_and_only_the_last_are_remembered() -> None:
    routes = [[offer(f"n{i}", 0, 8)] for i in range(MAX_ROUTES + 1)]
    known = CostsOfRoutes()
    first = known.of(routes[0])
    assert known.of(routes[0]) is first
    assert len({id(known.of(route)) for route in routes}) == len(routes) and known.of(routes[0]) is not first


def test_a_plain_round_now_and_then_keeps_the_estimate_true() -> None:
    depth = depth_with(0.1, 0.001)
    begun = []
    for _ in range(100):
        begun.append(depth.begin())
        if begun[-1] and depth.choose((), [0.9] * 4, is_apart=False):
            depth.sent()
        depth.note(3, 0.104)
    assert begun.count(False) == 3


def test_more_ahead_is_worth_less() -> None:
    """The first guess may be wrong, then all behind it are."""
    depth = depth_with(0.3, 0.005)
    counts = [depth.choose([0.8] * ahead, [0.8] * MAX_AHEAD, is_apart=False) for ahead in (0, 4, 8, 16)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]
    assert depth.choose([1.0] * MAX_AHEAD, [1.0] * 9, is_apart=False) == 0


def test_a_step_of_their_own_must_pay_too() -> None:
    """On one machine a round is what hops compute: a second step for drafts costs as much as it can win."""
    depth = depth_with(0.02, 0.0005, 0.0199)
    assert depth.choose((), [0.6] * 8, is_apart=False) > 0
    assert depth.choose((), [0.5] * 8, is_apart=True) == 0


def test_rows_cost_all_streams_that_share_the_route() -> None:
    depth = depth_with(0.1, 0.02)
    assert depth.choose((), [0.5] * 8, is_apart=False) > 0
    assert depth.choose((), [0.5] * 8, is_apart=False, streams=8) == 0


def test_drafts_that_win_nothing_are_stopped_and_tried_again_later() -> None:
    """Whatever the estimates say, what rounds took decides; each time that drafts lose they rest for longer."""
    depth, rests, drafting = depth_with(0.1, 0.0), list[int](), 0
    for _ in range(600):
        if depth.begin():
            if depth.choose((), [0.9] * 4, is_apart=False):
                drafting += 1
                depth.sent()
                depth.note(1, 0.15)
            continue
        depth.note(1, 0.1)
        rests.append(depth.trial.pause)
    assert drafting < 60 and max(rests) > 64


def test_rounds_that_do_not_look_for_drafts_count_in_a_pause() -> None:
    depth = depth_with(0.1, 0.0)
    depth.trial.pause = 3
    depth.rest(2)
    assert not depth.begin() and depth.begin()
    depth.rest(2)
    assert depth.begin()


def test_drafts_that_win_are_not_stopped() -> None:
    depth = depth_with(0.1, 0.001)
    for _ in range(300):
        if depth.begin() and depth.choose((), [0.9] * 4, is_apart=False):
            depth.sent()
            depth.note(3, 0.11)
    assert depth.trial.pause == 0


def test_acceptance_is_learnt_by_drafter_and_place() -> None:
    acceptance, rng = Acceptance(), random.Random(3)
    for _ in range(300):
        acceptance.note(copied(20), True)
        acceptance.note(modelled(0), rng.random() < 0.6)
        acceptance.note(modelled(5), False)
    assert acceptance.chance(copied(16)) > 0.95 and acceptance.chance(copied(3)) == 0.3
    assert 0.4 < acceptance.chance(modelled(0)) < 0.8 and acceptance.chance(modelled(9)) < 0.05


def test_verdict_names_the_figures() -> None:
    assert "no window" in Depth().verdict(0.5)
    assert (
        depth_with(0.0006, 0.0041).verdict(0.3)
        == "one more row costs 4.1 ms, a round 0.6 ms, a draft is right in 30%: drafting does not pay"
    )


def test_verdict_says_why_a_model_does_not_draft() -> None:
    """On one machine its drafts take too long for short rounds, and what it would get right is no reason to draft."""
    model = ReadyModel(range(9), 0.9)
    model.draft_s = 0.002
    costs = RouteCosts()
    drafter = AutoDrafter(Acceptance(), model=model)
    drafter.share(costs)
    costs.learn(Timing(1, 0.012))
    assert drafter.verdict == (
        "a round takes 12.0 ms; there was nothing to draft on this route yet; "
        "the model drafter rests: a draft takes 2.0 ms, too long for such rounds"
    )
    costs.learn(Timing(2, 0.0125))
    assert "a draft is right in 30%" in drafter.verdict
    alone = AutoDrafter(Acceptance(), model=model, copies=False)
    alone.share(costs)
    assert alone.verdict.endswith(
        "a round 12.0 ms; the model drafter rests: a draft takes 2.0 ms, too long for such rounds"
    )
    model.draft_s = 0.001
    assert "a draft is right in 60%" in drafter.verdict and "rests" not in drafter.verdict


def test_verdict_goes_by_drafts_that_were_seen() -> None:
    """A model that was always wrong does not pay because nothing is known of copies."""
    model, acceptance, costs = ReadyModel(range(9), 0.0), Acceptance(), RouteCosts()
    drafter = AutoDrafter(acceptance, model=model)
    drafter.share(costs)
    costs.learn(Timing(1, 0.3))
    costs.learn(Timing(2, 0.3002))
    for _ in range(300):
        acceptance.note(modelled(0), False)
    assert drafter.verdict.endswith("a draft is right in 2%: drafting pays")
    for _ in range(300):
        acceptance.note(copied(0), False)
        acceptance.note(modelled(0), True)
    assert "a draft is right in 9" in drafter.verdict


@pytest.mark.parametrize(
    ("token_s", "draft_s", "has_time"), [(0.08, 0.01, True), (0.08, 0.011, False), (0.003, 0.0, True)]
)
def test_a_model_drafts_only_where_rounds_are_much_longer_than_its_drafts(
    token_s: float, draft_s: float, has_time: bool
) -> None:
    costs = RouteCosts()
    costs.token_s = token_s
    assert Depth(costs).has_time_for(draft_s) is has_time
