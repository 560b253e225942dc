"""`manyhands pull`, `list`, `show`, `rm` as a person runs them, and the line that says what is being done."""

import io
import json
import logging
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.cli import app, shelf
from manyhands.cli.lines import columns
from manyhands.cli.process import log_plainly
from manyhands.cli.progress import ERASE, Phase, Screen, clear_line, doing
from manyhands.plain import size_of
from tests.cli.test_lines import Terminal
from tests.gguf_files import tiny_gguf
from tests.gguf_parts import split_gguf

VIEW = {
    "swarm": "home",
    "nodes": [
        {"name": "desk", "spans": [{"model": "tiny", "layers": "0-2"}]},
        {"name": "laptop", "spans": [{"model": "tiny", "layers": "3-5"}, {"model": "tales", "layers": "0-11"}]},
    ],
}


@pytest.fixture(autouse=True)
def swarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "_swarm", lambda: VIEW)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_file_is_listed_shown_and_forgotten(tmp_path: Path) -> None:
    file, _ = tiny_gguf("llama", tmp_path / "tiny.gguf")
    assert "tiny is here: manyhands up" in run("pull", str(file))
    listed = run("list")
    assert str(file) in listed and "all 6" in listed and "comes with manyhands" in listed
    assert "in swarm home:" in listed and "tiny  desk 0-2 · laptop 3-5" in listed
    assert "manyhands pull smollm2   98 MB" in listed
    told = json.loads(run("list", "--json"))
    assert told["swarm"]["tiny"] == {"desk": ["0-2"], "laptop": ["3-5"]}
    assert [each["kind"] for each in told["models"]] == ["bundled", "file"]
    shown = run("show", str(file))
    assert "llama, 6 layers" in shown and "held by" in shown and str(file) in shown
    assert "its file is yours" in run("rm", str(file))
    assert file.exists() and str(file) not in run("list")


def test_a_swarm_without_a_name_is_said_to_be_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`local --api` and `serve --api` have none: it was "in swarm :"."""
    monkeypatch.setattr(shelf, "_swarm", lambda: {**VIEW, "swarm": ""})
    assert "\nserved here:\n" in run("list")


def test_a_model_in_parts_is_one_model(tmp_path: Path) -> None:
    """Pulled by one part, shown by another, and counted with all of them; its folder names it too."""
    file, _ = tiny_gguf("llama", tmp_path / "tiny.gguf")
    parts = split_gguf(file, tmp_path / "parts", (0, 20))
    assert "tiny is here: manyhands up" in run("pull", str(parts[1]))
    (told,) = [each for each in json.loads(run("list", "--json"))["models"] if each["kind"] == "file"]
    assert (told["name"], told["where"], told["layers"]) == ("tiny", str(parts[0]), ["0-5"])
    assert told["size"] == sum(part.stat().st_size for part in parts)
    shown = json.loads(run("show", str(parts[0].parent), "--json"))
    assert shown["model"] == "tiny" and len(shown["here"]) == 1
    assert shown["swarm"] == {"tiny": {"desk": ["0-2"], "laptop": ["3-5"]}}
    whole = json.loads(run("show", str(file), "--json"))
    assert (shown["model_id"], shown["bytes"]) == (whole["model_id"], whole["bytes"])
    run("rm", str(parts[0]))
    assert all(part.exists() for part in parts)
    assert str(parts[0]) not in run("list")


def test_columns_are_aligned() -> None:
    assert columns([("A", "B"), ("long", "c")]) == ["A     B", "long  c"]


def test_a_phase_is_one_line_of_the_terminal() -> None:
    assert Phase("waiting for nas", 0.0).line(1.0, 80).endswith("waiting for nas")
    assert Phase("waiting for nas", 0.0).line(3.0, 80).endswith("waiting for nas  3 s")
    fetching = Phase("fetching BIG", 0.0, 100_000_000, 25_000_000).line(2.0, 120)
    assert "━" * 6 + "─" * 18 in fetching and fetching.endswith("25 MB of 100 MB  12 MB/s")
    for width in (10, 20, 40):
        assert len(Phase("x" * 200, 0.0, 10, 5).line(9.0, width)) < width
    assert size_of(1_500_000_000) == "1.5 GB" and size_of(2_500_000) == "2.5 MB"


def test_the_line_gives_way_to_what_is_printed() -> None:
    out = io.StringIO()
    screen = Screen(out, is_shown=True)
    screen.say("starting tales\x1b[31m")
    assert "starting tales" in out.getvalue() and "\x1b[31m" not in out.getvalue()
    screen.clear()
    assert out.getvalue().endswith(ERASE)
    screen.start("reading tales", 10)
    screen.advance(10)
    screen.done()
    screen.end()
    assert out.getvalue().endswith(ERASE)
    screen.start("moving layers", 10)
    screen.done()
    assert out.getvalue().endswith(ERASE), "a node that serves draws no more"


def test_the_line_gives_way_to_what_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(logging, "lastResort", None)
    log_plainly()
    log = logging.getLogger("a logger without handlers")
    log.propagate = False
    with doing("reading tales", out) as screen, screen.away():
        log.warning("hashes are not remembered")  # as a finalizer may, in the thread that prints
        screen.draw()
        log.warning("the disk is full")
    told = out.getvalue()
    assert f"{ERASE}hashes are not remembered\n" in told and f"{ERASE}the disk is full\n" in told


def test_nothing_is_drawn_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with doing("starting", out) as screen:
        with doing("then this", out) as inner:
            assert inner is screen
        screen.start("reading", 10)
        clear_line()
    assert out.getvalue() == ""
