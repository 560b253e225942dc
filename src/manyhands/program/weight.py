"""A tensor of the checkpoint, or outputs of one, as operations name it (ops.py)."""

from dataclasses import dataclass
from typing import Final, Literal

Activation = Literal["none", "silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid"]
EXPERT: Final = "{expert}"  # stands in a name for the expert's number, where each has a tensor of its own


@dataclass(frozen=True, slots=True)
class Rows:
    """Which outputs of a stored tensor: `groups` runs of `count`, run g starting at `start + g * stride`, in order, each output
    `copies` times."""

    start: int
    count: int
    stride: int = 0
    groups: int = 1
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the checkpoint, or outputs of one.

    `shape` is the stored one: [outputs, inputs] of a matrix (`transposed`: [inputs, outputs]), [outputs] of a vector.
    Of experts EXPERT stands in the name, or the stored tensor is `stacked`: experts (in latent attention: heads) are the
    first dimension (so is a vector stored as one row, or, as row `part`, with others). `rows`: some outputs, of a matrix no
    longer transposed or stacked.
    """

    name: str
    shape: tuple[int, ...]
    rows: Rows | None = None
    transposed: bool = False
    stacked: bool = False
    part: int = 0

    @property
    def outputs(self) -> int:
        """Outputs of this weight, after `rows`."""
        return self._whole[0] if self.rows is None else self.rows.count * self.rows.groups * self.rows.copies

    @property
    def inputs(self) -> int:
        """Columns that a row of a matrix has."""
        return self._whole[1]

    @property
    def _whole(self) -> tuple[int, ...]:
        shape = self.shape[1:] if self.stacked else self.shape
        return shape[::-1] if self.transposed else shape

    def stored_name(self, expert: int) -> str:
        """The name in the checkpoint of the tensor that has `expert` (any number where experts do not enter)."""
        return self.name.replace(EXPERT, str(expert))
