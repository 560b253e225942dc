"""Optional traces by the OpenTelemetry SDK: one span a request, one below it for each hop's time in the route, one a repair.

Needs the extra `manyhands[trace]`; nothing of it is imported before `open_tracing`. Names and numbers only: no prompt, no text.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from manyhands import __version__
from manyhands.api.run import Job, Outcome
from manyhands.errors import BadRequest
from manyhands.origin import Token
from manyhands.origin.repair_plan import Event
from manyhands.refusals import installing
from manyhands.route.search import Offer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

Attributes = dict[str, str | int | float]
# The header `traceparent` of the request that is being served (W3C Trace Context), whatever it holds.
PARENT: ContextVar[str | None] = ContextVar("parent", default=None)


@contextmanager
def open_tracing(exporter: str) -> "Iterator[Tracing]":
    """An observer that sends spans to `exporter`, by its standard name ("otlp", "console"; OTEL_* variables configure it).

    What is left is sent on leaving. Raises as trace_exporter.
    """
    made = trace_exporter(exporter)
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "manyhands"}))
    provider.add_span_processor(BatchSpanProcessor(made.load()()))
    try:
        yield Tracing(provider)
    finally:
        provider.shutdown()


def trace_exporter(exporter: str) -> EntryPoint:
    """Where the exporter of this name is found. Raises BadRequest if it, or the SDK, is not installed."""
    try:
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        raise BadRequest(f"traces need the OpenTelemetry SDK ({error}): {installing('trace')}") from error
    found = entry_points(group="opentelemetry_traces_exporter", name=exporter)
    if not found:
        known = sorted(point.name for point in entry_points(group="opentelemetry_traces_exporter"))
        more = f": {sys.executable} -m pip install opentelemetry-exporter-otlp" if exporter == "otlp" else ""
        raise BadRequest(f"no trace exporter {exporter!r} is installed; there is {', '.join(known) or 'none'}{more}")
    return next(iter(found))


class _Open:
    """The spans of a running job that have not ended."""

    def __init__(self, request: "Span") -> None:
        self.request, self.has_begun = request, False
        self.hops: dict[tuple[str, str], Span] = {}
        self.repairs: list[tuple[Span, int]] = []  # with their beginnings, in ns


class Tracing:
    """An observer (run.py) and makes spans of it."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._tracer: Tracer = provider.get_tracer("manyhands", __version__)
        self._open: dict[str, _Open] = {}

    def started(self, job: Job) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # One that is malformed is as none, says the standard.
        caller = TraceContextTextMapPropagator().extract({"traceparent": PARENT.get() or ""})
        attributes: Attributes = {
            "manyhands.request": job.id,
            "manyhands.model": job.model,
            "manyhands.api": job.api,
            "manyhands.prompt_tokens": job.prompt_tokens,
            "manyhands.max_tokens": job.max_tokens,
            "manyhands.queue_s": job.queue_s or 0.0,
        }
        span = self._tracer.start_span("request", caller, start_time=time.time_ns(), attributes=attributes)
        self._open[job.id] = _Open(span)

    def token(self, job: Job, token: Token) -> None:
        if not (opened := self._open[job.id]).has_begun:  # of a stream that goes on it is not the first of all
            opened.has_begun = True
            opened.request.add_event("first token", timestamp=time.time_ns())
            self._follow(job)

    def event(self, job: Job, event: Event) -> None:
        """Hops that are out end, new ones begin; what happened is an event of the request's span."""
        facts: Attributes = {"nodes": ", ".join(event.nodes), "at_token": event.at_token, "detail": event.detail}
        self._open[job.id].request.add_event(event.kind, facts, timestamp=time.time_ns())
        self._follow(job)

    def ended(self, job: Job, outcome: Outcome) -> None:
        from opentelemetry.trace import Status, StatusCode

        opened = self._open.get(job.id)
        if opened is None:
            return  # never started
        self._follow(job)
        del self._open[job.id]
        for span in opened.hops.values():
            span.end(time.time_ns())
        for (span, began_ns), repair in zip(opened.repairs, job.repairs, strict=True):
            span.set_attribute("manyhands.replay_s", repair.replay_s)
            span.end(began_ns + int(repair.total_s * 1e9))
        request = opened.request
        request.set_attributes(_summary(job, outcome))
        if outcome == "failed":
            request.set_status(Status(StatusCode.ERROR, job.error))
        request.end(time.time_ns())

    def _follow(self, job: Job) -> None:
        """Make the open hop spans those of the job's present route, and give each new repair its span."""
        opened, now = self._open[job.id], time.time_ns()
        present = {(hop.node, str(hop.info.span)): hop for hop in job.hops}
        for gone in [key for key in opened.hops if key not in present]:
            opened.hops.pop(gone).end(now)
        for index, (key, hop) in enumerate(present.items()):
            if key not in opened.hops:
                opened.hops[key] = self._start(opened, f"hop {index}", now, _hop_attributes(index, hop))
        for repair in job.repairs[len(opened.repairs) :]:
            facts: Attributes = {
                "manyhands.lost": ", ".join(repair.lost),
                "manyhands.replacement": ", ".join(repair.replacement),
                "manyhands.at_token": repair.at_token,
            }
            began_ns = now - int(repair.total_s * 1e9)
            opened.repairs.append((self._start(opened, "repair", began_ns, facts), began_ns))

    def _start(self, opened: _Open, name: str, at_ns: int, attributes: Attributes) -> "Span":
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(opened.request)
        return self._tracer.start_span(name, context=context, start_time=at_ns, attributes=attributes)


def _hop_attributes(index: int, hop: Offer) -> Attributes:
    return {
        "manyhands.hop": index,
        "manyhands.node": hop.node,
        "manyhands.node_name": hop.name,
        "manyhands.layers": str(hop.info.span),
    }


def _summary(job: Job, outcome: Outcome) -> Attributes:
    return {
        "manyhands.outcome": outcome,
        "manyhands.session": job.session or "",
        "manyhands.finish_reason": job.finish_reason or "",
        "manyhands.completion_tokens": job.completion_tokens,
        "manyhands.exactness": job.exactness,
        "manyhands.open_s": job.timings.open_s or 0.0,
        "manyhands.ttft_s": job.timings.ttft_s or 0.0,
    }
