"""Options in groups: a dataclass among a command's parameters stands for its fields."""

import asyncio
import errno
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from manyhands.cli.gateway import ApiOptions
from manyhands.cli.grouped import grouped
from manyhands.cli.member_options import MemberOptions, config_of
from manyhands.cli.options import Computing, Prompt, RouteOptions, Sampling, address, settings
from manyhands.cli.reporter import Reporter, tell_invitation
from manyhands.cli.runfile import run_file
from manyhands.config import RequestConfig
from manyhands.core import NodeAddr, NodeId, SamplingParams
from manyhands.errors import BadRequest, NoAddress
from manyhands.member.home import Running, announced
from manyhands.route.offer import Rules
from manyhands.swarm.identity import NodeKey
from manyhands.swarm.record import MAX_ADDRESSES
from manyhands.swarm.ticket import Ticket


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
    for bad in (Computing(dtype="fp8"), Computing(path="line"), Computing(ends="middle")):
        with pytest.raises(BadRequest):
            _ = bad.precision("tales"), bad.path_kind, bad.ends_at
    with pytest.raises(BadRequest, match=r"--log-json is for the HTTP API: open it with --api HOST:PORT"):
        ApiOptions(log_json=True).plan("")


def test_a_member_opens_the_api_of_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    given = ApiOptions(job_file=tmp_path / "jobs", trace="console", log_json=True)
    plan = given.member_plan("127.0.0.1:0")
    assert plan.is_told and plan == given.plan("127.0.0.1:0")
    assert (plan.job_file, plan.trace, plan.log_json) == (tmp_path / "jobs", "console", True)
    assert ApiOptions().member_plan("off").addr is None
    shown = ApiOptions().member_plan("")
    assert str(shown.addr) == "127.0.0.1:0" and not shown.is_told
    with pytest.raises(BadRequest, match="--trace is for the HTTP API"):
        ApiOptions(trace="otlp").member_plan("off")


def test_a_port_that_a_node_of_this_user_has_is_told_with_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        addr = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BadRequest, match=f"{addr} is in use: stop what listens there, or choose another --api"):
            ApiOptions().member_plan(addr)
        running = Running("home-7", os.getpid(), NodeId("1f" * 32), "home", "127.0.0.1:1", f"http://{addr}")
        with announced(tmp_path, running):
            with pytest.raises(BadRequest, match=rf"in use by home-7, which runs .*: `kill {os.getpid()}` ends it"):
                ApiOptions().plan(addr)  # no node can be stopped by that name
            (tmp_path / "key").touch()
            with run_file("desk", tmp_path / "key"):
                with pytest.raises(BadRequest, match=r"by the node desk, which runs .*: `manyhands stop desk` ends it"):
                    ApiOptions().member_plan(addr)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EACCES, "Permission denied; choose a port from 1024 on (--api HOST:PORT)"),
        (errno.EADDRNOTAVAIL, "Cannot assign requested address; choose an address of this machine (--api HOST:PORT)"),
    ],
)
def test_why_the_api_cannot_listen_at_an_address(number: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: tuple[str, int]) -> None:
        raise OSError(number, f"{os.strerror(number)} (while attempting to bind on address {address})")

    monkeypatch.setattr("manyhands.cli.gateway.socket.create_server", refuse)
    with pytest.raises(BadRequest) as told:
        ApiOptions(insecure=True).plan("127.0.0.1:80")
    assert isinstance(told.value, NoAddress) == (number == errno.EADDRNOTAVAIL), "a service is started again"
    assert str(told.value) == f"the API cannot listen on 127.0.0.1:80: {said}"


def test_lattice9s_short_options() -> None:
    """infer -p -m -d -t (L9-R07)."""
    told: list[SamplingParams] = []

    @grouped
    def ask(prompt: Prompt, sampling: Sampling = Sampling()) -> None:
        """Ask."""
        told.append(sampling.params)

    app = typer.Typer()
    app.command()(ask)
    result = CliRunner().invoke(app, ["-p", "the quick brown fox", "-m", "7", "-d", "-t", "0.5"])
    assert result.exit_code == 0, result.output
    assert told == [SamplingParams(max_tokens=7, deterministic=True, temperature=0.5)]


