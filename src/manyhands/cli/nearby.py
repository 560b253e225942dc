"""The swarms that a machine sees on its network, and joining one by the code that a machine of it shows."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import typer

from manyhands.cli.progress import clear_line, doing
from manyhands.cli.signals import INTERRUPTED
from manyhands.core import NodeAddr
from manyhands.errors import BadRequest, LinkClosed, WrongCode
from manyhands.net.own_address import reachable
from manyhands.net.pairing.code import TICKET_WAY, read_code
from manyhands.net.pairing.dial import ask_ticket
from manyhands.plain import one_line
from manyhands.swarm.lan import Browser, Nearby
from manyhands.swarm.ticket import MAX_ADDRESSES, PREFIX, Ticket

T = TypeVar("T")

SEARCH_S: Final = 5.0  # for the first swarm
SETTLE_S: Final = 0.8  # for others, after the last news
MAX_TYPED_CODES: Final = 3  # a machine that pretends to show the code gets one guess at each


@dataclass(frozen=True, slots=True)
class Row:
    """A swarm that is seen; `shown`: the machine that shows a code, None if none does. One row for each that shows one."""

    swarm: str
    fingerprint: str
    models: tuple[str, ...]
    num_nodes: int
    shown: Nearby | None

    def line(self) -> str:
        """As a person reads it."""
        what = ", ".join(self.models) if self.models else "no model yet"
        nodes = f"{self.num_nodes} {'node' if self.num_nodes == 1 else 'nodes'}"
        code = f"code on {machine(self.shown)}" if self.shown else "no code is shown: run `manyhands code` there"
        return one_line(f"{self.swarm}: {what}, {nodes}, {code}", 300)


def machine(near: Nearby) -> str:
    """What to call a machine."""
    return near.name or near.addresses[0].host


def rows_of(found: Collection[Nearby]) -> list[Row]:
    """What was found, those with a code first, by name. Pure."""
    rows: list[Row] = []
    for fingerprint in {near.fingerprint for near in found}:
        nodes = [near for near in found if near.fingerprint == fingerprint]
        models = tuple(sorted({near.model for near in nodes if near.model}))
        showing = sorted(
            (near for near in nodes if near.code_port is not None), key=lambda near: (near.name, near.node)
        )
        base = Row(nodes[0].swarm, fingerprint, models, len(nodes), None)
        rows += [replace(base, shown=near) for near in showing] or [base]
    return sorted(
        rows, key=lambda row: (row.shown is None, row.swarm, row.fingerprint, machine(row.shown) if row.shown else "")
    )


def chosen(rows: Sequence[Row], name: str) -> Row:
    """The row that `name` means: a swarm (name or fingerprint) or the machine that shows the code; "": the only one.

    Raises BadRequest if none or several fit, with what to type.
    """
    fits = _meant(rows, name)
    if len(fits) == 1:
        return fits[0]
    seen = "; ".join(row.line() for row in rows)
    if not fits:
        raise BadRequest(f"--swarm {name!r:.80}: not seen on this network, which has {seen or 'none'}")
    ways = ", ".join(f"--swarm {_unique(row, rows)}" for row in fits)
    raise BadRequest(f"{len(fits)} swarms or machines fit: say which with one of {ways}")


def _meant(rows: Sequence[Row], name: str) -> list[Row]:
    return [
        row
        for row in rows
        if name in ("", row.swarm, row.fingerprint) or (row.shown is not None and name == machine(row.shown))
    ]


def _unique(row: Row, rows: Sequence[Row]) -> str:
    """What names this row and no other."""
    names = [row.swarm, *([machine(row.shown)] if row.shown else []), row.fingerprint]
    return next(
        (n for n in names if sum(n in (r.swarm, r.shown and machine(r.shown)) for r in rows) == 1), row.fingerprint
    )


# -- looking ----------------------------------------------------------------------------------------------------------


async def search(is_enough: Callable[[list[Row]], bool]) -> list[Row]:
    """What the network shows: until `is_enough` has been so for SETTLE_S, SEARCH_S at most. Raises BadRequest."""
    news = asyncio.Event()
    browser = Browser(news.set)
    loop = asyncio.get_running_loop()
    end = loop.time() + SEARCH_S
    try:
        async with browser.listen():
            while (now := loop.time()) < end:
                rest = min(SETTLE_S, end - now) if is_enough(rows_of(browser.found.values())) else end - now
                news.clear()
                try:
                    async with asyncio.timeout(rest):
                        await news.wait()
                except TimeoutError:
                    break
    except OSError as error:
        raise BadRequest(f"this network cannot be searched ({error}): join {TICKET_WAY}") from error
    return rows_of(browser.found.values())


def look(name: str) -> list[Row]:
    """The swarms on this network; `name`: the one that is wanted. Raises BadRequest, with what to do, if there is none."""

    def is_enough(rows: list[Row]) -> bool:
        return any(row.shown and name in ("", row.swarm, row.fingerprint, machine(row.shown)) for row in rows)

    with doing("looking for swarms on this network"):
        rows = _run(search(is_enough))
    if not rows:
        here = reachable(NodeAddr("0.0.0.0", 0)).host
        raise BadRequest(
            f"no swarm is seen from this machine ({here}): is `manyhands up` running on the same network (the same Wi-Fi, "
            f"no guest network), and do both firewalls let UDP port 5353 (mDNS) in? Otherwise join {TICKET_WAY}"
        )
    return rows


def _run(main: Coroutine[Any, Any, T]) -> T:
    """Run it on asyncio's own loop, which leaves no thread behind: `join -d` forks next, and a process that is forked while
    libuv's threads run waits for them at its end, although it has none of them.
    """
    return asyncio.run(main)


# -- joining ----------------------------------------------------------------------------------------------------------


def ticket_by_code(code: str, name: str) -> Ticket:
    """The ticket of a swarm on this network, by `code` (read_code); `name`: as --swarm has it.

    Raises BadRequest, WrongCode, LinkClosed, with what to do.
    """
    rows = look(name)
    shown = [row for row in rows if row.shown]
    return _ticket(chosen(shown if _meant(shown, name) else rows, name), code)


def ask_for_code(name: str) -> Ticket:
    """As ticket_by_code, after a person has chosen from the list and typed the code. A typo is asked again."""
    rows = look(name)
    row = chosen(rows, name) if name else _choose(rows)
    tried = 0
    while True:
        row = row if row.shown else _wait_for_code(row)
        if row.shown is None:
            continue
        typed = _prompt(f"the code that {one_line(machine(row.shown))} shows").strip()
        if typed.startswith(PREFIX):
            return Ticket.parse(typed)
        try:
            code = read_code(typed)
        except BadRequest as error:
            typer.echo(str(error), err=True)
            continue
        try:
            return _ticket(row, code)
        except (WrongCode, LinkClosed) as error:
            tried += 1
            if tried == MAX_TYPED_CODES:
                raise
            typer.echo(one_line(error, 600), err=True)
            row = _again(row) if isinstance(error, LinkClosed) or not error.tries_left else row


def _wait_for_code(row: Row) -> Row:
    """What is seen of a swarm that shows no code, after its owner was asked to show one."""
    text = f"{row.swarm} shows no code: run `manyhands code` on one of its machines, then press Enter here"
    _prompt(one_line(text, 300), default="", show_default=False)
    return _again(row)


def _choose(rows: Sequence[Row]) -> Row:
    """Show the list; ask which one if there are several."""
    clear_line()
    for number, row in enumerate(rows, 1):
        typer.echo(f"  {number}  {row.line()}", err=True)
    if len(rows) == 1:
        return rows[0]
    while (number := _prompt("which one", type=int, default=1)) not in range(1, len(rows) + 1):
        typer.echo(f"{number}: it is 1 to {len(rows)}", err=True)
    return rows[number - 1]


def _prompt(text: str, **options: Any) -> Any:
    """What is typed. Raises typer.Exit, with the code of what is interrupted, for Ctrl-C and Ctrl-D."""
    try:
        return typer.prompt(text, **options)
    except typer.Abort as error:
        typer.echo(err=True)
        raise typer.Exit(INTERRUPTED) from error


def _again(row: Row) -> Row:
    """What the network shows of this swarm now: its machine may show another code, at another port."""
    try:
        now = [r for r in look(row.fingerprint) if r.fingerprint == row.fingerprint]
    except BadRequest:
        now = []
    same = [r for r in now if r.shown and row.shown and r.shown.node == row.shown.node]
    return next(iter(same or now), replace(row, shown=None))


def _ticket(row: Row, code: str) -> Ticket:
    """The ticket that the machine of `row` hands over, its own address first. Raises as ask_ticket, BadRequest."""
    near = row.shown
    if near is None or near.code_port is None:
        raise BadRequest(
            f"no machine of swarm {row.swarm} shows a code: run `manyhands code` on one of them, or join {TICKET_WAY}"
        )
    text = _ask(near, [NodeAddr(addr.host, near.code_port) for addr in near.addresses], code)
    ticket = Ticket.parse(text)
    if ticket.fingerprint != row.fingerprint:
        raise BadRequest(f"{machine(near)} gave the ticket of another swarm ({ticket.name}): join it by its own ticket")
    return replace(ticket, addresses=tuple(dict.fromkeys((near.addresses[0], *ticket.addresses)))[:MAX_ADDRESSES])


def _ask(near: Nearby, ways: list[NodeAddr], code: str) -> str:
    """What the machine that shows the code hands over. Raises as ask_ticket, with what to do."""
    try:
        with doing(f"showing the code to {machine(near)}"):
            return _run(ask_ticket(ways, near.fingerprint, code))
    except LinkClosed as error:
        raise LinkClosed(
            f"{machine(near)} cannot be asked ({error}): its code may have ended (`manyhands code` there shows one), or "
            f"its firewall keeps TCP port {ways[0].port} shut; or join {TICKET_WAY}"
        ) from error
