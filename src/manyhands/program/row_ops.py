"""Operations of a Program on rows, most of which few families need (ops.py has the others and the rules).

Copy, Mix, Rescale, Sparsify and SoftCap are those of Gemma 3n, Ngrams and Admit those of Qwen4-Exp, whose register "x" holds
several streams side by side (those of deepseek_v4 are in compressed_ops.py).
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

from manyhands.program.weight import Weight

Growth = Literal["whole", "power", "lengths"]
GROWTHS: Final[tuple[Growth, ...]] = ("whole", "power", "lengths")


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
class ScaleByPosition:
    """In place: target times 1 + beta log(1 + floor((p + offset) / length)), p being the row's position; by "power" times
    (1 + (p + offset) / length) ** beta, by "lengths" times 1 + beta log(max((p + offset) / length, 1)).

    The factor is computed in double and rounded to fp32 once; the product is one rounding to fp32. `beta` is not negative, of
    a power at most 4; `length` counts positions; `offset` is 0 or 1.
    """

    target: str
    beta: float
    length: int
    offset: int = 0
    growth: Growth = "whole"


@dataclass(frozen=True, slots=True)
class PositionEmbedding:
    """target = row p + offset of `table`, p being the row's position. The table has a row for each position that may be used;
    it is held as a matrix that is not rounded to small weights, and read as it is held."""

    target: str
    table: Weight
    offset: int = 0


@dataclass(frozen=True, slots=True)
class ScaleHeads:
    """In place: head h of target, of as many equal parts as `scales` has numbers, times scales_h log(1 + p) + biases_h, p being
    the row's position. The factor is computed in double and rounded to fp32 once; the product is one rounding to fp32."""

    target: str
    scales: Weight
    biases: Weight


@dataclass(frozen=True, slots=True)
class Multiply:
    """target = source * by. `by`: a register with a column for each of as many equal parts of a row (heads), or for all of it;
    in place also a number, or a stored vector of one, or of a number for each column, to each of which `offset` is added."""

    source: str
    by: str | Weight | float
    target: str
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Copy:
    """Columns [start, start + count) of source become the whole of target, or with `at` its columns [at, at + count): those of
    the residual stream are rounded. With a `width` target is written anew, that wide; other copies fill the rest."""

    source: str
    target: str
    start: int
    count: int
    at: int | None = None
    width: int | None = None


@dataclass(frozen=True, slots=True)
class Mix:
    """In place, in fp32: part b of target + by[b, a] * part a of source, for a < `sources` in order; b < `targets`.

    Parts are `width` columns, of source from `start` on, of target from `at` on. by [targets * sources] is a register, to each
    number of which `offset` is added first; without one all are 1.
    """

    source: str
    by: str | None
    target: str
    width: int
    sources: int
    targets: int
    start: int = 0
    at: int = 0
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Blend:
    """target = round(target * kept + source * added), column by column; source * added stays in source.

    Of a stored number g, each step in fp32: w = g / temperature; added = sigmoid(w); kept = sqrt(max(sigmoid(-w) (1 + added),
    least)). The sigmoids are computed in double. The target is the residual stream.
    """

    source: str
    gate: Weight
    temperature: float
    least: float
    target: str = "x"


@dataclass(frozen=True, slots=True)
class Rescale:
    """target = (source * size(like)) / size(source), sizes being sqrt(mean(v^2)), with at least `least` below the last root."""

    source: str
    like: str
    target: str
    least: float


@dataclass(frozen=True, slots=True)
class Sparsify:
    """In place: max(v - cut, 0) where cut = mean(v) + by * sqrt(mean((v - mean(v))^2)), of the row."""

    target: str
    by: float


@dataclass(frozen=True, slots=True)
class SoftCap:
    """In place: cap * tanh(v / cap)."""

    target: str
    cap: float


@dataclass(frozen=True, slots=True)
class Clip:
    """In place: numbers above limit become limit, those below -limit become -limit."""

    target: str
    limit: float


@dataclass(frozen=True, slots=True)
class Constant:
    """target = numbers, rounded to fp32, in every row (whose first number in "x" is one)."""

    target: str
    numbers: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Ngrams:
    """target: for n = 2 .. the number of `tokens`, and each head of n, a row of `table`, side by side.

    tokens[j] is a register whose last four columns are the digits (ops.py: Embed) of the id j positions before. A token before
    position 0, and all from an earlier `end` on backwards, counts as `end`. The row of a head is (the exclusive or, over j < n,
    of id_j * multipliers[j]) modulo the head's size, behind the sizes of the heads before. `table` is stored in `parts` of
    equal rows, EXPERT in the name being the part's number. `stored`: where a checkpoint has what is in `numbers`.
    """

    tokens: tuple[str, ...]
    target: str
    table: Weight
    parts: int
    stored: tuple[Weight, Weight, Weight]
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    end: int
    vocab: int

    @property
    def numbers(self) -> tuple[tuple[int, ...], ...]:
        """Multipliers; of each head its size, and the rows of the table before its own."""
        return self.multipliers, self.sizes, tuple(accumulate(self.sizes[:-1], initial=0))


@dataclass(frozen=True, slots=True)
class Admit:
    """Part s of target, of as many as `streams`, = value * sigmoid(root((key_s . query_s) * scale)).

    root(v) is sqrt(max(|v|, 1e-6)) with the sign of v, 0 of 0.
    """

    key: str
    query: str
    value: str
    target: str
    streams: int
    scale: float


@dataclass(frozen=True, slots=True)
class AttendStreams:
    """target = the sum over the first `streams` parts of source, in order, of weight_i * part_i; a part is as wide as target.

    The weights are the softmax over i of (part_i . by) / sqrt(mean(part_i^2) + eps), where `by` is the product of the vectors
    `weights`, each stored as [width] or [1, width]. Nothing is rounded. (Attention residuals, arXiv 2603.15031.)
    """

    source: str
    target: str
    streams: int
    weights: tuple[Weight, ...]
    eps: float


RowOp = (
    Blend
    | Clip
    | Constant
    | Copy
    | Mix
    | Rescale
    | Sparsify
    | SoftCap
    | Ngrams
    | Admit
    | AttendStreams
    | PositionEmbedding
)
