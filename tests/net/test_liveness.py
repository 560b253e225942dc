"""What silence means, as a table over time: busy here, busy there, frozen, cut, cut one way, a slow line, a lid closed."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from manyhands.net.liveness import (
    ANSWERS,
    FOUND_S,
    HEARD_BEATS,
    HEARTBEAT_S,
    PATIENCE_S,
    PROBE_S,
    SUSPECT_S,
    TICK_S,
    LinkEvidence,
    Pulse,
    Verdict,
    patience_s,
)
from manyhands.stalls import Stalls


@dataclass
class Peer:
    """What one link sees: answers to pings, bytes, acknowledgements. A scenario changes it as time goes on."""

    answers_after_s: float | None = 0.01  # None: never
    speaks: bool = True  # the peer's own pings arrive
    has_unacked: bool = False
    moves: bool = False  # its kernel acknowledges some bytes at every look
    gap_s: float = TICK_S  # between two looks: this process may be late
    received: int = 0
    acked: int = 0


def found_after_s(
    scenario: Callable[[float, Peer], None], until_s: float = 120.0, late_s: float = 0.0
) -> tuple[Verdict, float]:
    """Play `scenario` from time 10 on; returns the first verdict that is not "alive" and when (since then), or the end."""
    peer, now, stalls = Peer(), 0.0, Stalls(0.0, period_s=TICK_S)
    pulse, asked_at, beat_at = Pulse(0.0), None, -1.0
    while now < 10 + until_s:
        if now >= 10:
            scenario(now - 10, peer)
        now += peer.gap_s
        stalls.tick(now)
        awake_s = stalls.awake_s(now)
        peer.received += peer.speaks
        peer.acked += peer.moves
        if asked_at is not None and peer.answers_after_s is not None and now - asked_at >= peer.answers_after_s:
            peer.received += 1
            pulse.answered(awake_s)
            asked_at = None
        pulse.observe(LinkEvidence(peer.received, True, peer.acked, peer.has_unacked), awake_s)
        verdict = pulse.judge(awake_s, patience_s(max(late_s, stalls.worst_s(now), pulse.late_s)))
        if verdict != "alive":
            return verdict, now - 10
        if asked_at is None and now - beat_at >= pulse.beat_s(HEARTBEAT_S):
            pulse.asked(awake_s)
            asked_at = beat_at = now
    return "alive", until_s


def frozen(at: float, peer: Peer) -> None:
    """SIGSTOP: its kernel acknowledges, its loop says nothing."""
    peer.answers_after_s, peer.speaks = None, False


def cut(at: float, peer: Peer) -> None:
    frozen(at, peer)
    peer.has_unacked = True


def cut_towards_it(at: float, peer: Peer) -> None:
    """What it sends arrives; nothing gets there."""
    peer.answers_after_s, peer.speaks, peer.has_unacked = None, True, True


def busy_there(at: float, peer: Peer) -> None:
    """Later and later answers, up to 9 s, nothing in between."""
    peer.answers_after_s, peer.speaks = min(9.0, 0.05 + at / 4), False


def busy_here(at: float, peer: Peer) -> None:
    """This process runs for an instant every 4 s; the peer's answers lie in the socket until the look after."""
    peer.gap_s, peer.answers_after_s, peer.speaks = 4.0, 4.0, False


def slow_line(at: float, peer: Peer) -> None:
    """Pings wait behind 60 s of bulk, which gets there."""
    peer.answers_after_s, peer.has_unacked, peer.moves = 60.0, True, True


def suspended(at: float, peer: Peer) -> None:
    """The lid is closed for an hour; the answer of before comes within a second after."""
    peer.gap_s = 3600.0 if at < TICK_S else TICK_S
    peer.answers_after_s = 3601.0 if at < 3602 else 0.01
    peer.speaks = at > 3601


@pytest.mark.parametrize(
    ("scenario", "verdict", "within_s"),
    [(frozen, "frozen", FOUND_S), (cut, "cut", FOUND_S), (cut_towards_it, "cut", FOUND_S)],
)
def test_what_is_gone_is_found(scenario: Callable[[float, Peer], None], verdict: Verdict, within_s: float) -> None:
    found, after_s = found_after_s(scenario)
    assert found == verdict and SUSPECT_S - 2 * TICK_S <= after_s <= within_s


@pytest.mark.parametrize("scenario", [busy_there, busy_here, slow_line, suspended])
def test_what_is_slow_is_not_gone(scenario: Callable[[float, Peer], None]) -> None:
    until_s = 7200.0 if scenario is suspended else 120.0
    assert found_after_s(scenario, until_s) == ("alive", until_s)


