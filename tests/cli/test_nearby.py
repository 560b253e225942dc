"""`manyhands join` without a ticket: what is listed, which swarm is meant, and what a person who types sees."""

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from manyhands.cli import app, code, join, nearby, switch
from manyhands.cli.client import GatewayError
from manyhands.cli.code import say_code
from manyhands.cli.nearby import Row, ask_for_code, chosen, rows_of, ticket_by_code
from manyhands.core import NodeAddr, NodeId
from manyhands.errors import BadRequest, LinkClosed, WrongCode
from manyhands.member.home import load_ticket
from manyhands.net.pairing.code import MAX_FAILURES
from manyhands.swarm import lan
from manyhands.swarm.lan import Nearby
from manyhands.swarm.ticket import MAX_ADDRESSES, Ticket

HOME = Ticket.new("home").with_address(NodeAddr("10.0.0.9", 7700))
LAB = Ticket.new("lab")


def node(ticket: Ticket, name: str, model: str = "tales", code_port: int | None = None) -> Nearby:
    node_id = NodeId(name.encode().hex().ljust(64, "0"))
    return Nearby(
        ticket.name, ticket.fingerprint, node_id, (NodeAddr("10.0.0.1", 7700, node_id),), name, model, code_port
    )


DESK, NAS = node(HOME, "desk", code_port=7701), node(HOME, "nas")
OTHER = node(LAB, "bench", "smollm2")


def test_each_swarm_is_a_line_with_its_models_and_who_shows_a_code() -> None:
    lines = [row.line() for row in rows_of([OTHER, NAS, DESK])]
    assert lines == [
        "home: tales, 2 nodes, code on desk",
        "lab: smollm2, 1 node, no code is shown: run `manyhands code` there",
    ]
    assert rows_of([]) == []


def test_two_machines_that_show_codes_are_two_lines() -> None:
    rows = rows_of([DESK, node(HOME, "nas", code_port=9)])
    assert [row.line() for row in rows] == ["home: tales, 2 nodes, code on desk", "home: tales, 2 nodes, code on nas"]
    assert chosen(rows, "nas") is rows[1]
    with pytest.raises(BadRequest, match="--swarm desk, --swarm nas"):
        chosen(rows, "home")


def test_a_swarm_is_meant_by_its_name_its_fingerprint_or_the_machine_with_the_code() -> None:
    rows = rows_of([DESK, OTHER])
    assert [chosen(rows, name).swarm for name in ("home", HOME.fingerprint, "desk", "lab")] == ["home"] * 3 + ["lab"]
    assert chosen(rows[:1], "") is rows[0]
    with pytest.raises(BadRequest, match="2 swarms or machines fit: say which with one of --swarm home, --swarm lab"):
        chosen(rows, "")
    with pytest.raises(BadRequest, match="'shed': not seen on this network, which has home: tales"):
        chosen(rows, "shed")


def test_two_swarms_of_one_name_are_told_apart_by_their_fingerprints() -> None:
    twin = Ticket.new("home")
    rows = rows_of([DESK, node(twin, "desk", code_port=9)])
    with pytest.raises(BadRequest) as refused:
        chosen(rows, "home")
    assert HOME.fingerprint in str(refused.value) and twin.fingerprint in str(refused.value)


def test_a_machine_without_a_network_is_told_to_use_the_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_is_up(**options: Any) -> None:
        raise RuntimeError("No interfaces to listen on")

    monkeypatch.setattr(lan, "AsyncZeroconf", none_is_up)
    with pytest.raises(BadRequest, match=r"no network interface .* is up\): join with the ticket: manyhands join mh1"):
        nearby.look("")


def test_names_that_others_chose_do_not_break_the_list() -> None:
    loud = Nearby("x" * 64, "0" * 16, DESK.node, DESK.addresses, "y" * 64, "z" * 60, 1)
    assert len(rows_of([loud])[0].line()) < 300


# -- what a person sees -----------------------------------------------------------------------------------------------

Typed = Callable[[str], Ticket]


class Network:
    """What is seen and what the machine that shows the code answers, one after the other."""

    def __init__(self) -> None:
        self.rows = [rows_of([DESK])]
        self.answers: list[str | Exception] = []
        self.codes: list[str] = []

    def look(self, name: str) -> list[Row]:
        return self.rows.pop(0) if len(self.rows) > 1 else self.rows[0]

    async def ask(self, ways: list[NodeAddr], swarm: str, code: str) -> str:
        assert swarm == HOME.fingerprint and ways == [NodeAddr("10.0.0.1", 7701)]
        self.codes.append(code)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    made = Network()
    monkeypatch.setattr(nearby, "look", made.look)
    monkeypatch.setattr(nearby, "ask_ticket", made.ask)
    yield made
    assert not made.answers


