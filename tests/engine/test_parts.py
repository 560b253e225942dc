"""manyhands.engine.parts: plans are made once while they are used, and the last ones are kept."""

import pytest

from manyhands.core import Span
from manyhands.engine.parts import PlansOfParts
from manyhands.errors import CutError


class APlan:
    """Something that can be referred to weakly."""


WHOLE = APlan()


def plans(made: list[tuple[int, int]], kept: int) -> PlansOfParts[APlan]:
    def make(first: int, end: int) -> APlan:
        made.append((first, end))
        return APlan()

    return PlansOfParts(Span(4, 12), WHOLE, make, kept)


def test_a_part_is_counted_from_the_first_layer_of_the_span_and_the_whole_is_there() -> None:
    made: list[tuple[int, int]] = []
    parts = plans(made, 0)
    first = parts[Span(4, 8)]
    assert made == [(0, 4)] and parts[Span(4, 8)] is first
    assert parts[Span(4, 12)] is WHOLE and made == [(0, 4)]
    with pytest.raises(CutError, match="3-7"):
        parts[Span(3, 8)]


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_the_last_parts_are_kept_and_no_more(kept: int) -> None:
    made: list[tuple[int, int]] = []
    parts = plans(made, kept)
    ends = [5, 6, 7, 6, 7]  # a session each, one after the other
    for end in ends:
        parts[Span(4, end)]
    assert [end + 4 for _, end in made] == {0: ends, 1: ends, 2: [5, 6, 7]}[kept]
    for end in range(5, 12):
        parts[Span(4, end)]
    made.clear()
    for end in range(5, 12):
        parts[Span(4, end)]
    assert len(made) == 7  # asked for in turn, none was kept for so long
