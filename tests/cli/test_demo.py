"""`manyhands demo`: which model it takes, and a whole run each night."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from manyhands.cli import app, demo
from manyhands.errors import BadRequest, ModelError
from manyhands.weights import fetch


def test_without_a_network_the_bundled_model_tells_a_story(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(name: str, *_: Any) -> Path:
        raise ModelError(f"{name} came from neither source")

    monkeypatch.setattr(fetch, "resolve_model", unreachable)
    assert demo._fetched("") == "tales"
    assert "smollm2 cannot be fetched, so tales writes a story instead" in capsys.readouterr().out
    with pytest.raises(ModelError, match="neither source"):
        demo._fetched("smollm2")


def test_wrong_options_are_refused_before_anything_is_fetched(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_fetched", lambda model: pytest.fail("fetched"))
    with pytest.raises(BadRequest, match="max_tokens"):
        CliRunner().invoke(app, ["demo", "-n", "0"], catch_exceptions=False)


@pytest.mark.nightly
def test_the_text_is_that_of_one_node_although_a_process_is_killed(home: Path) -> None:
    found = CliRunner().invoke(app, ["demo", "--model", "tales", "--nodes", "2", "-n", "40"], catch_exceptions=False)
    assert found.exit_code == 0
    assert "node-1 is killed" in found.output and "spare-2 has taken over" in found.output
    assert "the two texts are identical" in found.output