def test_options_of_an_origin_become_its_configuration() -> None:
    given = RouteOptions("greedy", False, True, 2, 1, True)
    wanted = RequestConfig(
        policy="greedy", allow_self_as_shard=False, sticky=True, own_first=2, own_last=1, fallback=True
    )
    assert given.applied(RequestConfig()) == wanted
    assert Rules.of(wanted) == Rules("greedy", False, True, "", 2, 1)
    assert RouteOptions().for_api(RequestConfig(), has_api=False) == RequestConfig()
    alone = RouteOptions(fallback=True)
    with pytest.raises(BadRequest, match="draft is 'maybe'; it is one of auto, off, suffix, model, or model:MODEL"):
        RouteOptions(draft="maybe").applied(RequestConfig())
    assert RouteOptions(draft="off").applied(RequestConfig()).draft == "off"
    suffix, others = RouteOptions(draft="suffix"), RouteOptions(allow_self=False)
    for options, name in [(given, "policy"), (others, "avoid-self"), (alone, "fallback"), (suffix, "draft")]:
        with pytest.raises(BadRequest, match=f"--{name} is for requests to this machine's API"):
            options.for_api(RequestConfig(), has_api=False)
        options.for_api(RequestConfig(), has_api=True)


@pytest.mark.parametrize("text", ["bogus", "127.0.0.1:99999", ""])
def test_an_address_that_is_none_is_said_of_its_option(text: str) -> None:
    with pytest.raises(
        BadRequest, match=rf"--relay: address '{text}' is not of the form host:port, with a port from 0 to"
    ):
        address("--relay", text)


def test_a_node_that_shares_with_no_other_invites_none(capsys: pytest.CaptureFixture[str]) -> None:
    for scope, said in (("off", "for this machine alone (scope off)"), ("lan", "from elsewhere:  manyhands join mh1")):
        member: Any = SimpleNamespace(config=SimpleNamespace(scope=scope))
        invitations: Any = SimpleNamespace(member=member, ticket=lambda: Ticket.new("home"))
        asyncio.run(tell_invitation(invitations, Reporter(as_json=False), shows_code=False))
        assert capsys.readouterr().out.startswith(said)


@pytest.mark.parametrize(
    ("listen", "own_v6", "said"),
    [
        ("0.0.0.0", "2001:db8::5", "no IPv4 address: start it with --listen [::]:0"),
        ("0.0.0.0", "::1", "start it on a network"),
        ("127.0.0.1", "2001:db8::5", "without --listen 127.0.0.1:PORT"),
    ],
)
def test_a_machine_with_ipv6_alone_is_told_how_others_come(
    listen: str, own_v6: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told to leave out a --listen that it did not have, and to come to a network, where it was."""
    monkeypatch.setattr("manyhands.net.own_address.reachable", lambda bound: NodeAddr(own_v6, bound.port))
    member: Any = SimpleNamespace(config=SimpleNamespace(scope="lan", listen=NodeAddr(listen, 0)))
    ticket = replace(Ticket.new("home"), addresses=(NodeAddr("127.0.0.1", 7700),))
    invitations: Any = SimpleNamespace(member=member, ticket=lambda: ticket)
    asyncio.run(tell_invitation(invitations, Reporter(as_json=False), shows_code=True))
    assert said in capsys.readouterr().out


def test_a_node_on_loopback_invites_no_other_machine(capsys: pytest.CaptureFixture[str]) -> None:
    member: Any = SimpleNamespace(config=SimpleNamespace(scope="lan", listen=NodeAddr("127.0.0.1", 7700)))
    for hosts, said in (
        (("127.0.0.1",), "from this machine alone, as peers come to 127.0.0.1:7700:  manyhands join mh1"),
        (("127.0.0.1", "192.0.2.7"), "from elsewhere:  manyhands join mh1"),
    ):
        ticket = replace(Ticket.new("home"), addresses=tuple(NodeAddr(host, 7700) for host in hosts))
        invitations: Any = SimpleNamespace(member=member, ticket=lambda ticket=ticket: ticket)
        asyncio.run(tell_invitation(invitations, Reporter(as_json=False), shows_code=True))
        assert capsys.readouterr().out.startswith(said)


def test_a_member_names_as_many_relays_as_others_can_be_told_of() -> None:
    """Its own address stands beside them in its records."""

    def relays(count: int, *more: str) -> int:
        wish = MemberOptions(memory="1GB", relay=[*(f"203.0.113.{i}:4040" for i in range(count)), *more])
        return len(config_of(wish, "n", NodeKey.generate(), Ticket.new("home"), settings()).relays)

    assert relays(MAX_ADDRESSES - 1) == MAX_ADDRESSES - 1
    assert relays(MAX_ADDRESSES - 2, "https://relay.example") == MAX_ADDRESSES - 2
    for count, more in ((MAX_ADDRESSES, ()), (MAX_ADDRESSES - 1, ("https://relay.example",))):
        with pytest.raises(BadRequest, match="name fewer"):
            relays(count, *more)
