"""manyhands.cli.serve: how far a load is, for what reads the events (local.py)."""

import json

import pytest

from manyhands.cli.serve import EVENTS_S, LoadEvents


def test_loads_are_told_now_and_then_and_not_after_it_serves(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    events = LoadEvents(lambda: now[0])
    events.start("loading tales, layers 0-3", 100)
    for _ in range(50):
        events.advance(1)  # within one EVENTS_S: told together
    now[0] += EVENTS_S
    events.advance(50)
    events.done()
    events.close()
    events.start("loading tales, layers 0-3", 100)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["done"] for event in told] == [0, 100, 100]
    assert {(event["event"], event["text"], event["total"]) for event in told} == {
        ("loading", "loading tales, layers 0-3", 100)
    }
