"""What lets other machines into the swarm, for its owner and admins alone: the code that is shown, and the ticket."""

import asyncio
from typing import Any, Protocol

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse

from manyhands.api.access import admins_only
from manyhands.swarm.qr import qr_rows
from manyhands.swarm.ticket import Ticket


class Inviting(Protocol):
    """A member that lets others in (member/invite.py)."""

    def ticket(self) -> Ticket:
        """The ticket to give to others."""

    def told(self) -> dict[str, Any] | None:
        """The code as people read it, `seconds_left` and `tries_left`; None while none is shown."""

    async def show(self) -> None:
        """Show a new code. Raises BadRequest where no other machine could use it."""

    async def withdraw(self) -> None:
        """Show none."""


def invite_router(inviting: Inviting) -> APIRouter:
    """/api/invite, for admins; its answers are not to be kept."""
    router = APIRouter(tags=["swarm"], dependencies=[Depends(admins_only)])

    @router.get("/api/invite", summary="What lets a machine join", response_model=dict[str, Any])
    async def look() -> JSONResponse:
        """The swarm's ticket, as text and as a QR code (rows of 0 and 1), and the code that is shown (or null)."""
        ticket = inviting.ticket()
        qr = await asyncio.to_thread(qr_rows, ticket.encode())
        return _kept_by_none({"swarm": ticket.name, "ticket": ticket.encode(), "qr": qr, "code": inviting.told()})

    @router.post("/api/invite/code", summary="Show a new code", response_model=dict[str, Any])
    async def renew() -> JSONResponse:
        """A new code for machines of the same network; the one before opens nothing any more."""
        await inviting.show()
        return _kept_by_none({"swarm": inviting.ticket().name, "code": inviting.told()})

    @router.delete("/api/invite/code", summary="Show no code", response_model=dict[str, Any])
    async def end() -> JSONResponse:
        """The code that is shown opens nothing any more, and its listener is closed."""
        await inviting.withdraw()
        return _kept_by_none({"swarm": inviting.ticket().name, "code": inviting.told()})

    return router


def _kept_by_none(told: dict[str, Any]) -> JSONResponse:
    return JSONResponse(told, headers={"cache-control": "no-store"})