LOOKS_AND_ASKS = """
import asyncio, os, time
from manyhands.cli import nearby
from tests.cli.test_nearby import DESK, HOME, rows_of

async def resolve():
    await asyncio.get_running_loop().getaddrinfo("localhost", 80)

async def search(is_enough):
    await resolve()
    return rows_of([DESK])

async def ask(ways, swarm, code):
    await resolve()
    return HOME.encode()

def threads():
    return set(os.listdir("/proc/self/task"))

before, end = threads(), time.monotonic() + 30
nearby.search, nearby.ask_ticket = search, ask
nearby.ticket_by_code("ABCDEF", "")
while threads() - before and time.monotonic() < end:
    time.sleep(0.05)
print(len(threads() - before))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="lists threads as Linux does")
def test_joining_by_code_leaves_no_thread_behind() -> None:
    """`join -d` forks after it. At its end the child would wait for threads of libuv that only its parent has."""
    shown = subprocess.run(
        [sys.executable, "-c", LOOKS_AND_ASKS], capture_output=True, text=True, timeout=120, check=True
    )
    assert shown.stdout == "0\n"


def types(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_a_code_gives_the_ticket_with_that_machine_first(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    full = HOME
    for port in range(1, MAX_ADDRESSES + 1):
        full = full.with_address(NodeAddr("10.0.0.9", port))
    network.answers = [full.encode()]
    types(monkeypatch, "k7w-4qx")
    got = ask_for_code("")
    assert got.secret == HOME.secret and got.addresses[0] == DESK.addresses[0] and len(got.addresses) == MAX_ADDRESSES
    assert network.codes == ["K7W4QX"]


def test_ctrl_c_where_the_code_is_asked_for_is_an_interruption(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code was 1, and "Aborted!" was printed. The end of the input ends a prompt in the same way."""
    types(monkeypatch)
    with pytest.raises(typer.Exit) as ended:
        ask_for_code("")
    assert ended.value.exit_code == 130


def test_what_can_be_no_code_is_asked_again_without_a_call(
    network: Network, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network.answers = [HOME.encode()]
    types(monkeypatch, "K7W", "K7W4Q0", "", "K7W4QX")
    ask_for_code("")
    said = capsys.readouterr()
    assert network.codes == ["K7W4QX"] and "it has 3 letters" in said.err and "never hold" in said.err


def test_a_wrong_code_is_asked_again_and_the_third_ends_it(
    network: Network, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network.answers = [WrongCode("10.0.0.1", left) for left in (2, 1, 0)]
    types(monkeypatch, *["K7W4QX"] * 9)
    with pytest.raises(WrongCode, match="manyhands code"):
        ask_for_code("")
    assert len(network.codes) == MAX_FAILURES and "2 tries are left" in capsys.readouterr().err


def test_a_machine_that_breaks_off_gets_three_codes_too(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that only pretends to show a code tries one guess at each code typed, whatever it answers."""
    network.answers = [LinkClosed("it ended the exchange")] * 3
    types(monkeypatch, *["K7W4QX"] * 9)
    with pytest.raises(LinkClosed, match="TCP port 7701"):
        ask_for_code("")
    assert len(network.codes) == 3


def test_a_code_that_was_used_up_is_looked_for_again(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    network.rows = [rows_of([DESK]), rows_of([NAS]), rows_of([DESK])]
    network.answers = [WrongCode("10.0.0.1", 0), HOME.encode()]
    types(monkeypatch, "K7W4QX", "", "K7W4QY")
    assert ask_for_code("").secret == HOME.secret


def test_of_several_swarms_one_is_chosen_by_its_number(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    network.rows = [rows_of([DESK, OTHER])]
    network.answers = [HOME.encode()]
    types(monkeypatch, "7", "1", "K7W4QX")
    assert ask_for_code("").name == "home"


def test_a_ticket_may_be_pasted_instead(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    types(monkeypatch, LAB.encode())
    assert ask_for_code("") == LAB


def test_a_ticket_of_another_swarm_is_refused(network: Network) -> None:
    network.answers = [LAB.encode()]
    with pytest.raises(BadRequest, match="another swarm"):
        ticket_by_code("K7W4QX", "")


def test_where_no_code_is_shown_a_script_is_told_what_to_do(network: Network) -> None:
    network.rows = [rows_of([NAS])]
    with pytest.raises(BadRequest, match="run `manyhands code`"):
        ticket_by_code("K7W4QX", "home")


def test_a_swarm_that_is_seen_and_shows_no_code_is_not_called_unseen(network: Network) -> None:
    network.rows = [rows_of([DESK, OTHER])]
    with pytest.raises(BadRequest, match="no machine of swarm lab shows a code: run `manyhands code`"):
        ticket_by_code("K7W4QX", "lab")


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    monkeypatch.delenv("MANYHANDS_TICKET", raising=False)
    return tmp_path


def test_the_ticket_is_kept_as_soon_as_it_is_there(
    home: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a join that is interrupted while it fetches goes on without a code."""
    network.answers = [HOME.encode()]
    got = join._ticket("", "k7w 4qx", "")
    assert load_ticket(home) == got and join._ticket("", "", "") == got
    network.answers = [HOME.encode()]  # --swarm and --code look again, though this machine has a swarm
    assert join._ticket("", "K7W4QX", "home") == got


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["join"], "in scripts, manyhands join --code"),
        (["join", "--code", "12345"], "it has 5 letters and digits"),
        (["join", "--code", "ABCDEF", "mh1xyz"], "leave them out"),
        (["join", "--swarm", "x", "mh1xyz"], "leave them out"),
        (["code", "--new", "--off"], "one of the two"),
    ],
)
def test_what_cannot_be_is_refused_before_the_network_is_looked_at(home: Path, words: list[str], why: str) -> None:
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, BadRequest) and why in str(result.exception)


