"""What the native stream says of a running request: lattice9's events and HearthNet's diagnostic frames. Run in, frames out.

start · token … reshard · token … · done | error                       (L9-23, L9-R02)
prefill, before the first; shard_status token_delta shard_failover pipeline_aborted, between them, if asked for (HN-40, HN-R01
§4.1, LP-23)
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from manyhands.api.http.encode import JsonBytes, JsonText
from manyhands.api.jobs import hop_object, in_ms, prefill_object, timings_object
from manyhands.api.run import Job, Run
from manyhands.origin import Token
from manyhands.origin.repair_plan import Event
from manyhands.route.search import Offer

# Frames that follow from request and seed: every attempt at a stream has them, in this order. Others tell what happened.
REPEATED = frozenset({"start", "token", "done"})


class Frame(NamedTuple):
    """One server-sent event."""

    event: str
    data: dict[str, Any]


class EventEncoder:
    """Makes the frames of one run."""

    def __init__(self, run: Run, *, diagnostics: bool) -> None:
        self._run, self._job, self._diagnostics = run, run.job, diagnostics
        self._last_at = time.monotonic()
        self._events_told = 0
        self._repairs_told = 0
        self._prefilled_told = 0
        self._hops: tuple[Offer, ...] = run.job.hops  # the route as it was last told

    def start(self, prompt: JsonBytes | None) -> Frame:
        """The request has a route and a first token. `prompt` is echoed to its sender."""
        job, answer = self._job, self._run.answer
        self._hops = job.hops
        facts: dict[str, Any] = {"request_id": job.id, "session": job.session, "model": job.model, "prompt": prompt}
        facts |= {"seed": answer.params.seed, "exactness": job.exactness, "prompt_tokens": job.prompt_tokens}
        facts["cached_tokens"] = job.cached_tokens
        return Frame("start", {**facts, "assignments": [hop_object(hop) for hop in job.hops]})

    def token(self, token: Token) -> Iterator[Frame]:
        """What happened before the token, then the token."""
        if self._job.completion_tokens == 1 and self._diagnostics:
            yield self._shard_status(self._hops, (), "")
        yield from self.news()
        now = time.monotonic()
        index, ms = self._job.completion_tokens - 1, round(1e3 * (now - self._last_at), 3)
        self._last_at = now
        decode_worker = self._hops[-1].node if self._hops else None
        if self._diagnostics:
            hops = [
                {"shard_id": self._shard_id(hop), "host": _host(hop), **_waterfall(self._job, index)}
                for index, hop in enumerate(self._hops)
            ]
            facts = {"text": token.text, "token_id": token.id, "index": index, "hops": hops}
            yield Frame("token_delta", {**facts, **self._job.waterfall.last.parts_ms()._asdict()})
        yield Frame(
            "token",
            {
                "index": index,
                "token_id": token.id,
                "token_text": token.text,
                "decode_worker": decode_worker,
                "ms": ms,
            },
        )

    def done(self) -> Frame:
        """All of it again, at once."""
        return Frame("done", result_object(self._run))

    def news(self) -> Iterator[Frame]:
        """Events that have not been told, against the route as it was before them; and how far the prompt is."""
        done = self._job.prefilled_tokens
        if self._diagnostics and self._prefilled_told < done and self._job.is_prefilling:
            self._prefilled_told = done
            yield Frame("prefill", prefill_object(self._job, time.time()))
        for event in self._job.events[self._events_told :]:
            self._events_told += 1
            yield from self._about(event)

    def _about(self, event: Event) -> Iterator[Frame]:
        if event.kind in ("shard_failover", "reshard"):
            yield from self._new_route(event)
        elif event.kind == "audit":
            yield Frame("audit", {"token_index": event.at_token, "workers": list(event.nodes), "detail": event.detail})
        elif self._diagnostics and event.kind == "shard_status":
            yield self._shard_status(self._hops, event.nodes, event.detail)
        elif self._diagnostics:
            yield Frame("pipeline_aborted", {"token_index": event.at_token, "detail": event.detail})

    def _new_route(self, event: Event) -> Iterator[Frame]:
        """Both kinds change the topology, so both are a reshard to lattice9's clients."""
        repairs = self._job.repairs[self._repairs_told :][:1]
        repair = next((one for one in repairs if one.replacement == event.nodes), None)
        self._repairs_told += repair is not None
        if self._diagnostics and repair is not None and event.kind == "shard_failover":
            failed = [self._shard_id(hop) for hop in self._hops if hop.name in repair.lost]
            new = [f"{self._shard_id(hop)}@{hop.name}" for hop in self._job.hops if hop.name in repair.replacement]
            yield Frame("shard_failover", {"failed_shard": ", ".join(failed), "replacement": ", ".join(new)})
        self._hops = self._job.hops
        facts: dict[str, Any] = {"token_index": event.at_token, "kind": event.kind}
        if repair is None:  # the request began alone, on the fallback
            facts |= {"dropped_worker": "", "reason": event.detail, "repair_ms": None}
        else:
            facts |= {"dropped_worker": ", ".join(repair.lost), "reason": repair.reason}
            facts |= {"repair_ms": in_ms(repair.total_s)}
        yield Frame("reshard", {**facts, "remaining": [hop_object(hop) for hop in self._job.hops]})

    def _shard_status(self, hops: Sequence[Offer], degraded: Sequence[str], detail: str) -> Frame:
        shards = [
            {
                "shard_id": self._shard_id(hop),
                "host": _host(hop),
                "name": hop.name,
                "status": "degraded" if hop.name in degraded else "online",
                "latency_ms": in_ms(_rtt_s(self._run, hop)),
            }
            for hop in hops
        ]
        facts: dict[str, Any] = {"status": "degraded", "detail": detail} if degraded else {"status": "online"}
        return Frame("shard_status", {**facts, "shards": shards})

    def _shard_id(self, hop: Offer) -> str:
        """HearthNet's name of a shard: model, first and last layer."""
        return f"{self._job.model}:{hop.info.span.start}-{hop.info.span.end - 1}"


