"""Plans of parts of a span's layers, made as sessions ask for them."""

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from manyhands.core import Span
from manyhands.errors import CutError

P = TypeVar("P")


class PlansOfParts(Generic[P]):
    """The plan of each part of `span`; it lives as long as something uses it, the last `kept` that were asked for longer.
    whole: that of all layers. make: the plan of layers [first, end), counted from the span's first."""

    def __init__(self, span: Span, whole: P, make: Callable[[int, int], P], kept: int = 0) -> None:
        self._span, self._make, self._kept = span, make, kept
        self._recent: list[P] = []
        self._plans: WeakValueDictionary[Span, P] = WeakValueDictionary({span: whole})

    def __getitem__(self, span: Span) -> P:
        """Raises CutError for layers that are not among the span's."""
        plan = self._plans.get(span)
        if plan is None:
            if not self._span.covers(span):
                raise CutError(f"layers {span} are not among layers {self._span}")
            plan = self._plans[span] = self._make(span.start - self._span.start, span.end - self._span.start)
        self._recent = [plan, *(each for each in self._recent if each is not plan)][: self._kept]
        return plan
