"""Layers that no node serves: since when, and which of them a member with room is to take."""

from collections.abc import Collection, Sequence

from manyhands.core import Span


class LayerGaps:
    """What `first_lasting` was told of before, by layer."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def first_lasting(self, gaps: Sequence[Span], claimed: Collection[Span], now: float, gap_s: float) -> Span | None:
        """The first of `gaps`, all that there are now, of which no layer was served for `gap_s` and none is claimed.

        A claim only postpones: when it is withdrawn, the layers have been missing all the time.
        """
        layers = [layer for gap in gaps for layer in range(gap.start, gap.end)]
        self._since = {layer: self._since.get(layer, now) for layer in layers}
        for gap in gaps:
            is_lasting = all(now - self._since[layer] >= gap_s for layer in range(gap.start, gap.end))
            if is_lasting and not any(gap.overlaps(span) for span in claimed):
                return gap
        return None
