"""What a node says of a span before it is loaded."""

from pathlib import Path

from manyhands.checkpoint.manifest import Manifest
from manyhands.config import WorkerConfig
from manyhands.core import Precision, Span, SpanInfo
from manyhands.worker.loading import Loading
from manyhands.worker.runner import describe


def describe_span(
    folder: Path, span: Span, precision: Precision, loading: Loading, config: WorkerConfig
) -> tuple[SpanInfo, Manifest]:
    """Of `span` of the model in `folder`, and what proves its tensors. Blocking. Raises ModelError, CutError."""
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
    return info, manifest
