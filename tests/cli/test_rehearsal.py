"""manyhands.cli.rehearsal: what is taken off what, and one of them held."""

import pytest

from manyhands.cli import rehearsal
from manyhands.cli.rehearsal import Compute, Timed, overheads_of, rehearsed
from manyhands.errors import ModelError
from manyhands.place.measure import Overheads


def test_what_is_not_compute_is_a_hops_or_the_origins() -> None:
    """A token over one hop of 5 ms of layers and 2 of ends takes 8.5; over two, whose steps cost 0.2 more, 9.2. A
    first token takes 6 ms more where the route is found; 3 ms of CPU where it is given, 4.8 on two hops."""
    found, one = Timed(0.0145, 0.0085, 0.004), Timed(0.0135, 0.0085, 0.003)
    said = overheads_of(found, one, Timed(0.030, 0.0092, 0.0048), Compute(0.005, 0.0052, 0.002))
    assert said.hop_s == pytest.approx(0.0005) and said.origin_s == pytest.approx(0.001)
    assert said.begin_s == pytest.approx(0.0145 - 0.0085 - 0.0005) and said.open_s == pytest.approx(0.0018)


def test_a_machine_that_wavers_gives_no_negative_times() -> None:
    found, one, two = Timed(0.001, 0.002, 0.003), Timed(0.003, 0.002, 0.002), Timed(0.001, 0.001, 0.001)
    assert overheads_of(found, one, two, Compute(0.003, 0.002, 0.1)) == Overheads(0, 0, 0, 0)


def test_where_none_can_be_held_the_usual_overheads_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def without() -> None:
        raise ModelError("the package was built without it")

    monkeypatch.setattr(rehearsal, "model_path", without)
    assert rehearsed() == Overheads()


@pytest.mark.nightly
def test_it_is_held_with_processes() -> None:
    said = rehearsed()
    assert said != Overheads() and 0 < said.hop_s + said.origin_s < 1 and 0 < said.begin_s < 1
    assert 0 <= said.open_s < 1
