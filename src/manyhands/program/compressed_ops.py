"""Operations of deepseek_v4, of which hy_v4 has the streams: several residual streams in a row, positions that are compressed,
and attention over both.

**Streams.** A row that goes from layer to layer has `streams` residual streams, one behind the other (register "x", and rows on
the wire, are as many times as wide). `Collapse` makes of them the one row that attention or experts read, and how what these
give is to be put back; `Spread` puts it back. So a cut between two layers sends streams times the bytes. Where experts are
chosen by the token's id, the row has four columns more: the id's digits to base 256, each / 256, which bf16 holds exactly
(ops.py: Embed, ExpertRouting). No operation changes them, so that a node which sees no ids has each row's id.

**Entries.** Entry w stands for positions [w rate, (w + 1) rate): `Compress` gives it in the row of the last of them, and
zeros in all other rows; norm and rotary embedding (at the first of them: Rotary.back) make it what attention caches. A row
at position p sees entries w < (p + 1) // rate, rounded down: those whose positions it sees all of. What is cached of a
position, in blocks of 64 positions as for every model, is its key, and in that of the last one of an entry the entry and its
index key. An entry is made of values and gates alone (of both compressors), each rounded once, in the order of positions; so it
has the same bits whichever steps its positions came in. They are kept of the last positions, and of those that an entry takes
which begins at a multiple of 64 (engine/rings.py): a session that goes back there has all that it needs, and the entry itself
is written again before it is seen. Rates divide 64, or are multiples of it.
"""

from dataclasses import dataclass

from manyhands.program.weight import Weight


@dataclass(frozen=True, slots=True)
class Collapse:
    """target [width] = sum over streams i, in order, of pre_i * source_i; `kept` = pre [streams], post [streams], comb
    [streams, streams] row by row, or pre alone where mix [(2 + streams) streams, all columns] is [streams, ...]. Nothing is
    rounded.

    m = (mix . source, rounded as products are) * s, of the first streams * width columns, s = 1 / sqrt(mean(source^2) +
    norm_epsilon); then m * scale + base: scale has a number for each of pre, post, comb. pre = sigmoid + epsilon; post = 2
    sigmoid. comb = softmax of each row + epsilon, then each column divided by (its sum + epsilon); then iterations - 1
    times each row, then each column, likewise. mix is held as it is stored, in fp32 too. With a `magnitude` mix is
    [2 streams, ...], post = magnitude * sigmoid + epsilon, and there is no comb.
    """

    source: str
    target: str
    kept: str
    streams: int
    mix: Weight
    base: Weight
    scale: Weight
    norm_epsilon: float
    epsilon: float
    iterations: int = 1
    magnitude: float | None = None

    @property
    def width(self) -> int:
        """Columns of a stream."""
        return self.mix.inputs // self.streams

    @property
    def keeps(self) -> int:
        """0: pre alone; 1: post and comb too; 2: post, as of a magnitude."""
        return 2 if self.magnitude is not None else int(self.mix.outputs > self.streams)


@dataclass(frozen=True, slots=True)
class Spread:
    """Stream k of target = source * post_k + the sum over streams j, in order, of stream j * comb[j, k], without comb stream
    k + source * post_k; rounded, as Add's. `kept` is Collapse's."""

    source: str
    kept: str
    streams: int
    target: str = "x"


@dataclass(frozen=True, slots=True)
class GroupedProduct:
    """target: of each of `groups` equal parts of the rounded source, in order, the product with its rows of the weight
    [groups * outputs of a part, inputs of a part]. With `is_shared` all have the same rows, [outputs of a part, inputs of a
    part], which are held as they are stored."""

    source: str
    target: str
    weight: Weight
    groups: int
    is_shared: bool = False

    @property
    def width(self) -> int:
        """Columns of a part of the target."""
        return self.weight.outputs if self.is_shared else self.weight.outputs // self.groups


@dataclass(frozen=True, slots=True)
class Compress:
    """target [width] = the entry of which the row's position is the last: the sum over its positions, in order, of
    softmax(gate + bias) * value, column by column. Rows at other positions: zeros.

    values and gates [width], of each position, are kept rounded; `bias` [rate, width] by place in the entry. With
    `is_doubled` all three are twice as wide: an entry is of the first half of the columns at the positions of the entry
    before (none before the first entry), then of the other half at its own.
    """

    values: str
    gates: str
    target: str
    width: int
    rate: int
    bias: Weight
    is_doubled: bool = False

    @property
    def cache_widths(self) -> tuple[int, ...]:
        """Values and gates of a position, in the storage dtype."""
        return (self.width * (1 + self.is_doubled),) * 2


@dataclass(frozen=True, slots=True)
class EntryIndex:
    """Which entries a row sees: as `Index` of latent attention, of entries in place of positions. `key` [width] is read and
    cached in the row of an entry's last position."""

    query: str
    key: str
    weight: str
    heads: int
    width: int
    top_k: int


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """target [heads * width] = attention of all heads over one cached key [width], which is the value too: over the last
    `window` positions, then, with an `entry` [width], over the entries that the row sees, or of these over those that an
    `index` chooses, in order. All take the places of positions 0, 1, ... of a session in one softmax. Sinks as in
    Attention.
    """

    query: str
    key: str
    target: str
    heads: int
    width: int
    scale: float
    window: int
    sinks: Weight
    entry: str | None = None
    rate: int = 1
    index: EntryIndex | None = None

    @property
    def cache_widths(self) -> tuple[int, ...]:
        """Values that a position keeps where entries are kept in their last position's row: key, entry, index key."""
        entry = () if self.entry is None else (self.width,)
        return (self.width, *entry, *(() if self.index is None else (self.index.width,)))
