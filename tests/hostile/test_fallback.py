"""A local fallback that does not work ends the request within its deadline, with its reason (audit.md, section 3.0)."""

import asyncio

import pytest

from manyhands.errors import PipelineAborted, ShardUnavailable
from manyhands.origin.session import HopLost
from tests.origin.test_repair import FakeSession, Patient, play
from tests.route.test_search import offer

LOAD_S, PATIENCE_S = 120.0, 10.0
HOME = offer("home", 0, 12)


def refuse(session: FakeSession) -> None:
    """As the reshape of a session whose fallback refuses its Open."""
    session.lose(0, "cannot load: tensor lm_head.weight is damaged")
    raise HopLost("hop 0 (home) cannot load: tensor lm_head.weight is damaged")


def test_a_fallback_whose_open_always_fails_has_one_deadline() -> None:
    """Seen: 14,359 attempts in an hour. Each may read a whole model, so they come at growing intervals."""

    async def main() -> None:
        patient = Patient(last_resort=HOME)
        patient.session.outcomes = [refuse] * 20_000
        with pytest.raises(ShardUnavailable, match=r"fallback did not open within 120 s: .*lm_head\.weight is damaged"):
            await patient.lose(1)
        assert 2 <= len(patient.session.shapes) <= 12
        assert patient.events[-1] == "pipeline_aborted"

    assert PATIENCE_S < play(main) <= PATIENCE_S + LOAD_S + 1


def test_a_fallback_that_never_answers_has_one_deadline() -> None:
    async def main() -> None:
        patient = Patient(last_resort=HOME)

        async def hang(*args: object) -> None:
            await asyncio.Event().wait()

        setattr(patient.session, "reshape", hang)  # noqa: B010
        with pytest.raises(ShardUnavailable, match="fallback did not open within 120 s"):
            await patient.lose(1)

    assert play(main) <= PATIENCE_S + LOAD_S + 1


def test_a_fallback_that_cannot_be_reached_has_one_deadline() -> None:
    async def main() -> None:
        patient = Patient(last_resort=HOME)
        patient.world.unreachable = {"home"}
        with pytest.raises(ShardUnavailable, match="fallback did not open within 120 s"):
            await patient.lose(1)

    assert play(main) <= PATIENCE_S + LOAD_S + 1


def test_a_fallback_that_opens_and_fails_at_every_step_is_given_up() -> None:
    """Each repair succeeds, none brings a token: the count bounds them, not the deadline of one."""

    async def main() -> None:
        patient = Patient(last_resort=HOME, max_repairs=2)
        with pytest.raises(PipelineAborted, match="5 repairs without progress"):
            for _ in range(100):
                await patient.lose(0)
        assert len(patient.session.shapes) == 6

    play(main)


def test_progress_gives_a_fallback_its_chances_back() -> None:
    async def main() -> None:
        patient = Patient(last_resort=HOME, max_repairs=1)
        for committed in range(5, 50):
            await patient.lose(0, committed=committed)

    play(main)
