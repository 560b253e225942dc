"""Whose exchange begins next, in virtual time: bounded in number, pace and share, whatever a flood does."""

from hypothesis import given
from hypothesis import strategies as st

from manyhands.net.pairing.queue import PairingQueue, QueueLimits

LIMITS = QueueLimits(
    waiting=8, waiting_per_source=3, patience_s=5.0, running=4, running_per_source=2, per_s=2.0, burst=3
)


def queue() -> PairingQueue[int]:
    return PairingQueue(LIMITS, 0.0)


def test_no_more_begin_than_the_pace_allows() -> None:
    many = queue()
    begun = 0
    for tenth in range(100):  # ten seconds, four callers a tenth from as many sources, each gone at once
        now = tenth / 10
        for caller in range(4):
            many.enter(tenth * 4 + caller, f"10.0.{tenth}.{caller}", now)
        while (key := many.next(now)) is not None:
            begun += 1
            many.ended(key)
    assert begun <= LIMITS.burst + 10 * LIMITS.per_s


def test_a_source_that_floods_has_its_share_and_another_is_next() -> None:
    crowded = queue()
    for caller in range(50):
        crowded.enter(caller, "10.0.0.1", 0.0)
    assert len(crowded.waiting) == LIMITS.waiting_per_source
    crowded.enter(99, "10.0.0.2", 0.0)
    assert [crowded.next(0.0) for _ in range(3)] == [47, 99, 48]
    assert crowded.next(100.0) is None  # two of one source run
    crowded.ended(47)
    assert crowded.next(100.0) == 49


def test_the_oldest_of_the_fullest_source_makes_room() -> None:
    full = queue()
    evicted = [full.enter(caller, f"10.0.0.{caller % 4}", float(caller)) for caller in range(9)]
    assert evicted[:8] == [None] * 8 and evicted[8] == 0


def test_who_waits_too_long_is_dropped() -> None:
    slow = queue()
    slow.enter(1, "10.0.0.1", 0.0)
    slow.enter(2, "10.0.0.1", 3.0)
    assert slow.overdue(4.9) == [] and slow.overdue(5.0) == [1] and slow.next(5.0) == 2 and slow.next(99.0) is None


@given(st.lists(st.tuples(st.sampled_from(["enter", "next", "ended", "late"]), st.integers(0, 5)), max_size=120))
def test_every_bound_holds_and_nothing_is_remembered_of_callers_that_went(steps: list[tuple[str, int]]) -> None:
    any_ = queue()
    present: set[int] = set()
    running: list[int] = []
    for now, (step, number) in enumerate(steps):
        if step == "enter":
            present.add(now)
            present.discard(-1 if (gone := any_.enter(now, f"10.0.0.{number}", now)) is None else gone)
        elif step == "next" and (key := any_.next(now)) is not None:
            running.append(key)
        elif step == "ended" and running:
            present.discard(gone := running.pop(number % len(running)))
            any_.ended(gone)
        elif step == "late":
            present -= set(any_.overdue(now))
        assert len(any_.waiting) <= LIMITS.waiting and any_.num_running == len(running) <= LIMITS.running
        assert len(any_.waiting) + any_.num_running == len(present)
    for key in list(present):
        any_.ended(key)
    assert not any_._source_of and not any_._has_begun and not any_.num_running
