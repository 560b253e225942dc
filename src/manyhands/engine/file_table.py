"""A table of embeddings that stays in the checkpoint's file: a token's row is read when it is asked for."""

from collections.abc import Sequence

import numpy as np

from manyhands.core import Precision
from manyhands.engine.filed import Files
from manyhands.engine.weights import Read, Stored, as_numbers, find, rows_held
from manyhands.program.ops import Weight


class FileTable:
    """The table that `weight` names. Where `read` gives a view of a file, no memory holds it, and the file stays mapped.

    Raises ModelError where it is missing or has another shape.
    """

    def __init__(self, weight: Weight, read: Read, precision: Precision, back_end: str) -> None:
        found, _ = find(weight, read)
        self._stored = found if found.order is None else as_numbers(found)
        self._precision, self._back_end = precision, back_end
        self._files = Files([self._stored.array])

    def rows(self, ids: Sequence[int]) -> Stored:
        """The rows of `ids`, as the table held at this precision has them; row 0 for ids that it lacks. Raises ModelError."""
        self._files.check()
        num_rows = len(self._stored.array)
        chosen = np.array([number if number < num_rows else 0 for number in ids], np.int64)
        found = rows_held(self._stored, chosen, self._precision, self._back_end)
        self._files.let_go()
        return found
