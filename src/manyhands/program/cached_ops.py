"""Operations of a Program that use what a session has cached of earlier positions (ops.py has the others and the rules).

Attention caches every position. A convolution and linear attention keep a state, which each position changes.
"""

from dataclasses import dataclass

from manyhands.program.compressed_ops import EntryIndex
from manyhands.program.weight import Activation, Weight


@dataclass(frozen=True, slots=True)
class BlockIndex:
    """Which blocks of `block` positions, the first from 0 on, the query heads of each key head see: `top_k` of them, in order.

    query [heads * width], one head for each of attention's key heads, key [width]; keys are cached. A block's score is the
    highest of q . k of its positions that the row sees; one that is no number does not count. The `local` last blocks, the
    row's own among them, come before all others; of equal scores the earlier. A row with no more blocks than that sees all.
    """

    query: str
    key: str
    heads: int
    width: int
    block: int  # a multiple of 64
    top_k: int
    local: int


@dataclass(frozen=True, slots=True)
class Attention:
    """target [heads * value_width] = causal attention of the row's session; keys and values are cached.

    query [heads * width], key [kv_heads * width], value [kv_heads * value_width], head by head; query head h reads key
    head h // (heads / kv_heads). score = (q . k) * scale; with `soft_cap` c: score = c tanh(score / c). A row at position
    p sees positions <= p, with `window` w only those > p - w, where it `is_chunked` only those >= w floor(p / w). `sinks`
    [heads]: one more score a head, whose value is 0. Without window, a BlockIndex has a row see the positions of the blocks
    that it chooses alone; an EntryIndex those of the entries that it chooses, each of `rate` positions, and those behind its
    last entry, in order, as if they were positions 0, 1, ...
    `biases` [heads * extent], head by head: a score of the position d before the row's takes number d, added last; none from
    `extent` on. Not with an index. `slopes` [heads]: that score takes slope * -d instead, both roundings to fp32 (ALiBi,
    arXiv 2108.12409).
    """

    query: str
    key: str
    value: str
    target: str
    heads: int
    kv_heads: int
    width: int
    value_width: int
    scale: float
    window: int | None = None
    is_chunked: bool = False
    soft_cap: float | None = None
    sinks: Weight | None = None
    index: BlockIndex | EntryIndex | None = None
    rate: int = 1
    biases: str | None = None
    slopes: tuple[float, ...] = ()

    @property
    def cache_widths(self) -> tuple[int, ...]:
        """Values that a position keeps in the cache, in the storage dtype: of keys, of values, of index keys if any."""
        index = () if self.index is None else (self.index.width,)
        return (self.kv_heads * self.width, self.kv_heads * self.value_width, *index)


@dataclass(frozen=True, slots=True)
class Index:
    """Which positions a row of latent attention sees: those of the `top_k` highest scores, of equal scores the earlier ones;
    all, where there are no more.

    query [heads * width], key [width], weight [heads]; keys are cached. The score of a position is the sum over heads, in
    order, of weight_h * max(q_h . k, 0); one that is no number counts as -infinity. Factors that the scores of a row have in
    common do not change which are the highest, and are left out. target [top_k]: for a row that sees more than top_k positions
    those that are chosen, in order; else anything.
    """

    query: str
    key: str
    weight: str
    heads: int
    width: int
    top_k: int
    target: str = "chosen"


@dataclass(frozen=True, slots=True)
class SharedIndex:
    """As Index, of positions that are chosen already: source [top_k] is the target of one. A row that sees no more than top_k
    positions sees all of them; a number that is no position before the row's stands for the row's own."""

    source: str
    top_k: int


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """target [heads * value_width] = attention over cached latents c [rank] and rotary keys r [rotary_width].

    query [heads * (width + rotary_width)]: of each head first the part without position, then the rotary part. Head h:
    a = round(key_weight_h^T . q) [rank]; score = (a . c + q_rotary . r) * scale, one sum over rank + rotary_width columns;
    l = round(softmax(score) . c) [rank]; target_h = value_weight_h . l. Nothing is expanded, in prefill either, so that
    chunks change no bit. `key_weight` [heads * width, rank], `value_weight` [heads * value_width, rank], or `stacked` by head.
    With an `index` a row sees the positions that it chooses, in order, as if they were positions 0, 1, ...; an EntryIndex as in
    Attention. `sinks` and, without an index, `window` as there. Without rotary columns nothing reads `rotary`.
    """

    query: str
    latent: str
    rotary: str
    target: str
    heads: int
    width: int
    rotary_width: int
    value_width: int
    rank: int
    scale: float
    key_weight: Weight
    value_weight: Weight
    index: Index | SharedIndex | EntryIndex | None = None
    sinks: Weight | None = None
    window: int | None = None
    rate: int = 1

    @property
    def cache_widths(self) -> tuple[int, ...]:
        """Values that a position keeps in the cache, in the storage dtype: of latents, of rotary keys, of index keys if any."""
        return (
            self.rank,
            self.rotary_width,
            *((self.index.width,) if isinstance(self.index, Index | EntryIndex) else ()),
        )


