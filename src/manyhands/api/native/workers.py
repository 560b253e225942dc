"""The nodes behind a gateway, as an operator sees and moves them (lattice9 calls a node a worker).

Reading asks no node: links know what their peer hosts and how far away it is. The origin evicts (origin/routes.py), for
every model served here at once.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from manyhands.api.gateway import Gateway
from manyhands.api.gauges import known_offers, sessions_by_node
from manyhands.api.jobs import hop_object, in_ms
from manyhands.core import EdgeHealth, NodeAddr, NodeId, Span
from manyhands.errors import BadRequest, Conflict, LinkClosed, NotFound, ShardUnavailable, WeightsMismatch
from manyhands.net.transport import Link
from manyhands.origin import Origin
from manyhands.origin.eviction import Evicted
from manyhands.route.search import Offer

# How long a node that is named by its address may take to answer.
REGISTER_TIMEOUT_S = 5.0
REASSIGN_WAIT_S = 10.0  # for a node that moves: loading layers takes less, fetching them more
POLL_S = 0.05
MIN_PREFIX = 6  # hex digits of an id that may stand for it


@dataclass(slots=True)
class WorkerView:
    """A node and what it offers for models served here; no offers: not linked now (evicted, or named by the ticket)."""

    node: NodeId
    name: str = ""
    address: str = ""
    offers: list[tuple[str, Offer]] = field(default_factory=list)  # (model served here, span)
    is_evicted: bool = False
    num_sessions: int = 0
    edges: dict[str, EdgeHealth] = field(default_factory=dict)  # by lane

    @property
    def status(self) -> str:
        return "evicted" if self.is_evicted else "active" if self.offers else "unreachable"


def list_workers(gateway: Gateway) -> list[WorkerView]:
    """Every node known to the origins of this gateway, linked or not."""
    workers: dict[NodeId, WorkerView] = {}
    for model, origin in gateway.origins.items():
        for addr in origin.routes.addrs:
            if addr.node is not None:
                workers.setdefault(addr.node, WorkerView(addr.node, address=str(addr)))
        for offer in known_offers(gateway, model):
            worker = workers.setdefault(offer.node, WorkerView(offer.node))
            worker.name, worker.address = offer.name, str(offer.addr)
            worker.offers.append((model, offer))
        for node in origin.routes.evicted:
            workers.setdefault(node, WorkerView(node)).is_evicted = True
    for home in {id(o.node): o.node for o in gateway.origins.values()}.values():
        for node, count in sessions_by_node(home).items():
            workers.setdefault(node, WorkerView(node)).num_sessions += count
        for (node, lane), health in home.pool.health().items():
            if node in workers:
                workers[node].edges[lane] = health
    return sorted(workers.values(), key=lambda w: (w.offers[0][1].info.span.start if w.offers else 1 << 30, w.node))


async def meet(gateway: Gateway) -> None:
    """Dial the nodes of origins that have no open link yet: they were not asked for anything so far. At most ~2 s."""
    unlinked = [origin for model, origin in gateway.origins.items() if not known_offers(gateway, model)]
    await asyncio.gather(*(origin.routes.look_around() for origin in unlinked))


def find_worker(gateway: Gateway, name: str) -> WorkerView:
    """By node id, the first digits of one, or a name. Raises NotFound, Conflict if several are meant."""
    workers = list_workers(gateway)
    found = [w for w in workers if w.node == name] or [w for w in workers if w.name == name]
    if not found and len(name) >= MIN_PREFIX:
        found = [w for w in workers if w.node.startswith(name)]
    if len(found) > 1:
        raise Conflict(f"worker {name[:80]!r} may be {', '.join(w.node[:12] for w in found)}: use more of the id")
    if not found:
        raise NotFound(
            f"no worker {name[:80]!r} is known here: `manyhands workers` (GET /api/workers) lists those that are"
        )
    return found[0]


def evict(gateway: Gateway, worker: WorkerView, *, force: bool) -> Evicted:
    """Keep a node out until it is readmitted; sessions that run through it repair to others. Returns how many do.

    Raises Conflict if a model that has a route now would have none, unless forced: sessions that run then end there, new ones
    wait for others. Raises BadRequest for this process itself.
    """
    if any(worker.node == origin.node.transport.node for origin in gateway.origins.values()):
        raise BadRequest("this is the gateway's own node: stop it instead")
    if not force:
        _check_others_hold(gateway, worker)
    told = [origin.routes.evict(worker.node) for origin in gateway.origins.values()]
    return Evicted(sum(each.repaired for each in told), sum(each.finishing for each in told))


def _check_others_hold(gateway: Gateway, worker: WorkerView) -> None:
    for model, origin in gateway.origins.items():
        offers = [offer for offer in known_offers(gateway, model) if offer.node not in origin.routes.evicted]
        rest = [offer for offer in offers if offer.node != worker.node]
        if _has_route(origin, offers) and not _has_route(origin, rest):
            raise Conflict(
                f"no other node holds the layers of {model} that {worker.name or worker.node[:12]} does: add a node first, "
                "or evict it with --force (force=true; requests that run then end there, new ones wait for another node)"
            )


def readmit(gateway: Gateway, worker: WorkerView) -> None:
    """Let new sessions and repairs use the node again."""
    for origin in gateway.origins.values():
        origin.routes.readmit(worker.node)


async def reassign(gateway: Gateway, worker: WorkerView, to: str, model: str | None, *, force: bool) -> dict[str, Any]:
    """Ask a node to serve layers `to` ("0-7") instead; answers as InferD does (IN-R04). Deadline: that of Orders.ask, then
    REASSIGN_WAIT_S for the node to serve them: `status` is then "reassigned", else "accepted".

    Raises CutError, BadRequest, NotFound; Conflict, WeightsMismatch as the node refuses; ShardUnavailable if it is not there.
    """
    span = Span.parse(to)
    served = _model_of(gateway, worker, model)
    origin = await gateway.ensure(served)
    link = await _link_to(origin, worker)
    said = await origin.node.orders.ask(link, origin.model.id, origin.model.precision, span, is_forced=force)
    is_done = await _until_served(gateway, served, worker.node, span)
    status = "reassigned" if is_done else "accepted"
    return {"node_info": {"id": worker.node}, "new_stage": str(span), "status": status, "said": said}


def _model_of(gateway: Gateway, worker: WorkerView, model: str | None) -> str:
    """The model whose layers are meant: as named, else the only one. Raises BadRequest."""
    offered = {name for name, _ in worker.offers} or set(gateway.origins)
    if model is None and len(offered) != 1:
        raise BadRequest(f"model is missing: {worker.name or worker.node[:12]} may serve {', '.join(sorted(offered))}")
    return model or next(iter(offered))


async def _link_to(origin: Origin, worker: WorkerView) -> Link:
    """A control link to the node. Deadline: REGISTER_TIMEOUT_S. Raises ShardUnavailable."""
    who = worker.name or worker.node[:12]
    if (link := origin.node.pool.find(worker.node, "control")) is not None:
        return link
    if not worker.address:
        raise ShardUnavailable(f"{who} is not linked now, and has no address: is it running?")
    try:
        async with asyncio.timeout(REGISTER_TIMEOUT_S):
            return await origin.node.pool.get(replace(NodeAddr.parse(worker.address), node=worker.node), "control")
    except (LinkClosed, TimeoutError) as error:
        raise ShardUnavailable(f"{who} cannot be reached: {error or 'no answer'}") from error


async def _until_served(gateway: Gateway, model: str, node: NodeId, span: Span) -> bool:
    """Whether `node` offers `span` within REASSIGN_WAIT_S."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REASSIGN_WAIT_S):
            while all((o.node, o.info.span) != (node, span) for o in known_offers(gateway, model)):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            return True
    return False


