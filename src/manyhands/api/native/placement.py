"""A plan carried out: which nodes are asked to serve other layers, in which order, and what each of them says.

Each node decides for itself (place/orders.py), and none leaves layers that no other serves: what is refused is asked again once
another has moved.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from manyhands.api.gateway import Gateway
from manyhands.api.gauges import known_offers
from manyhands.api.native.workers import WorkerView, find_worker, reassign, route_now
from manyhands.core import Span
from manyhands.errors import Conflict, ManyhandsError, ShardUnavailable, WeightsMismatch
from manyhands.origin import Origin
from manyhands.place.living import WORTH, LivingSwarm, PlannedMove, is_worth, reassignments, token_s_of
from manyhands.place.orders import PAUSE_S
from manyhands.route.permit import gaps_of

ROUNDS: Final = 3  # in which a node that was needed where it is, is asked again
TRIES: Final = 3  # of a registered node, for fewer layers each time


async def apply_plan(
    gateway: Gateway, model: str, origin: Origin, swarm: LivingSwarm, plan: Mapping[str, Any], *, force: bool
) -> dict[str, Any]:
    """Ask the nodes of `plan` (its `hops`: machine, layers) to serve what it says. `status`: kept, applied, partly or refused.

    Deadline: that of `reassign` for each move and round.
    """
    hops = [(str(hop["machine"]), Span.parse(hop["layers"])) for hop in plan["hops"]]
    moves = reassignments(swarm, hops)
    if not moves:
        return {"status": "kept", "moves": [], "said": "every node holds its part already"}
    placed = [(swarm.task.fleet.get_machine(name), span) for name, span in hops]
    if not force and not is_worth(swarm, placed, await _token_s_now(origin, swarm)):
        said = f"no node moves for less than {WORTH} times the speed of the route of now"
        return {"status": "kept", "moves": [], "said": said}
    told = await move_all(gateway, model, moves, force=force)
    num_refused = sum(each["status"] == "refused" for each in told)
    status = "applied" if not num_refused else "refused" if num_refused == len(told) else "partly"
    return {"status": status, "moves": told, "said": ""}


async def _token_s_now(origin: Origin, swarm: LivingSwarm) -> float | None:
    """What a token takes on the route of now; None without one."""
    try:
        return token_s_of(swarm, [(offer.node, offer.info.span) for offer in await route_now(origin)])
    except (ShardUnavailable, WeightsMismatch):
        return None


async def move_all(gateway: Gateway, model: str, moves: Sequence[PlannedMove], *, force: bool) -> list[dict[str, Any]]:
    """Ask for one move after the other; those refused again, as long as others have moved."""
    told = {move.node: _said(move, "refused", "") for move in moves}
    for _ in range(ROUNDS):
        has_moved = False
        for move in moves:
            if told[move.node]["status"] != "refused":
                continue
            try:
                answer = await reassign(gateway, find_worker(gateway, move.node), str(move.span), model, force=force)
                told[move.node] = _said(move, answer["status"], answer["said"])
                has_moved = True
            except ManyhandsError as error:
                told[move.node] = _said(move, "refused", str(error))
        if not has_moved:
            break
    return list(told.values())


def _said(move: PlannedMove, status: str, said: str) -> dict[str, Any]:
    held = [str(span) for span in move.held]
    return {"node": move.node, "name": move.name, "from": held, "to": str(move.span), "status": status, "said": said}


# -- a node that is registered ----------------------------------------------------------------------------------------


async def assign(gateway: Gateway, worker: WorkerView, layers: str = "") -> str:
    """Ask a node to serve `layers`, or ("") the first run of layers that no node holds; what it says, "" if nothing is missing.

    A run that it has no room for is asked for in halves. A refusal is what it says: it serves what it did before.
    """
    found = [(layers, None)] if layers else [(str(gap), model) for model, gap in _missing(gateway)]
    if not found:
        return ""
    text, model = found[0]
    span, said = Span.parse(text), ""
    for _ in range(1 if layers else TRIES):
        try:
            return str((await reassign(gateway, worker, str(span), model, force=False))["said"])
        except (Conflict, ShardUnavailable) as error:
            said = str(error)
        if len(span) == 1:
            break
        span = Span(span.start, span.start + len(span) // 2)
        await asyncio.sleep(PAUSE_S)
    return said


def _missing(gateway: Gateway) -> list[tuple[str, Span]]:
    """Runs of layers that no node in use holds, of models that are asked for here."""
    found: list[tuple[str, Span]] = []
    for model, origin in gateway.origins.items():
        offers = [
            o for o in known_offers(gateway, model) if o.node not in origin.routes.evicted and not o.info.is_spare
        ]
        found += [(model, gap) for gap in gaps_of(offers, origin.model.num_layers)]
    return found
