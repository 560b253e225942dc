"""manyhands infer: by a gateway, which needs neither a ticket nor the model's name; and as an origin of a ticket."""

import asyncio
import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.colony import Colony, colony
from manyhands.cli import app
from manyhands.cli.chat_events import BrokenStream
from manyhands.cli.client import GatewayError
from manyhands.cli.infer_gateway import Telling, figures, infer_by_gateway
from manyhands.cli.options import Computing
from manyhands.cli.swarm_origin import _unknown
from manyhands.core import SamplingParams
from manyhands.errors import BadRequest, NotFound, ShardUnavailable
from manyhands.swarm.ticket import Ticket
from tests.api.served import make_model, served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("infer") / "tiny")


def test_a_gateway_says_what_an_own_origin_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.7, top_p=0.9, seed=7)

    async def main() -> str:
        async with served(folder) as scene:
            api = f"http://{scene.addr}"
            await infer_by_gateway(api, "", "", "Once", params, "ring", "", as_json=False)
            await infer_by_gateway(api, "", "tiny", "Once", params, "star", "suffix", as_json=True)
            with pytest.raises(GatewayError, match="other"):
                await infer_by_gateway(api, "", "other", "Once", params, "ring", "", as_json=False)
            return (await scene.swarm.origin.complete(scene.swarm.origin.request("Once", params))).text

    text = asyncio.run(main())
    told = capsys.readouterr()
    assert told.out.startswith(f"{text}\n")
    assert json.loads(told.out[len(text) + 1 :])["result"] == text
    assert "hop 0  layers 0 " in told.err and "6 tokens" in told.err and "finish: length" in told.err


@pytest.mark.parametrize("event", [{"worker_trace": []}, {"assignments": 3}, {"remaining": 1, "dropped_worker": "x"}])
def test_what_is_no_gateway_is_an_error(event: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def events(*args: Any, **named: Any) -> Any:
        yield "", event

    monkeypatch.setattr("manyhands.cli.infer_gateway.events_of", events)
    params = SamplingParams(max_tokens=1)
    with pytest.raises(BrokenStream, match="sent what is no event"):
        asyncio.run(infer_by_gateway("http://h:1", "", "", "x", params, "ring", "", as_json=False))


def test_repairs_are_told_and_an_error_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    telling = Telling("Once")
    remaining = [
        {"layers": "0-3", "name": "desk", "address": "h:1"},
        {"layers": "4-7", "name": "tv\x1b", "address": "h:2"},
    ]
    repair = {
        "token_index": 3,
        "dropped_worker": "nas\x1b",
        "repair_ms": 12.0,
        "kind": "reshard",
        "remaining": remaining,
    }
    assert not telling.take(repair)
    said = capsys.readouterr().err
    assert "[repair at token 3: nas? was lost, 12 ms]" in said
    assert [line.split()[1:5] for line in said.splitlines()[-2:]] == [
        ["0", "layers", "0-3", "desk"],
        ["1", "layers", "4-7", "tv?"],
    ]
    with pytest.raises(GatewayError, match="no node holds layers 3-5"):
        telling.take({"detail": "no node holds layers 3-5", "code": "shard_unavailable"})
    done = {"timings": {}, "tokens_generated": 0, "reshard_events": [{}], "exactness": "E0", "audit": None}
    done["finish_reason"] = "stop"
    assert figures(done) == "0 tokens · 1 repair · exactness E0 (the same bits on any nodes) · finish: stop"


@pytest.mark.parametrize("outcome", ["passed", "failed"])
def test_what_an_audit_found_is_told_and_no_class_beside_a_failure(
    outcome: str, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = {"outcome": outcome, "layers": ["4-7"], "detail": "n1 did it"}
    done = {"timings": {}, "tokens_generated": 0, "reshard_events": [], "exactness": "E0", "finish_reason": "stop"}
    assert Telling("Once").take({**done, "audit": audit, "worker_trace": []})
    said = capsys.readouterr().err
    assert f"audit of layers 4-7 {outcome}: n1 did it" in said
    assert ("exactness E0" in said) == (outcome == "passed") != ("this text may be wrong" in said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tales", "-p", "x", "--api", "http://127.0.0.1:9", "--dtype", "fp32"], "--dtype is for an origin"),
        (["-p", "x", "--api", "http://127.0.0.1:9", "--cache-dtype", "w8"], "--cache-dtype is for an origin"),
        (["-p", "x", "--api", "127.0.0.1:9"], "--api is '127.0.0.1:9'"),
        (["-p", ""], "the prompt is empty"),
        (["-p", "x", "--draft", "model:x"], "a gateway takes auto, off, suffix or model"),
        (["-p", "x", "--draft", "maybe"], "draft is 'maybe'"),
    ],
)
def test_wishes_that_cannot_be(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    with pytest.raises(BadRequest, match=said):
        CliRunner().invoke(app, ["infer", *arguments], catch_exceptions=False)


@pytest.mark.nightly
def test_every_machine_asks_by_the_name_that_status_shows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that lies on one machine alone: asked by its ticket with and without its name, and on members."""

    async def scene(town: Colony) -> None:
        first, second = town.resident("first"), town.resident("second")
        await town.found(first, "--layers", "0-0", model=str(folder))
        await town.join(second, "--layers", "1-1")
        await second.said("api")
        elsewhere = first.home.with_name("elsewhere")
        ways = [
            (elsewhere, ["--ticket", town.ticket]),
            (elsewhere, [folder.name, "--ticket", town.ticket]),
            (second.home, []),
            (first.home, [folder.name]),
        ]
        texts = [await asyncio.to_thread(asked, home, words) for home, words in ways]
        assert texts[0] and texts == [texts[0]] * 4

    def asked(home: Path, words: list[str]) -> str:
        monkeypatch.setenv("MANYHANDS_HOME", str(home))
        found = CliRunner().invoke(app, ["infer", "-p", "Once", "-n", "8", *words], catch_exceptions=False)
        assert found.exit_code == 0
        return found.stdout

    async def main() -> None:
        async with colony(forked=True) as town:
            with contextlib.suppress(asyncio.CancelledError):
                await scene(town)

    asyncio.run(main())


def test_nodes_that_were_started_by_hand_are_said_to_hold_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no records: it was "serves no model yet: run `manyhands up MODEL`", although they answer for one."""
    offers = [SimpleNamespace(info=SimpleNamespace(model_name="tales"))] * 2
    requests = SimpleNamespace(known_offers=lambda addrs, excluded: offers)
    node = SimpleNamespace(requests=requests)
    member: Any = SimpleNamespace(records=list, ticket=Ticket.new("home"), node=node)
    with pytest.raises(BadRequest, match="hold tales and have no directory: name MODEL"):
        asyncio.run(_unknown(member, "", Computing()))
    offers.clear()
    with pytest.raises(ShardUnavailable, match="serves no model yet"):
        asyncio.run(_unknown(member, "", Computing()))
    monkeypatch.setattr("manyhands.cli.swarm_origin.kinds_of", lambda records: [SimpleNamespace(name="tales")])
    with pytest.raises(NotFound, match="swarm home serves no 'smollm2'; it has tales"):
        asyncio.run(_unknown(member, "smollm2", Computing()))
