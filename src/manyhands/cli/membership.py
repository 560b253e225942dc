"""What `up` and `join` run: a member from its options to its leaving, and the lines it says on the way."""

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.cli import options
from manyhands.cli.gateway import Names
from manyhands.cli.process import freeze_startup
from manyhands.cli.signals import StopSignals
from manyhands.core import NodeAddr, NodeId, Precision, Span
from manyhands.errors import BadRequest, ManyhandsError, ShardUnavailable
from manyhands.plain import one_line

if TYPE_CHECKING:
    from manyhands.config_file import Settings
    from manyhands.member.hosting import Hosting
    from manyhands.member.member import Member, MemberConfig
    from manyhands.origin import Origin
    from manyhands.swarm.identity import NodeKey
    from manyhands.swarm.ticket import Ticket
    from manyhands.worker.execute import Device

QUIET_S = 0.5  # changes come in pairs: a claim becomes a span


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """The options of `up` and `join`, as given."""

    layers: str
    memory: str
    api: str
    insecure: bool
    names: Names
    listen: str
    advertise: str
    name: str
    key: Path | None
    scope: str
    relay: list[str] | None
    allow: list[str] | None
    deny: list[str] | None
    threads: int | None
    directory: str = ""


@dataclass(frozen=True, slots=True)
class Named:
    """The model that `up` names."""

    model: str
    precision: Precision | None


class Reporter:
    """Says what happens: lines for people, or JSON objects; on stdout."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def __call__(self, event: str, text: str, **facts: Any) -> None:
        plain = "\n".join(one_line(line, 4000) for line in text.split("\n"))  # our own breaks: foreign texts have none
        line = json.dumps({"event": event, "text": text, **facts}) if self.as_json else plain
        print(line, flush=True)

    def line(self, text: str) -> None:
        self("note", text)


def start(
    wish: MemberOptions, ticket: "Ticket | None", named: Named | None, *, as_json: bool, while_stdin: bool
) -> None:
    """Run a member until it is told to leave. `ticket` None: this machine's swarm, or a new one."""
    tell = Reporter(as_json)
    try:
        options.run(_run(wish, ticket, named, tell, while_stdin))
    except ManyhandsError as error:
        if as_json:
            tell("error", str(error), code=error.code)
        raise


async def _run(
    wish: MemberOptions, ticket: "Ticket | None", named: Named | None, tell: Reporter, while_stdin: bool
) -> None:
    from manyhands.cli.connect import member_transport
    from manyhands.cli.runfile import run_file
    from manyhands.config import home_from_env
    from manyhands.member.home import Running, announced, check_name, load_ticket
    from manyhands.member.member import Member
    from manyhands.swarm.identity import NodeKey
    from manyhands.swarm.ticket import Ticket
    from manyhands.worker.execute import device_of_process

    began = time.monotonic()  # what comes now is not Python loading libraries
    home = home_from_env()
    name = check_name(wish.name or socket.gethostname())
    key = NodeKey.load_or_create(wish.key or home / "node.key")
    found = options.settings()
    wanted = wish.directory or found.swarm.directory
    ticket = ticket or load_ticket(home) or Ticket.new(name, wanted)
    ticket.agree(wanted)
    config = _config_of(wish, name, key, ticket, found)
    _check_api(wish, home)
    with StopSignals(while_stdin=while_stdin) as signals, device_of_process(wish.threads) as device:
        made = member_transport(key, ticket, config)
        async with Member(key, ticket, config, made, worker=found.worker, request=found.request) as member:
            me = Running(name, os.getpid(), member.id, ticket.name, str(member.addresses[0]))
            with run_file(name), announced(home, me) as announce:
                work = _serve(member, wish, named, device, home, tell, announce, signals, began)
                await signals.run(work)
        tell("left", "left")


async def _serve(
    member: "Member",
    wish: MemberOptions,
    named: Named | None,
    device: "Device",
    home: Path,
    tell: Reporter,
    announce: Callable[[str], None],
    signals: StopSignals,
    began: float,
) -> None:
    """Come in, host, answer, until told to leave; then hand over."""
    from manyhands.cli.model import progress_bar
    from manyhands.member.home import keep_ticket, save_ticket, update_ticket
    from manyhands.member.hosting import Hosting

    await _meet(member, named, tell)
    with progress_bar() as bar:
        weights = await _weights(member, named, home, bar)
        is_origin = wish.api not in ("", "off")
        hosting = Hosting(member, weights, device, home, bar, tell.line, with_ends=is_origin)
        choice = await hosting.start()
    save_ticket(home, member.remembered())
    member.node.start(keep_ticket(home, member))
    _tell_serving(member, hosting, tell, choice.why, time.monotonic() - began)
    member.node.start(hosting.keep_balance())
    async with _advertised(member, tell), _gateway(wish, hosting, device, tell, announce):
        freeze_startup()
        invitation = member.invitation().encode()
        tell("invitation", f"on another machine:  manyhands join {invitation}", ticket=invitation)
        watch = asyncio.ensure_future(_watch(member, hosting, tell))
        try:
            await signals.leaving()
        finally:
            watch.cancel()
            update_ticket(home, member.remembered())
        tell("leaving", "leaving: handing sessions over (Ctrl-C again to leave at once)")
        await member.leave()
        await member.idle()


