"""bench.colony: what a process says is read while it writes."""

import asyncio
from pathlib import Path

import pytest

from bench.colony import Resident


def test_a_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    """The first part of a long line may look like a whole one, and may end within a letter."""
    resident = Resident("desk", tmp_path)
    line = '{"event": "came", "text": {"é": 1}}\n'.encode()
    for length in range(len(line)):
        resident.output.write_bytes(b'warning\n{"event": "api"}\n' + line[:length])
        assert resident.events() == [{"event": "api"}]
    resident.output.write_bytes(line)
    assert [event["event"] for event in resident.events()] == ["came"]


def test_what_a_process_says_last_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It speaks and ends while it is looked at."""
    resident = Resident("desk", tmp_path)
    resident.output.write_bytes(b"")

    def is_alive(self: Resident) -> bool:
        self.output.write_bytes(b'{"event": "left"}\n')
        return False

    monkeypatch.setattr(Resident, "is_alive", property(is_alive))
    assert asyncio.run(resident.said("left")) == {"event": "left"}
