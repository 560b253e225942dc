"""What must hold after a life of requests (request_lives.py): texts, reasons to fail, and that nothing is left."""

import asyncio
import gc
import logging
from typing import TYPE_CHECKING, Any, Final

from manyhands.errors import Busy, PipelineAborted, ShardUnavailable
from manyhands.origin.node import FullNode

if TYPE_CHECKING:
    from tools.request_draws import Asked
    from tools.request_lives import Life

CALM_S: Final = 13.0  # after which no dial, heartbeat or exchange is under way any more


class Logged(logging.Handler):
    """What the loggers of the process call an error while the block lasts, asyncio's included."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def __enter__(self) -> "Logged":
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        gc.collect()  # what asyncio complains of as it is freed
        logging.getLogger().removeHandler(self)


async def left_by(life: "Life") -> list[str]:
    """What nodes that live still hold, some time after the last request has ended."""
    await asyncio.sleep(CALM_S)
    found: list[str] = []
    for place in life.places:
        if place.is_up and place.node is not None:
            found += [f"{place.name}: {what}" for what in left_on(place.node)]
    for number, origin in enumerate(life.origins):
        found += [f"origin{number}: {what}" for what in left_on(origin.node)]
        found += [f"origin{number}: {origin.waiting}"] if len(origin.waiting) else []
    return found


def left_on(node: FullNode) -> list[str]:
    """What a node holds of sessions, none of which is open any more."""
    worker = node.worker
    # Early rows are counted right: what comes late of a session that ended with a link stays, within bounds (worker/early.py).
    held: dict[str, Any] = {
        "sessions": node.sessions,
        "openings": node.requests._num_opening,
        "owners": worker.owners._held,
        "dials": worker.dials.under_way.num_used,
        "early rows": worker.unopened._num_bytes - sum(held.num_bytes for held in worker.unopened._by_link.values()),
    }
    for host in node.hosts:
        host.parking.expire(asyncio.get_running_loop().time() + 10_000)
        engine = host.engine
        held |= {
            f"{host.info.span} {what}": value
            for what, value in {
                "places": len(host._places),
                "openings": host._opening,
                "sessions": engine._sessions,
                "steps": engine._on_device,
                "copies": engine._copies._turns,
                "leases": host.leases._leased,
                "bytes of leases": host.leases.leased_bytes,
                "parked": len(host.parking),
            }.items()
        }
    held |= {"logs": worker.logs._logs, "bytes of logs": worker.logs.num_bytes}
    return [f"{what} are left: {value}" for what, value in held.items() if value]


def wrong_with(life: "Life", one: "Asked") -> list[str]:
    """What is wrong with how a request of a life has ended."""
    got, want = one.got, one.wanted
    if got is None or want is None:
        return []  # it was cancelled before it began
    found = [] if got.token_ids == want.token_ids[: len(got.token_ids)] else ["other tokens"]
    if one.error is not None:
        found += [] if may_fail(life, one.error, has_begun=got.session is not None) else ["failed"]
    elif one.outcome == "ok" and len(got.token_ids) < len(want.token_ids):
        found += [] if life.is_small and got.finish_reason == "length" else ["ended too soon"]
    elif one.outcome == "ok" and (got.finish_reason, got.text) != (want.finish_reason, want.text):
        found += ["ended otherwise"]
    session = got.session
    if session is not None and session.untrusted_nodes - life.poisoned:
        found += ["an honest node is not trusted"]
    return found


def may_fail(life: "Life", error: BaseException, *, has_begun: bool) -> bool:
    """Whether what befell a life is reason enough for a request to fail so. `has_begun`: it has had a route."""
    match error:
        case Busy():
            return life.is_small
        case PipelineAborted():  # two repairs without a position between them, and one that would be the third
            return life.num_faults > 2
        case ShardUnavailable():  # who sent nonsense never comes back into a session; nor does a first route wait
            return bool(life.poisoned) or not (has_begun or life.num_faults == 0)
        case _:
            return False
