"""Parametrisations of which a part waits for the night: each kind of case once in `make test`, the others in `make nightly`."""

from collections.abc import Iterable
from typing import Any

import pytest


def daily(cases: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Values for `parametrize`: `cases` by `make test`, `others` nightly. A tuple has a value for each of several arguments."""
    late = (one if isinstance(one, tuple) else (one,) for one in others)
    return [*cases, *(pytest.param(*values, marks=pytest.mark.nightly) for values in late)]
