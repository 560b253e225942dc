"""A Program: what a model computes, as a list of operations a layer. Plain data; engines run it.

**Registers.** A layer's operations read and write named registers: rows of fp32, one row a token. Register "x" is the
residual stream: it enters the layer, and what it holds after the last operation leaves it. All others live within one
layer and are written before they are read. A target may be its source. Widths follow from the operations.

**Roundings.** An engine computes in fp32 between these places, and rounds to the storage dtype (bf16, round to nearest
even; with fp32 storage a rounding does nothing) at these and no others:
  1. a row that a product reads (`Product`, the products inside `Experts`, `LatentAttention`, `Collapse` and `Head`): the
     register keeps its fp32 values, the product reads them rounded; several products that read one register read the same
     row;
  2. queries, keys and values of `Attention`, the query rows, latent and rotary key of `LatentAttention`, queries and keys
     of their indexes: rounded once, where attention reads or caches them (so after head norm and rotary embedding);
  3. attention weights before they multiply values (the sum that divides them is of the unrounded ones);
  4. the residual stream: the result of `Embed`, of `Spread` and of every `Add` to it (not of a `Norm` of it in place, as of
     nanochat's embedding), and the columns that a `Copy` replaces in it;
  5. the rows that a `Convolution` or a `Pool` reads;
  6. queries, keys and entries of `CompressedAttention`, queries and keys of its index, values and gates of `Compress`:
     where they are read or cached.
Products sum in fp32 and are not rounded; logits are fp32. Numbers (epsilons, scales, caps, limits) are rounded to fp32
before use; only Rope.factor and ScaleByPosition.beta are used in double. The order of every sum is stated in
docs/arithmetic.md, not here.

**Weights.** Matrices are held in the storage dtype, vectors (of norms, biases, sinks) as fp32, as the checkpoint stores them.
"""

from dataclasses import dataclass, field
from typing import Final, Literal

from manyhands.program.cached_ops import Attention as Attention
from manyhands.program.cached_ops import BlockIndex as BlockIndex
from manyhands.program.cached_ops import ChannelDecay as ChannelDecay
from manyhands.program.cached_ops import Convolution as Convolution
from manyhands.program.cached_ops import Decay as Decay
from manyhands.program.cached_ops import Index as Index
from manyhands.program.cached_ops import LatentAttention as LatentAttention
from manyhands.program.cached_ops import LinearAttention as LinearAttention
from manyhands.program.cached_ops import Pool as Pool
from manyhands.program.cached_ops import SelectiveScan as SelectiveScan
from manyhands.program.cached_ops import SharedIndex as SharedIndex
from manyhands.program.cached_ops import Softplus as Softplus
from manyhands.program.cached_ops import Taps as Taps
from manyhands.program.compressed_ops import Collapse as Collapse
from manyhands.program.compressed_ops import Compress as Compress
from manyhands.program.compressed_ops import CompressedAttention as CompressedAttention
from manyhands.program.compressed_ops import EntryIndex as EntryIndex
from manyhands.program.compressed_ops import GroupedProduct as GroupedProduct
from manyhands.program.compressed_ops import Spread as Spread
from manyhands.program.expert_ops import FIRST_RANK as FIRST_RANK
from manyhands.program.expert_ops import SCORES as SCORES
from manyhands.program.expert_ops import ExpertRouting as ExpertRouting
from manyhands.program.expert_ops import Experts as Experts
from manyhands.program.expert_ops import Gating as Gating
from manyhands.program.expert_ops import Score as Score
from manyhands.program.row_ops import GROWTHS as GROWTHS
from manyhands.program.row_ops import Admit as Admit
from manyhands.program.row_ops import AttendStreams as AttendStreams
from manyhands.program.row_ops import Blend as Blend
from manyhands.program.row_ops import Clip as Clip
from manyhands.program.row_ops import Constant as Constant
from manyhands.program.row_ops import Copy as Copy
from manyhands.program.row_ops import Mix as Mix
from manyhands.program.row_ops import Multiply as Multiply
from manyhands.program.row_ops import Ngrams as Ngrams
from manyhands.program.row_ops import PositionEmbedding as PositionEmbedding
from manyhands.program.row_ops import Rescale as Rescale
from manyhands.program.row_ops import RowOp as RowOp
from manyhands.program.row_ops import ScaleByPosition as ScaleByPosition
from manyhands.program.row_ops import ScaleHeads as ScaleHeads
from manyhands.program.row_ops import SoftCap as SoftCap
from manyhands.program.row_ops import Sparsify as Sparsify
from manyhands.program.row_ops import Xielu as Xielu
from manyhands.program.weight import EXPERT as EXPERT
from manyhands.program.weight import Activation as Activation
from manyhands.program.weight import Rows as Rows
from manyhands.program.weight import Weight as Weight

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
    pair (a, b) and its cos c and sin s: a <- a c - b s, b <- b c + a s. A row at position p has the angles of p - `back`, or 0.
    With `exponents` [rope.width / 2] each frequency is first multiplied by exp of its own, in fp32.
    """

    target: str
    heads: int
    width: int
    rope: int
    offset: int = 0
    pairs: bool = False
    back: int = 0
    exponents: Weight | None = None

    @property
    def table(self) -> tuple[int, Weight | None]:
        """What its frequencies are made of: operations that have it in common have the same."""
        return self.rope, self.exponents


@dataclass(frozen=True, slots=True)
class Gate:
    """target = gating(gate, up), column by column, in fp32."""

    gate: str
    up: str
    target: str
    gating: Gating


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
    | CompressedAttention
    | Compress
    | Collapse
    | Spread
    | GroupedProduct
    | Convolution
    | Pool
    | Decay
    | ChannelDecay
    | Softplus
    | LinearAttention
    | SelectiveScan
    | Xielu
    | Gate
    | ExpertRouting
    | Experts
    | Multiply
    | ScaleByPosition
    | ScaleHeads
    | RowOp
    | Add
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: operations in order, from "x" to "x"."""

    ops: tuple[Op, ...]

    @property
    def attentions(self) -> tuple[Attention | LatentAttention | CompressedAttention, ...]:
        """The operations that attend to what is cached of every position: mostly one, of longcat_flash two."""
        kinds = Attention | LatentAttention | CompressedAttention
        return tuple(op for op in self.ops if isinstance(op, kinds))

    @property
    def attention(self) -> Attention | LatentAttention | CompressedAttention | None:
        """The first of them, if there is one."""
        return next(iter(self.attentions), None)

    @property
    def compressed(self) -> tuple[Compress, ...]:
        """The operations that cache what entries are made of."""
        return tuple(op for op in self.ops if isinstance(op, Compress))

    @property
    def cache_widths(self) -> tuple[int, ...]:
        """Values that a position keeps in the cache, part by part: of each of `compressed`, then of attention."""
        found = tuple(width for op in self.attentions for width in op.cache_widths) or (0, 0)
        return (*(width for op in self.compressed for width in op.cache_widths), *found)

    @property
    def recurrent(self) -> tuple[Convolution | Pool | LinearAttention | SelectiveScan, ...]:
        """The operations that keep a state instead: what they cached last, which each position changes."""
        return tuple(op for op in self.ops if isinstance(op, Convolution | Pool | LinearAttention | SelectiveScan))


