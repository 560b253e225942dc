"""`up` and `join` as people start them: real processes, real TLS on loopback, homes of their own."""

import asyncio
import contextlib
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from bench.colony import Colony, Resident, colony, complete
from manyhands.checkpoint.folder import read_entries
from manyhands.checkpoint.manifest import build_manifest
from manyhands.checkpoint.partition import span_tensors
from manyhands.cli import main
from manyhands.cli.client import call
from manyhands.core import Span
from manyhands.errors import ManyhandsError
from manyhands.swarm.ticket import Ticket
from manyhands.testing.tiny import make_tiny
from tests.waiting import GUARD_S
from tests.weights.hub_server import REPO, FakeHub, serving

pytestmark = pytest.mark.slow


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(GUARD_S):
        while not await is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def takes(route: list[tuple[str, str]], api: str) -> bool:
    """Whether a request to `api` would take this route now."""
    told = (await asyncio.to_thread(call, api, "", "GET", "/api/workers"))["scheduler"]["routes"]["tales"]
    return told is not None and [(hop["name"], hop["layers"]) for hop in told] == route


async def names(resident: Resident) -> set[str]:
    return {node["name"] for node in (await resident.view())["nodes"]}


def test_up_and_two_joins_answer_and_a_killed_one_disappears() -> None:
    """No member is told layers or addresses; after kill -9 members cease to offer the dead node, and the answer is the same.

    The directory is a DHT, which only the ticket tells the others; the test below has the usual one.
    """

    async def scene(town: Colony) -> None:
        first, second, third = (town.resident(name) for name in ("first", "second", "third"))
        api = await town.found(first, "--layers", "0-5", "--directory", "dht")
        await asyncio.gather(town.join(second), town.join(third, "--layers", "6-11"))
        for resident in (first, second, third):
            await until(lambda: sees(resident, {"first", "second", "third"}))  # noqa: B023
            assert (await resident.view())["directory"] == "dht"
        text = await complete(api, "Once upon a time", 16)
        second.signal(signal.SIGKILL)
        await second.ended()
        for resident in (first, third):
            await until(lambda: sees(resident, {"first", "third"}))  # noqa: B023
        assert await complete(api, "Once upon a time", 16) == text
        second_node = (await second.said("serving"))["node"]
        await town.join(second)
        assert (await second.said("serving"))["node"] == second_node
        await until(lambda: sees(first, {"first", "second", "third"}))

    async def sees(resident: Resident, wanted: set[str]) -> bool:
        return await names(resident) == wanted

    asyncio.run(_with_colony(scene))


