"""How far the load of a model is, in bytes of its checkpoint: read, packed or taken as packed before. Told by the thread that
loads, to a HashProgress that other threads show."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

from manyhands.checkpoint.header import TensorEntry
from manyhands.checkpoint.manifest import CheckedProgress, HashProgress, Manifest, Silent, build_manifest
from manyhands.checkpoint.partition import ends_tensors, layer_of
from manyhands.core import Span
from manyhands.engine.memory import Memory
from manyhands.engine.packing import Make, Packer
from manyhands.engine.weights import Stored
from manyhands.errors import ModelError
from manyhands.worker.thread import check_is_wanted


@dataclass(frozen=True, slots=True)
class Loading:
    """Who is told of a load, and the model's name for people.

    Work that reports to it raises Unwanted (thread.py) at its next report once nothing waits for it.
    """

    progress: HashProgress
    model: str

    @property
    def _checked(self) -> CheckedProgress:
        return CheckedProgress(check_is_wanted, self.progress)

    def manifest(self, folder: Path) -> Manifest:
        """The manifest of the model in `folder`, whose bytes are hashed unless they were before. Raises ModelError."""
        return build_manifest(folder, self._checked, called=self.model)

    def layers(self, span: Span, entries: Iterable[TensorEntry]) -> "LoadBar":
        """A bar for the layers of `span`, which are packed one after another."""
        sizes = [0] * len(span)
        for entry in entries:
            layer = layer_of(entry.name)
            if layer is not None and span.start <= layer < span.end:
                sizes[layer - span.start] += len(entry)
        return LoadBar(self._checked, f"loading {self.model}, layers {span}", sizes)

    def ends(self, entries: Iterable[TensorEntry], *, embed: bool, head: bool) -> "LoadBar":
        """A bar for embedding and head. A tied head is the embedding, and is read once."""
        sizes = {entry.name: len(entry) for entry in entries}
        try:
            wanted = ends_tensors(sizes, embed=embed, head=head)
        except ModelError:  # what loads them says what is missing
            wanted = []
        what = " and ".join(["embedding"] * embed + ["head"] * head)
        return LoadBar(self._checked, f"loading {what} of {self.model}", [sum(sizes[name] for name in wanted)])


UNSEEN: Final = Loading(Silent(), "")


class LoadBar:
    """One load. `sizes`: bytes of its parts, in the order in which they are packed."""

    def __init__(self, progress: HashProgress, text: str, sizes: Sequence[int]) -> None:
        self._progress, self._ends = progress, list(accumulate(sizes, initial=0))
        self._part = self._done = 0
        progress.start(text, self._ends[-1])

    def begin_part(self) -> None:
        """The next part begins, so the ones before it are done."""
        self._reach(self._ends[self._part])
        self._part = min(self._part + 1, len(self._ends) - 1)

    def read(self, count: int) -> None:
        """So many bytes were read."""
        self._reach(min(self._done + count, self._ends[max(self._part, 1)]))

    def end(self) -> None:
        """All of it is there."""
        self._reach(self._ends[-1])
        self._progress.done()

    def _reach(self, done: int) -> None:
        if done > self._done:
            self._progress.advance(done - self._done)
            self._done = done


class WatchedPacker:
    """A Packer of layers: `bar` is told of each one that begins, so that those found packed count too."""

    def __init__(self, packer: Packer, bar: LoadBar) -> None:
        self._packer, self._bar = packer, bar

    def begin(self, part: str) -> None:
        """As Packer.begin."""
        self._bar.begin_part()
        self._packer.begin(part)

    def take(self, make: Make, memory: Memory) -> Stored:
        """As Packer.take."""
        return self._packer.take(make, memory)
