"""Layers of a model run by themselves: rows in, rows out, on the nodes that hold them. For people who look into a model.

    ids ─ embed ─► rows ─ layers [0, 4) ─► rows ─ layers [4, 12) ─► rows ─ logits
                   states[0]               states[4]                states[12]

Every stretch is a session of its own over the spans that hold it, opened, bounded and closed like any other.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyhands.core import NodeId, Span
from manyhands.errors import BadRequest, Corruption, PipelineStalled, ProtocolError, ShardUnavailable
from manyhands.origin.origin import Origin
from manyhands.origin.route import Lease
from manyhands.origin.session import Session
from manyhands.route.offer import Offer
from manyhands.wire.message import ITEMSIZE, DType
from manyhands.wire.rows import Rows, read_rows, rows_payload
from manyhands.worker.bounds import norms
from manyhands.worker.execute import WIRE_DTYPES

# What comes back may take stall_timeout_s, and as long again for each so many rows: a peer that gives one row at a time, each
# just before it is late, would hold a stretch up for hours.
STALL_ROWS: Final = 16


class LayerRows(NamedTuple):
    """What `run_layers` found. `states[k]` are the rows that enter layer k, [num_layers] those that left the last one, before
    the final norm; all in `dtype`. `logits` [n, vocab] are those of the last n rows. `hops`: which node ran which layers."""

    states: dict[int, Rows]
    dtype: DType
    logits: NDArray[np.float32] | None
    hops: tuple[Offer, ...]


async def run_layers(
    origin: Origin,
    given: Sequence[int] | Rows,
    span: Span,
    at: Collection[int] = (),
    *,
    num_logits: int = 0,
    node: NodeId | None = None,
) -> LayerRows:
    """Run `given` (token ids, which enter layer 0, or rows in the model's dtype) through the layers of `span`.

    `at`: boundaries within it whose rows are wanted beside the last ones; each costs a session. `num_logits`: of how many last
    rows; the span must end with the model. `node`: where all of it is to run; None: as a request's route would.

    Raises BadRequest for what this model does not have; ShardUnavailable, PipelineStalled, Corruption as requests do.
    """
    dtype = WIRE_DTYPES[origin.model.precision]
    _check(origin, given, span, at, num_logits)
    if isinstance(given, np.ndarray):
        _check_rows(given, origin.model.hidden_size, dtype)
    rows = given if isinstance(given, np.ndarray) else await _embed(origin, given)
    states, hops = {span.start: rows}, list[Offer]()
    for start, end in pairwise(sorted({span.start, *at, span.end})):
        route = await _route(origin, Span(start, end), node)
        rows = states[end] = await _through(origin, rows, route, dtype)
        hops += route
    wanted = {k: v for k, v in states.items() if k in at or k == span.end}
    return LayerRows(wanted, dtype, await _logits(origin, rows, num_logits), tuple(hops))


def _check(origin: Origin, given: Sequence[int] | Rows, span: Span, at: Collection[int], num_logits: int) -> None:
    layers, is_ids = origin.model.num_layers, not isinstance(given, np.ndarray)
    if span.end > layers:
        raise BadRequest(f"layers {span} are out of range: the model has layers 0-{layers - 1}")
    if not all(span.start <= boundary <= span.end for boundary in at):
        raise BadRequest(f"at is {sorted(at)}; rows enter and leave layers {span} at {span.start} to {span.end}")
    if is_ids and span.start:
        raise BadRequest(f"token ids enter layer 0, not layer {span.start}: send hidden states")
    if num_logits and span.end != layers:
        raise BadRequest(f"logits come after the last layer, {layers - 1}: end there, or leave logits out")
    if not 0 <= num_logits <= len(given):
        raise BadRequest(f"logits of {num_logits} rows are asked for; there are {len(given)}")
    if (is_ids or num_logits) and origin.ends is None:
        raise BadRequest(
            "embedding and head are at the edges (--ends edges): send hidden states, and ask for no logits"
        )
    if not len(given) or (is_ids and not all(0 <= i < origin.model.vocab_size for i in given)):
        raise BadRequest(f"the input is one or more token ids from 0 to {origin.model.vocab_size - 1}, or rows")


def _check_rows(rows: Rows, width: int, dtype: DType) -> None:
    """Raise BadRequest for rows that no layer would take."""
    if rows.shape[1] != width * ITEMSIZE[dtype]:
        raise BadRequest(f"hidden states of this model are rows of {width} numbers in {dtype}")
    try:
        norms(rows.tobytes(), len(rows), dtype, "hidden states")
    except Corruption as error:
        raise BadRequest(str(error)) from error


async def _embed(origin: Origin, ids: Sequence[int]) -> Rows:
    assert origin.ends is not None
    payload = await origin.ends.turn(None, lambda _: ids)
    assert payload is not None
    return read_rows(payload, len(ids))


async def _logits(origin: Origin, rows: Rows, count: int) -> NDArray[np.float32] | None:
    if not count:
        return None
    assert origin.ends is not None
    made: list[NDArray[np.float32]] = []

    def keep(logits_TV: NDArray[np.float32]) -> Sequence[int]:
        made.append(logits_TV.copy())
        return ()

    await origin.ends.turn(np.ascontiguousarray(rows[-count:]), keep)
    return made[0]


async def _route(origin: Origin, span: Span, node: NodeId | None) -> list[Offer]:
    """The parts of offers that run `span`: those of `node`, or those of a route of the whole model."""
    if node is None:
        whole = await origin.routes.find()
    else:
        model = origin.model
        whole = tuple(
            offer
            for offer in await origin.routes.offers(())
            if (offer.node, offer.info.model, offer.info.precision) == (node, model.id, model.precision)
            and offer.info.span.covers(span)
        )[:1]
        if not whole:
            raise ShardUnavailable(f"node {node[:12]} does not hold layers {span} of this model, or is not linked now")
    return [_part(offer, span) for offer in whole if offer.info.span.overlaps(span)]


def _part(offer: Offer, span: Span) -> Offer:
    held = offer.info.span
    both = Span(max(held.start, span.start), min(held.end, span.end))
    return replace(offer, info=replace(offer.info, span=both))


async def _through(origin: Origin, rows: Rows, route: Sequence[Offer], dtype: DType) -> Rows:
    """`rows` as they leave the last hop of `route`."""
    model, requests, count = origin.model, origin.node.requests, len(rows)
    session = await requests.open(route, Lease(model.id, model.precision, count, count, "ring", "origin", None))
    try:
        config = requests.request
        most = max(1, min(config.prefill_chunk, config.frame_bytes // rows.shape[1]))
        for start in range(0, count, most):
            part = rows[start : start + most]
            session.send(start, len(part), 0, None, rows_payload(part, dtype))
        parts, got, stall_s, now = list[Rows](), 0, config.stall_timeout_s, asyncio.get_running_loop().time
        began = now()
        while got < count:
            left_s = began + stall_s * (1 + got / STALL_ROWS) - now()
            part = await _next(session, got, dtype, rows.shape[1], min(stall_s, max(0.0, left_s)))
            if (got := got + len(part)) > count:
                raise ProtocolError(f"{got} rows came back, {count} were sent")
            parts.append(part)
        return np.concatenate(parts)
    finally:
        requests.close(session)


async def _next(session: Session, position: int, dtype: DType, row_bytes: int, limit_s: float) -> Rows:
    """The next rows of the last hop, which begin at `position`. Raises PipelineStalled if none come within `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            while (step := await session.next_result(limit_s)) is None or not step.count:
                pass
    except TimeoutError:
        raise PipelineStalled(f"no step came back within {limit_s:.3g} s") from None
    payload = step.payload
    if payload is None or step.position != position or payload.dtype != dtype:
        raise ProtocolError(f"what came back at position {step.position} are not the rows due at {position}")
    rows = read_rows(payload, step.count)
    if rows.shape[1] != row_bytes:
        raise ProtocolError(f"rows of {rows.shape[1]} bytes came back, not of {row_bytes}")
    norms(rows.tobytes(), len(rows), dtype, "hidden states of the last hop")
    return rows
