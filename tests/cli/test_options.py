"""Options in groups: a dataclass among a command's parameters stands for its fields."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from manyhands.cli.gateway import ApiOptions
from manyhands.cli.options import Computing, Sampling, grouped
from manyhands.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Paint:
    color: Annotated[str, typer.Option("--color", help="Which.")] = "red"
    coats: Annotated[int, typer.Option("--coats", min=1)] = 1


def test_fields_become_options_with_the_defaults_of_the_instance() -> None:
    said: list[object] = []

    @grouped
    def wall(
        name: Annotated[str, typer.Argument()],
        paint: Paint = Paint(coats=2),
        dry: Annotated[bool, typer.Option("--dry")] = False,
    ) -> None:
        """Paint a wall."""
        said.append((name, paint, dry))

    app = typer.Typer()
    app.command()(wall)
    assert CliRunner().invoke(app, ["north"]).exit_code == 0
    assert CliRunner().invoke(app, ["south", "--color", "blue", "--dry"]).exit_code == 0
    assert said == [("north", Paint("red", 2), False), ("south", Paint("blue", 2), True)]
    assert CliRunner().invoke(app, ["west", "--coats", "0"]).exit_code == 2
    told = CliRunner().invoke(app, ["--help"]).stdout
    assert "Paint a wall." in told and "--coats" in told and "--paint" not in told


def test_groups_check_what_they_are_given() -> None:
    assert Sampling(max_tokens=3, stop=["."]).params.stop == (".",)
    for bad in (Computing(dtype="fp8"), Computing(path="line"), Computing(ends="middle"), Computing(draft="maybe")):
        with pytest.raises(BadRequest):
            _ = bad.precision, bad.path_kind, bad.ends_at, bad.drafts
    with pytest.raises(BadRequest, match=r"--log-json is for the HTTP API: open it with --api HOST:PORT"):
        ApiOptions(log_json=True).plan("")
