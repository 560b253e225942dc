"""tools/nightly.py: what is stored of each step, and when all of it holds."""

import json
import sys
from datetime import date, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tools import nightly
from tools.nightly import Step, read_report, run, seed_of, steps, summary

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one"/>
<testcase classname="tests.a" name="two"><failure message="no"/></testcase>
<testcase classname="tests.b" name="three"><error message="no"/></testcase>
<testcase classname="tests.b" name="four"><skipped message="NOT RUN: no podman"/></testcase>
<testcase classname="tests.b" name="five"><skipped message="NOT RUN: no podman"/></testcase>
</testsuite></testsuites>"""


def python(code: str, **options: Any) -> Step:
    return Step([sys.executable, "-c", code], **{"limit_min": 1, **options})


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is written; steps are those of `monkeypatch`, all on one commit."""
    monkeypatch.setattr(nightly, "RESULT", tmp_path / "nightly.json")
    monkeypatch.setattr(nightly, "commit", lambda: "abc")
    monkeypatch.setattr(nightly, "machine", lambda: {})
    return tmp_path / "nightly.json"


def play(monkeypatch: pytest.MonkeyPatch, given: dict[str, Step], *words: str) -> int:
    monkeypatch.setattr(nightly, "steps", lambda minutes, seed: given)
    monkeypatch.setattr(sys, "argv", ["nightly", *words])
    return nightly.main()


def test_a_report_tells_what_failed_and_what_was_skipped_and_why(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    told = read_report(tmp_path / "report.xml")
    assert told == {
        "tests": 3,
        "failed": ["tests.a::two", "tests.b::three"],
        "skipped": {"NOT RUN: no podman": 2},
    }


def test_a_step_of_tests_writes_its_report(tmp_path: Path) -> None:
    code = f"import sys; open(sys.argv[1].partition('=')[2], 'w').write({REPORT!r}); sys.exit(1)"
    outcome = run(python(code, tests=True))
    assert not outcome["passed"] and outcome["tests"] == 3


def test_a_step_that_takes_too_long_is_ended_and_has_failed() -> None:
    outcome = run(python("import time; time.sleep(600)", limit_min=0.005))
    assert not outcome["passed"] and outcome["ended"] == "it took more than 0.005 minutes" and outcome["seconds"] < 300


def test_each_step_is_stored_when_it_is_over(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second finds what the first left."""
    code = f"import json, sys; sys.exit('first' not in json.load(open({str(stored)!r}))['steps'])"
    given = {"first": python(""), "second": python(code), "third": python("", missing="no gcc")}
    assert play(monkeypatch, given) == 0
    told = json.loads(stored.read_text())
    assert told["holds"] and told["commit"] == "abc" and list(told["steps"]) == list(given)
    skipped = {"commit": "abc", "command": "-c ", "passed": True, "seconds": 0, "skipped": {"no gcc": 1}}
    assert told["steps"]["third"] == skipped


def test_one_step_again_keeps_the_others(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"first": python("raise SystemExit(3)"), "second": python("")}
    assert play(monkeypatch, given) == 1
    assert not json.loads(stored.read_text())["holds"]
    assert play(monkeypatch, {**given, "first": python("")}, "--only", "first") == 0
    assert json.loads(stored.read_text())["holds"]
    monkeypatch.setattr(nightly, "commit", lambda: "def")
    assert play(monkeypatch, {**given, "first": python("")}, "--only", "first") == 0
    told = json.loads(stored.read_text())
    assert not told["holds"] and told["commit"] == "", "they passed on different commits"


def test_a_tree_that_differs_from_its_commit_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nightly, "machine", lambda: {})
    one = {"passed": True, "seconds": 1}
    assert summary({"a": {"commit": "abc", **one}}, ["a"])["holds"]
    assert not summary({"a": {"commit": "abc+", **one}}, ["a"])["holds"]
    assert not summary({"a": {"commit": "abc", **one}}, ["a", "b"])["holds"], "one has not run"


def test_no_day_draws_what_another_drew() -> None:
    """With the date itself as the seed, a night repeated all draws of the one before but one."""
    count = steps(60, 0)["fuzz configs"].command
    drawn = int(count[count.index("--count") + 1])
    days = sorted(seed_of(date(2026, 1, 1) + timedelta(days)) for days in range(400))
    assert min(later - earlier for earlier, later in pairwise(days)) >= drawn


def test_every_step_is_a_module_or_pytest() -> None:
    for name, step in steps(1, 2).items():
        module = step.command[step.command.index("-m") + 1]
        assert module == "pytest" or (nightly.ROOT / f"{module.replace('.', '/')}.py").is_file(), name
        assert step.limit_min > 0 and step.tests == (module == "pytest")