def result_object(run: Run) -> dict[str, Any]:
    """A finished answer as JSON: lattice9's fields, and ours."""
    job, answer = run.job, run.answer
    return {
        "request_id": job.id,
        "session": job.session,
        "model": job.model,
        "result": JsonText(answer.text),
        "tokens_generated": job.completion_tokens,
        "prompt_tokens": job.prompt_tokens,
        "cached_tokens": job.cached_tokens,
        "redrawn_tokens": answer.redrawn,
        "finish_reason": job.finish_reason,
        "seed": answer.params.seed,
        "exactness": job.exactness,
        "codec": job.routing.loss.as_object(),
        "audit": None if job.audit is None else job.audit.as_object(),
        "total_latency_ms": in_ms(job.timings.total_s),
        "timings": timings_object(job),
        "worker_trace": [_trace(run, index, hop) for index, hop in enumerate(job.hops)],
        "reshard_events": [
            {"token_index": r.at_token, "dropped_worker": ", ".join(r.lost), "replacement": ", ".join(r.replacement)}
            for r in job.repairs
        ],
    }


def _trace(run: Run, index: int, hop: Offer) -> dict[str, Any]:
    """A hop of the last route. `calls`: tokens it had a part in; `avg_call_ms`: by its own word, its queue and its step;
    `rtt_ms`: the round trip between it and the origin."""
    since = max((r.at_token for r in run.job.repairs if hop.name in r.replacement), default=0)
    calls, each_ms = run.job.completion_tokens - since, run.job.waterfall.hop_ms(hop.node)
    return {
        **hop_object(hop),
        "url": str(hop.addr),
        "phase": _phase(index, len(run.job.hops)),
        "calls": calls,
        "latency_ms": None if each_ms is None else round(calls * each_ms, 3),
        "avg_call_ms": each_ms,
        "rtt_ms": in_ms(_rtt_s(run, hop)),
    }


def _phase(index: int, num_hops: int) -> str:
    """lattice9's word for a place in the route."""
    if num_hops == 1:
        return "full"
    return "encode" if index == 0 else "decode" if index == num_hops - 1 else "middle"


def _waterfall(job: Job, index: int) -> dict[str, float]:
    """What a hop said of the last token's step, if it said something."""
    if index >= len(job.waterfall.last.hops):
        return {}
    timing = job.waterfall.last.hops[index]
    return {"queue_ms": timing.queue_us / 1e3, "compute_ms": timing.compute_us / 1e3}


def _rtt_s(run: Run, hop: Offer) -> float | None:
    link = run.origin.node.pool.find(hop.node, "control")
    return None if link is None else link.health.rtt_s


def _host(hop: Offer) -> str:
    return f"ed25519:{hop.node}"
