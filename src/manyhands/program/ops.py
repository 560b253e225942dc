"""A Program: what a model computes, as a list of operations a layer. Plain data; engines run it.

**Registers.** A layer's operations read and write named registers: rows of fp32, one row a token. Register "x" is the
residual stream: it enters the layer, and what it holds after the last operation leaves it. All others live within one
layer and are written before they are read. A target may be its source. Widths follow from the operations.

**Roundings.** An engine computes in fp32 between these places, and rounds to the storage dtype (bf16, round to nearest
even; with fp32 storage a rounding does nothing) at these and no others:
  1. a row that a product reads (`Product`, the products inside `Experts`, `LatentAttention` and `Head`): the register
     keeps its fp32 values, the product reads them rounded; several products that read one register read the same row;
  2. queries, keys and values of `Attention`, the query rows, latent and rotary key of `LatentAttention`, queries and keys
     of its `Index`: rounded once, where attention reads or caches them (so after head norm and rotary embedding);
  3. attention weights before they multiply values (the sum that divides them is of the unrounded ones);
  4. the residual stream: the result of `Embed` and of every `Add` to it (not of a `Norm` of it in place, as of nanochat's
     embedding);
  5. the rows that a `Convolution` reads.
Products sum in fp32 and are not rounded; logits are fp32. Numbers (epsilons, scales, caps, limits) are rounded to fp32
before use; only Rope.factor and ScaleByPosition.beta are used in double. The order of every sum is stated in
docs/arithmetic.md, not here.

**Weights.** Matrices are held in the storage dtype, vectors (of norms, biases, sinks) as fp32, as the checkpoint stores them.
"""

from dataclasses import dataclass, field
from typing import Final, Literal

from manyhands.program.cached_ops import Attention as Attention
from manyhands.program.cached_ops import Convolution as Convolution
from manyhands.program.cached_ops import Decay as Decay
from manyhands.program.cached_ops import Index as Index
from manyhands.program.cached_ops import LatentAttention as LatentAttention
from manyhands.program.cached_ops import LinearAttention as LinearAttention
from manyhands.program.cached_ops import Softplus as Softplus
from manyhands.program.weight import EXPERT as EXPERT
from manyhands.program.weight import Activation as Activation
from manyhands.program.weight import Rows as Rows
from manyhands.program.weight import Weight as Weight

Score = Literal["softmax", "sigmoid", "mixer"]
SCORES: Final[tuple[Score, ...]] = ("softmax", "sigmoid", "mixer")
NormKind = Literal["rms", "layer"]

RESIDUAL: Final = "x"


@dataclass(frozen=True, slots=True)
class Rope:
    """The tables of a rotary embedding; `Program.ropes` holds each once, operations name it by index.

    Angle i of position p is the fp32 product of p and `frequencies[i]` (each an exact fp32 value; one below zero turns the
    other way round). The tables are cos and sin of that angle in double, times `factor` in double, then rounded to fp32. They
    are never rounded to the storage dtype.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0

    @property
    def width(self) -> int:
        """Columns of a head that turn: two for each frequency."""
        return 2 * len(self.frequencies)


@dataclass(frozen=True, slots=True)
class Gating:
    """The function f(g, u) of a gated block, by column, in fp32.

    With a `limit`: g <- min(g, limit), u <- min(max(u, -limit), limit). Then f = activation(g) * (u + up_offset), where
    silu is g * sigmoid(alpha * g) and the other activations have no alpha.
    """

    activation: Activation = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Norm:
    """target = norm(source), for each of `groups` equal parts of a row (heads) by itself.

    rms: v / sqrt(mean(v^2) + eps) * (offset + weight); layer: the same of v - mean(v), with mean((v - mean(v))^2), then
    + bias. `weight` is empty, one vector (as wide as a part, shared by the parts), or one vector a part. `bias` likewise.
    """

    source: str
    target: str
    kind: NormKind
    eps: float
    weight: tuple[Weight, ...]
    bias: tuple[Weight, ...] = ()
    offset: float = 0.0
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """target = activation(rounded source . weight^T + bias), width weight.outputs."""

    target: str
    weight: Weight
    bias: Weight | None = None
    activation: Activation = "none"


@dataclass(frozen=True, slots=True)
class Product:
    """Products that read one source. They may be computed as one; each column's bits are those of its product alone.

    gelu is v/2 (1 + erf(v / sqrt 2)); gelu_tanh v/2 (1 + tanh(sqrt(2/pi) (v + 0.044715 v^3))); relu2 max(v, 0)^2.
    """

    source: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Rotary:
    """In place, for each of `heads` parts (each `width` wide): columns [offset, offset + rope.width) turn by the
    position's angles; the others stay.

    Halves: column i of the turning part goes with column i + rope.width / 2; `pairs`: column 2i with 2i + 1. For such a
    pair (a, b) and its cos c and sin s: a <- a c - b s, b <- b c + a s.
    """

    target: str
    heads: int
    width: int
    rope: int
    offset: int = 0
    pairs: bool = False


@dataclass(frozen=True, slots=True)
class Xielu:
    """In place, v by v in fp32: above zero (p v) v + beta v, else (expm1(min(v, epsilon)) - v) n + beta v.

    p = softplus(rise) and n = beta + softplus(fall), in double, rounded to fp32 once. All four are stored numbers.
    """

    target: str
    rise: Weight
    fall: Weight
    beta: Weight
    epsilon: Weight

    @property
    def numbers(self) -> tuple[Weight, ...]:
        """All that is stored."""
        return self.rise, self.fall, self.beta, self.epsilon


@dataclass(frozen=True, slots=True)
class Gate:
    """target = gating(gate, up), column by column, in fp32."""

    gate: str
    up: str
    target: str
    gating: Gating


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """From `source` [experts] (router products) choose `top_k` experts a row: target = pairs (expert, weight).

    score s = sigmoid(source), or softmax(source) over all experts. Ranked by s + correction (descending, of equals the
    lower number first). With groups: experts lie in `groups` equal runs, a run's rank is the sum of its two highest
    (score + correction), only the `top_groups` best runs stay. A chosen expert's weight is its s (without correction),
    divided by (the sum of the chosen s, + `epsilon` for sigmoid) if `normalise`, times `scale`, times the expert's number in
    `factors`. A normalised softmax is the softmax over the chosen ones: computed so, exp(v - max) / sum over the chosen.
    The pairs are in order of rank.
    mixer: ranked by source. The weight of each in turn is its softmax over those that do not rank before it and for which
    not (its source v - source) / max(|source|, v) > `epsilon`; it is not normalised.
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
    epsilon: float = 1e-20
    factors: Weight | None = None
    may_lack_correction: bool = field(default=False, repr=False)