class Gateway:
    """What answers `manyhands code`, and what it was asked."""

    def __init__(self, shown: str | None) -> None:
        self.shown, self.asked = shown, list[str]()

    def call(self, api: str, key: str, method: str, path: str) -> dict[str, Any]:
        self.asked.append(method)
        self.shown = {"GET": self.shown, "POST": "NEW-CDE", "DELETE": None}[method]
        code = None if self.shown is None else {"code": self.shown, "seconds_left": 60, "tries_left": 3}
        return {"swarm": "home", "code": code, "ticket": HOME.encode()}


@pytest.mark.parametrize(
    ("shown", "words", "asked", "said"),
    [
        ("GHJ-KMN", [], ["GET"], "GHJ-KMN"),
        (None, [], ["GET", "POST"], "NEW-CDE"),
        ("GHJ-KMN", ["--new"], ["POST"], "NEW-CDE"),
        ("GHJ-KMN", ["--off"], ["GET", "DELETE"], "no code is shown"),
        ("GHJ-KMN", ["--json"], ["GET"], '"code": "GHJ-KMN"'),
    ],
)
def test_code_shows_the_one_there_is_or_a_new_one(
    home: Path, monkeypatch: pytest.MonkeyPatch, shown: str | None, words: list[str], asked: list[str], said: str
) -> None:
    gateway = Gateway(shown)
    monkeypatch.setattr(code, "call", gateway.call)
    result = CliRunner().invoke(app, ["code", *words], catch_exceptions=False)
    assert gateway.asked == asked and said in result.output and HOME.encode() not in result.output


def test_a_gateway_of_no_member_cannot_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise GatewayError("POST /api/switch: Not Found", "not_found", 404)

    monkeypatch.setattr(switch, "ask", refuse)
    result = CliRunner().invoke(app, ["switch", "off"])
    assert isinstance(result.exception, BadRequest) and "of no member" in str(result.exception)


def test_a_gateway_of_no_member_shows_no_codes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(*_: str) -> None:
        raise GatewayError("GET /api/invite: Not Found", "not_found", 404)

    monkeypatch.setattr(code, "call", call)
    result = CliRunner().invoke(app, ["code"])
    assert isinstance(result.exception, BadRequest) and "of no member" in str(result.exception)


def test_what_is_said_of_a_code() -> None:
    said = say_code({"code": "K7W-4QX", "seconds_left": 600, "tries_left": 3})
    assert "manyhands join" in said and "K7W-4QX" in said and "10 minutes and 3 wrong tries" in said
    assert "1 minute and 1 wrong try;" in say_code({"code": "K7W-4QX", "seconds_left": 5, "tries_left": 1})
    assert "no code" in say_code(None)
