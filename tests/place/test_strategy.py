"""How many layers fit, which to take, how to share (LP-11..13, LP-17, L9-16..18, L9-R09, SH-R14)."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.core import Span, check_cover
from manyhands.errors import BadRequest, CutError
from manyhands.place.machines import Machine
from manyhands.place.shape import PROCESS_BYTES
from manyhands.place.strategy import (
    Holding,
    assign,
    check_budget,
    choose_span,
    coverage,
    gaps,
    layers_that_fit,
    share,
    weakest_span,
)
from manyhands.plain import figure_of, size_of
from tests.place.fleet import MB, machine, shape
from tests.place.simulate import hosts


def room(layers: float) -> int:
    return PROCESS_BYTES + round(layers * 100 * MB)


def test_layers_that_fit_count_cache_ends_and_process() -> None:
    """LP-12: 100 MB a layer and 1 MB of cache for 1,000 positions of 1,000 bytes."""
    model = shape(ends_mb=250, cache_bytes=1000)
    assert layers_that_fit(room(5.05), model, 1000) == 5
    assert layers_that_fit(room(5.04), model, 1000) == 4
    assert layers_that_fit(room(5.05), model, 1000, with_ends=True) == 2
    assert layers_that_fit(room(99), model, 1000) == 24
    assert layers_that_fit(0, model, 1000) == 0


def test_layers_wherever_they_lie_take_what_the_largest_take() -> None:
    """Those of deepseek_v3 that have experts come last."""
    model = replace(shape(cache_bytes=3), layer_bytes=(7, 100, 20, 40), cache_bytes=(3,) * 4)
    assert [model.most_bytes(count, 10) for count in (0, 1, 2, 4)] == [0, 130, 200, 287]


def test_a_budget_too_small_says_what_one_layer_takes() -> None:
    given, needed = PROCESS_BYTES + 50 * MB, PROCESS_BYTES + 101 * MB
    said = rf"{size_of(given)} of memory holds no layer of m: one takes 100 MB.*give at least {size_of(needed)}"
    with pytest.raises(BadRequest, match=said):
        check_budget(given, shape(cache_bytes=1000), 1000)
    with pytest.raises(BadRequest, match=f"give at least {size_of(needed, is_limit=True)} or use --dtype w4"):
        check_budget(given, shape(cache_bytes=1000), 1000)
    needed = PROCESS_BYTES + 1100 * MB
    with pytest.raises(
        BadRequest, match=f"give at least {size_of(needed, is_limit=True)}$"
    ):  # smaller weights do not help
        check_budget(given, shape(cache_bytes=1000 * MB), 1)


@pytest.mark.parametrize("num_bytes, text", [(3.24e9, "3.2 GB"), (12e9, "12 GB"), (5e5, "500 kB"), (7, "7 B")])
def test_sizes_are_for_people(num_bytes: float, text: str) -> None:
    assert size_of(num_bytes) == text


@pytest.mark.parametrize("num_bytes, text", [(300_200_001, "301 MB"), (3.21e9, "3.3 GB"), (3e9, "3.0 GB")])
def test_who_gives_what_is_asked_for_gives_enough(num_bytes: float, text: str) -> None:
    assert size_of(num_bytes, is_limit=True) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1414.6, "1415"), (99.96, "100"), (99.94, "99.9"), (8.17, "8.2"), (0.996, "1.0"), (0.034, "0.03"), (0.0, "0")],
)
def test_figures_have_the_digits_that_matter(value: float, text: str) -> None:
    assert figure_of(value) == text


def test_the_second_node_fills_what_the_first_lacks() -> None:
    """LP-17: A has 1-5, B joins and takes 6-10, or however many fit."""
    first = hosts("0-4", 1)
    assert choose_span(shape(10), first, room(5), tokens=1).span == Span.parse("5-9")
    few = choose_span(shape(10), first, room(3), tokens=1)
    assert few.span == Span.parse("5-7") and few.why == "no node holds layers 5-7, and 3 fit here"


def test_room_beyond_a_gap_goes_to_the_next_copy_if_one_is_wanted() -> None:
    """LP-13: gaps first, then a new pipe if max_pipes allows."""
    first = hosts("0-4", 1)
    assert choose_span(shape(10), first, room(10), tokens=1, max_pipes=1).span == Span.parse("5-9")
    both = choose_span(shape(10), first, room(10), tokens=1, max_pipes=2)
    assert both.span == Span.parse("0-9") and "it takes 0-9" in both.why


def test_two_holes_are_bridged_by_who_has_room() -> None:
    held = [*hosts("0-2", 1), *hosts("5-5", 1, first=1)]
    assert choose_span(shape(8), held, room(8), tokens=1, max_pipes=1).span == Span.parse("3-7")
    assert choose_span(shape(8), held, room(2), tokens=1, max_pipes=1).span == Span.parse("3-4")


def test_a_second_copy_is_completed_before_a_third_begins() -> None:
    held = [*hosts("0-9", 1), *hosts("0-3", 1, first=1)]
    assert choose_span(shape(10), held, room(4), tokens=1, max_pipes=2).span == Span.parse("4-7")
    assert choose_span(shape(10), held, room(4), tokens=1, max_pipes=2).why.startswith("only 1 node holds layers 4-7")


def test_when_there_are_copies_enough_the_weakest_layers_win() -> None:
    """Petals' rule: held as often as others, but by slower nodes."""
    held = [*hosts("0-4", 2), *hosts("5-9", 2, first=2, layer_s=0.05)]
    chosen = choose_span(shape(10), held, room(5), tokens=1, max_pipes=2)
    assert chosen.span == Span.parse("5-9") and "least throughput" in chosen.why


