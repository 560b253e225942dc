"""Which hops: from the spans that nodes offer to a chain that covers the model. Pure.

`find_route` filters (trust, scope, room), picks one kind of weights, and then by policy: `latency`, the cheapest chain by
measured costs (space.py, chain.py), or `greedy`, hop by hop (HN-22). `next_hop` is one such choice on its own (IN-10). Where
the figures come from: learn.py. What they mean: cost.py, docs/routing.md.
"""

import hashlib
import itertools
from collections.abc import Sequence

from manyhands.core import ModelId, NodeId, Precision, Span
from manyhands.errors import ShardUnavailable, WeightsMismatch
from manyhands.route.chain import SPARE, RoutePart, shortest
from manyhands.route.classes import unheld, why_split
from manyhands.route.offer import ANY, Offer, Pair, Rules, Terms
from manyhands.route.permit import admitted, filled, gaps_of, has_room, permitted
from manyhands.route.shortlist import shortlist
from manyhands.route.space import Space, rtt_between

__all__ = [
    "Kind",
    "Offer",
    "Pair",
    "Rules",
    "Terms",
    "cover",
    "find_route",
    "next_hop",
    "without_needless_loading",
]

Kind = tuple[ModelId, Precision]

# Routes within this share of the cheapest are equals, among which requests are spread. Less than what a step differs from
# the next on a shared machine (bench/results/step-0.5b-avx2-amd25.json), more than the error of a learnt average.
NEAR = 0.05
# A route whose nodes compute equal bits may cost this much more than one that mixes arithmetic classes (exactness.md).
CLASS_WORTH = 0.10
# Classes of which a pure route is looked for, one search each, where the cheapest mixes some.
MOST_CLASSES = 4
# Offers that a refusal names.
MOST_NAMED = 8
# A session leaves its route only for one that is better by this share: moving costs a replay.
HYSTERESIS = 0.20


def find_route(
    offers: Sequence[Offer], num_layers: int, wanted: Kind | None = None, terms: Terms = ANY
) -> tuple[Offer, ...]:
    """The best chain of spans for [0, num_layers) on `terms`; the order of `offers` does not matter.

    No layer is loaded that a node holds in memory. The fewest layers on spares come first in every policy. Unmeasured offers
    are taken to be as fast as the fastest, so that they are tried; with no figures at all the fewest hops win, then the most
    free cache.
    What is known of room is some seconds old: a full offer is used only for layers that no offer with room holds, and its node
    is then asked all the same (HN-32). `wanted`: weights and precision to prefer, if they cover the model. Raises
    WeightsMismatch if the offers disagree on weights or precision and no one kind covers the model; ShardUnavailable naming
    the layers that no node holds.
    """
    fit = admitted(offers, terms)
    run = Span(0, num_layers)
    for alike in _by_kind(fit, wanted):
        held = permitted(alike, run, terms)
        groups = [shortlist(one, run, terms) for one in _groups(held, terms.rules) if not _missing(one, num_layers)]
        if groups:
            return _choose(_preferred(_short_enough(groups, run, terms), run, terms), run, terms)
    raise _refusal(offers, fit, run, terms)


def cover(offers: Sequence[Offer], span: Span, terms: Terms = ANY, between: Pair | None = None) -> tuple[Offer, ...]:
    """The cheapest chain of (parts of) offers for `span`: fewest layers on spares, then least time. () if there is none.

    All of one kind; nothing is filtered. `between`: the nodes before the first hop and after the last; the origin if None.
    """
    if not offers or unheld((o.info.span for o in offers), span.end, span.start):
        return ()
    space = Space.of(shortlist(offers, span, terms), terms, between)
    return space.route(space.cheapest(span) or [])


def without_needless_loading(offers: Sequence[Offer], run: Span) -> list[Offer]:
    """The loaded offers, and of those that would have to be loaded the parts of `run` that no other offer holds."""
    loaded = [o for o in offers if o.info.is_loaded]
    return filled(loaded, [o for o in offers if not o.info.is_loaded], run)


def _with_room_first(offers: Sequence[Offer], run: Span, terms: Terms) -> list[Offer]:
    """The offers with room, and of full ones the parts of `run` that no other holds."""
    with_room = [o for o in offers if has_room(o, terms)]
    return filled(with_room, [o for o in offers if not has_room(o, terms)], run)


def _short_enough(groups: Sequence[list[Offer]], run: Span, terms: Terms) -> list[list[Offer]]:
    """Of each group those to ask, or all of it where their chains have more hops than the rules allow; groups whose chains all
    have more are left out. Raises ShardUnavailable if none is left."""
    most = terms.rules.max_hops
    first = [without_needless_loading(_with_room_first(one, run, terms), run) for one in groups]
    if most >= len(run):
        return first
    hops = [
        [len(shortest([o.info.span for o in those], run)) for those in pair] for pair in zip(first, groups, strict=True)
    ]
    if (fewest := min(map(min, hops))) > most:
        raise _too_long(most, fewest)
    asked = zip(first, groups, hops, strict=True)
    return [ready if few <= most else held for ready, held, (few, least) in asked if least <= most]


