"""Admission is pure: time is a number here."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.api.limits import CHARGED_TOKENS, NO_QUOTA, Admission, Bucket, Quota, default_tokens
from manyhands.config import LimitsConfig
from manyhands.errors import BadRequest, RateLimited


def admission(**limits: int) -> tuple[Admission, list[str]]:
    started: list[str] = []
    return Admission(LimitsConfig(**limits), started.append, lambda job, why: None), started


def test_first_come_first_served_up_to_the_limit() -> None:
    gate, started = admission(max_running=2, max_queue=1)
    for job in "abc":
        gate.ask(job, None, NO_QUOTA, 10, 0.0)
    assert started == ["a", "b"]
    with pytest.raises(RateLimited, match="max_queue 1") as refusal:
        gate.ask("d", None, NO_QUOTA, 10, 0.0)
    assert refusal.value.retry_after_s >= 1
    gate.leave("a", 10, 1.0)
    assert started == ["a", "b", "c"]
    gate.leave("a", 10, 1.0)
    assert len(gate.running) == 2


def test_the_queue_is_fair_by_key() -> None:
    gate, started = admission(max_running=2)
    for job in ("a1", "a2", "a3", "a4"):
        gate.ask(job, "a", NO_QUOTA, 1, 0.0)
    gate.ask("b1", "b", NO_QUOTA, 1, 0.0)
    gate.leave("a1", 1, 1.0)
    assert started == ["a1", "a2", "b1"]  # not a3, though it waited longer
    gate.leave("a2", 1, 1.0)
    assert started[-1] == "a3"


def test_a_full_queue_is_shared_by_keys() -> None:
    """One key that fills it keeps out no other: the newest of what the fullest has waiting makes room, and costs nothing."""
    started: list[str] = []
    dropped: list[tuple[str, str]] = []
    gate = Admission(
        LimitsConfig(max_running=1, max_queue=4), started.append, lambda job, why: dropped.append((job, str(why)))
    )
    quota = Quota(tokens_per_minute=100)
    for number in range(5):
        gate.ask(f"a{number}", "a", quota, 20, 0.0)
    gate.enter("b", NO_QUOTA, 0.0)
    gate.ask("b0", "b", NO_QUOTA, 1, 0.0)
    gate.ask("c0", "c", NO_QUOTA, 1, 0.0)
    assert [job for job, _ in dropped] == ["a4", "a3"] and "max_queue 4" in dropped[0][1]
    assert list(gate.waiting) == ["a1", "a2", "b0", "c0"] and gate.use_of("a", 0.0) == {
        "running": 1,
        "tokens_per_minute": 60,
    }
    for key in "abc":  # two, one and one wait: to trade places would end in nothing
        with pytest.raises(RateLimited, match="max_queue 4"):
            gate.enter(key, NO_QUOTA if key != "a" else quota, 0.0)
    for job in ("a0", "a1", "a2", "b0"):
        gate.leave(job, 1, 1.0)
    assert started == ["a0", "a1", "a2", "b0", "c0"]


def test_concurrency_of_a_key_holds_only_that_key_up() -> None:
    gate, started = admission(max_running=8)
    quota = Quota(concurrency=1)
    gate.ask("a1", "a", quota, 1, 0.0)
    gate.ask("a2", "a", quota, 1, 0.0)
    gate.ask("b1", "b", NO_QUOTA, 1, 0.0)
    assert started == ["a1", "b1"]
    gate.leave("a1", 1, 1.0)
    assert started == ["a1", "b1", "a2"]


def test_quotas_refill_and_unused_tokens_come_back() -> None:
    gate, _ = admission()
    quota = Quota(tokens_per_minute=100)
    gate.ask("1", "a", quota, 80, 0.0)
    with pytest.raises(RateLimited, match=r"tokens_per_minute of this key \(100\) is used up: wait 18 s") as refusal:
        gate.ask("2", "a", quota, 50, 0.0)
    assert refusal.value.retry_after_s == pytest.approx(18.0)
    gate.leave("1", 10, 0.0)
    gate.ask("3", "a", quota, 90, 0.0)
    with pytest.raises(RateLimited, match="lower max_tokens"):
        gate.ask("4", "a", quota, 101, 1e9)
    gate.ask("5", "a", quota, 100, 1e9)


def test_requests_per_minute() -> None:
    gate, started = admission()
    quota = Quota(requests_per_minute=2)
    gate.ask("1", "a", quota, 5, 0.0)
    gate.ask("2", "a", quota, 5, 0.0)
    with pytest.raises(RateLimited, match="requests_per_minute"):
        gate.ask("3", "a", quota, 5, 1.0)
    gate.ask("4", "a", quota, 5, 31.0)
    assert started == ["1", "2", "4"]


def test_a_refused_request_costs_nothing() -> None:
    gate, _ = admission(max_running=1, max_queue=0)
    quota = Quota(requests_per_minute=2, tokens_per_minute=100)
    gate.ask("1", "a", quota, 50, 0.0)
    with pytest.raises(RateLimited, match="max_queue"):
        gate.ask("2", "a", quota, 50, 0.0)
    gate.leave("1", 50, 0.0)
    gate.ask("3", "a", quota, 50, 0.0)


@given(st.lists(st.tuples(st.integers(0, 120), st.floats(0, 50)), max_size=40))
def test_a_bucket_never_gives_more_than_it_holds(takes: list[tuple[int, float]]) -> None:
    """Over any time, no more is taken than the capacity and what ran in since."""
    bucket, now, taken = Bucket(100, 60.0, 0.0), 0.0, 0
    for amount, pause in takes:
        now += pause
        wait_s = bucket.wait_s(amount, now)
        assert (wait_s == math.inf) == (amount > 100)
        if wait_s == 0:
            bucket.take(amount)
            taken += amount
    assert taken <= 100 + now * 100 / 60 + 1e-6


@given(
    st.lists(st.tuples(st.sampled_from("ask leave".split()), st.integers(0, 9), st.sampled_from("abc")), max_size=60)
)
def test_limits_hold_whatever_happens(steps: list[tuple[str, int, str]]) -> None:
    asked: set[str] = set()
    started: list[str] = []
    gate = Admission(LimitsConfig(max_running=3, max_queue=2), started.append, lambda job, why: asked.discard(job))
    for now, (what, number, key) in enumerate(steps):
        job = f"{key}{number}"
        if what == "leave":
            gate.leave(job, 1, float(now))
            asked.discard(job)
        elif job not in asked:
            try:
                gate.ask(job, key, Quota(concurrency=2), 5, float(now))
                asked.add(job)
            except RateLimited:
                pass
        assert len(gate.running) <= 3 and len(gate.waiting) <= 2
        assert gate.running.keys() | gate.waiting.keys() == asked
        assert all(sum(e.key == k for e in gate.running.values()) <= 2 for k in "abc")
        assert set(gate.running) <= set(started)


@pytest.mark.parametrize(
    "bad", [{"max_running": 0}, {"max_queue": -1}, {"patience_s": 0.0}, {"read_timeout_s": float("nan")}]
)
def test_impossible_limits_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(BadRequest, match=next(iter(bad))):
        LimitsConfig(**bad)  # type: ignore[arg-type]


def test_impossible_quotas_are_refused() -> None:
    with pytest.raises(BadRequest, match="concurrency is 0"):
        Quota(concurrency=0)


def test_a_key_without_limits_of_its_own_has_the_gateways() -> None:
    asks, started = admission(concurrency=1, tokens_per_minute=100)
    asks.ask("a", "anna", Quota(tokens_per_minute=1000), 500, 0.0)
    asks.ask("b", "anna", Quota(tokens_per_minute=1000), 500, 0.0)
    asks.ask("c", "ben", NO_QUOTA, 100, 0.0)
    assert started == ["a", "c"]
    with pytest.raises(RateLimited, match="tokens_per_minute of this key"):
        asks.ask("d", "ben", NO_QUOTA, 1, 0.0)
    with pytest.raises(
        RateLimited, match="tokens_per_minute of callers without a key is 100, and this request may use"
    ):
        asks.ask("e", None, NO_QUOTA, 101, 0.0)


@pytest.mark.parametrize(
    ("limits", "quota", "expected"),
    [
        ({}, NO_QUOTA, None),
        ({}, Quota(concurrency=1, requests_per_minute=1), None),
        ({}, Quota(tokens_per_day=1 << 20), CHARGED_TOKENS),
        ({}, Quota(tokens_per_day=1 << 20, tokens_per_minute=400), 100),
        ({}, Quota(tokens_per_minute=1), 1),
        ({"tokens_per_minute": 400}, NO_QUOTA, 100),
        ({"default_max_tokens": 7, "tokens_per_minute": 4}, NO_QUOTA, 7),
    ],
)
def test_a_request_without_a_limit_is_charged_little(
    limits: dict[str, int], quota: Quota, expected: int | None
) -> None:
    """All that the context leaves would use up a key's tokens before it has begun."""
    assert default_tokens(LimitsConfig(**limits), quota) == expected
