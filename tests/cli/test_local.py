"""manyhands.cli.local: what the terminal shows while the node processes start and load."""

import io

import pytest

from manyhands.cli.local import NodesToCome
from manyhands.cli.progress import ERASE, Screen


def test_what_all_nodes_have_loaded_is_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    out = io.StringIO()
    waiting = NodesToCome(Screen(out, True, clock=lambda: 0.0), "tales", 2)
    assert out.getvalue().endswith("starting 2 node processes of tales")
    waiting.loads("node-0", 0, 50_000_000)
    waiting.loads("node-1", 25_000_000, 50_000_000)
    waiting.serves("node-0")
    waiting.loads("node-1", 50_000_000, 50_000_000)
    waiting.loads("node-0", 50_000_000, 50_000_000)
    waiting._screen.draw()
    line = out.getvalue().rpartition(ERASE)[2]
    assert "starting 2 node processes of tales, 1 to come" in line and "100 MB of 100 MB" in line
    waiting.serves("node-1")
    assert out.getvalue().rpartition(ERASE)[2].endswith("2 node processes serve tales")
    assert "0.0 MB of 100 MB" not in out.getvalue()  # the bar goes on where it was when there is more to load
