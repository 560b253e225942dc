"""One span of a model on one node: hidden states in, hidden states out. Knows nothing of sessions' owners or networks."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from manyhands.checkpoint.manifest import Manifest
from manyhands.checkpoint.verify import Add, verifying
from manyhands.core import Precision, Span
from manyhands.errors import CutError
from manyhands.model import attention, threads, tiles
from manyhands.model.cache import CacheProbe, LayerShape, ShardCache, ShardSegment, StepPlan
from manyhands.model.calls import LayerCalls
from manyhands.model.fuse import fuse
from manyhands.model.linear import DTYPES, pad_rows, replace_linears
from manyhands.model.load import ModelPart, context_length, find_layers, load_part, read_config
from manyhands.model.stack import FEW_ROWS, TRIAL_ROWS, FewRows, Stack, decoder_of

_PROBE = 4  # rows of the step that shows what a layer does

# Layers that run in one go: the first, what runs them (None: transformers, one layer), and which of its layers they are.
_Part = tuple[int, Stack | None, range]


class Shard:
    """Layers `span` of the checkpoint in `folder`, in `precision`. One thread at a time, best in torch.inference_mode().

    With a `manifest`, what it computes with is proven to be that model's. Raises ModelError (checkpoint; Damaged if it is
    not), CutError (span outside the model).
    """

    def __init__(
        self,
        folder: Path,
        span: Span,
        precision: Precision,
        config: PreTrainedConfig | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        self.config = config or read_config(folder)
        self.span, self.precision = span, precision
        if span.end > self.config.num_hidden_layers:
            last = self.config.num_hidden_layers - 1
            raise CutError(f"layers {span} are out of range: the model has layers 0-{last}")
        self._stacks: dict[int, tuple[Stack, range]] = {}
        self._cuts: dict[tuple[int, int], list[_Part]] = {}
        self._few: FewRows | None = None
        with verifying(folder, manifest) as use:
            self._load(folder, use)
        if precision == "bf16" and tiles.available():
            self._stacks = self._stacked()
            self._few = FewRows(self.hidden_size) if self._stacks else None

    def _load(self, folder: Path, use: Add) -> None:
        """Build and pack; `use` is told each tensor."""
        model = load_part(folder, self.config, ModelPart(self.span), self.precision, use)
        owner, name, self._layers = find_layers(model, self.config.num_hidden_layers)
        self.hidden_size, self.dtype = int(self.config.hidden_size), DTYPES[self.precision]
        context = context_length(self.config)
        self._calls = LayerCalls(model.base_model, owner, name, self.hidden_size, self.dtype, context)
        self.shapes = self._prepare()

    def _prepare(self) -> dict[int, LayerShape]:
        """Probe once: learn what each layer caches and which linears share an input; then pack what linears are left."""
        fuse(self._layers, self.precision)
        order: list[tuple[nn.Linear, int]] = []
        alive: list[Tensor] = []

        def record(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            alive.append(args[0])  # keeps the ids distinct
            order.append((module, id(args[0])))  # type: ignore[arg-type]

        hooks = [m.register_forward_pre_hook(record) for m in self._layers.modules() if type(m) is nn.Linear]
        probe, calls = CacheProbe(), self._calls.of(_alone(_PROBE), _PROBE)
        hidden_ND = torch.zeros(_PROBE, self.hidden_size, dtype=self.dtype)
        with attention.running(probe):
            for index in range(self.span.start, self.span.end):
                hidden_ND = self._layer(index, hidden_ND, calls[index])
        for hook in hooks:
            hook.remove()
        replace_linears(self._layers, order)
        return probe.shapes

    @torch.inference_mode()
    def _stacked(self) -> dict[int, tuple[Stack, range]]:
        """For each layer that our kernels compute whole: the stack it is in, and which layers that has."""
        calls = self._calls.of(_alone(TRIAL_ROWS), TRIAL_ROWS)
        indices = range(self.span.start, self.span.end)
        decoders = {i: decoder_of(self._layers[i], i, self.shapes[i], calls[i]) for i in indices}
        stacks: dict[int, tuple[Stack, range]] = {}
        for _, group in groupby(indices, lambda i: (decoders[i] is not None, id(calls[i]))):
            layers = list(group)
            found = [decoder for i in layers if (decoder := decoders[i]) is not None]
            if found:
                stacks |= dict.fromkeys(layers, (Stack(found), range(layers[0], layers[-1] + 1)))
        return stacks

    def bytes_per_token(self, span: Span | None = None) -> int:
        """Cache bytes that one position of one session takes on `span` (default: all of this)."""
        return sum(shape.bytes_per_token for shape in self._shapes_of(span).values())

    def new_cache(self, capacity: int, span: Span | None = None) -> ShardCache:
        """An empty cache for a session on `span`, which lies within this one's (default: all of it)."""
        return ShardCache(self._shapes_of(span), capacity)

    def _shapes_of(self, span: Span | None) -> dict[int, LayerShape]:
        inside = span or self.span
        return {layer: shape for layer, shape in self.shapes.items() if inside.start <= layer < inside.end}

    def forward(self, hidden_ND: Tensor, plan: StepPlan, span: Span | None = None) -> Tensor:
        """Run `span` (within this one's; default: all of it) on the rows of `plan`: [rows, hidden] to the same.

        Writes the sessions' caches at the rows' positions and sets each session's length to the end of its segment.
        """
        count, padded_ND = hidden_ND.shape[0], pad_rows(hidden_ND)
        out = self._run(padded_ND, plan, span or self.span)
        _advance(plan)
        return out if padded_ND is hidden_ND else out[:count]

    def _run(self, hidden_ND: Tensor, plan: StepPlan, span: Span) -> Tensor:
        calls: list[dict[str, Any]] = []
        for index, stack, stretch in self._parts(span):
            if stack is not None:
                hidden_ND = stack(plan, hidden_ND, stretch, self._calls.turn(index, plan))
                continue
            calls = calls or self._calls.of(plan, len(hidden_ND))
            num_threads = 1 if len(hidden_ND) <= FEW_ROWS else threads.available()
            with attention.running(plan), threads.using(num_threads):
                hidden_ND = self._layer(index, hidden_ND, calls[index])
        return hidden_ND

    def _parts(self, span: Span) -> list[_Part]:
        """The layers of `span` in order."""
        key = span.start, span.end
        return self._cuts.get(key) or self._cuts.setdefault(key, list(self._cut(span)))

    def _cut(self, span: Span) -> Iterator[_Part]:
        index = span.start
        while index < span.end:
            stack, layers = self._stacks.get(index, (None, range(index, index + 1)))
            stretch = range(index - layers.start, min(span.end, layers.stop) - layers.start)
            yield index, stack, stretch
            index += len(stretch)

    def few(self, span: Span) -> FewRows | None:
        """What takes rows for `forward_few`; None if some layers of `span` are not our own kernels'."""
        for _, stack, _ in self._parts(span):
            if stack is None:
                return None
        return self._few

    def is_ready(self, end: int) -> bool:
        """Whether what layers are called with before position `end` is worked out; else the step that gets there does it."""
        return self._calls.is_ready(end)

    def forward_few(self, plan: StepPlan, span: Span) -> None:
        """As `forward`, on the rows that `few(span)` was given, in place."""
        for index, stack, stretch in self._parts(span):
            assert stack is not None and self._few is not None, "few(span) is None"
            self._few.run(plan, stack, stretch, self._calls.turn(index, plan))
        _advance(plan)

    def _layer(self, index: int, hidden_ND: Tensor, call: dict[str, Any]) -> Tensor:
        """transformers' own layer, with our parts in it."""
        out = self._layers[index](hidden_ND[None], **call)
        hidden_1ND: Tensor = out[0] if isinstance(out, tuple) else out
        return hidden_1ND[0]


def _advance(plan: StepPlan) -> None:
    for s in plan.segments:
        s.cache.length = s.start + s.count


def _alone(count: int) -> StepPlan:
    """A step of positions 0 .. count - 1 of a session that has no caches."""
    return StepPlan([ShardSegment(ShardCache({}, 0), 0, 0, count)])
