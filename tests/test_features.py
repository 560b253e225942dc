"""docs/features.md against the code: what it names exists, each id stands once, what does not work says what is missing."""

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from manyhands.cli import app
from manyhands.config_file import SECTIONS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "features.md"
STATES = {"works", "partial", "absent", "declined"}
COMMAND: Any = typer.main.get_command(app)


class Row(NamedTuple):
    """One line of a table."""

    id: str
    what: str
    state: str
    shown: str
    missing: str

    @property
    def proofs(self) -> list[str]:
        return re.findall(r"`([^`]+)`", self.shown)


def rows(text: str) -> Iterator[Row]:
    for line in text.splitlines():
        if re.match(r"\| [A-Z]+[0-9]?-?[0-9]+ ", line):
            yield Row(*(cell.strip() for cell in line.strip("|").split("|")))


ROWS = list(rows(PAGE.read_text("utf8")))


def check_command(line: str) -> None:
    """Raise unless each command and each option of `line` exists."""
    words = shlex.split(line)[1:]
    command = COMMAND
    while words and hasattr(command, "commands") and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    assert command is not COMMAND, f"no such command: {line}"
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [word for word in words if re.match(r"-{1,2}[a-z]", word) and word not in known]
    assert not unknown, f"{line}: no option {unknown[0]}"


def check_proof(proof: str) -> None:
    """Raise unless what `proof` names exists: a test, a command, a key, a file."""
    if proof.startswith("manyhands "):
        return check_command(proof)
    if key := re.fullmatch(r"\[(\w+)\] (\w+)", proof):
        names = {field.name for field in dataclasses.fields(SECTIONS[key[1]])}
        assert key[2] in names, f"no key {proof}"
        return None
    path, _, test = proof.partition("::")
    assert (ROOT / path).is_file(), f"no file {path}"
    if test:
        found = re.search(rf"^(async )?def {test}\(", (ROOT / path).read_text("utf8"), re.MULTILINE)
        assert found, f"no test {test} in {path}"
    return None


def test_every_id_stands_once_and_in_order() -> None:
    ids = [row.id for row in ROWS]
    assert len(set(ids)) == len(ids)
    assert [one for one in ids if one.startswith("F")] == [f"F{number:02}" for number in range(1, 71)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_what_a_row_names_exists(row: Row) -> None:
    assert row.state in STATES
    assert row.missing or row.state in ("works", "absent"), "say what is missing, or why it is declined"
    assert row.proofs or row.state in ("absent", "declined"), "name what shows it"
    for proof in row.proofs:
        check_proof(proof)


@pytest.mark.parametrize(
    "proof",
    [
        "manyhands nonsense",
        "manyhands up tales --nonsense",
        "[request] nonsense",
        "tests/nonsense.py",
        "tests/test_features.py::test_nonsense",
    ],
)
def test_what_does_not_exist_is_noticed(proof: str) -> None:
    with pytest.raises(AssertionError):
        check_proof(proof)


def test_what_a_row_refers_to_is_open_too() -> None:
    """ "as F44" stands only where F44 is not finished."""
    state = {row.id: row.state for row in ROWS}
    for row in ROWS:
        for other in re.findall(r"[aA]s ([A-Z]+[0-9-]+)", row.missing):
            assert state[other] != "works" or row.state in ("works", "declined"), (
                f"{row.id} waits for {other}, which works"
            )
