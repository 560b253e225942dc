"""What the bulk lane carries: parts of a model, asked for and sent. Values only, as message.py."""

from dataclasses import dataclass
from typing import Literal

from manyhands.core import ModelId

Part = Literal["tensor", "file"]  # what can be had of a model: bytes of a tensor, or of a small file beside the weights
MAX_CHUNK_BYTES = 1 << 20  # of weights in one WeightsChunk: 84 ms at 100 Mbit/s


@dataclass(frozen=True, slots=True)
class WeightRequest:
    """Send bytes [offset, offset + length) of `name` of `model`; `request` is the asker's number for it.

    A tensor's bytes are those its manifest hashes. A file is one of a fixed list (weights/provider.py) and may be shorter than
    asked: then fewer bytes come, perhaps none. `length` is 1 to MAX_CHUNK_BYTES.
    """

    request: int
    model: ModelId
    part: Part
    name: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class WeightsChunk:
    """The answer to WeightRequest `request`: `data` stands at `offset`. Received data is a view of the frame's body."""

    request: int
    offset: int
    data: bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class WeightsNotFound:
    """The answer to WeightRequest `request` if it cannot be met. `code` is an error code of errors.py."""

    request: int
    code: str
