"""manyhands.origin.draft: the longest earlier occurrence is found, in bounded time, and copied on."""

from collections import UserList
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.origin.depth import Acceptance
from manyhands.origin.draft import AutoDrafter, Drafting, DraftTally, Returned, SuffixIndex
from manyhands.origin.step_costs import Timing


def longest(ids: list[int]) -> int:
    """Length of the longest suffix that occurred before, up to LONGEST, or 0 below MIN_MATCH: by definition."""
    best = 0
    for at in range(1, len(ids)):
        length = 0
        while length < min(at, SuffixIndex.LONGEST) and ids[at - 1 - length] == ids[len(ids) - 1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= SuffixIndex.MIN_MATCH else 0


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(0, 5))
def test_the_longest_match_is_found_where_the_chain_is_short(ids: list[int], step: int) -> None:
    index = SuffixIndex()
    index.CANDIDATES = 1000
    for end in range(step, len(ids) + 1, step + 1):
        at, match = index.find(ids[:end])
        assert match == longest(ids[:end])
        assert (at == -1) == (match == 0)
        assert ids[at - match : at] == ids[end - match : end] or at == -1


def test_a_run_without_end_costs_a_bounded_number_of_comparisons() -> None:
    """Every position is a candidate, and every candidate matches as far as it goes."""

    class Counted(UserList[int]):
        reads = 0

        def __getitem__(self, key: Any) -> Any:
            Counted.reads += isinstance(key, int)
            return self.data[key]

    ids = Counted([7, 8] * 20_000)
    index = SuffixIndex()
    while index.find(ids) == (-1, 0):
        pass  # it is indexed in parts
    Counted.reads = 0
    at, match = index.find(ids)
    assert match == index.LONGEST and at < len(ids)
    assert Counted.reads <= 2 * index.LONGEST * index.CANDIDATES


def outcome(
    tokens: int, right: int, timing: Timing | None = None, *, now: float = 0.0, is_dead: bool = False
) -> Returned:
    return Returned(tokens, right, is_dead, timing, False, now)


def warm(drafter: AutoDrafter) -> AutoDrafter:
    """A drafter that has seen a plain round of 100 ms, and one with cheap rows."""
    drafter.propose([], [], 0)
    drafter.note(outcome(1, 0, Timing(1, 0.1, (0.02,)), now=0.1))
    drafter.propose([], [], 0)
    drafter.note(outcome(1, 0, Timing(3, 0.102, (0.022,)), now=0.2))
    return drafter


def drafts_after(ids: list[int], most: int = 8) -> list[int]:
    """What a drafter that has seen fast plain windows proposes."""
    return list(warm(AutoDrafter(Acceptance())).propose(ids, [], most))


def test_what_followed_before_is_proposed() -> None:
    assert drafts_after([1, 2, 3, 4, 5, 6, 9, 9, 1, 2, 3], 2) == [4, 5]


def test_a_match_that_overlaps_the_end_repeats_itself() -> None:
    drafts = drafts_after([5, 6, 7] * 8, 8)
    assert drafts and drafts == ([5, 6, 7] * 3)[: len(drafts)]


@pytest.mark.parametrize("ids", [[], [1], [1, 2], [1, 2, 3], list(range(50))])
def test_nothing_is_proposed_without_a_match(ids: list[int]) -> None:
    assert drafts_after(ids) == []


def test_no_more_than_asked_for() -> None:
    assert len(drafts_after([1, 2, 3, 4] * 9, 2)) <= 2
    assert drafts_after([1, 2, 3, 4] * 9, 0) == []


def test_windows_that_follow_go_on_with_the_copy() -> None:
    """Also past the end of what there is, where the match overlaps it."""
    drafter, ids, guessed = warm(AutoDrafter(Acceptance())), [5, 6, 7] * 8, list[int]()
    while drafts := drafter.propose(ids, guessed, 4):
        guessed += drafts
    assert len(guessed) > 8 and guessed == ([5, 6, 7] * 30)[: len(guessed)]
    drafter.note(outcome(4, 4))
    more = drafter.propose([*ids, *guessed[:4]], guessed[4:], 4)
    assert list(more) == ([5, 6, 7] * 30)[len(guessed) : len(guessed) + len(more)]


def test_what_came_back_is_counted_by_drafter() -> None:
    drafter = warm(AutoDrafter(Acceptance()))
    drafts = drafter.propose([5, 6, 7] * 8, [], 8)
    drafter.note(outcome(3, 2, is_dead=True))
    assert drafter.tallies == {"suffix": DraftTally(len(drafts), 2)}
    assert drafter.propose([*[5, 6, 7] * 8, 5, 6, 9], [], 8) == ()  # a new round, of ids that match nothing


class Model:
    """A ModelSource that always says the same."""

    def __init__(self, says: list[int]) -> None:
        self.says, self.trouble, self.restarts = says, "", 0
        self.draft_s = 0.0

    def begin(self, wake: object) -> None:
        return

    def close(self) -> None:
        return

    def restart(self, ids: object) -> None:
        self.restarts += 1

    def take(self, start: int, most: int, wanted: int) -> list[int]:
        return self.says[: min(most, wanted)]


def test_a_model_drafts_where_nothing_repeats_and_not_where_a_long_match_is_likelier() -> None:
    model = Model([8, 9])
    drafter = warm(AutoDrafter(Acceptance(), model=model))
    assert drafter.propose(list(range(50)), [], 8) == [8, 9] and model.restarts == 2
    drafter.note(outcome(1, 0, is_dead=True))
    assert list(drafter.propose([*range(50), *[5, 6, 7] * 8], [], 2)) == [5, 6] and model.restarts == 2
    assert drafter.tallies == {"model": DraftTally(2, 0), "suffix": DraftTally(2, 0)}


def test_a_model_in_trouble_is_left_out_and_named() -> None:
    model = Model([8, 9])
    drafter = warm(AutoDrafter(Acceptance(), model=model))
    model.trouble = "a turn took more than 1 s"
    assert drafter.propose(list(range(50)), [], 8) == ()
    assert "the model drafter is off: a turn took more than 1 s" in drafter.verdict


def test_each_drafter_alone() -> None:
    ids = [5, 6, 7] * 8
    assert warm(AutoDrafter(Acceptance(), model=Model([8]), copies=False)).propose(ids, [], 8) == [8]
    assert warm(AutoDrafter(Acceptance())).propose(list(range(50)), [], 8) == ()


def test_tokens_per_traversal() -> None:
    assert Drafting().tokens_per_traversal is None
    assert Drafting(windows=4, tokens=10, drafted=9, accepted=6).tokens_per_traversal == 2.5


def test_a_prompt_is_indexed_while_the_hops_compute_it() -> None:
    """And not when its first token is there, which would wait for that."""
    drafter = AutoDrafter(Acceptance())
    drafter.begin([*range(1000)], lambda: None)
    assert len(drafter._index._older) == 1001


def test_a_long_prompt_is_indexed_in_parts() -> None:
    """131,072 ids at once are 0.1 s of the event loop."""
    index, ids = SuffixIndex(), [*range(3), *([7, 8, 9, 10] * SuffixIndex.AT_ONCE)]
    found = []
    for _ in range(8):
        before = len(index._older)
        found.append(index.find(ids))
        assert len(index._older) - before <= SuffixIndex.AT_ONCE + 1
        ids.append(ids[-4])
    assert found[0] == (-1, 0) and found[-1][1] == SuffixIndex.LONGEST