async def check_model(gateway: Gateway, name: str, total_layers: int) -> None:
    """Raise ModelNotFound, Conflict unless a model of that name ("": any) and that many layers (0: any) is served here."""
    served = [await gateway.ensure(name)] if name else list(gateway.origins.values())
    if total_layers and all(origin.model.num_layers != total_layers for origin in served):
        there = ", ".join(f"{model}: {origin.model.num_layers}" for model, origin in gateway.origins.items())
        raise Conflict(f"total_layers is {total_layers}; the models served here have other numbers ({there})")


async def register(gateway: Gateway, address: str, worker_id: str = "") -> WorkerView:
    """Dial a node that the ticket does not name and use what it offers. Deadline: REGISTER_TIMEOUT_S.

    It must prove membership of the swarm, and be `worker_id` if that is given. Raises BadRequest; Conflict, also where no model
    is loaded; ShardUnavailable if nothing answers there.
    """
    addr = NodeAddr.parse(address)
    if not gateway.origins:
        raise Conflict("no model is loaded here yet, whose nodes could be used: ask for one first")
    for origin in [*gateway.origins.values()]:  # others may be loaded meanwhile
        try:
            async with asyncio.timeout(REGISTER_TIMEOUT_S):
                link = await origin.node.pool.get(addr, "control")
        except (LinkClosed, TimeoutError) as error:
            raise ShardUnavailable(
                f"no member of the swarm answers at {addr}: is it serving, with this ticket?"
            ) from error
        if worker_id and worker_id != link.hello.name and not link.peer.startswith(worker_id):
            raise Conflict(f"the node at {addr} is {link.hello.name} ({link.peer[:12]}), not {worker_id[:80]!r}")
        if not any((known.host, known.port) == (addr.host, addr.port) for known in origin.routes.addrs):
            origin.routes.addrs.append(NodeAddr(addr.host, addr.port, link.peer))
    return find_worker(gateway, link.peer)


