"""manyhands.cli.rehearsal: what is taken off what, and one of them held."""

from dataclasses import astuple
from math import isfinite

import pytest

from manyhands.cli import rehearsal
from manyhands.cli.rehearsal import Compute, Rehearsal, Timed, overheads_of, rehearsed
from manyhands.core import Span
from manyhands.errors import ModelError
from manyhands.place.measure import Overheads, Speed, machine_of
from manyhands.place.plan import evaluate
from manyhands.route.chunks import LEAST_ROWS
from tests.place.fleet import task


def test_what_is_not_compute_is_a_hops_or_the_origins() -> None:
    """A token over one hop of 5 ms of layers and 2 of ends takes 8.5; over two, whose steps cost 0.2 more, 9.2. A prompt
    of a chunk of 9 ms takes 18 over one, 20.8 over two, whose chunks cost 0.1 more; where the route is found the first token
    comes after 22. The origin's CPU to it is 3 ms, 4.8 on two hops."""
    found, one, two = (
        Timed(0.022, 0.0085, 0.004),
        Timed(0.018, 0.0085, 0.003),
        Timed(0.0208, 0.0092, 0.0048),
    )
    said = overheads_of(Rehearsal(found, one, two, Compute(0.005, 0.0052, 0.002, 0.009, 0.0091)))
    assert said.hop_s == pytest.approx(0.0005) and said.origin_s == pytest.approx(0.001)
    assert said.open_s == pytest.approx(0.0018) and said.new_s == pytest.approx(0.0028 - 0.0018 - 0.0001 - 0.0005)
    assert said.begin_s == pytest.approx(0.022 - 0.009 - 0.002 - 0.001 - 2 * 0.0005 - 0.0004)


def test_what_was_rehearsed_is_what_is_planned() -> None:
    """A prompt of one chunk over one hop on the machine of the rehearsal: the first token of the route that was found."""
    found, one, two = (
        Timed(0.022, 0.0085, 0.004),
        Timed(0.018, 0.0085, 0.003),
        Timed(0.0208, 0.0092, 0.0048),
    )
    overheads = overheads_of(Rehearsal(found, one, two, Compute(0.005, 0.0052, 0.002, 0.009, 0.0091)))
    here = machine_of("here", 1 << 40, Speed(0.005 / 24, 0.0, 0.002, 0.0, 1.0, 0.009 / 24, "layers"), overheads)
    plan = evaluate(task(here, prompt=LEAST_ROWS), [(here, Span(0, 24))])
    assert plan.ttft_s == pytest.approx(found.first_s) and plan.token_s == pytest.approx(found.token_s)


def test_a_machine_that_wavers_gives_no_negative_times() -> None:
    found, one, two = (
        Timed(0.001, 0.002, 0.003),
        Timed(0.003, 0.002, 0.002),
        Timed(0.001, 0.001, 0.001),
    )
    assert overheads_of(Rehearsal(found, one, two, Compute(0.003, 0.002, 0.1, 0.1, 0.2))) == Overheads(0, 0, 0, 0, 0)


def test_where_none_can_be_held_the_usual_overheads_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def without() -> None:
        raise ModelError("the package was built without it")

    monkeypatch.setattr(rehearsal, "model_path", without)
    assert rehearsed() == Overheads()


@pytest.mark.nightly
def test_it_is_held_with_processes() -> None:
    """Nothing is said of how long it takes: other work on the machine may stretch any of its times."""
    said = rehearsed()
    assert said != Overheads() and min(astuple(said)) >= 0 and isfinite(sum(astuple(said)))
