"""What a node knows of a span before it is loaded."""

from dataclasses import dataclass
from pathlib import Path

from manyhands.checkpoint.manifest import Manifest
from manyhands.config import WorkerConfig
from manyhands.core import Precision, Span, SpanInfo
from manyhands.worker.execute import Device
from manyhands.worker.loading import Loading
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

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes of one position of a session on the span."""
        return sum(self.position_bytes[self.info.span.start : self.info.span.end])

    @property
    def session_bytes(self) -> int:
        """Cache bytes of a session on the span whatever its length."""
        return sum(self.state_bytes[self.info.span.start : self.info.span.end])


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
