"""The metadata of one architecture in a GGUF header. Every key is read or refused; all errors are ModelError of one line."""

from typing import Any, Final

import numpy as np

from manyhands.checkpoint.gguf import Gguf, shown
from manyhands.errors import ModelError

Config = dict[str, Any]
MAX_LAYERS: Final = 1 << 10  # that a recipe may have
_ROTATED: Final = "prism.hadamard."  # of files whose matrices are for rows turned by it: Bonsai 2, in types of any kind


def layers_ahead(gguf: Gguf, arch: str) -> int:
    """How many layers guess tokens ahead: they come last, and do not compute. A deepseek4 may state some that it has not."""
    count, ahead = (gguf.one(f"{arch}.{name}") for name in ("block_count", "nextn_predict_layers"))
    if type(count) is not int or type(ahead) is not int:
        return 0
    own = f"blk.{count - ahead}.nextn."
    return ahead if arch != "deepseek4" or any(tensor.name.startswith(own) for tensor in gguf.tensors) else 0


class GgufKeys:
    """Reading a key marks it as used; `finish` refuses those that nothing has read."""

    def __init__(self, gguf: Gguf, arch: str) -> None:
        self.gguf, self.arch = gguf, arch
        self.tensors = frozenset(  # of layers, each name once, without the number of the layer
            tensor.name.split(".", 2)[-1] for tensor in gguf.tensors if tensor.name.startswith("blk.")
        )
        self._used: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it stands."""
        key = f"{self.arch}.{name}"
        self._used.add(key)
        return self.gguf.facts.get(key, default)

    def one(self, name: str, default: Any = None) -> Any:
        """A value that is no list."""
        self.get(name)
        return self.gguf.one(f"{self.arch}.{name}", default)

    def layers_with(self, name: str, layers: int) -> list[bool]:
        """For each layer whether it has this tensor."""
        names = {tensor.name for tensor in self.gguf.tensors}
        return [f"blk.{i}.{name}" in names for i in range(layers)]

    def refused(self, what: str) -> ModelError:
        """The error for a file that cannot be served."""
        return ModelError(f"{self.gguf.file} refused: {what}")

    def only(self, name: str, allowed: Any) -> None:
        """The key must be absent or have this value."""
        value = self.one(name, allowed)
        if value != allowed:
            raise self.refused(f"{self.arch}.{name} is {shown(value)}; served is {allowed!r}")

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.refused(f"{self.arch}.{name} is {shown(value)}; true or false is needed")
        return value

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number; of a list with one value for each layer, that value if it is the same for all."""
        value = self.get(name, default)
        if isinstance(value, np.ndarray) and len(value) and bool((value == value[0]).all()):
            value = value[0].item()
        if type(value) is not int or value < least:
            raise self.refused(f"{self.arch}.{name} is {shown(value)}; a whole number from {least} is needed")
        return value

    def counts(self, name: str, layers: int, default: int) -> list[int]:
        """A whole number from 0 for each layer; one alone is that of all."""
        value = self.get(name, default)
        found = _each(value, layers)
        if len(found) != layers or any(type(one) is not int or one < 0 for one in found):
            needed = f"a whole number from 0 for each of {layers} layers is needed"
            raise self.refused(f"{self.arch}.{name} is {shown(value)}; {needed}")
        return found

    def switches(self, name: str, layers: int) -> list[bool] | None:
        """For each layer whether it is on; None where there is no such key."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or len(value) != layers:
            raise self.refused(f"{name} is {shown(value)}; a switch for each of {layers} layers is needed")
        return [bool(one) for one in value]

    def number(self, name: str, default: float | None = None) -> float:
        """As the shortest decimal that is this fp32: 1e-05, not 9.999999747378752e-06."""
        value = self.get(name, default)
        if type(value) not in (int, float) or abs(value) > 1e30:
            raise self.refused(f"{self.arch}.{name} is {shown(value)}; a number is needed")
        return float(str(np.float32(value)))

    def numbers(self, name: str, layers: int, default: float) -> list[float]:
        """A number for each layer; one alone is that of all."""
        value = self.get(name, default)
        found = _each(value, layers)
        if len(found) != layers or any(type(one) not in (int, float) or not abs(one) <= 1e30 for one in found):
            raise self.refused(f"{self.arch}.{name} is {shown(value)}; a number for each of {layers} layers is needed")
        return [float(str(np.float32(one))) for one in found]

    def finish(self) -> None:
        """Raises ModelError for the first key that nothing read and that may change the arithmetic."""
        ours = {key for key in self.gguf.facts if key.startswith((f"{self.arch}.", _ROTATED))}
        harmless = {f"{self.arch}.{name}" for name in ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")}
        for key in sorted(ours - self._used - harmless):
            raise self.refused(f"the key {key[:80]!a} is not known here and may change the model's arithmetic")


def _each(value: Any, layers: int) -> list[Any]:
    """The value of each layer, one alone being that of all; of more no more than tells that they are too many."""
    return value[: layers + 1].tolist() if isinstance(value, np.ndarray) else [value] * layers
