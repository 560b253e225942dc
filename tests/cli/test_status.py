"""manyhands status: what people read of a view, whatever names peers give themselves."""

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from manyhands.cli import app, client, status
from manyhands.cli.client import GatewayError
from manyhands.cli.status_screen import coverage_strip, groups_of, render, ruler, span_strip
from manyhands.core import UNPROVEN, EdgeHealth, Span, SpanInfo, SpanLoad
from manyhands.errors import LinkClosed
from manyhands.member.home import Running, announced
from manyhands.member.view import SwarmSnapshot, view_of
from manyhands.swarm.record import NearNode
from tests.swarm.records import NOW, info_of, node_of, record_of
from tests.waiting import GUARD_S


def view(**changes: Any) -> dict[str, Any]:
    """Three nodes: layers 0-7, 0-15 and (loading) 16-23 of 24, and one that hosts nothing."""
    records = [
        record_of(0, name="desk"),
        record_of(1, name="nas", info=info_of(0, 16), load=SpanLoad(3, 0, 0.02)),
        record_of(2, name="lap", info=info_of(16, 24, max_sessions=0)),
        record_of(3, name="pi", info=None),
    ]
    edges = {node_of(1): EdgeHealth(0.0123, path_kind="relay"), node_of(2): EdgeHealth()}
    facts: dict[str, Any] = {"sessions": 2, "api": "http://127.0.0.1:8000", "complaints": ("set the clock",)}
    return view_of(SwarmSnapshot("home", node_of(0), NOW + 2, records, edges, {}, **{**facts, **changes}))


def shown(told: dict[str, Any], width: int = 140) -> str:
    said = io.StringIO()
    Console(width=width, file=said).print(render(told, width))
    return said.getvalue()


def test_nodes_layers_load_and_way_are_shown() -> None:
    text = shown(view())
    assert "swarm home  4 nodes (gossip) · 2 requests run here · API http://127.0.0.1:8000" in text
    by_hand = shown({**view(sessions=1), "swarm": ""})  # as `local` and `serve --api` have it
    assert "swarm 4 nodes (gossip) · 1 request runs here" in by_hand
    assert "tales  bf16, 24 layers" in text
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "████████················ 0-7" in rows["desk"] and "here" in rows["desk"]
    assert "████████████████········ 0-15" in rows["nas"] and "12.3 ms" in rows["nas"] and "relay" in rows["nas"]
    assert "20.00" in rows["nas"] and "3/32" in rows["nas"]
    assert "················▒▒▒▒▒▒▒▒ 16-23 loading" in rows["lap"] and "direct" in rows["lap"]
    assert rows["served"].split("served by")[1].strip() == "222222221111111100000000"
    assert "without layers: pi (8.6 GB, no link)" in text


def test_when_a_node_spoke_is_not_told_by_a_clock_that_is_off() -> None:
    """`seen 86400 s` of a node that is there: its clock, not its silence."""
    records = [
        record_of(index, name=f"n{index}", issued_at=NOW - off) for index, off in enumerate((0, 86_400, -86_400))
    ]
    told = view_of(SwarmSnapshot("home", node_of(0), NOW + 3, records, {}, {}))
    assert [node["spoke_s_ago"] for node in told["nodes"]] == [3.0, None, None]
    text = shown(told)
    assert "86" not in text and "3 s" in text


def test_round_trips_between_nodes_and_uplinks_are_shown() -> None:
    """F18: what nodes state of each other, the larger figure being each node's own."""
    near = [tuple(sorted((NearNode.of(node_of(to), s)) for to, s in told.items())) for told in ({1: 0.02}, {0: 0.03})]
    records = [record_of(0, name="desk", near=near[0], uplink_Bps=2.5e6), record_of(1, name="nas", near=near[1])]
    told = view_of(SwarmSnapshot("home", node_of(0), NOW, records, {}, {}))
    assert told["nodes"][1]["near"] == [{"node": node_of(0), "name": "desk", "rtt_ms": 30.0}]
    lines = [line.split() for line in shown(told).splitlines()]
    assert ["desk", "·", "20.0", "20.0", "Mbit/s"] in lines and ["nas", "30.0", "·", "-"] in lines
    assert "ms from" not in shown(view()), "no node has measured anything"


def test_what_is_wrong_comes_last_and_plainly() -> None:
    lines = shown(view()).splitlines()
    notes = [line for line in lines if line.startswith("! ")]
    assert notes == [
        "! tales: layers 16-23 are held by no node",
        "! set the clock",
        "! tales: layers 8-15 are held once: losing nas stops the model",
    ]


def test_nodes_that_share_no_route_are_named_with_the_remedy() -> None:
    """Every layer is held, but only by exact nodes and a device of torch together: nothing is missing, nothing is served."""

    def notes(*infos: SpanInfo, **facts: bool) -> list[str]:
        records = [record_of(index, name=f"n{index}", info=info) for index, info in enumerate(infos)]
        told = view_of(SwarmSnapshot("home", node_of(0), NOW, records, {}, {}, **facts))  # type: ignore[arg-type]
        return [line for line in shown(told, 300).splitlines() if "exact" in line]

    exact, device = info_of(0, 16), info_of(8, 24, arithmetic="bf16/torch-2/cuda" + UNPROVEN)
    (line,) = notes(exact, device)
    assert "exact classes do not hold layers 16-23 of 24" in line and "do not hold layers 0-7" in line
    assert "--mix-classes" in line
    assert notes(exact, device, mixes_classes=True) == [], "its requests run over both"
    assert notes(exact) == [] and notes(exact, device, info_of(16, 24)) == [] and notes(exact, info_of(16, 24)) == []
    assert notes(exact, replace(device, max_sessions=0)) == [], "it still loads: layers are missing"