@dataclass(frozen=True, slots=True)
class Pool:
    """target [width], in the row of an entry's last position: the sum over its `rate` positions j of softmax_j(gates + bias_j)
    * values, for each column; in other rows zeros. Values and gates are read rounded; `bias` is stored [rate, width]. It is
    Compress of entries that are not doubled, for models with states."""

    values: str
    gates: str
    target: str
    width: int
    rate: int
    bias: Weight


@dataclass(frozen=True, slots=True)
class Taps:
    """Weights of a convolution that the model has by definition: for each tap one, the same of all columns."""

    outputs: int
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Convolution:
    """target = activation(sum over j < taps of weight[c, j] * source[p - (taps - 1 - j) * step, c] + bias), for each column c.

    Rows of its session before position 0 are zeros; source rows are read rounded. `weight` is stored [columns, 1, taps] or
    [columns, taps]; its `rows` are columns. The sum goes from j = 0 on, each term by one fused multiply-add. The target is
    another register.
    """

    source: str
    target: str
    taps: int
    weight: Weight | Taps
    bias: Weight | None = None
    activation: Activation = "none"
    step: int = 1

    @property
    def length(self) -> int:
        """Positions from the first that it reads to the row's."""
        return (self.taps - 1) * self.step + 1


@dataclass(frozen=True, slots=True)
class Decay:
    """target = exp(-rate * softplus(source + bias)), column by column, in double, rounded to fp32 at the end.

    rate is exp(stored) where `is_log`, else the size of what is stored. softplus(v) = log(1 + exp(v)), and v beyond 20.
    """

    source: str
    target: str
    rate: Weight
    bias: Weight
    is_log: bool = True


@dataclass(frozen=True, slots=True)
class ChannelDecay:
    """target = exp(-rate_h * softplus(source + bias)), column by column, in fp32; h is the column's head. With a `bound`,
    below zero: exp(bound * sigmoid(rate_h * (source + bias))).

    rate [heads] is exp(stored) in double, rounded to fp32, where `is_log`, else the size of what is stored; stored [heads] or
    [1, 1, heads, 1]. Each head has as many columns.
    """

    source: str
    target: str
    rate: Weight
    bias: Weight
    is_log: bool = True
    bound: float | None = None


@dataclass(frozen=True, slots=True)
class Softplus:
    """target = softplus(source + bias), column by column, in double, rounded to fp32 at the end."""

    source: str
    target: str
    bias: Weight | None = None


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """target [heads * value_width] = linear attention of the row's session, in fp32: the gated delta rule, or (`is_sum`) the
    plain sum of Mamba 2.

    query and key [key_heads * width], value [heads * value_width], decay and strength [heads], head by head; head h reads
    key head h // (heads / key_heads), where `is_tiled` h % key_heads. A head's state S [width, value_width] is zeros before
    position 0. At each position: S <- S * decay (`by_channel`, of the delta rule alone: decay [heads * width], one for each row
    of S); d = (value - key . S) * strength, where `is_sum` value * strength;
    S <- S + key (outer) d; target = query . S, with a `skip` [heads] + skip * value. The order of the sums is in
    docs/arithmetic.md.
    """

    query: str
    key: str
    value: str
    decay: str
    strength: str
    target: str
    heads: int
    key_heads: int
    width: int
    value_width: int
    is_tiled: bool = False
    is_sum: bool = False
    by_channel: bool = False
    skip: Weight | None = None

    @property
    def kept_key_heads(self) -> int:
        """Key heads that a state keeps of a position: with `is_tiled` one for each head."""
        return self.heads if self.is_tiled else self.key_heads


@dataclass(frozen=True, slots=True)
class SelectiveScan:
    """target [columns] = the selective scan (Mamba 1) of the row's session, in fp32.

    query and key [width], value and step [columns]. A column c has a state S_c [width], zeros before position 0. At each
    position, for each k: S_ck <- S_ck * exp(step_c * rate_ck) + key_k * (value_c * step_c); target_c = sum over k of query_k
    S_ck, + skip_c * value_c. rate is -exp of what is stored [columns, width], unless `is_log` is off. Steps are not negative.
    docs/arithmetic.md has the order of the sums.
    """

    query: str
    key: str
    value: str
    step: str
    target: str
    rate: Weight
    skip: Weight
    is_log: bool = True

    @property
    def columns(self) -> int:
        """Of a row, each with a state."""
        return self.rate.shape[0]

    @property
    def width(self) -> int:
        """Numbers of a column's state."""
        return self.rate.shape[1]
