"""manyhands.origin.step_costs: what rows cost and who shares the steps, by what hops say."""

from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.origin.depth import Depth
from manyhands.origin.step_costs import DeviceStep, StepCosts, Timing
from manyhands.worker.batch import WINDOW_ROWS

_US = st.integers(0, (1 << 32) - 1).map(lambda us: 1e-6 * us)
_SAID = st.tuples(_US, _US, st.builds(DeviceStep, st.integers(0, 65535), st.integers(0, 255), st.integers(0, 255)))


def learnt(*steps: tuple[int, DeviceStep, float]) -> StepCosts:
    """By windows of so many rows on one hop."""
    costs = StepCosts()
    for rows, company, seconds in steps:
        costs.note(Timing(rows, None, (seconds,), (0.0,), (company,)))
    return costs


def test_rows_of_others_in_a_step_do_not_make_a_row_dear() -> None:
    """A step takes 20 ms, and 1 ms for each further row, whoseever it is."""
    costs = learnt(
        *((own, DeviceStep(own + more, 2, 2), 0.019 + 0.001 * (own + more)) for own in (1, 5) for more in (1, 40))
    )
    assert costs.row_s == pytest.approx(0.001, rel=0.05) and sum(costs.each_s) == pytest.approx(0.02, rel=0.05)


def test_company_alone_shows_what_a_row_costs() -> None:
    """Without a draft of ours: a step of eight streams has eight rows."""
    assert learnt(*((1, DeviceStep(rows, rows, 8), 0.01 * rows) for rows in (1, 8))).row_s == pytest.approx(0.01)


def test_steps_with_parts_of_prompts_teach_nothing_of_rows() -> None:
    costs = learnt((1, DeviceStep(1, 1, 1), 0.02), (1, DeviceStep(65, 0, 2), 0.5))
    assert costs.row_s is None and sum(costs.each_s) == pytest.approx(0.02)


def test_rounds_count_as_computed_where_hops_say_nothing() -> None:
    costs = StepCosts()
    for rows in (1, 3):
        costs.note(Timing(rows, 0.1 * rows))
    assert costs.row_s == pytest.approx(0.1)


def test_the_hop_with_most_to_do_sets_the_load() -> None:
    """Two of three equal hops serve us alone, eight streams share the third."""
    costs = StepCosts()
    costs.note(
        Timing(1, None, (0.01,) * 3, (0.0,) * 3, (DeviceStep(1, 1, 1), DeviceStep(1, 1, 8), DeviceStep(1, 1, 1)))
    )
    assert costs.busiest(1) == pytest.approx((8, 8 / 3)) and costs.busiest(16) == pytest.approx((16, 16 / 3))


def test_windows_of_other_origins_are_told_from_ours() -> None:
    """Of our four streams each window has two rows, of four others five; steps have two of each."""
    costs = learnt(*((2, DeviceStep(14, 4, 8), 0.02),) * 50)
    assert costs.rows_of_others(1, 3.0) == pytest.approx(4.0, rel=0.01), "of three others alike"
    assert costs.rows_of_others(4, 4.0) == pytest.approx(5.5, rel=0.01), "less what our own three have of seven"


def test_long_windows_of_others_that_share_no_step_of_late_are_forgotten() -> None:
    shared, alone = ((1, DeviceStep(6, 2, 2), 0.02),) * 20, ((1, DeviceStep(1, 1, 2), 0.02),) * 200
    assert learnt(*shared).rows_of_others(1, 1.0) == pytest.approx(5.0, rel=0.02)
    assert learnt(*shared, *alone).rows_of_others(1, 1.0) == pytest.approx(1.0, abs=0.1)


@given(st.lists(st.tuples(st.integers(1, WINDOW_ROWS), st.lists(_SAID, min_size=2, max_size=2)), max_size=40))
def test_nothing_that_hops_can_say_breaks_it(windows: list[tuple[int, list[tuple[float, float, DeviceStep]]]]) -> None:
    depth = Depth()
    for rows, said in windows:
        depth.learn(Timing(rows, 0.1, *map(tuple, zip(*said, strict=True))))
        for streams in (1, 4):
            depth.begin(streams)
            assert 0 <= depth.choose((0.5,), [0.9] * 8, is_apart=False, streams=streams) <= 8
            rounds = depth.costs.shared(streams)
            assert all(isfinite(each) and each >= 0 for each in (*rounds, depth.costs.odd_row_s(streams)))
            assert 1 <= rounds.others_rows <= WINDOW_ROWS
        sizes = [hop.sizes for hop in depth.costs._steps._hops]
        assert all(len(each) <= 61 for each in sizes)
