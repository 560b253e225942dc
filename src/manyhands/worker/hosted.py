"""What a node knows of a span before it is loaded."""

from dataclasses import dataclass
from pathlib import Path

from manyhands.checkpoint.manifest import Manifest
from manyhands.config import WorkerConfig
from manyhands.core import Precision, Span, SpanInfo
from manyhands.worker.execute import Device
from manyhands.worker.leases import CacheBudget, SpanLeases
from manyhands.worker.loading import Loading
from manyhands.worker.parking import Parking
from manyhands.worker.runner import describe


@dataclass(frozen=True, slots=True)
class KnownSpan:
    """A span of the model in `folder`, for `device`. `manifest` proves its tensors; `position_bytes` is what each layer of the
    model caches for a position, `state_bytes` what for a session beside."""

    folder: Path
    device: Device
    info: SpanInfo
    manifest: Manifest
    position_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]

    def leases(self, budget: CacheBudget, parking: Parking) -> SpanLeases:
        """Those of the span, within `budget`."""
        span = self.info.span
        layers = slice(span.start, span.end)
        return SpanLeases(budget, parking, span, self.position_bytes[layers], self.state_bytes[layers])


def describe_span(
    folder: Path, span: Span, precision: Precision, device: Device, loading: Loading, config: WorkerConfig
) -> KnownSpan:
    """What is known of `span` of the model in `folder`. Blocking. Raises ModelError, CutError."""
    manifest = loading.manifest(folder)
    facts = describe(folder, precision)
    info = SpanInfo(
        model=manifest.id,
        model_name=loading.model,
        span=span,
        num_layers=facts.num_layers,
        precision=precision,
        arithmetic=facts.arithmetic,
        hidden_size=facts.hidden_size,
        context_length=facts.context_length,
        has_ends=False,
        free_tokens=config.cache_tokens,
        max_sessions=config.max_sessions,
    )
    return KnownSpan(folder, device, info, manifest, facts.position_bytes, facts.state_bytes)