def _too_long(most: int, fewest: int) -> ShardUnavailable:
    return ShardUnavailable(
        f"max_shards_per_request is {most}, and no route over these nodes has fewer than {fewest} hops: raise it to {fewest}, "
        "or serve more layers on a node"
    )


def next_hop(offers: Sequence[Offer], layer: int, end: int, sender: NodeId, terms: Terms = ANY) -> Offer:
    """Who computes on from `layer`, as `sender` sees it, up to at most layer `end`: the greedy rule (HN-22, HN-44).

    No spare if possible, nor the origin itself as its own first hop (HN-24); then the lowest queue, the furthest reach, the
    nearest to the sender (HN-23's hop weight, measured), the lowest id; full nodes after all others. A spare computes as far as
    to the first layer that another node holds. Where every layer is held there is no dead end, since any part of a span can
    be used. Raises ShardUnavailable if none that `terms` admit holds it.
    """
    known = admitted(offers, terms)
    fit = [o for o in known if o.info.span.start <= layer < o.info.span.end]
    if not fit:
        raise ShardUnavailable(f"no node holds layer {layer}: serve it on a node, or admit more")

    def rank(o: Offer) -> tuple[bool, bool, bool, int, int, float, NodeId, Span]:
        is_full, is_own = not has_room(o, terms), o.node == sender == terms.origin
        far = -min(end, o.info.span.end)
        rtt_s = rtt_between(sender, o, terms)
        return is_full, o.info.is_spare, is_own, max(0, o.load.queue), far, rtt_s, o.node, o.info.span

    best = min(fit, key=rank)
    healthy = [o.info.span.start for o in known if not o.info.is_spare and has_room(o, terms)]
    held = [start for start in healthy if start > layer] if best.info.is_spare else []
    return best.part(Span(layer, min([end, best.info.span.end, *held])))


# -- which may take part --------------------------------------------------------------------------------------------------


def _groups(offers: Sequence[Offer], rules: Rules) -> list[list[Offer]]:
    """What may be hops of one route: all, or those that keep rows apart, and those that do not."""
    if rules.mix_classes:
        return [list(offers)]
    return [[o for o in offers if o.keeps_rows], [o for o in offers if not o.keeps_rows]]


def _preferred(groups: Sequence[Sequence[Offer]], run: Span, terms: Terms) -> Space:
    """The first, of exact classes, unless that costs more than CLASS_WORTH above the other."""
    spaces = [Space.of(group, terms) for group in groups]
    if len(spaces) == 1:
        return spaces[0]
    exact, other = (space.priced(run) for space in spaces)
    return exact if _is_near(_cost(exact, run), _cost(other, run), CLASS_WORTH) else other


def _kind(offer: Offer) -> Kind:
    return offer.info.model, offer.info.precision


def _by_kind(offers: Sequence[Offer], wanted: Kind | None) -> list[list[Offer]]:
    """The offers of each kind, those of `wanted` first."""
    found: dict[Kind, list[Offer]] = {}
    for offer in offers:
        found.setdefault(_kind(offer), []).append(offer)
    return [found[kind] for kind in sorted(found, key=lambda kind: (kind != wanted, kind))]


def _refusal(
    offers: Sequence[Offer], fit: Sequence[Offer], run: Span, terms: Terms
) -> ShardUnavailable | WeightsMismatch:
    """Why there is no route: what is missing at the first of weights in common, holders, trust, what the origin keeps."""
    num_layers = run.end
    if len({_kind(o) for o in fit}) > 1:
        held_by = "; ".join(f"{o.name} {o.info.span}: {o.info.model[:12]} {o.info.precision}" for o in fit[:MOST_NAMED])
        held_by += f"; and {len(fit) - MOST_NAMED} more" if len(fit) > MOST_NAMED else ""
        return WeightsMismatch(
            f"the nodes hold different weights or precision ({held_by}): serve the same on all of them"
        )
    missing = _missing(fit, num_layers)
    if len(fit) < len(offers) and missing:
        missing += f" of {num_layers} among those that trust and scope admit ({len(offers) - len(fit)} spans are not)"
        return ShardUnavailable(
            f"no node holds layers {missing}: join one more machine, or admit more (--scope, --allow)"
        )
    if not missing and not terms.rules.mix_classes and (why := why_split([o.info for o in fit], num_layers)):
        return ShardUnavailable(why)
    if not missing:
        kept, rules = _missing(permitted(fit, run, terms), num_layers), terms.rules
        if rules.trusted_first or rules.trusted_last:
            return ShardUnavailable(
                f"no trusted node holds layers {kept} of {num_layers}, and with trusted_first = {rules.trusted_first} and "
                f"trusted_last = {rules.trusted_last} no other may compute them: serve them on a node of the allow list or here"
            )
        return ShardUnavailable(
            f"this node does not hold layers {kept} of {num_layers}, and with own_first = {rules.own_first} and own_last = "
            f"{rules.own_last} no other may compute them: serve them here, or keep fewer"
        )
    which, back = "", ""
    if terms.num_evicted:
        which, back = " that is not evicted", ", or let one back (manyhands workers readmit)"
    return ShardUnavailable(
        f"no node{which} holds layers {missing} of {num_layers}: join one more machine (manyhands join; `manyhands status` "
        f"says with how much memory){back}"
    )