async def route_now(origin: Origin) -> tuple[Offer, ...]:
    """A route that could be opened at this moment. Dials only if there is none over the open links; takes ~2 s at most.

    Raises ShardUnavailable, WeightsMismatch.
    """
    try:
        return origin.routes.choose(await origin.routes.offers(()))
    except ShardUnavailable:
        await origin.routes.look_around()
        return origin.routes.choose(await origin.routes.offers(()))


def _has_route(origin: Origin, offers: Sequence[Offer]) -> bool:
    try:
        return bool(origin.routes.choose(offers))
    except (ShardUnavailable, WeightsMismatch):
        return False


# -- as JSON ----------------------------------------------------------------------------------------------------------


def worker_object(worker: WorkerView) -> dict[str, Any]:
    """A worker as JSON (docs/api.md)."""
    control = worker.edges.get("control")
    return {
        "worker_id": worker.node,
        "name": worker.name,
        "address": worker.address,
        "status": worker.status,
        "sessions": worker.num_sessions,
        "rtt_ms": in_ms(control.rtt_s if control else None),
        "path_kind": control.path_kind if control else None,
        "last_error": control.last_error if control else None,
        "bytes_sent": sum(edge.bytes_sent for edge in worker.edges.values()),
        "bytes_received": sum(edge.bytes_received for edge in worker.edges.values()),
        "spans": [span_object(model, offer) for model, offer in worker.offers],
    }


def span_object(model: str, offer: Offer) -> dict[str, Any]:
    """A span that a worker offers, as JSON; lattice9's assignment."""
    info = offer.info
    return {
        "model": model,
        "layers": str(info.span),
        "is_first": info.span.start == 0,
        "is_last": info.span.end == info.num_layers,
        "total_layers": info.num_layers,
        "precision": info.precision,
        "arithmetic": info.arithmetic,
        "is_spare": info.is_spare,
        "is_loaded": info.is_loaded,
        "has_ends": info.has_ends,
        "free_positions": info.free_tokens,
        "max_sessions": info.max_sessions,
    }


async def scheduler_object(gateway: Gateway) -> dict[str, Any]:
    """What lattice9 calls scheduler stats: which nodes there are, what runs, and which route a request would take now."""
    workers = list_workers(gateway)
    return {
        "total_workers": len(workers),
        "active_workers": sum(worker.status == "active" for worker in workers),
        "evicted_workers": sum(worker.is_evicted for worker in workers),
        "running_requests": gateway.num_running,
        "queued_requests": gateway.num_waiting,
        "routes": {model: await _route_object(origin) for model, origin in [*gateway.origins.items()]},
    }


async def _route_object(origin: Origin) -> list[dict[str, Any]] | None:
    """The hops a request would take now, by what open links say; null if there is no route."""
    try:
        return [hop_object(offer) for offer in origin.routes.choose(await origin.routes.offers(()))]
    except (ShardUnavailable, WeightsMismatch):
        return None
