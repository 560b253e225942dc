"""`manyhands demo`: which model it takes, and a whole run each night."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from manyhands.cli import app, demo
from manyhands.cli.local import InjectedFault
from manyhands.core import SamplingParams
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


class Scene:
    """An origin whose second word comes after a death, and its third from a replacement."""

    def __init__(self) -> None:
        hop = SimpleNamespace(name="node-1", info=SimpleNamespace(span="6-11"))
        speed = SimpleNamespace(decode_tokens_per_s=lambda count: 1.0)
        self.told = SimpleNamespace(token_ids=[], repairs=[], route=[hop], timings=speed)

    def request(self, *_: Any) -> None:
        pass

    def answer(self, request: None) -> SimpleNamespace:
        return self.told

    async def stream(self, answer: SimpleNamespace) -> AsyncIterator[SimpleNamespace]:
        for number, text in enumerate((" said", " his", " sons")):
            answer.token_ids.append(number)
            answer.repairs += [SimpleNamespace(replacement=["spare-2"])] * (number == 2)
            yield SimpleNamespace(text=text)

    def check(self) -> list[str]:
        """As a FaultInjector: whom it has just killed."""
        return ["node-1"] * (len(self.told.token_ids) == 1)


def test_what_is_told_of_nodes_has_lines_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A word that was under way at the death stood before what was told of the repair."""
    scene: Any = Scene()
    monkeypatch.setattr(demo, "FaultInjector", lambda *_: scene)
    fault = InjectedFault("kill", 0, 1, "")
    asyncio.run(demo._tell(demo.Script("tales", "He", SamplingParams()), scene, [], fault))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == ["He said", "", "── node-1 is killed (kill -9): layers 6-11 are gone", " his", ""]
    assert lines[5].startswith("── spare-2 has taken over:") and lines[6:8] == ["", " sons"]


@pytest.mark.nightly
def test_the_text_is_that_of_one_node_although_a_process_is_killed(home: Path) -> None:
    found = CliRunner().invoke(app, ["demo", "--model", "tales", "--nodes", "2", "-n", "40"], catch_exceptions=False)
    assert found.exit_code == 0
    assert "node-1 is killed" in found.output and "spare-2 has taken over" in found.output
    assert "the two texts are identical" in found.output
