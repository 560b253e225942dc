"""What a model passes to its decoder layers beside the hidden states, for any positions.

transformers works it out in every forward pass, at half a millisecond a step with warm caches: masks, which our attention does
not use, and rotary angles, which depend on the position alone. So the model's own forward runs once for every BLOCK positions,
over layers that only note what they are called with, and a step takes the rows of its positions from these notes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from manyhands.errors import ContextOverflow, ModelError
from manyhands.model.attend import RotationTables
from manyhands.model.cache import StepPlan
from manyhands.model.load import Pass

# Positions made ready at a time for steps of one row, and how many such groups are kept: a stream takes one after the other.
_GROUP = 61
_MAX_GROUPS = 64
# Positions worked out at a time: odd, so that no other dimension of a model is as long.
BLOCK = 17 * _GROUP


@dataclass(frozen=True, slots=True)
class _Rows:
    """Stands in a call for the rows of the `index`-th tensor."""

    index: int


class LayerCalls:
    """The keyword arguments of the layers `owner.name` in the forward pass of `base`, by position.

    `hidden_size` and `dtype` are those of hidden states, `context` the number of positions there are. Raises ModelError for a
    model that does not call each layer once, or passes it what depends on more than its position.
    """

    def __init__(
        self, base: nn.Module, owner: nn.Module, name: str, hidden_size: int, dtype: torch.dtype, context: int
    ) -> None:
        self._base, self._owner, self._name, self._context = base, owner, name, context
        self._hidden_1BD = torch.zeros(1, 1, hidden_size, dtype=dtype).expand(1, BLOCK, hidden_size)
        self._calls, self._tensors = self._block(0, self._hidden_1BD)
        calls, tensors = self._block(0, self._hidden_1BD + 1)
        if calls != self._calls or not all(map(torch.equal, tensors, self._tensors)):
            raise ModelError(f"{type(base).__name__} passes its layers more than their positions: it is not supported")
        self._axes = [_position_axis(tensor) for tensor in tensors]
        self._num_positions = BLOCK
        self._groups: dict[int, list[list[dict[str, Any]]]] = {}
        self._turns: dict[int, RotationTables] = {}  # by the tensor of cosines

    def of(self, plan: StepPlan, num_rows: int) -> list[dict[str, Any]]:
        """Each layer's arguments for the rows of `plan` and, up to `num_rows`, for rows at position 0.

        Raises ContextOverflow for a position that the model does not have.
        """
        self._reach(plan)
        if num_rows == 1:
            group, index = divmod(plan.segments[0].start, _GROUP)
            return (self._groups.get(group) or self._add_group(group))[index]
        return self._fill(self._rows(plan, num_rows))

    def turn(self, index: int, plan: StepPlan) -> RotationTables:
        """The rotary angles of layer `index`, for position 0 and on, as far as `plan` goes at least. Raises ContextOverflow."""
        self._reach(plan)
        cos, sin = self._calls[index]["position_embeddings"]
        if (turn := self._turns.get(cos.index)) is None:
            turn = self._turns[cos.index] = RotationTables(self._tensors[cos.index], self._tensors[sin.index])
        return turn

    def is_ready(self, end: int) -> bool:
        """Whether positions before `end` are worked out."""
        return end <= self._num_positions

    def _reach(self, plan: StepPlan) -> None:
        """Work out what layers are called with at the positions of `plan`. Raises ContextOverflow."""
        end = 0
        for s in plan.segments:
            end = max(end, s.start + s.count)
        if end > self._context:
            raise ContextOverflow(f"position {end - 1} is beyond the model's context of {self._context}")
        while self._num_positions < end:
            _, more = self._block(self._num_positions, self._hidden_1BD)
            self._tensors = list(map(torch.cat, zip(self._tensors, more, strict=True), self._axes))
            self._num_positions += BLOCK
            self._turns.clear()

    def _add_group(self, group: int) -> list[list[dict[str, Any]]]:
        """For each position of a group what `of` returns for it alone. (To slice tensors at each step takes a hop 90 us.)"""
        parts = [t.narrow(axis, group * _GROUP, _GROUP) for t, axis in zip(self._tensors, self._axes, strict=True)]
        split = [torch.split(t, 1, axis) for t, axis in zip(parts, self._axes, strict=True)]
        if len(self._groups) >= _MAX_GROUPS:
            del self._groups[next(iter(self._groups))]
        self._groups[group] = [self._fill(rows) for rows in zip(*split, strict=True)]
        return self._groups[group]

    def _fill(self, rows: Sequence[Tensor]) -> list[dict[str, Any]]:
        made: dict[int, dict[str, Any]] = {}  # layers of a kind share theirs
        for call in self._calls:
            if id(call) not in made:
                made[id(call)] = _filled(call, rows)
        return [made[id(call)] for call in self._calls]

    def _rows(self, plan: StepPlan, num_rows: int) -> Sequence[Tensor]:
        first = plan.segments[0]
        if first.count == num_rows:
            return [t.narrow(axis, first.start, num_rows) for t, axis in zip(self._tensors, self._axes, strict=True)]
        positions_N = torch.zeros(num_rows, dtype=torch.long)
        for s in plan.segments:
            positions_N[s.row : s.row + s.count] = torch.arange(s.start, s.start + s.count)
        return [t.index_select(axis, positions_N) for t, axis in zip(self._tensors, self._axes, strict=True)]

    def _block(self, start: int, hidden_1BD: Tensor) -> tuple[list[dict[str, Any]], list[Tensor]]:
        """Each layer's arguments for BLOCK positions from `start`, with _Rows for the tensors, which come beside them."""
        layers: nn.ModuleList = getattr(self._owner, self._name)
        notes: list[dict[str, Any]] = []
        given: list[Tensor] = []
        # Never one beyond the context: some rotary embeddings would then turn the whole block by other angles.
        positions_1B = torch.arange(start, start + BLOCK).clamp(max=self._context - 1)[None]
        setattr(self._owner, self._name, nn.ModuleList([_Note(notes, given, len(layers)) for _ in layers]))
        try:
            self._base(inputs_embeds=hidden_1BD, position_ids=positions_1B, past_key_values=_NO_CACHE, use_cache=True)
        except _Noted:
            return _taken_apart(notes)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:  # positions from a table, say
            raise ModelError(f"{type(self._base).__name__} is not supported: {error}") from error
        finally:
            setattr(self._owner, self._name, layers)
        raise ModelError(f"{type(self._base).__name__} does not call each of its layers once: it is not supported")


