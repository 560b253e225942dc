"""What lets other machines in: the code that this member shows, one at a time, and the ticket (docs/operations.md, Join)."""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from manyhands.errors import BadRequest
from manyhands.net.listener import BACKLOG
from manyhands.net.pairing.code import CODE_S, MAX_FAILURES, JoinCode, draw_code, shown_code
from manyhands.net.pairing.host import CodeAttempt, PairingHost
from manyhands.swarm.lan import Advertised
from manyhands.swarm.ticket import Ticket

if TYPE_CHECKING:
    from manyhands.member.member import Member

logger = logging.getLogger(__name__)

MINUTES = CODE_S / 60


class Invitations:
    """The codes of one member. `advertised` None: it is not announced on the local network, so it shows none.

    `say` gets lines for people; none holds the code. The listener is a task of the member's node.
    """

    def __init__(self, member: "Member", advertised: Advertised | None, say: Callable[[str], None]) -> None:
        self.member = member
        self._advertised, self._say = advertised, say
        self._host: PairingHost | None = None
        self._serving: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    def ticket(self) -> Ticket:
        """The ticket to give to others."""
        return self.member.invitation()

    def told(self) -> dict[str, Any] | None:
        """The code as people read it, `seconds_left` and `tries_left`; None while none is shown."""
        now = asyncio.get_running_loop().time()
        if self._host is None or not (code := self._host.code).is_live(now):
            return None
        left = {"seconds_left": round(code.until - now), "tries_left": code.tries_left}
        return {"code": shown_code(code.text), **left}

    async def show(self) -> None:
        """Show a new code in place of the one that is shown. Raises BadRequest where no other machine could use it."""
        async with self._turn:
            await self._withdraw()
            if self._advertised is None or not self._advertised.is_sent:
                raise BadRequest(
                    "a code needs a node that others on this network can find: start it without --scope off, "
                    "--listen 127.0.0.1:PORT and --advertise of a name, where multicast works; or use the ticket"
                )
            listening = _listen(self.member.config.listen.host, self.member.addresses[0].port)
            code = JoinCode(draw_code(secrets.randbelow), asyncio.get_running_loop().time() + CODE_S)
            host = PairingHost(code, self.member.ticket.fingerprint, lambda: self.ticket().encode(), self._on_attempt)
            self._host, port = host, listening.getsockname()[1]
            self._serving = self.member.node.start(self._serve(host, listening))
            await self._advertise(port)

    async def withdraw(self) -> None:
        """Show no code any more."""
        async with self._turn:
            await self._withdraw()

    async def _withdraw(self) -> None:
        if self._host is not None and self._serving is not None:
            self._host.withdraw()
            await asyncio.wait([self._serving])
        self._host = self._serving = None

    async def _serve(self, host: PairingHost, listening: socket.socket) -> None:
        try:
            await host.serve(listening)
        except Exception:  # what lets others in must not end the node
            logger.exception("the listener for codes failed")
            host.withdraw()
        if not host.code.is_withdrawn:
            why = (
                f"{MINUTES:g} minutes have passed" if host.code.tries_left else f"{MAX_FAILURES} wrong codes were tried"
            )
            self._say(f"the code opens nothing any more ({why}): manyhands code shows a new one")
        await self._advertise(None)

    async def _advertise(self, port: int | None) -> None:
        """A network that is gone takes no news: the code is then found by no one, and dies in time."""
        assert self._advertised is not None, "a code is shown where it can be found"
        with contextlib.suppress(OSError):
            await self._advertised.show_code(port)

    def _on_attempt(self, attempt: CodeAttempt) -> None:
        if attempt.is_right:
            self._say(f"the machine at {attempt.host} typed the code and has the ticket")
        else:
            left = f"{attempt.tries_left} {'try' if attempt.tries_left == 1 else 'tries'} left"
            self._say(f"a wrong code was typed at {attempt.host}: {left}")


def _listen(host: str, node_port: int) -> socket.socket:
    """A listening socket beside the node's: at the next port, which a firewall may have open too, else at any.

    Raises BadRequest.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in (node_port + 1 if node_port < 65535 else 0, 0):
        try:
            listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if port == 0:
                raise BadRequest(f"no port of {host} is free for a code ({error})") from error
        else:
            listening.setblocking(False)
            return listening
    raise AssertionError("the last port is any")
