"""For tests of what is made of the golden digests: one or two cases of each group stand for all, which take seconds a back end.

That every back end reproduces all of them is tests/engine/test_golden.py's.
"""

from functools import cache

import pytest

from manyhands.engine import golden

FEW = {"norms", "functions", "small experts", "cache codes edges"}


def few_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have back ends prove FEW for the rest of the test, in caches of its own."""
    groups = {group: {name: cases[name] for name in FEW & cases.keys()} for group, cases in golden.GROUPS.items()}
    assert all(groups.values())
    monkeypatch.setattr(golden, "GROUPS", groups)
    for name in ("_unlike", "_chosen"):
        monkeypatch.setattr(golden, name, cache(getattr(golden, name).__wrapped__))


def forget() -> None:
    """As in a process that has just started."""
    golden._unlike.cache_clear()
    golden._chosen.cache_clear()
