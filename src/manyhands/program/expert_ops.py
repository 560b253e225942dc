"""Operations of a Program that choose experts and compute them (ops.py has the others and the rules)."""

from dataclasses import dataclass, field
from typing import Final, Literal

from manyhands.program.weight import Activation, Weight

Score = Literal["softmax", "sigmoid", "mixer", "root", "logit"]
SCORES: Final[tuple[Score, ...]] = ("softmax", "sigmoid", "mixer", "root", "logit")
FIRST_RANK: Final = 1e30  # more than any other: the correction of experts that every row takes


@dataclass(frozen=True, slots=True)
class Gating:
    """The function f(g, u) of a gated block, by column, in fp32.

    With a `limit`: g <- min(g, limit), u <- min(max(u, -limit), limit). Then f = activation(g) * (u + up_offset), where
    silu is g * sigmoid(alpha * g) and the other activations have no alpha. With `limits_activated` it is min(activation(g),
    limit) instead. situ: (alpha * tanh(g / alpha) * sigmoid(g)) * (limit * tanh(u / limit)), without a limit times u.
    """

    activation: Activation | Literal["situ"] = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    limits_activated: bool = False

    @classmethod
    def of(cls, act: "Activation | Gating") -> "Gating":
        """`act` itself, or the function with this activation and no limits."""
        return act if isinstance(act, Gating) else cls(act)


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """From `source` [experts + always] (router products) choose `top_k` experts a row: target = pairs (expert, weight).

    score s = sigmoid(source), or softmax(source) over all experts. Ranked by s + correction (descending, of equals the
    lower number first). With groups: experts lie in `groups` equal runs, a run's rank is the sum of its two highest
    (score + correction), or with `is_by_best` its highest (of a softmax without correction: of source); only the
    `top_groups` best runs stay. A chosen expert's weight is its s (without correction), divided by (the sum of the chosen
    s, + `epsilon` for sigmoid) if `normalise`, times `scale`, times the expert's number in `factors`. A normalised softmax
    is the softmax over the chosen ones: computed so, exp(v - max) / sum over the chosen. The pairs are in order of rank.
    mixer: ranked by source. The weight of each in turn is its softmax over those that do not rank before it and for which
    not (its source v - source) / max(|source|, v) > `epsilon`; it is not normalised.
    root: s = sqrt(source), else as sigmoid. logit: as sigmoid, but ranked by source + correction.
    With a `table` [tokens, top_k] of whole numbers the chosen ones are those of the token's row, in
    its order; the token's id is in the last four columns of `ids` (compressed_ops.py), 0 where it is none.
    `always` more experts, the last of source, are of every row: their scores count among the chosen ones where those are
    normalised, before them, and their weights [always], scaled likewise, are in `shares`; no route names them. Not with
    groups or a table. `factors` may be one number, of all of them.
    With `may_lack_correction` a checkpoint that lacks the correction has none (tensors.py: without_corrections).
    """

    source: str
    target: str
    experts: int
    top_k: int
    score: Score
    normalise: bool
    scale: float = 1.0
    correction: Weight | None = None
    groups: int = 1
    top_groups: int = 1
    is_by_best: bool = False
    epsilon: float = 1e-20
    factors: Weight | None = None
    may_lack_correction: bool = field(default=False, repr=False)
    table: Weight | None = None
    ids: str = "x"
    always: int = 0
    shares: str = "shares"


@dataclass(frozen=True, slots=True)
class Experts:
    """target = the sum over the row's routes, in their order from zero, of weight * expert(source), in fp32.

    expert(v) = down . round(gating(gate . round(v) + gate_bias, up . round(v) + up_bias)) + down_bias. If `gate` is
    None: down . round(activation(up . round(v) + up_bias)) + down_bias, where activation is the gating's. With
    `scales_source` the sum is of expert(weight * source). With a `norm` each expert's result v is normed before: v <- v (1 +
    norm), then v / sqrt(mean(v^2) + norm_eps). Routes may name `identities` experts more: each gives its source.
    """

    source: str
    routes: str
    target: str
    experts: int
    gating: Gating
    gate: Weight | None
    up: Weight
    down: Weight
    gate_bias: Weight | None = None
    up_bias: Weight | None = None
    down_bias: Weight | None = None
    scales_source: bool = False
    identities: int = 0
    norm: Weight | None = None
    norm_eps: float = 0.0