def _missing(offers: Sequence[Offer], num_layers: int) -> str:
    """Layers that no offer holds; "" if there are none."""
    return ", ".join(map(str, gaps_of(offers, num_layers)))


# -- which of them ------------------------------------------------------------------------------------------------------


def _choose(space: Space, run: Span, terms: Terms) -> tuple[Offer, ...]:
    """A route over offers that cover `run`."""
    if terms.rules.policy == "greedy":
        if len(route := _greedy(space.offers, run, terms)) <= terms.rules.max_hops:
            return _stay(space, route, terms.current)
    whole = space.priced(run)
    kept = whole.find(terms.current)
    space = _prefer_one_class(whole, run)
    if kept and _is_near(whole.spans.cost(kept), _cost(space, run), 1 / (1 - HYSTERESIS) - 1):
        return whole.route(kept)
    return _spread(space, run, terms.key) if terms.key else space.route(_find(space, run))


def _stay(space: Space, best: tuple[Offer, ...], current: Sequence[Offer]) -> tuple[Offer, ...]:
    """The route `current` if its nodes still hold it and none has a longer queue than the longest of `best`; else `best`."""
    kept = space.route(space.find(current) or [])
    if not _is_chain(kept, best) or (any(o.info.is_spare for o in kept) and not any(o.info.is_spare for o in best)):
        return best
    return best if max(o.load.queue for o in kept) > max(o.load.queue for o in best) else kept


def _is_chain(route: Sequence[Offer], other: Sequence[Offer]) -> bool:
    """Whether the spans of `route` follow each other over the same layers as those of `other`."""
    spans = [o.info.span for o in route]
    ends = bool(spans) and (spans[0].start, spans[-1].end) == (other[0].info.span.start, other[-1].info.span.end)
    return ends and all(a.end == b.start for a, b in itertools.pairwise(spans))


def _greedy(candidates: Sequence[Offer], run: Span, terms: Terms) -> tuple[Offer, ...]:
    route: list[Offer] = []
    layer, sender = run.start, terms.origin
    while layer < run.end:
        route.append(next_hop(candidates, layer, run.end, sender, terms))
        layer, sender = route[-1].info.span.end, route[-1].node
    return tuple(route)


def _prefer_one_class(space: Space, run: Span) -> Space:
    """The offers of the arithmetic class with the cheapest chain, if that costs at most CLASS_WORTH more than a mixed one. Of
    many classes that cover the run, those that most offers have are looked at."""
    held: dict[str, list[Span]] = {}
    for offer in space.offers:
        held.setdefault(offer.info.arithmetic, []).append(offer.info.span)
    if len(held) == 1:
        return space
    used = {space.offers[at].info.arithmetic for at, _ in _find(space, run)}
    if len(used) == 1:
        return space.only(*used)
    whole = [arithmetic for arithmetic, spans in held.items() if not unheld(spans, run.end, run.start)]
    common = sorted(whole, key=lambda arithmetic: (-len(held[arithmetic]), arithmetic))[:MOST_CLASSES]
    pure = [alike for arithmetic in common if (alike := space.only(arithmetic)).cheapest(run)]
    best = min(pure, key=lambda alike: _cost(alike, run), default=space)
    return best if _is_near(_cost(best, run), _cost(space, run), CLASS_WORTH) else space


def _cost(space: Space, run: Span) -> int:
    return space.spans.cost(_find(space, run))


def _find(space: Space, run: Span) -> list[RoutePart]:
    chain = space.cheapest(run)
    assert chain is not None, "the candidates cover the run"
    return chain


def _spread(space: Space, run: Span, key: bytes) -> tuple[Offer, ...]:
    """Two routes drawn by `key` from those within NEAR of the cheapest; the one with less to do.

    Every node is taken to cost up to NEAR more, by a draw of its own, and the cheapest is looked for once more: what is
    found costs at most 1 + NEAR times the best. Two draws and the lighter load: what is known of load is
    always old, and if all requests took the least loaded node by it, all would take the same one (Mitzenmacher, The Power
    of Two Choices, 2001).
    """
    routes = []
    for salt in (b"1", b"2"):
        draws = [1 + NEAR * _draw(salt + key, o.node) for o in space.offers]
        routes.append(space.route(space.stretched(draws).cheapest(run) or _find(space, run)))
    return min(routes, key=lambda route: (sum(o.load.queue for o in route), sum(o.load.sessions for o in route)))


def _draw(key: bytes, node: NodeId) -> float:
    """Uniform in [0, 1), always the same for a key and a node."""
    digest = hashlib.blake2b(node.encode(), key=key[: hashlib.blake2b.MAX_KEY_SIZE], digest_size=7).digest()
    return int.from_bytes(digest, "big") / (1 << 56)


def _is_near(cost: int, best: int, share: float) -> bool:
    """Whether `cost` uses no more spares than `best` and takes at most `share` longer."""
    return cost - best <= share * (best % SPARE)