def test_a_frozen_peer_is_found_on_busy_machines_too() -> None:
    found, after_s = found_after_s(frozen, late_s=5.0)
    assert found == "frozen" and after_s == pytest.approx(PATIENCE_S, abs=2 * TICK_S)


def test_a_cut_line_is_found_as_soon_on_busy_machines() -> None:
    """Kernels acknowledge however busy the processes are."""
    found, after_s = found_after_s(cut, late_s=5.0)
    assert found == "cut" and after_s <= FOUND_S


def test_patience_grows_with_lateness_up_to_ten_seconds() -> None:
    assert (
        patience_s(0.0) == SUSPECT_S
        and patience_s(0.2) == pytest.approx(5.0)
        and patience_s(60.0) == PATIENCE_S == 10.0
    )


@pytest.mark.parametrize("stops", ["speaks", "moves"])
def test_a_peer_that_is_well_is_pinged_less_often_until_it_was_silent_for_a_look(stops: str) -> None:
    """Either it says nothing more, or what is sent to it is acknowledged no more."""
    pulse, now, received, acked = Pulse(0.0), 0.0, 0, 0
    assert pulse.beat_s(HEARTBEAT_S) == HEARTBEAT_S, "nothing has come yet"
    beats = []
    for look in range(1, 13):
        now = look * TICK_S
        received += look <= 8 or stops != "speaks"
        acked += look <= 8 or stops != "moves"
        pulse.observe(LinkEvidence(received, True, acked, True), now)
        beats.append(pulse.beat_s(HEARTBEAT_S) / HEARTBEAT_S)
    assert beats == [HEARD_BEATS] * 8 + [1] * 4


@pytest.mark.parametrize("has_unacked", [False, None])
def test_where_nothing_waits_to_be_acknowledged_what_comes_decides(has_unacked: bool | None) -> None:
    pulse = Pulse(0.0)
    for look in range(1, 9):
        pulse.observe(LinkEvidence(look, True, None, has_unacked), look * TICK_S)
    assert pulse.beat_s(HEARTBEAT_S) == HEARD_BEATS * HEARTBEAT_S
    pulse.observe(LinkEvidence(8, True, None, has_unacked), 9 * TICK_S)
    assert pulse.beat_s(HEARTBEAT_S) == HEARTBEAT_S


def test_a_long_round_trip_is_not_lateness() -> None:
    pulse = Pulse(0.0)
    assert pulse.late_s == 0.0
    for took_s, late_s in ((0.6, 0.0), (0.6, 0.0), (0.9, 0.3), (0.7, 0.3)):
        pulse.asked(1.0)
        pulse.answered(1.0 + took_s)
        assert pulse.late_s == pytest.approx(late_s)
    for _ in range(ANSWERS):
        pulse.asked(1.0)
        pulse.answered(1.6)
    assert pulse.late_s == pytest.approx(0.0)


def test_beside_a_link_that_was_given_up_one_probe_is_enough() -> None:
    pulse = Pulse(0.0)
    pulse.asked(0.0)
    pulse.observe(LinkEvidence(0), 0.0)
    assert pulse.judge(PROBE_S, SUSPECT_S) == "alive"
    assert pulse.judge_suspect(PROBE_S) == "frozen"
    pulse.observe(LinkEvidence(1), PROBE_S)
    assert pulse.judge_suspect(PROBE_S) == "alive"


def test_a_node_that_reads_nothing_blames_no_peer() -> None:
    pulse = Pulse(0.0)
    pulse.asked(0.0)
    for second in range(60):
        pulse.observe(LinkEvidence(0, is_reading=False), float(second))
        assert pulse.judge(float(second), SUSPECT_S) == "alive"


def test_where_the_system_tells_nothing_of_acknowledgements_the_loop_decides() -> None:
    pulse = Pulse(0.0)
    pulse.asked(0.0)
    pulse.observe(LinkEvidence(0), 2.9)
    assert pulse.judge(2.9, SUSPECT_S) == "alive"
    assert pulse.judge(3.0, SUSPECT_S) == "frozen"


def test_after_a_move_a_link_is_cut_off_after_one_probe_that_nothing_acknowledges() -> None:
    pulse = Pulse(0.0)
    pulse.asked(0.0)
    pulse.observe(LinkEvidence(0, True, 0, has_unacked=True), 0.0)
    assert pulse.judge(PROBE_S, SUSPECT_S) == "alive"
    assert pulse.judge(PROBE_S, SUSPECT_S, is_doubted=True) == "cut"
    pulse.observe(LinkEvidence(0, True, 1, has_unacked=True), PROBE_S)
    assert pulse.judge(PROBE_S, SUSPECT_S, is_doubted=True) == "alive"
