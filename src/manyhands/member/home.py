"""What a machine keeps of its swarm in $MANYHANDS_HOME, and what it says there of the nodes that run on it.

swarm.ticket     the ticket of the swarm that this machine belongs to (0600), with addresses of members as they come and go
                 (`keep_ticket`): `up` and `join` resume it, and call there too where a ticket is given
run/NAME.json    a running node (0600): pid and when it began, node, swarm, listen, api
run/api-PORT.secret  what proves to the gateway at that port that its owner asks (0600; cli/owner.py)
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

from manyhands.core import NodeId
from manyhands.errors import BadRequest, ManyhandsError, TicketError
from manyhands.files import alone, private_folder, read_plain, removed, write_private
from manyhands.member.process import is_running, start_ticks
from manyhands.swarm.ticket import Ticket

if TYPE_CHECKING:
    from manyhands.member.member import Member

TICKET = "swarm.ticket"
SAVE_S = 1.0
_MAX_BYTES = 1 << 16  # of a file here


def load_ticket(home: Path) -> Ticket | None:
    """The ticket of this machine's swarm, None if it belongs to none. Raises TicketError, BadRequest."""
    try:
        return Ticket.parse(read_plain(home / TICKET, _MAX_BYTES).decode())
    except FileNotFoundError:
        return None
    except TicketError as error:
        raise TicketError(
            f"{home / TICKET}: {error}; or remove the file: this machine belongs to no swarm then"
        ) from error
    except (OSError, UnicodeDecodeError, BadRequest) as error:
        raise BadRequest(f"{home / TICKET} cannot be read ({error}): fix its rights, or remove it") from error


def starting_ticket(home: Path, given: Ticket | None) -> Ticket | None:
    """`given`, and behind its addresses those that this machine has saved of the same swarm: one that is given at each start,
    by a service say, names where members once were. Without it the saved one.

    Raises as load_ticket, unless one is given.
    """
    try:
        saved = load_ticket(home)
    except ManyhandsError:
        if given is None:
            raise
        return given
    if given is None or saved is None or saved.secret != given.secret:
        return given or saved
    found = replace(given, addresses=saved.addresses)
    for addr in reversed(given.addresses):
        found = found.with_address(addr)
    return found


def save_ticket(home: Path, ticket: Ticket) -> None:
    """Remember the swarm. Waits for the disk. Raises BadRequest if the folder cannot be written."""
    write_private(home / TICKET, ticket.encode() + "\n")


def update_ticket(home: Path, ticket: Ticket) -> None:
    """As save_ticket, unless the file has another secret by now: a member that leaves must not undo `ticket rotate`."""
    known = load_ticket(home)
    if known is None or known.secret == ticket.secret:
        save_ticket(home, ticket)


async def keep_ticket(home: Path, member: "Member") -> NoReturn:
    """Save the ticket whenever the members that are linked change, at most once in SAVE_S.

    So a node that is killed and comes back at another address finds its swarm. A file that cannot be written is told in
    `member.notes` until it can be.
    """
    import asyncio

    saved: Ticket | None = None
    told: list[str] = []
    while True:
        ticket = member.remembered()
        if ticket != saved:
            before, told = told, []
            try:
                await asyncio.to_thread(update_ticket, home, ticket)
                saved = ticket
            except ManyhandsError as error:
                told = [f"the addresses of members are not remembered: {error}"]
            for note in before:
                member.notes.remove(note)
            member.notes += told
        async with member.directory.changed:
            await member.directory.changed.wait()
        await asyncio.sleep(SAVE_S)


@dataclass(frozen=True, slots=True)
class Running:
    """A node that runs on this machine. `api`: the URL of its gateway, "" if it has none. `began`: see process.py."""

    name: str
    pid: int
    node: NodeId
    swarm: str
    listen: str
    api: str = ""
    began: int | None = None


@contextlib.contextmanager
def announced(home: Path, running: Running) -> Iterator[Callable[[str], None]]:
    """Say that a node runs, until the block ends; yields what to call with the URL of its gateway."""
    list_running(home)  # removes what one that was killed has left, which may have had this name
    running = replace(running, began=start_ticks(running.pid))
    path = home / "run" / f"{running.name}.json"

    def write(api: str) -> None:
        with alone(private_folder(path.parent)):  # see _remove_dead
            write_private(path, json.dumps(asdict(replace(running, api=api))), is_durable=False)

    write(running.api)
    try:
        yield write
    finally:
        removed(path)


def list_running(home: Path) -> list[Running]:
    """The nodes that run on this machine, by name; files of dead processes are removed."""
    found = []
    for path in sorted((home / "run").glob("*.json")):
        try:
            running = Running(**json.loads(said := read_plain(path, _MAX_BYTES)))
            is_alive = is_running(running.pid, running.began, path.stat().st_mtime)
        except (OSError, ValueError, TypeError, RecursionError, BadRequest):
            continue
        if is_alive:
            found.append(running)
        else:
            _remove_dead(path, said, running.api)
    return found


def _remove_dead(path: Path, said: bytes, api: str) -> None:
    """Remove the file of a dead process, and the secret of its gateway at `api`, unless it says something else by now: its node
    may have started again. Another gateway has its port if the secret is newer."""
    with contextlib.suppress(OSError, ValueError), alone(path.parent):
        if path.read_bytes() == said:
            written_at = path.stat().st_mtime_ns
            path.unlink()
            if api and (secret := secret_path(path.parent, urlsplit(api).port)).stat().st_mtime_ns <= written_at:
                secret.unlink()


def secret_path(run: Path, port: int | None) -> Path:
    """The file in the folder `run` by which the owner proves to the gateway at `port` who asks."""
    return run / f"api-{port}.secret"


def check_name(name: str) -> str:
    """`name` itself if it can name a node and a file. Raises BadRequest."""
    if "/" in name or name in ("", ".", "..") or not name.isprintable() or len(name.encode()) > 64:
        raise BadRequest(f"{name!r:.80} cannot name a node: 1 to 64 printable characters without a slash")
    return name
