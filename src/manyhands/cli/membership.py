"""What `up` and `join` run: a member from its options to its leaving, and the lines it says on the way."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.aside import entered_aside
from manyhands.cli import gateway, options
from manyhands.cli.ahead import import_ahead
from manyhands.cli.background import go_on_in_background
from manyhands.cli.gateway import ApiPlan
from manyhands.cli.leaving import leave
from manyhands.cli.member_options import MemberOptions, config_of
from manyhands.cli.process import steady_memory
from manyhands.cli.progress import doing, end_lines
from manyhands.cli.reporter import Reporter, keep_telling, tell_invitation, tell_page, tell_serving
from manyhands.cli.signals import StopSignals
from manyhands.config import DIRECTORIES, RequestConfig
from manyhands.core import NodeId, Precision, Span
from manyhands.errors import BadRequest, ManyhandsError, ShardUnavailable

if TYPE_CHECKING:
    from manyhands.member.hosting import Hosting
    from manyhands.member.invite import Invitations
    from manyhands.member.member import Member
    from manyhands.origin import Origin, OriginModel
    from manyhands.swarm.ticket import Ticket
    from manyhands.worker.execute import Device

SILENT_S = 1.0  # after which is said who has not answered


@dataclass(frozen=True, slots=True)
class Named:
    """The model that `up` names, and how a new swarm keeps its directory ("": as configured)."""

    model: str
    precision: Precision | None
    directory: str = ""


def start(
    wish: MemberOptions,
    api: ApiPlan,
    routing: options.RouteOptions,
    ticket: "Ticket | None",
    named: Named | None,
    *,
    as_json: bool,
    while_stdin: bool,
    detach: bool = False,
) -> None:
    """Run a member until it is told to leave. `ticket` None: the settings' swarm, or this machine's, or a new one.

    `detach`: in a process of its own; this one ends when that serves.
    """
    tell = Reporter(as_json)
    if detach:
        tell.serves = go_on_in_background(wish.node_name, as_json=as_json).serves
    try:
        options.use_device(wish.device)  # after the fork, which what drives a GPU does not survive
        request = routing.for_api(options.settings().request, has_api=api.addr is not None)
        with doing(f"starting {named.model}" if named else "joining the swarm"):
            import_ahead(owns_requests=True, is_member=True, has_api=api.addr is not None)
            if api.addr is not None:
                from manyhands.cli.drafters import fetch_named

                fetch_named(request.draft)
            options.run(_run(wish, api, request, ticket, named, tell, while_stdin))
    except ManyhandsError as error:
        if as_json:
            tell("error", str(error), code=error.code)
        raise


async def _run(
    wish: MemberOptions,
    api: ApiPlan,
    request: RequestConfig,
    ticket: "Ticket | None",
    named: Named | None,
    tell: Reporter,
    while_stdin: bool,
) -> None:
    from manyhands.cli.connect import member_transport
    from manyhands.cli.runfile import run_file
    from manyhands.cli.tls import own_key, own_key_file
    from manyhands.config import home_from_env
    from manyhands.member.home import Running, announced, starting_ticket
    from manyhands.member.member import Member
    from manyhands.swarm.ticket import Ticket
    from manyhands.worker.execute import device_of_process

    began = time.monotonic()  # what comes now is not Python loading libraries
    home = home_from_env()
    name = wish.node_name
    key = own_key(wish.key)
    found = options.settings()
    wanted = (named.directory if named else "") or found.swarm.directory
    if ticket is None and found.swarm.ticket:
        ticket = Ticket.parse(found.swarm.ticket)
    ticket = starting_ticket(home, ticket) or Ticket.new(name, wanted)
    ticket.agree(wanted)
    config = config_of(wish, name, key, ticket, found)
    if named is not None:
        _check_servable(named.model, home, with_text=api.addr is not None)
    alone = run_file(name, own_key_file(wish.key))
    with StopSignals(while_stdin=while_stdin, node=name) as signals, alone, device_of_process(wish.threads) as device:
        made = member_transport(key, ticket, config)

        async def work() -> None:
            async with Member(key, ticket, config, made, worker=found.worker, request=request) as member:
                me = Running(name, os.getpid(), member.id, ticket.name, str(member.addresses[0]))
                async with entered_aside(announced(home, me)) as announce:
                    await _serve(member, api, named, device, home, tell, announce, signals, began)

        await signals.run(work())
        tell("left", "left")
        signals.check_interrupted()


def _check_servable(name: str, home: Path, *, with_text: bool) -> None:
    """Before a swarm is founded: raise ModelError if `name` is a model of this disk of which no layer can be served or,
    `with_text`, that cannot be asked for want of a tokenizer. Blocking.
    """
    from manyhands.checkpoint.folder import read_entries
    from manyhands.program.families import read_program
    from manyhands.text.tokenizer import load_tokenizer
    from manyhands.weights.here import folder_named

    if (folder := folder_named(name, home)) is None:
        return
    read_program(folder)
    read_entries(folder)
    if with_text:
        load_tokenizer(folder)


async def _serve(
    member: "Member",
    api: ApiPlan,
    named: Named | None,
    device: "Device",
    home: Path,
    tell: Reporter,
    announce: Callable[[str], None],
    signals: StopSignals,
    began: float,
) -> None:
    """Come in and host, then stay."""
    from manyhands.member.hosting import Hosting
    from manyhands.weights.shelf import in_use

    with doing(f"calling the nodes of swarm {member.ticket.name}") as bar:
        await _meet(member, named, tell)
        bar.say(f"reading {named.model}" if named else "asking the swarm for its model")
        weights = await _weights(member, named, home, bar)
        bar.say(f"choosing and loading layers of {weights.name}")
        hosting = Hosting(member, weights, device, home, bar, tell.line, with_ends=_is_origin(api, member))
        choice = await hosting.start()
    assert hosting.folder is not None, "it hosts already"
    async with entered_aside(in_use(hosting.folder)):
        await _stay(member, hosting, choice.why, api, device, home, tell, announce, signals, began)


async def _stay(
    member: "Member",
    hosting: "Hosting",
    why: str,
    api: ApiPlan,
    device: "Device",
    home: Path,
    tell: Reporter,
    announce: Callable[[str], None],
    signals: StopSignals,
    began: float,
) -> None:
    """Announce what is served, answer, until told to leave; then hand over."""
    from manyhands.member.home import keep_ticket, save_ticket, update_ticket
    from manyhands.member.invite import Invitations
    from manyhands.member.lan_presence import present_on_lan

    await asyncio.to_thread(save_ticket, home, member.remembered())
    member.node.start(keep_ticket(home, member))
    signals.begin_serving()
    tell_serving(member, hosting, tell, why, time.monotonic() - began)
    member.start_until_leaving(hosting.balancer.keep())
    async with contextlib.AsyncExitStack() as stack:
        advertised = await stack.enter_async_context(present_on_lan(member, hosting.weights.name, tell.line))
        invitations = Invitations(member, advertised, tell.line)
        await stack.enter_async_context(_gateway(api, hosting, device, home, tell, announce, invitations))
        await stack.enter_async_context(steady_memory())
        end_lines()
        await tell_invitation(invitations, tell, shows_code=api.is_told)
        tell.serves()
        watch = asyncio.ensure_future(keep_telling(member, hosting, tell))
        try:
            await signals.leaving()
        finally:
            watch.cancel()
            try:
                await asyncio.to_thread(update_ticket, home, member.remembered())
            except ManyhandsError as error:  # the disk is full, say: sessions are handed over all the same
                tell.line(f"the addresses of members are not remembered: {error}")
        await leave(member, invitations, tell)


# -- the parts --------------------------------------------------------------------------------------------------------


async def _meet(member: "Member", named: Named | None, tell: Reporter) -> None:
    """Call the swarm. `up` may be the first one back, so it goes on alone; `join` needs a member, wherever that is by now."""
    from manyhands.member.lan_presence import met_on_lan

    late = asyncio.get_running_loop().call_later(SILENT_S, _tell_silence, member, tell)
    try:
        if member.config.scope != "off":
            await member.meet()
    except ShardUnavailable as error:
        late.cancel()
        if named is not None:
            tell.line(f"alone so far: {error}")
        elif not await met_on_lan(member):
            raise
    finally:
        late.cancel()
    _say_met(member, tell)


def _say_met(member: "Member", tell: Reporter) -> None:
    others = sorted({record.name for record in member.records() if record.node != member.id})
    who = f"with {', '.join(others)}" if others else "no other node yet"
    name, kind = member.ticket.name, member.ticket.directory
    text = f"swarm {name}, {who}" + f", directory by {kind}" * (kind != DIRECTORIES[0])
    tell("swarm", text, swarm=name, directory=kind, node=member.id, others=others)


def _tell_silence(member: "Member", tell: Reporter) -> None:
    """Who is called, where none of them has answered yet."""
    from manyhands.member.bootstrap import DIAL_S

    addresses = member.bootstrap.addresses()
    if addresses and not member.bootstrap.answered():
        more = f" and {len(addresses) - 3} more" if len(addresses) > 3 else ""
        tell.line(f"no answer yet from {', '.join(map(str, addresses[:3]))}{more}: waiting {DIAL_S:g} s in all")


async def _weights(member: "Member", named: Named | None, home: Path, bar: Any) -> Any:
    """The model: as named, or the one of the swarm that lacks most."""
    from manyhands.member.providers import provider_of
    from manyhands.member.view import missing_spans
    from manyhands.member.weights import kinds_of, known_kinds, weights_of, weights_soon

    def holders(kind: Any) -> list[Any]:
        found = [r for r in member.records() if kind.is_of(r) and r.node != member.id and member.book(r.node)]
        return [provider_of(member, record) for record in found]

    def is_linked(node: NodeId) -> bool:
        return member.node.pool.find(node, "control") is not None

    if named is not None:
        return await weights_of(named.model, named.precision, member.records(), home, bar, holders, is_linked)
    if member.config.scope == "off":
        raise BadRequest(
            "scope is off, so that no other node is called to say what to serve: join with another --scope"
        )
    if not await member.wait_until(lambda: bool(kinds_of(member.records())), 5.0):
        raise _without_model(member)
    known = known_kinds(member.records(), is_linked)
    kind = min(known, key=lambda kind: not missing_spans(kind, known[kind], with_spares=False))
    return await weights_soon(kind, holders, home, bar)


def _without_model(member: "Member") -> ManyhandsError:
    """Why no record of the swarm names a model, and what to do."""
    name, answered = member.ticket.name, member.bootstrap.answered()
    if complaints := member.complaints():
        return BadRequest(complaints[0])
    if answered and not any(record.node != member.id for record in member.records()):
        where = ", ".join(map(str, answered[:3]))
        return ShardUnavailable(
            f"{where} took the call and says nothing of swarm {name}: if another machine has a copy of this one's key, start "
            "this one with --key FILE; else stop that node and start it again, or join by the ticket of another member"
        )
    return BadRequest(f"swarm {name} serves no model yet: run `manyhands up MODEL` on one of its machines")


def _is_origin(api: ApiPlan, member: "Member") -> bool:
    """Whether requests are prepared for now and not with the first one: --api says so, or layers are kept here for them, which
    may be held by no other node then."""
    kept = member.node.request
    return api.addr is not None and (api.is_told or kept.fallback or kept.own_first > 0 or kept.own_last > 0)


@contextlib.asynccontextmanager
async def _gateway(
    api: ApiPlan,
    hosting: "Hosting",
    device: "Device",
    home: Path,
    tell: Reporter,
    announce: Callable[[str], None],
    invitations: "Invitations",
) -> AsyncIterator[None]:
    """The API of every model of the swarm. This member's own is loaded now if it `_is_origin`, else with a request."""
    if api.addr is None:
        yield
        return
    from manyhands.api.native.invite import invite_router
    from manyhands.api.native.switch import switch_router
    from manyhands.cli.drafters import load_drafter
    from manyhands.cli.own_layers import keep_layers
    from manyhands.member.models import SwarmModels
    from manyhands.member.view import view_of
    from manyhands.origin import Origin

    async def make(model: "OriginModel", fetch: Callable[[Span], Awaitable[Path]]) -> "Origin":
        member = hosting.member
        drafter = await load_drafter(model, member.node.request.draft)
        origin = Origin(member.node, model, device, (), member.directory, drafter)
        await keep_layers(origin, device, fetch)
        return origin

    with doing(f"reading the tokenizer of {hosting.weights.name}") as bar:
        models = SwarmModels(hosting, device, home, lambda: bar, make)
        origins = {hosting.weights.name: await models.load_hosted()} if _is_origin(api, hosting.member) else {}
    shown: list[str] = []  # the URL, once it is known

    async def view() -> dict[str, Any]:
        return await asyncio.to_thread(view_of, hosting.snapshot("".join(shown)))

    member = hosting.member
    most, secret = member.node.worker.config.max_sessions, member.ticket.secret
    switch = switch_router(lambda on: member.switch(on=on), lambda: not member.node.worker.is_off)
    async with api.open(origins, most, view, secret, [switch, invite_router(invitations)], models) as url:
        shown.append(url)
        await asyncio.to_thread(announce, url)
        told = gateway.told_url(url)
        tell("api", f"chat in a browser: {told}/\nAPI for programs:  {told}/v1", api=url)
        if api.is_told:
            await tell_page(url, tell)
        yield