@dataclass(frozen=True, slots=True)
class Embed:
    """x = round(weight[id] * scale), `streams` times. With `round_scale`, the scale itself is first rounded to the storage
    dtype. With `has_ids` the id's four digits to base 256 follow, the lowest first, each / 256.

    x may be wider: columns from `column` on are those of a second table, likewise; ids that it does not have get its row 0.
    All others are zeros."""

    weight: Weight
    scale: float = 1.0
    round_scale: bool = False
    streams: int = 1
    has_ids: bool = False
    beside: "Embed | None" = None
    column: int = 0


@dataclass(frozen=True, slots=True)
class Head:
    """logits [vocab] = product . norm(x) (rounded when read) + bias, times `scale`; with `soft_cap` c: c tanh(logit / c).

    `before` leaves what `norm` reads, else that is "x"; `norm`, or what is `behind`, writes "h", `product` reads it and
    writes "logits" (fp32, unrounded). A tied head names the embedding's tensor, and as `own` the one that it is where a
    checkpoint has it (tensors.py: with_own_head)."""

    norm: Norm
    product: Product
    scale: float = 1.0
    soft_cap: float | None = None
    own: Weight | None = field(default=None, repr=False)
    before: tuple[Op, ...] = ()
    behind: tuple[Op, ...] = ()

    @property
    def ops(self) -> tuple[Op, ...]:
        """All its operations, in order."""
        return (*self.before, self.norm, *self.behind, self.product)


@dataclass(frozen=True, slots=True)
class Program:
    """A whole text model. `context`: positions that may be used; `hidden`: columns of a row that goes from layer to layer."""

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
        """Whether some layers choose the positions, or their blocks, that attention sees."""
        return any(op.index is not None for op in self._attentions)

    @property
    def chooses_entries(self) -> bool:
        """Whether attention of some layers sees the positions of entries that an index chooses."""
        return any(isinstance(op.index, EntryIndex) for op in self._attentions)

    @property
    def holds_numbers(self) -> bool:
        """Whether rows hold whole numbers, which rounding changes: tokens' ids, or chosen positions."""
        return self.embed.has_ids or any(isinstance(op.index, SharedIndex) for op in self._attentions)

    @property
    def _attentions(self) -> list[Attention | LatentAttention]:
        return [op for layer in self.layers for op in layer.ops if isinstance(op, Attention | LatentAttention)]

    @property
    def has_entries(self) -> bool:
        """Whether keys are values, and some layers may compress positions."""
        return any(isinstance(layer.attention, CompressedAttention) for layer in self.layers)

    @property
    def has_streams(self) -> bool:
        """Whether a row that goes from layer to layer holds several residual streams."""
        return any(isinstance(op, Mix | Spread | AttendStreams) for layer in self.layers for op in layer.ops)

    @property
    def has_biases(self) -> bool:
        """Whether scores of attention in some layers take a number by distance."""
        return any(isinstance(op, Attention) and op.biases is not None for op in self._attentions)

    @property
    def has_scans(self) -> bool:
        """Whether some layers have a selective scan."""
        return any(isinstance(op, SelectiveScan) for layer in self.layers for op in layer.ops)

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state, so that a session cannot go back to every position."""
        return any(layer.recurrent for layer in self.layers)
