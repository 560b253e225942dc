"""Rotary embeddings: config.json -> the frequencies and the factor of each table (ops.Rope).

Only +, -, *, / and square roots of IEEE doubles are used, and roundings to fp32, in a fixed order: `math.log` and
`math.pow` belong to the C library and differ between machines. Follows transformers, which rounds to fp32 where `_fp32`
stands. Scalings that switch with the length seen (dynamic, longrope) hold the model to the length before it.
"""

import math
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from manyhands.program.fields import LARGEST, SMALLEST, Fields
from manyhands.program.ops import Rope, ScaleByPosition

_LN2_HIGH: Final = 6.93147180369123816490e-01  # its last 32 bits are zero: k * _LN2_HIGH is exact
_LN2_LOW: Final = 1.90821492927058770002e-10
_PI: Final = 3.141592653589793
_ORIGINAL: Final = "original_max_position_embeddings"
_SCALED_FROM: Final = ("dynamic", "llama3", "longrope", "su", "yarn")  # these scalings read it


def exp(x: float) -> float:
    """e ** x to 1e-15, the same bits on every machine; |x| < 700."""
    k = math.floor(x / 0.6931471805599453 + 0.5)
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    total = 1.0
    for n in range(17, 0, -1):
        total = 1.0 + total * r / n
    return math.ldexp(total, k)


def log(x: float) -> float:
    """The natural logarithm to 1e-15, the same bits on every machine; x > 0."""
    mantissa, k = math.frexp(x)
    if mantissa < 0.7071067811865476:
        mantissa, k = mantissa * 2.0, k - 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    total, square = 0.0, s * s
    for n in range(27, 0, -2):
        total = total * square + 1.0 / n
    return k * _LN2_HIGH + (2.0 * s * total + k * _LN2_LOW)