@pytest.mark.parametrize("name", ["\x1b[2J", "[red]x[/]", "a\nb", "\u202eevil", "", "n" * 64])
def test_names_of_peers_do_nothing_to_a_terminal(name: str) -> None:
    told = view()
    told["nodes"][0]["name"] = told["swarm"] = told["models"][0]["name"] = name
    text = shown(told)
    assert "\x1b" not in text and "\u202e" not in text
    assert len(text.splitlines()) == len(shown(view()).splitlines())


def test_without_a_model_there_is_still_something_to_say() -> None:
    told = view_of(SwarmSnapshot("home", node_of(0), NOW, [record_of(0, info=None)], {}, {}))
    assert "swarm home  1 node" in shown(told)


@pytest.mark.parametrize("width", [40, 50, 60, 80, 100])
def test_a_narrow_terminal_is_shown_fewer_columns_and_none_of_them_cut(width: int) -> None:
    """`la… sessi… q… ms/la… lat…` at 50 columns."""
    text = shown(view(), width)
    assert "…" not in text
    assert ("sessions" in text) == (width >= 80) and ("latency" in text) == (width >= 50)
    assert all(row in text for row in ("desk", "0-7", "nas", "0-15", "16-23 loading", "served by"))


@given(st.integers(1, 400), st.integers(12, 64), st.data())
def test_every_layer_has_its_cell(num_layers: int, most: int, data: st.DataObject) -> None:
    groups = groups_of(num_layers, most)
    assert [layer for group in groups for layer in group] == list(range(num_layers))
    assert all(len(group) for group in groups) and len(groups) <= most
    start = data.draw(st.integers(0, num_layers - 1))
    end = data.draw(st.integers(start + 1, num_layers))
    strip = span_strip(Span(start, end), groups, "serving").plain
    assert [mark == "█" for mark in strip] == [any(start <= layer < end for layer in group) for group in groups]
    assert len(ruler(groups)) <= max(len(groups), 6)


def test_a_cell_of_several_layers_tells_the_weakest() -> None:
    counts = [12] * 128
    counts[5] = 0
    strip = coverage_strip(counts, groups_of(128, 64)).plain
    assert (len(strip), strip[2], set(strip) - {strip[2]}) == (64, "0", {"+"})


def test_a_narrow_terminal_gets_shorter_strips_and_whole_words() -> None:
    text = shown(view(), width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "…" not in text and "loading" in text and "here" in text
    assert "████········" in text


class Gateway(BaseHTTPRequestHandler):
    """Tells `view()` to clients that have the key."""

    def do_GET(self) -> None:
        is_known = self.headers["authorization"] == "Bearer mhk_x" and self.path == "/api/swarm"
        body = view() if is_known else {"error": {"message": "no key", "code": "unauthorized"}}
        self.send_response(200 if is_known else 401)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        """Silence."""


@pytest.fixture
def api() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_asking_a_gateway(api: str) -> None:
    text = CliRunner().invoke(app, ["status", "--api", api, "--api-key", "mhk_x"], env={"COLUMNS": "140"}).stdout
    assert "losing nas stops the model" in text
    told = json.loads(CliRunner().invoke(app, ["status", "--api", api, "--api-key", "mhk_x", "--json"]).stdout)
    assert told == json.loads(json.dumps(view()))
    refused = CliRunner().invoke(app, ["status", "--api", api])
    assert isinstance(refused.exception, GatewayError) and refused.exception.http_status == 401


def test_a_member_that_runs_here_is_asked(api: str, home: Path) -> None:
    with announced(home, Running("desk", os.getpid(), node_of(0), "home", "127.0.0.1:1", api)):
        assert client.running_api() == api
        told = CliRunner().invoke(app, ["status"], env={"MANYHANDS_API_KEY": "mhk_x"})
    assert "swarm home" in told.stdout


def test_watching_goes_on_while_the_gateway_is_away(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = iter(["mhk_x", "wrong", "mhk_x"])
    asked: list[bool] = []

    def call(where: str, key: str, method: str, path: str) -> Any:
        try:
            told = client.call(where, next(keys), method, path)
        except StopIteration:
            raise KeyboardInterrupt from None
        except GatewayError:
            asked.append(False)
            raise
        asked.append(True)
        return told

    monkeypatch.setattr(status, "call", call)
    monkeypatch.setattr(status, "REFRESH_S", 0.0)
    result = CliRunner().invoke(app, ["status", "--watch", "--api", api])
    assert asked == [True, False, True] and result.exit_code == 0
    assert result.stdout.count("swarm home") == 3 and result.stdout.count("no key") == 1, (
        "no terminal: one below the other"
    )


def test_a_terminal_without_its_letters_is_shown_others(api: str) -> None:
    """It was a traceback: `·` is no ASCII, `█` no Latin-1."""
    for encoding in ("ascii", "latin-1"):
        found = subprocess.run(
            [sys.executable, "-m", "manyhands", "status", "--api", api, "--api-key", "mhk_x"],
            env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "140"},
            capture_output=True,
            check=True,
            timeout=GUARD_S,
        )
        assert b"swarm home  4 nodes" in found.stdout and b"??????????" in found.stdout.replace(b"\xb7", b"?")


def test_no_member_there_is_one_line() -> None:
    result = CliRunner().invoke(app, ["status", "--api", "http://127.0.0.1:9"])
    assert isinstance(result.exception, LinkClosed) and "start one" in str(result.exception)


def test_a_swarm_without_nodes_is_shown() -> None:
    """Of `local --api` whose processes have all ended: it was a traceback."""
    told = view()
    told["nodes"] = []
    assert "0 nodes" in shown(told) and "served by" in shown(told)
