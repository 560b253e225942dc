"""Half a second: every command says what it does, on a terminal, before it loads or asks anything large."""

from pathlib import Path

import pytest

from bench.first_word import COMMANDS, REFUSALS, first_word
from manyhands.cli import commands

MOST_CPU_S = (
    0.9  # 0.5 on a machine with nothing else to do (bench.first_word); a busy one takes up to 1.7 times as much
)


def test_every_command_is_measured() -> None:
    measured = {command.split()[0] for command in COMMANDS}
    assert set(commands.COMMANDS) == {name for name in measured if not name.startswith("-")}


@pytest.mark.nightly
@pytest.mark.parametrize("command", [*COMMANDS, *REFUSALS])
def test_the_first_word_comes_at_once(command: str, tmp_path: Path) -> None:
    word = min((first_word(command, tmp_path) for _ in range(2)), key=lambda found: found.cpu_s)
    assert word.cpu_s <= MOST_CPU_S, word
    assert "Traceback" not in word.text