def test_a_hub_model_comes_from_a_peer_and_leaving_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up HUB_ID` reads the hub; who joins fetches exactly its layers from there, and the hub hears nothing of it."""
    folder = make_tiny("llama", tmp_path / "tiny", layers=6, seed=3)

    async def scene(town: Colony) -> None:
        first, second = town.resident("first"), town.resident("second")
        api = await town.found(first, model=REPO)
        asked = len(hub.tokens)
        await town.join(second, "--layers", "2-3")
        pulled = second.home / "models" / build_manifest(folder, home=tmp_path).id
        wanted = span_tensors([entry.name for entry in read_entries(folder)], Span(2, 4))
        assert sorted(entry.name for entry in read_entries(pulled)) == wanted
        assert asked > 0 and len(hub.tokens) == asked
        theirs = (await second.said("api"))["api"]
        assert await complete(theirs, "Once", 4, REPO) == await complete(api, "Once", 4, REPO), "every member answers"
        await first.said("came")
        second.signal(signal.SIGTERM)
        await second.ended()
        assert [event["event"] for event in second.events()][-2:] == ["leaving", "left"]
        assert (await first.said("gone"))["text"] == "second has left"
        assert not list((second.home / "run").iterdir())
        assert (second.home / "swarm.ticket").stat().st_mode & 0o077 == 0

    with serving(FakeHub(folder)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        asyncio.run(_with_colony(scene))


def test_a_member_that_serves_leaves_while_it_fetches_from_a_silent_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first request needs the ends, which no other member has; the hub's deadlines are 90 s together."""
    folder = make_tiny("llama", tmp_path / "tiny", layers=6, seed=3)

    async def scene(town: Colony) -> None:
        first, second = town.resident("first"), town.resident("second")
        await town.start(first, "up", REPO, "--api", "off", "--layers", "0-5")
        town.ticket = (await first.said("invitation"))["ticket"]
        await town.join(second, "--layers", "2-3")
        api = (await second.said("api"))["api"]
        hub.is_silent = True
        asking = asyncio.ensure_future(complete(api, "Once", 4, REPO))
        assert await asyncio.to_thread(hub.stalled.wait, GUARD_S)
        second.signal(signal.SIGINT)
        await second.ended()
        assert [event["event"] for event in second.events()][-2:] == ["leaving", "left"]
        with pytest.raises(ManyhandsError):
            await asking

    with serving(FakeHub(folder)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        asyncio.run(_with_colony(scene))


def test_a_member_has_the_options_of_serve(tmp_path: Path) -> None:
    """A history of requests in a file, a spare that says that it is one, layers that would be loaded in need."""

    async def scene(town: Colony) -> None:
        first, second = town.resident("first"), town.resident("second")
        api = await town.found(first, "--job-file", str(tmp_path / "jobs"), "--layers", "0-11", "--can-load", "2")
        assert any("would load up to 2 more" in event.get("text", "") for event in first.events())
        await town.join(second, "--spare")
        await until(lambda: is_spare(first))
        await complete(api, "Once upon a time", 4)
        first.signal(signal.SIGTERM)
        await first.ended()
        with contextlib.closing(sqlite3.connect(tmp_path / "jobs")) as file:
            (table,) = file.execute("select name from sqlite_master where type = 'table'").fetchone()
            assert file.execute(f"select count(*) from {table}").fetchone() == (1,)

    async def is_spare(resident: Resident) -> bool:
        nodes = {node["name"]: node for node in (await resident.view())["nodes"]}
        return "second" in nodes and [span["state"] for span in nodes["second"]["spans"]] == ["spare"]

    asyncio.run(_with_colony(scene))


def test_a_member_keeps_a_fallback_for_its_requests_without_api_being_told() -> None:
    """F44: `join` answers on a free port; the whole model lies here from the start, while others can still give it."""

    async def scene(town: Colony) -> None:
        first, second = town.resident("first"), town.resident("second")
        api = await town.found(first, "--layers", "0-5")
        await town.join(second, "--layers", "6-11", "--fallback", "--policy", "greedy")
        theirs = (await second.said("api"))["api"]
        await until(lambda: takes([("first", "0-5"), ("second", "6-11")], api))
        text = await complete(api, "Once upon a time", 16)
        first.signal(signal.SIGKILL)
        await first.ended()
        await until(lambda: alone(second))
        assert await complete(theirs, "Once upon a time", 16) == text
        (job,) = (await asyncio.to_thread(call, theirs, "", "GET", "/api/jobs"))["jobs"]
        assert (job["routing"]["policy"], job["routing"]["is_fallback"]) == ("greedy", True)

    async def alone(resident: Resident) -> bool:
        return await names(resident) == {"second"}

    asyncio.run(_with_colony(scene))


@pytest.mark.nightly
def test_a_spare_takes_the_hole_of_a_killed_node_and_gives_it_back_in_mid_stream() -> None:
    """kill -9 of a member: the spare serves its layers and no others, until the member is back: then a running stream moves."""

    async def scene(town: Colony) -> None:
        first, second, third = (town.resident(name) for name in ("first", "second", "third"))
        api = await town.found(first, "--layers", "0-5")
        await town.join(second, "--layers", "6-11")
        await town.join(third, "--spare")
        await until(lambda: takes([("first", "0-5"), ("second", "6-11")], api))
        lengths = (480, 290)  # two streams that seldom end together: at any time one is in its middle
        wanted = [{await complete(api, "Once upon a time", tokens)} for tokens in lengths]
        repairs: list[tuple[list[str], list[str]]] = []
        for _ in range(5):  # both may be about to end when the member is back: then neither moves
            second.signal(signal.SIGKILL)
            await second.ended()
            await until(lambda: takes([("first", "0-5"), ("third", "6-11")], api))
            is_back = asyncio.Event()
            running = [asyncio.create_task(streams(tokens, api, is_back)) for tokens in lengths]
            await asyncio.sleep(0.3)
            await town.join(second, "--layers", "6-11")
            await until(lambda: takes([("first", "0-5"), ("second", "6-11")], api))
            is_back.set()
            assert await asyncio.gather(*running) == wanted
            jobs = (await asyncio.to_thread(call, api, "", "GET", "/api/jobs"))["jobs"]
            repairs = [(r["lost"], r["replacement"]) for job in jobs for r in job["repairs"]]
            if repairs:
                break
        assert len(repairs) in (1, 2) and all(repair == (["third"], ["second"]) for repair in repairs)

    async def streams(tokens: int, api: str, end: asyncio.Event) -> set[str]:
        """The texts of one stream after the other, until `end` is set and the last one is over."""
        texts = set()
        while not end.is_set():
            texts.add(await complete(api, "Once upon a time", tokens))
        return texts

    asyncio.run(_with_colony(scene))


async def _with_colony(scene: Callable[[Colony], Awaitable[None]]) -> None:
    async with colony(forked=True) as town:
        await scene(town)


def test_a_process_that_cannot_begin_says_why_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "manyhands.cli", "join", "mh1AAAA"]
    environment = {"MANYHANDS_HOME": str(tmp_path), "PATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "ticket is truncated" in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["join", "mh2AAAA"], "version '2'"),
        (["up", "tales", "--memory", "1MB"], "give at least"),
        (["up", "tales", "--layers", "3-40"], "tales has layers 0-11"),
        (["up", "tales", "--api", "0.0.0.0:0"], "make one (manyhands key add NAME)"),
        (["up", "tales", "--trace", "otlp"], "--trace is for the HTTP API: open it with --api HOST:PORT"),
        (["join", Ticket.new("home").encode(), "--job-file", "jobs"], "--job-file is for the HTTP API"),
        (["up", "tales", "--scope", "family"], "must be one of off, lan, trusted, public"),
        (["up", "tales", "--name", "a/b"], "cannot name a node"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_with_the_remedy(
    arguments: list[str],
    wanted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process: that it is the same in one of its own is shown above, and each would import torch."""
    api = ["--api", "off"] if arguments[0] == "up" and "--api" not in arguments else []
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["manyhands", *arguments, *api])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert wanted in said and len(said.strip().splitlines()) == 1


def test_up_comes_to_the_swarm_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container, where the ticket is in the environment; a swarm of its own beside it would help no one."""
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    monkeypatch.setenv("MANYHANDS_TICKET", Ticket.new("home", "dht").encode())
    monkeypatch.setattr(sys, "argv", ["manyhands", "up", "tales", "--api", "off", "--directory", "gossip"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "dht" in capsys.readouterr().err
