"""manyhands.cli.progress: one line, also where the terminal is narrow; none where it could not be taken away again."""

import io
import time

import pytest

from manyhands.cli.progress import TICK_S, Phase, doing, no_line
from tests.waiting import GUARD_S


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_narrow_terminal_keeps_the_name_and_drops_the_bar() -> None:
    phase = Phase("loading SmolLM2-135M-Instruct, layers 0-29", 0.0, 98_000_000, 49_000_000)
    wide, narrow = phase.line(4.0, 120), phase.line(4.0, 46)
    assert "━─" in wide and wide.endswith("49 MB of 98 MB  12 MB/s")
    assert len(narrow) < 46 and "loading SmolLM2-135M-Instruct" in narrow and narrow.endswith("50 %")
    assert Phase("x", 0.0, 0, 0).line(0.5, 40).endswith("0 B of 0 B")


def test_a_dumb_terminal_gets_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    with doing("reading tales", out):
        assert "reading tales" in out.getvalue()
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    with doing("reading tales", out):
        pass
    assert out.getvalue() == ""


def test_nothing_is_drawn_over_what_is_printed() -> None:
    """Two lines that were printed at once were flushed one by one, and the line of progress came over the second."""
    out = Terminal()
    with doing("reading tales", out):
        with no_line():
            before = out.getvalue()
            time.sleep(3 * TICK_S)
            assert out.getvalue() == before
        deadline = time.monotonic() + GUARD_S
        while out.getvalue() == before:  # it goes on afterwards
            assert time.monotonic() < deadline
            time.sleep(TICK_S)