def _fp32(x: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def _powers(base: float, width: int) -> list[float]:
    """base ** (2 i / width), as fp32, for i < width / 2."""
    scale = log(base)
    return [_fp32(exp(_fp32(i / width) * scale)) for i in range(0, width, 2)]


def _frequencies(base: float, width: int) -> list[float]:
    return [_fp32(1.0 / power) for power in _powers(base, width)]


class RopeReader:
    """Reads the rotary fields of a config, in their old form (rope_theta, rope_scaling) and the new (rope_parameters).

    `context` is the number of positions that may be used; reading a scaling that switches makes it smaller.
    """

    def __init__(
        self,
        fields: Fields,
        *,
        theta: float = 10000.0,
        fraction: float = 1.0,
        original: int | None = None,
        growing: bool = False,
        stretched: bool = False,
        sectioned: bool = False,
        scaled: bool = False,
    ) -> None:
        """With `growing` a family multiplies queries by 1 + beta log(1 + floor(position / original length)); with `stretched`
        a dynamic scaling may have an alpha; with `sectioned` heads turn in sections by place in time and in an image, which for
        text are equal; with `scaled` longrope has factors of tables of its own."""
        self.fields = fields
        self.context = fields.count("max_position_embeddings", 2048)
        by_usual_name = fields.has("max_position_embeddings") and not fields.is_renamed("max_position_embeddings")
        self._length = self.context if by_usual_name else None  # which a scaling takes for the length before it
        self._outer_original = fields.optional_count("original_max_position_embeddings", original)
        self._theta = theta
        self._fraction = fraction
        self._growing = growing
        self._stretched = stretched
        self._sectioned = sectioned
        self._scaled = scaled
        for name in ("rope_parameters", "rope_scaling"):
            if not isinstance(fields.raw(name, {}), dict):
                raise fields.refuse(name, "an object is needed")

    @property
    def _parameters(self) -> Mapping[str, Any]:
        """The one table's fields. An original length outside of them goes before one inside (phi3) in scalings that read it."""
        found: Mapping[str, Any] = self.fields.raw("rope_scaling") or self.fields.raw("rope_parameters") or {}
        is_read = self._outer_original and found.get("rope_type", found.get("type")) in _SCALED_FROM
        return {**found, _ORIGINAL: self._outer_original} if is_read else found

    def plain(self, width: int, *, partial: bool = False) -> Rope:
        """The one table of a model whose heads are `width` wide; with `partial` a part of a head may turn."""
        return self._rope(self._parameters, width, self.fields.number("rope_theta", self._theta), partial)

    def with_base(self, width: int, base: float) -> Rope:
        """The table of layers whose base frequency is `base`, with the scaling that all layers have."""
        return self._rope({**self._parameters, "rope_theta": base}, width, base, False)

    def by_type(
        self,
        kind: str,
        width: int,
        *,
        theta: float,
        field: str | None = None,
        scaled: bool,
        partial: bool = False,
        unread: Collection[str] = (),
    ) -> Rope:
        """The table of layers of type `kind`, where types have tables of their own.

        rope_parameters has an object for each type; the base frequency of one that says none is that in `field`, if there is
        one, else `theta`. rope_scaling, of old configs, goes before the fields of the `scaled` type. `unread`: fields of a
        type that transformers makes up, whatever is said.
        """
        tables = self.fields.raw("rope_parameters", {})
        if not all(isinstance(value, dict | None) for name, value in tables.items() if name != _ORIGINAL):
            raise self.fields.refuse("rope_parameters", "an object for each type of layer is needed")
        base = self.fields.number(field, theta) if field else theta
        old = self.fields.raw("rope_scaling", {}) if scaled else {}
        found = {**(tables.get(kind) or {"rope_type": "default"}), **old}
        return self._of_type({key: value for key, value in found.items() if key not in unread}, width, base, partial)

    def by_types(
        self, kinds: Collection[str], width: int, *, theta: float, unread: Collection[str] = ()
    ) -> dict[str, Rope]:
        """The tables of those types of layers that turn: rope_parameters has an object for each type, or null for one that does
        not. `unread`: fields beside them that transformers drops. It takes rope_scaling in their place as it stands."""
        self.fields.only("rope_scaling", None)
        tables = self.fields.raw("rope_parameters", {})
        others = (value for name, value in tables.items() if name not in unread)
        if not all(isinstance(value, dict | None) for value in others) or not tables.keys() >= set(kinds):
            raise self.fields.refuse("rope_parameters", f"an object or null is needed for {', '.join(sorted(kinds))}")
        turning = sorted(kind for kind in kinds if tables[kind] is not None)
        return {kind: self._of_type(tables[kind], width, theta, False) for kind in turning}

    def _of_type(self, given: Mapping[str, Any], width: int, theta: float, partial: bool) -> Rope:
        """A type's table. Of these transformers does not read `truncate`: it rounds, whatever is said there."""
        Fields(given, f"{self.fields.where}: rope_parameters").only("truncate", True)
        return self._rope(given, width, theta, partial)

    @property
    def kind(self) -> object:
        """The scaling of the one table."""
        return self._parameters.get("rope_type", self._parameters.get("type", "default"))

    def attention_scale(self) -> tuple[float, float]:
        """(mscale_all_dim, factor) of a scaling, which latent attention also applies to its scores; else (0, 1)."""
        found = Fields(self._parameters, f"{self.fields.where}: rope_parameters")
        if self.kind == "default":
            return 0.0, 1.0
        return found.number("mscale_all_dim", 0.0, positive=False), found.number("factor", 1.0)

    def query_scale(self) -> ScaleByPosition | None:
        """What multiplies queries, the register "q", in a family in which they grow; None where all factors are 1."""
        found = Fields(self._parameters, f"{self.fields.where}: rope_parameters")
        beta = found.number("llama_4_scaling_beta", positive=False)
        if beta < 0.0:
            raise found.refuse("llama_4_scaling_beta", "a number from 0 is needed")
        is_guessed = found.raw("rope_type", found.raw("type")) in _SCALED_FROM  # as in transformers
        return ScaleByPosition("q", beta, self._original(found, is_guessed)) if beta else None

    def _rope(self, given: Mapping[str, Any], width: int, theta: float, partial: bool) -> Rope:
        inner = Fields(given, f"{self.fields.where}: rope_parameters")
        kind = inner.raw("rope_type", inner.raw("type", "default"))
        inner.ignore("type")
        base = inner.number("rope_theta", theta)
        if base <= 1.0:
            raise inner.refuse("rope_theta", "a number above 1 is needed")
        if kind == "proportional":
            return self._proportional(inner, base, width)
        fraction = inner.number("partial_rotary_factor", self._fraction) if partial else 1.0
        if not partial:
            inner.only("partial_rotary_factor", 1.0)
        turned = int(width * fraction)
        if turned < 2 or turned % 2 or turned > width:
            raise inner.refuse(
                "partial_rotary_factor", f"{turned} of {width} columns would turn: an even number is needed"
            )
        read = _KINDS.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise inner.refuse("rope_type", f"supported are {', '.join(_KINDS)}, proportional")
        if self._scaled and kind not in ("default", "longrope"):
            raise inner.refuse("rope_type", "this family has default and longrope alone")
        rope: Rope = read(self, inner, base, turned)
        if self._sectioned:
            inner.ignore("mrope_section", "mrope_interleaved")
        if self._growing:
            inner.ignore("max_position_embeddings", "llama_4_scaling_beta", "original_max_position_embeddings")
        inner.finish()
        return rope

    def _original(self, inner: Fields, is_guessed: bool = True) -> int:
        """Positions before a scaling; if `is_guessed`, those of the context where `inner` does not say."""
        return inner.count(_ORIGINAL, self._length if is_guessed else None)

    def _factor(self, inner: Fields, original: int) -> float:
        """How much longer the model is than before the scaling, if `inner` does not say."""
        return inner.number("factor", None if self._length is None else self._length / original)

    def default(self, inner: Fields, base: float, width: int) -> Rope:
        """No scaling. (Fields of scalings may stay behind in a config; they are not read then.)"""
        inner.ignore("factor", "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim")
        return Rope(tuple(_frequencies(base, width)))

    def _proportional(self, inner: Fields, base: float, width: int) -> Rope:
        """A table of whole heads, of which a part turns: pairs are those of the whole head, and the others have frequency 0."""
        part, factor = inner.number("partial_rotary_factor", self._fraction), inner.number("factor", 1.0)
        turned = int(part * width // 2)
        if part > 1.0 or width % 2:
            raise inner.refuse(
                "partial_rotary_factor", f"at most 1 of a whole number of pairs is needed ({width} columns)"
            )
        inner.finish()
        found = [_fp32(value / factor) for value in _frequencies(base, width)[:turned]]
        return Rope((*found, *(0.0,) * (width // 2 - turned)))

    def linear(self, inner: Fields, base: float, width: int) -> Rope:
        """Positions divided by a factor."""
        factor = inner.number("factor")
        inner.ignore("original_max_position_embeddings")
        return Rope(tuple(_fp32(value / factor) for value in _frequencies(base, width)))

    def dynamic(self, inner: Fields, base: float, width: int) -> Rope:
        """No scaling within the trained length, to which the model is held; with an alpha (hunyuan) a larger base."""
        alpha = inner.optional("alpha") if self._stretched else None
        if alpha is not None:
            if alpha < 1.0 or width < 4:
                raise inner.refuse("alpha", "a number from 1 and heads of at least 4 columns are needed")
            inner.ignore("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
            return Rope(tuple(_frequencies(base * exp(log(alpha) * (width / (width - 2))), width)))
        inner.ignore("factor")
        self.context = min(self.context, self._original(inner))
        return Rope(tuple(_frequencies(base, width)))

    def llama3(self, inner: Fields, base: float, width: int) -> Rope:
        """Long wavelengths divided by a factor, short ones left, those between in proportion."""
        factor, low, high = (inner.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
        original = self._original(inner)
        if low > high:
            raise inner.refuse("low_freq_factor", f"a number up to high_freq_factor ({high}) is needed")

        def scaled(value: float) -> float:
            wavelength = 2.0 * _PI / value
            if wavelength > original / low:
                return _fp32(value / factor)
            if wavelength < original / high or low == high:
                return value
            smooth = (original / wavelength - low) / (high - low)
            return _fp32((1.0 - smooth) * value / factor + smooth * value)

        return Rope(tuple(map(scaled, _frequencies(base, width))))

    def yarn(self, inner: Fields, base: float, width: int) -> Rope:
        """Between a first and a last column, from unscaled to divided by a factor; tables times a factor of their own."""
        original = self._original(inner)
        factor = self._factor(inner, original)
        fast, slow = inner.number("beta_fast", 32.0), inner.number("beta_slow", 1.0)

        def column(rotations: float) -> float:
            return width * log(original / (rotations * 2.0 * _PI)) / (2.0 * log(base))

        first, last = column(fast), column(slow)
        if inner.flag("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        last = last + 0.001 if first == last else last
        out = []
        for i, power in enumerate(_powers(base, width)):
            ramp = min(max((i - first) / (last - first), 0.0), 1.0)
            out.append(_fp32(ramp / (factor * power) + (1.0 - ramp) / power))
        return Rope(tuple(out), self._yarn_factor(inner, factor))

    def _yarn_factor(self, inner: Fields, factor: float) -> float:
        top, bottom = inner.number("mscale", 0.0, positive=False), inner.number("mscale_all_dim", 0.0, positive=False)
        given = inner.optional("attention_factor")
        if given is not None:
            return given
        if top and bottom:
            return yarn_scale(factor, top) / yarn_scale(factor, bottom)
        return yarn_scale(factor, 1.0)

    def longrope(self, inner: Fields, base: float, width: int) -> Rope:
        """A factor a column; the short ones, for the length before the switch, to which the model is held."""
        original = self._original(inner)
        inner.ignore("long_factor")
        factors = inner.raw("short_factor")
        self._check_factors(inner, factors, width // 2)
        factor = self._factor(inner, original)
        inner.ignore(*(("long_mscale",) if self._scaled else ()))
        given = inner.number("short_mscale") if self._scaled else inner.optional("attention_factor")
        if given is None:
            if original == 1 and factor > 1.0:
                raise inner.refuse(_ORIGINAL, "a whole number from 2 is needed")
            given = 1.0 if factor <= 1.0 else math.sqrt(1.0 + log(factor) / log(original))
        self.context = min(self.context, original)
        pairs = zip(factors, _powers(base, width), strict=True)
        return Rope(tuple(_fp32(1.0 / _fp32(_fp32(by) * power)) for by, power in pairs), given)

    @staticmethod
    def _check_factors(inner: Fields, factors: object, needed: int) -> None:
        good = isinstance(factors, Sequence) and len(factors) == needed
        if not good or not all(isinstance(by, int | float) and SMALLEST <= by <= LARGEST for by in factors):  # type: ignore[attr-defined]
            raise inner.refuse("short_factor", f"a list of {needed} positive numbers is needed")


def yarn_scale(factor: float, mscale: float) -> float:
    """What yarn multiplies tables (and, in latent attention, scores) with."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * log(factor) + 1.0


_KINDS: Final = {
    "default": RopeReader.default,
    "linear": RopeReader.linear,
    "dynamic": RopeReader.dynamic,
    "llama3": RopeReader.llama3,
    "yarn": RopeReader.yarn,
    "longrope": RopeReader.longrope,
    "su": RopeReader.longrope,
}