# -- the parts --------------------------------------------------------------------------------------------------------


def _config_of(wish: MemberOptions, name: str, key: "NodeKey", ticket: "Ticket", found: "Settings") -> "MemberConfig":
    from manyhands.member.member import MemberConfig
    from manyhands.member.neighbours import reachable, relays_for, split_nodes
    from manyhands.place.machines import parse_bytes
    from manyhands.place.measure import available_memory, num_cores
    from manyhands.swarm.members import Members

    urls = [relay for relay in wish.relay or () if "://" in relay]
    named = [NodeAddr.parse(relay) for relay in wish.relay or () if "://" not in relay]
    if len(urls) > 1:
        raise BadRequest(f"--relay names {len(urls)} iroh relays; a node listens at one: give one URL")
    members = Members(
        wish.scope,  # type: ignore[arg-type]  # it checks
        frozenset(NodeId(node) for node in wish.allow or ()),
        frozenset(NodeId(node) for node in wish.deny or ()),
    )
    shown = NodeAddr.parse(wish.advertise) if wish.advertise else None
    here, others = split_nodes(found.swarm.nodes, shown or reachable(NodeAddr.parse(wish.listen or "0.0.0.0:0")))
    listed = f"0.0.0.0:{here.addr.port}" if here else ""
    return MemberConfig(
        name=name,
        listen=_listen_at(wish.listen or listed, key, ticket),
        memory_bytes=parse_bytes(wish.memory) if wish.memory else available_memory(),
        advertise=shown,
        relays=relays_for(ticket, named),
        iroh_url=urls[0] if urls else None,
        scope=members.scope,
        allow=members.allow,
        deny=members.deny,
        nodes=tuple(other.addr for other in others),
        span=Span.parse(wish.layers) if wish.layers else here.span if here else None,
        cores=num_cores(),
        balance=found.balance,
    )


def _listen_at(listen: str, key: "NodeKey", ticket: "Ticket") -> NodeAddr:
    """Where told; else on every interface, at the port that the ticket names for this node if it is still free."""
    if listen:
        return NodeAddr.parse(listen)
    for addr in ticket.addresses:
        if addr.node == key.node_id and "%" not in addr.host and _is_free(addr.port):
            return NodeAddr("0.0.0.0", addr.port)
    return NodeAddr("0.0.0.0", 0)


def _is_free(port: int, host: str = "0.0.0.0") -> bool:
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True


def _check_api(wish: MemberOptions, home: Path) -> None:
    """Say now, and not when the model is loaded, that the API cannot be opened. Raises BadRequest."""
    from manyhands.api.auth import FILE, KeyRing
    from manyhands.api.http.server import check_exposure

    if wish.api in ("", "off"):
        return
    addr = NodeAddr.parse(wish.api)
    check_exposure(addr.host, KeyRing(home / FILE), insecure=wish.insecure)
    if addr.port and ":" not in addr.host and not _is_free(addr.port, addr.host):
        raise BadRequest(f"{addr} is in use or not of this machine: choose another --api HOST:PORT, or --api off")


async def _meet(member: "Member", named: Named | None, tell: Reporter) -> None:
    """Call the swarm. `up` may be the first one back, so it goes on alone; `join` needs somebody."""
    try:
        if member.config.scope != "off":
            await member.meet()
    except ShardUnavailable as error:
        if named is None:
            raise
        tell.line(f"alone so far: {error}")
    others = sorted({record.name for record in member.records() if record.node != member.id})
    who = f"with {', '.join(others)}" if others else "nobody else yet"
    name, kind = member.ticket.name, member.ticket.directory
    text = f"swarm {name}, directory by {kind}, {who}"
    tell("swarm", text, swarm=name, directory=kind, node=member.id, others=others)


async def _weights(member: "Member", named: Named | None, home: Path, bar: Any) -> Any:
    """The model: as named, or the one of the swarm that lacks most."""
    from manyhands.member.hosting import provider_of
    from manyhands.member.view import missing_spans
    from manyhands.member.weights import kinds_of, weights_in, weights_of

    def holders(kind: Any) -> list[Any]:
        found = [r for r in member.records() if kind.is_of(r) and r.node != member.id and member.book(r.node)]
        return [provider_of(member, record) for record in found]

    if named is not None:
        return await weights_of(named.model, named.precision, member.records(), home, bar, holders)
    if not await member.wait_until(lambda: bool(kinds_of(member.records())), 5.0):
        if complaints := member.complaints():
            raise BadRequest(complaints[0])
        raise BadRequest(
            f"swarm {member.ticket.name} serves no model yet: run `manyhands up MODEL` on one of its machines"
        )
    records = member.records()
    kind = min(kinds_of(records), key=lambda kind: not missing_spans(kind, records))
    return await weights_in(kind, holders(kind), home, bar)


