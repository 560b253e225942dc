"""Arithmetic classes that share no route unless that is allowed: exact ones, and devices of torch (class E2). Pure."""

from collections.abc import Iterable, Sequence

from manyhands.core import UNPROVEN, Span, SpanInfo


def keeps_rows(arithmetic: str) -> bool:
    """Whether a class gives a row the same bits in any company: only such hops make an answer exact."""
    return not arithmetic.endswith(UNPROVEN)


def unheld(spans: Iterable[Span], num_layers: int, first: int = 0) -> list[Span]:
    """Runs of the layers [first, num_layers) that lie in none of `spans`."""
    held = 0  # a bit a layer
    for span in spans:
        held |= (1 << min(span.end, num_layers)) - (1 << min(span.start, num_layers))
    gaps: list[Span] = []
    for layer in range(first, num_layers):
        if not held >> layer & 1:
            start = gaps.pop().start if gaps and gaps[-1].end == layer else layer
            gaps.append(Span(start, layer + 1))
    return gaps


def why_split(infos: Sequence[SpanInfo], num_layers: int) -> str:
    """Why nodes that hold every layer between them have no route, and the remedy; "" if one kind of them holds all, or if not
    even both do."""
    exact = unheld((info.span for info in infos if keeps_rows(info.arithmetic)), num_layers)
    other = unheld((info.span for info in infos if not keeps_rows(info.arithmetic)), num_layers)
    if not exact or not other or unheld((info.span for info in infos), num_layers):
        return ""
    lacking_exact, lacking_other = (", ".join(map(str, gaps)) for gaps in (exact, other))
    return (
        f"nodes of exact classes do not hold layers {lacking_exact} of {num_layers}, nodes of class E2 (devices of torch) do "
        f"not hold layers {lacking_other}, and they do not share a route: allow it with --mix-classes, for answers of class E2"
    )