def test_who_restarts_keeps_what_is_on_its_disk() -> None:
    """SH-R14: re-tiling all ranges cost half an hour of downloads."""
    files = Span.parse("12-23")
    assert choose_span(shape(), [], room(12), tokens=1, files=files).span == files
    whole = hosts("0-23", 1)
    assert choose_span(shape(), whole, room(12), tokens=1, files=files).span == files
    assert "disk" in choose_span(shape(), whole, room(12), tokens=1, files=files).why


def test_who_has_more_room_than_files_grows_from_them() -> None:
    held = hosts("0-11", 1)
    chosen = choose_span(shape(12), held, room(6), tokens=1, max_pipes=2, files=Span.parse("3-4"))
    assert chosen.span == Span.parse("3-8") and "layers 3-4 are on this machine's disk already" in chosen.why
    assert choose_span(shape(12), held, room(6), tokens=1, max_pipes=1, files=Span.parse("3-4")).span == Span.parse(
        "3-4"
    )


def test_of_more_files_than_room_the_weakest_layers_are_kept() -> None:
    held = [*hosts("0-11", 1), *hosts("0-7", 2)]
    assert choose_span(shape(12), held, room(3), tokens=1, max_pipes=1, files=Span.parse("4-10")).span == Span.parse(
        "8-10"
    )


def test_files_do_not_win_over_a_hole() -> None:
    held = hosts("12-23", 2)
    assert choose_span(shape(), held, room(12), tokens=1, files=Span.parse("12-23")).span == Span.parse("0-11")
    assert choose_span(shape(4), [], room(2), tokens=1, files=Span.parse("20-23")).span == Span.parse("0-1")


def test_bad_wishes_are_refused() -> None:
    with pytest.raises(BadRequest, match="max_pipes is 0"):
        choose_span(shape(), [], room(9), tokens=1, max_pipes=0)
    with pytest.raises(BadRequest, match="holds no layer"):
        choose_span(shape(), [], room(0.5), tokens=1)


