"""Operations with states as tests draw them: a convolution of all that enters, and linear attention over it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from manyhands.engine import library
from manyhands.engine.golden_cases import Op, reals
from manyhands.engine.states import delta_form

OUT = 7  # the register that leaves


@dataclass(frozen=True)
class StateLayer:
    """Sizes of both, and whether the attention is the plain sum of Mamba 2, with skips, or decays by channel."""

    heads: int = 6
    key_heads: int = 2
    width: int = 10
    value_width: int = 37
    taps: int = 4
    is_sum: bool = False
    by_channel: bool = False

    @property
    def parts(self) -> tuple[int, ...]:
        """Numbers of a row's queries, keys, values, decays and strengths."""
        keys = self.key_heads * self.width
        return keys, keys, self.heads * self.value_width, self.num_decays, self.heads

    @property
    def num_decays(self) -> int:
        return self.heads * (self.width if self.by_channel else 1)

    @property
    def entering(self) -> int:
        return sum(self.parts)

    @property
    def widths(self) -> list[int]:
        """Of the registers; the first takes what enters."""
        return [self.entering, self.entering, *self.parts, self.heads * self.value_width]

    @cached_property
    def weights(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Of the convolution [taps, entering], and its bias."""
        return reals(1, self.taps, self.entering, around=-1), reals(2, self.entering, around=-2)

    @cached_property
    def decays(self) -> tuple[NDArray[np.float32] | NDArray[np.float64], NDArray[np.float32]]:
        """Rates, in fp32 those of channels, and biases."""
        rates = np.abs(reals(3, self.num_decays, around=0))
        return rates if self.by_channel else rates.astype(np.float64), reals(4, self.num_decays, around=0)

    @cached_property
    def skips(self) -> NDArray[np.float32] | None:
        return reals(5, self.heads) if self.is_sum else None

    @property
    def ops(self) -> list[Op]:
        form = delta_form(self.is_sum, self.by_channel)
        shape = self.heads, self.key_heads, self.width, self.value_width, form
        silu = library.ACTIVATIONS.index("silu")
        found: list[Op] = [(library.CONVOLVE, (0, 1, self.taps, silu), (), self.weights)]
        for i, width in enumerate(self.parts):
            found.append((library.COPY, (1, i + 2, sum(self.parts[:i]), 0, width, 1, 0, 0), (), ()))
        found.append((library.DECAY, (5, 5, int(self.by_channel)), (), self.decays))
        found.append((library.DELTA, (2, 3, 4, 5, 6, OUT, *shape), (), (self.skips,)))
        return found