@dataclass(frozen=True, slots=True)
class Experts:
    """target = the sum over the row's routes, in their order from zero, of weight * expert(source), in fp32.

    expert(v) = down . round(gating(gate . round(v) + gate_bias, up . round(v) + up_bias)) + down_bias. If `gate` is
    None: down . round(activation(up . round(v) + up_bias)) + down_bias, where activation is the gating's. With
    `scales_source` the sum is of expert(weight * source).
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


@dataclass(frozen=True, slots=True)
class Multiply:
    """target = source * by. `by`: a register with a column for each of as many equal parts of a row (heads), or for all of it;
    in place also a stored vector of one, or a number."""

    source: str
    by: str | Weight | float
    target: str


@dataclass(frozen=True, slots=True)
class ScaleByPosition:
    """In place: target times 1 + beta log(1 + floor((p + offset) / length)), p being the row's position.

    The factor is computed in double and rounded to fp32 once; the product is one rounding to fp32. Before position `length` -
    `offset` it is 1. `beta` is not negative; `length` counts positions; `offset` is 0 or 1.
    """

    target: str
    beta: float
    length: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Term:
    """source * scale (no multiplication if it is 1), one rounding to fp32."""

    source: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Add:
    """x = round(((x + term 0) + term 1) ...): what a branch adds to the residual stream. Another `target` is not rounded."""

    terms: tuple[Term, ...]
    target: str = RESIDUAL


Op = (
    Norm
    | Product
    | Rotary
    | Attention
    | LatentAttention
    | Convolution
    | Decay
    | Softplus
    | LinearAttention
    | Xielu
    | Gate
    | ExpertRouting
    | Experts
    | Multiply
    | ScaleByPosition
    | Add
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: operations in order, from "x" to "x"."""

    ops: tuple[Op, ...]

    @property
    def attention(self) -> Attention | LatentAttention | None:
        """The layer's one operation that caches every position, if it has one."""
        return next((op for op in self.ops if isinstance(op, Attention | LatentAttention)), None)

    @property
    def cache_widths(self) -> tuple[int, ...]:
        """Values that a position keeps in the cache, part by part."""
        return (0, 0) if self.attention is None else self.attention.cache_widths

    @property
    def recurrent(self) -> tuple[Convolution | LinearAttention, ...]:
        """The operations that keep a state instead: what they cached last, which each position changes."""
        return tuple(op for op in self.ops if isinstance(op, Convolution | LinearAttention))


@dataclass(frozen=True, slots=True)
class Embed:
    """x = round(weight[id] * scale). With `round_scale`, the scale itself is first rounded to the storage dtype."""

    weight: Weight
    scale: float = 1.0
    round_scale: bool = False


@dataclass(frozen=True, slots=True)
class Head:
    """logits [vocab] = product . norm(x) (rounded when read) + bias, times `scale`; with `soft_cap` c: c tanh(logit / c).

    `norm` goes from register "x" to register "h", `product` reads "h" and writes "logits" (fp32, unrounded). A tied head
    names the embedding's tensor, and as `own` the one that it is where a checkpoint has it (tensors.py: with_own_head)."""

    norm: Norm
    product: Product
    scale: float = 1.0
    soft_cap: float | None = None
    own: Weight | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Program:
    """A whole text model. `context`: positions that may be used."""

    family: str
    hidden: int
    vocab: int
    context: int
    ropes: tuple[Rope, ...]
    embed: Embed
    layers: tuple[Layer, ...]
    head: Head

    @property
    def has_index(self) -> bool:
        """Whether some layers choose the positions that attention sees."""
        return any(
            isinstance(op, LatentAttention) and op.index is not None for layer in self.layers for op in layer.ops
        )

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state, so that a session cannot go back to every position."""
        return any(layer.recurrent for layer in self.layers)
