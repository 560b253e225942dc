"""manyhands.origin.draft: the longest earlier occurrence is found, in bounded time, and copied on."""

import random
from collections import UserList
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.origin.depth import Acceptance
from manyhands.origin.draft import Drafting, SuffixDrafter, SuffixIndex


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
    index.find(ids)
    Counted.reads = 0
    at, match = index.find(ids)
    assert match == index.LONGEST and at < len(ids)
    assert Counted.reads <= 2 * index.LONGEST * index.CANDIDATES


def drafts_after(ids: list[int], most: int = 8) -> list[int]:
    """What a drafter that has seen fast plain windows proposes."""
    drafter = SuffixDrafter(Acceptance())
    drafter.propose([], 0)
    drafter.note([1], 0.1)
    return list(drafter.propose(ids, most))


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


def test_wrong_drafts_silence_the_drafter_and_right_ones_bring_it_back() -> None:
    """On ids whose suffixes recur with another continuation each time, then on ids that repeat."""
    rng = random.Random(3)
    drafter = SuffixDrafter(Acceptance())
    ids: list[int] = []
    last_wrong = 0
    for window in range(400):
        drafts = drafter.propose(ids, 15)
        if drafts:
            last_wrong = window
        ids += [1, 2, 3, 100 + rng.randrange(10_000)] if window % 2 else [1, 2, 3]
        drafter.note([-1], 0.1 + 0.02 * len(drafts))
    assert last_wrong < 399 or drafter.verdict.endswith("does not pay")
    accepted = 0
    ids += list(range(200, 240))
    for _ in range(60):
        drafts = drafter.propose(ids, 15)
        token = 200 + (ids[-1] - 200 + 1) % 40
        right = [200 + (token - 200 + i) % 40 for i in range(len(drafts) + 1)]
        accepted += sum(a == b for a, b in zip(drafts, right, strict=False))
        drafter.note(right, 0.1 + 0.001 * len(drafts))
        ids += right
    assert accepted > 60


def test_tokens_per_traversal() -> None:
    assert Drafting().tokens_per_traversal is None
    assert Drafting(windows=4, drafted=9, accepted=6).tokens_per_traversal == 2.5