def _tell_serving(member: "Member", hosting: "Hosting", tell: Reporter, why: str, seconds: float) -> None:
    from manyhands.worker.runner import widening_note

    for host in hosting.hosts:
        info, layer_s = host.info, member.layer_s[host.info.span]
        text = (
            f"serving layers {info.span} of {info.model_name} in {info.precision}: {why}\n"
            f"  one token takes {layer_s * len(info.span) * 1e3:.1f} ms here ({layer_s * 1e3:.2f} ms a layer), "
            f"peers come to {member.addresses[0]}"
        )
        if note := widening_note(hosting.weights.config, info.precision):
            text += f"\n  {note}"
        tell(
            "serving",
            text,
            model=info.model_name,
            model_id=info.model,
            layers=str(info.span),
            dtype=info.precision,
            arithmetic=info.arithmetic,
            back_end=host.back_end,
            why=why,
            layer_ms=layer_s * 1e3,
            address=str(member.addresses[0]),
            node=member.id,
            seconds=round(seconds, 3),
        )


@contextlib.asynccontextmanager
async def _advertised(member: "Member", tell: Reporter) -> AsyncIterator[None]:
    """Be found on the local network, and find others of this swarm there; pointless for who listens on loopback only."""
    from manyhands.swarm.lan import Browser, advertise

    direct = [addr for addr in member.addresses if "%" not in addr.host and not addr.host.startswith("127.")]
    if not direct:
        yield
        return
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(advertise(member.ticket, member.id, direct, member.config.scope))
            if member.config.scope != "off":
                browser = Browser(lambda: member.hear(browser.addresses(member.ticket)))
                await stack.enter_async_context(browser.listen())
        except (OSError, BadRequest) as error:
            tell.line(f"other machines cannot find this swarm by themselves ({error}): give them the whole line below")
        yield


@contextlib.asynccontextmanager
async def _gateway(
    wish: MemberOptions, hosting: "Hosting", device: "Device", tell: Reporter, announce: Callable[[str], None]
) -> AsyncIterator[None]:
    """The API of this member's model; by default, on who joins, only the view of the swarm for `manyhands status`."""
    if wish.api == "off":
        yield
        return
    from manyhands.api.native.swarm import swarm_router
    from manyhands.cli.gateway import api_for

    addr = NodeAddr.parse(wish.api or "127.0.0.1:0")
    origins = {hosting.weights.name: await _origin(hosting, device)} if wish.api else {}
    shown: list[str] = []  # the URL, once it is known
    router = swarm_router(lambda: hosting.view("".join(shown)))
    limit = hosting.member.node.worker.config.max_sessions
    more: dict[str, Any] = {"insecure": wish.insecure, "names": wish.names, "extra_routers": [router]}
    async with api_for(origins, addr, max_running=limit, **more) as url:
        shown.append(url)
        announce(url)
        if wish.api:
            tell("api", f"API at {url}/v1", api=url)
        yield


async def _origin(hosting: "Hosting", device: "Device") -> "Origin":
    from manyhands.origin import Origin, OriginModel
    from manyhands.weights.refetch import use_fetched

    member, precision = hosting.member, hosting.weights.precision
    assert hosting.folder is not None, "it hosts already"

    async def load(folder: Path) -> OriginModel:
        return await device.run(lambda: OriginModel(folder, precision, "origin", device.num_threads))

    model = await use_fetched(hosting.folder, lambda: hosting.fetch(hosting.held[0]), load)
    return Origin(member.node, model, device, (), member.directory)


async def _watch(member: "Member", hosting: "Hosting", tell: Reporter) -> None:
    """Say who comes and goes, and what is missing, whenever that changes."""
    from manyhands.member.view import missing_spans, say_missing

    known, said = _present(member), ""
    complained: set[str] = set()
    while True:
        spans = missing_spans(hosting.kind, member.records())
        line = say_missing(spans, hosting.weights.shape, hosting.budget.tokens)
        if line != said:
            said = line
            text = f"{hosting.weights.name}: {line or 'every layer is held'}"
            tell("missing", text, layers=[str(span) for span in spans])
        for complaint in set(member.complaints()) - complained:
            complained.add(complaint)
            tell("complaint", complaint)
        async with member.directory.changed:
            await member.directory.changed.wait()
        await asyncio.sleep(QUIET_S)
        present = _present(member)
        for node in known.keys() - present.keys():
            tell("gone", f"{known[node]} has left", node=node)
        for node in present.keys() - known.keys():
            tell("came", f"{present[node]} has come", node=node)
        known = present


def _present(member: "Member") -> dict[NodeId, str]:
    return {record.node: record.name for record in member.records() if record.node != member.id}