def _position_axis(tensor: Tensor) -> int:
    axis = min(1, tensor.dim() - 1)
    if axis < 0 or tensor.shape[axis] != BLOCK:
        raise ModelError(f"the model passes its layers a tensor of {tuple(tensor.shape)}: it is not supported")
    return axis


def _taken_apart(notes: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """`notes` with _Rows in place of tensors, equal ones one and the same; and these tensors."""
    tensors: list[Tensor] = []
    kinds: list[dict[str, Any]] = []
    for note in notes:
        call = _without(note, tensors)
        if call not in kinds:
            kinds.append(call)
    return [kinds[kinds.index(_without(note, tensors))] for note in notes], tensors


def _without(value: Any, tensors: list[Tensor]) -> Any:
    """`value` with _Rows in place of tensors, which join `tensors` if they are not there."""
    if isinstance(value, Tensor):
        index = next((i for i, tensor in enumerate(tensors) if tensor is value), len(tensors))
        if index == len(tensors):
            tensors.append(value)
        return _Rows(index)
    if isinstance(value, tuple):
        return tuple(_without(v, tensors) for v in value)
    return {k: _without(v, tensors) for k, v in value.items()} if isinstance(value, dict) else value


def _filled(value: Any, rows: Sequence[Tensor]) -> Any:
    if isinstance(value, _Rows):
        return rows[value.index]
    if isinstance(value, tuple):
        return tuple([_filled(v, rows) for v in value])
    return {k: _filled(v, rows) for k, v in value.items()} if isinstance(value, dict) else value


class _Noted(Exception):
    """Ends a forward pass once every layer was called."""


class _Note(nn.Module):
    """Stands where a layer was, and adds what it is called with to `notes`, its hidden states to `given`."""

    attention_type = Pass.attention_type

    def __init__(self, notes: list[dict[str, Any]], given: list[Tensor], wanted: int) -> None:
        super().__init__()
        self._notes, self._given, self._wanted = notes, given, wanted

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args:
            raise ModelError("the model passes its layers arguments without names: it is not supported")
        self._notes.append(kwargs)
        is_last, is_new = len(self._notes) == self._wanted, all(hidden_states is not given for given in self._given)
        if is_new or is_last:  # every layer returns what it got: to look again at each would take 30 ms in wide models
            if not torch.equal(hidden_states, hidden_states[:, :1].expand_as(hidden_states)):
                raise ModelError("the model adds positions to its embeddings: it is not supported")
            self._given.append(hidden_states)
        if is_last:
            raise _Noted
        return hidden_states


class _NoCache(Cache):  # type: ignore[misc]
    """What the layers see as their cache. It stores nothing: our attention writes the sessions' caches, where keys and
    values are final (latent attention expands them only after this call)."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, keys_1HND: Tensor, values_1HND: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return keys_1HND, values_1HND

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


_NO_CACHE = _NoCache()