def test_gaps_are_the_runs_without_a_holder() -> None:
    counts = coverage([*hosts("2-3", 1), *hosts("3-5", 1)], 8)
    assert counts == [0, 0, 1, 2, 1, 1, 0, 0]
    assert gaps(counts) == [Span(0, 2), Span(6, 8)]
    assert gaps([1, 1]) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 3))
def test_joiners_of_any_size_complete_the_model(sizes: list[int], max_pipes: int) -> None:
    """Nodes that come one by one: each covers as much of what no node holds as one span can."""
    held: list[Holding] = []
    for index, layers in enumerate(sizes):
        empty = [count == 0 for count in coverage(held, 12)]
        span = choose_span(shape(12), held, room(layers), tokens=1, max_pipes=max_pipes).span
        assert len(span) <= layers
        assert sum(empty[span.start : span.end]) == max(sum(empty[i : i + layers]) for i in range(12))
        held += hosts(str(span), 1, first=index)


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0]), min_size=1, max_size=9), st.data())
def test_the_weakest_span_is_the_one_that_lists_worst(strength: list[float], data: st.DataObject) -> None:
    length = data.draw(st.integers(1, len(strength)))
    span = weakest_span(strength, length)
    windows = [sorted(strength[i : i + length]) for i in range(len(strength) - length + 1)]
    assert windows[span.start] == min(windows) and min(windows) not in windows[: span.start]


@pytest.mark.parametrize("length", [0, 5])
def test_a_window_that_cannot_be_is_refused(length: int) -> None:
    with pytest.raises(CutError):
        weakest_span([1.0] * 4, length)


def test_uniform_gives_the_rest_to_the_earliest() -> None:
    """L9-16, L9-R09: 12/5 -> 3,3,2,2,2 and 22/3 -> 0-7, 8-14, 15-21."""
    five = assign("uniform", [machine(c, 9) for c in "abcde"], shape(12))
    assert [len(span) for span in five] == [3, 3, 2, 2, 2]
    assert list(map(str, assign("uniform", [machine(c, 9) for c in "abc"], shape(22)))) == ["0-7", "8-14", "15-21"]


def test_capacity_is_cores_plus_gibibytes() -> None:
    """L9-18: weights 4 + 4, 8 + 8, 2 + 2 of 22 layers: 6.29, 12.57, 3.14."""
    sizes = [Machine(str(n), n << 30, 1.0, cores=n) for n in (4, 8, 2)]
    spans = assign("capacity", sizes, shape(22))
    assert [len(span) for span in spans] == [6, 13, 3]
    check_cover(spans, 22)


@given(st.integers(1, 80), st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=20))
def test_shares_are_contiguous_and_nearly_proportional(num_layers: int, weights: list[float]) -> None:
    if len(weights) > num_layers:
        with pytest.raises(CutError):
            share(num_layers, weights)
        return
    spans = share(num_layers, weights)
    check_cover(spans, num_layers)
    small = sum(num_layers * weight / sum(weights) < 1 for weight in weights)
    for span, weight in zip(spans, weights, strict=True):
        assert abs(len(span) - num_layers * weight / sum(weights)) < 1.001 + small


@given(st.integers(1, 13))
def test_every_number_of_workers_covers_once(count: int) -> None:
    """L9-R09: 12 layers, 1 to 13 workers."""
    workers = [machine(str(i), 99) for i in range(count)]
    if count == 13:
        with pytest.raises(CutError):
            assign("uniform", workers, shape(12))
        return
    for strategy in ("uniform", "capacity"):
        spans = assign(strategy, workers, shape(12))
        check_cover(spans, 12)
        assert all(a.end == b.start for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize("weights", [[], [0.0, 1.0], [float("nan")], [float("inf"), 1.0], [-1.0, 2.0]])
def test_weights_that_mean_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(CutError):
        share(12, weights)


def test_no_machines_no_shares() -> None:
    with pytest.raises(BadRequest, match="no machines"):
        assign("uniform", [], shape())
