"""What people read of an answer's exactness: its class, and what an audit found (docs/exactness.md, docs/audits.md)."""

import sys
from collections.abc import Mapping
from typing import Any

import typer

from manyhands.cli.lines import fitted
from manyhands.plain import one_line


def explained(exactness: str, audit: Mapping[str, Any] | None = None) -> str:
    """An exactness class in a few words; "" if `audit` (its JSON form) found that something is wrong: no class holds then."""
    if is_doubtful(audit):
        return ""
    same = {"E0": "the same bits on any nodes", "E2": "equal up to rounding: the nodes compute differently"}
    return f"exactness {exactness}" + (f" ({same[exactness]})" if exactness in same else "")


def is_doubtful(audit: Mapping[str, Any] | None) -> bool:
    """Whether it found that something is wrong."""
    return audit is not None and audit["outcome"] in ("failed", "disputed")


def audit_line(audit: Mapping[str, Any]) -> str:
    """What an audit found, in a line."""
    layers = f" of layers {', '.join(audit['layers'])}" if audit["layers"] else ""
    doubt = "; this text may be wrong" if is_doubtful(audit) else ""
    return one_line(f"audit{layers} {audit['outcome']}: {audit['detail']}", 600) + doubt


def print_audit(audit: Mapping[str, Any] | None) -> None:
    """To stderr, in red if something is wrong; nothing if none was made."""
    if audit is not None:
        is_well = not is_doubtful(audit)
        typer.secho(fitted(audit_line(audit), sys.stderr), dim=is_well, fg=None if is_well else "red", err=True)
