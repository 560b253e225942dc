"""Stands for the engine's library in library.py, while remote.c computes in another process, under qemu if need be."""

import ctypes
import re
import struct
import subprocess
from pathlib import Path
from typing import Any, cast

import numpy as np

from manyhands.engine.cache import SessionCache
from manyhands.engine.layout import Tensor
from manyhands.engine.library import Array

SOURCE = Path(__file__).with_name("remote.c")
NAMES = re.findall(r"X\((\w+)\)", SOURCE.read_text())


REFERENCE = type(ctypes.byref(ctypes.c_char()))
WIDE = {  # not of type int
    "mh_calls", "mh_packed_size", "mh_plan_new", "mh_plan_block_bytes", "mh_plan_state_bytes", "mh_plan_now_bytes",
    "mh_team_start",
}  # fmt: skip


class Remote:
    """Functions of the library by name. Arrays go there before a call, and come back after it."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lent: list[tuple[Array, int]] = []

    def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.stdout.close()  # type: ignore[union-attr]
        self._process.wait()

    def _ask(self, sent: bytes, size: int) -> bytes:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(sent)
        self._process.stdin.flush()
        found = self._process.stdout.read(size) if size else b""
        assert len(found) == size, "the other process has died"
        return found

    def upload(self, data: bytes) -> int:
        (at,) = struct.unpack("<q", self._ask(struct.pack("<cq", b"A", len(data)), 8))
        self._ask(struct.pack("<cqq", b"W", at, len(data)) + data, 0)
        return int(at)

    def address(self, array: Array | None) -> int | None:
        """In place of library.address and of library._fresh."""
        if array is None:
            return None
        given = array
        if not array.flags.c_contiguous:  # a view that C reads by its strides: all that lies between its numbers
            extent = (
                sum((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)) // array.itemsize + 1
            )
            given = np.lib.stride_tricks.as_strided(array, (extent,), (array.itemsize,), writeable=False)
        at = self.upload(given.tobytes())
        if given is array:
            self._lent.append((array, at))
        return at

    @property
    def cache_address(self) -> property:
        """In place of SessionCache._address: asked at every step, for blocks go there and come back at each."""

        def listed(cache: SessionCache) -> int:
            return self.upload(np.array([self.address(block) for block in cache._blocks], np.uintp).tobytes())

        return property(listed, lambda cache, kept: None)

    def tensor(self, array: Array | None) -> Tensor:
        """In place of library.tensor."""
        return Tensor(None, 0) if array is None else Tensor(self.upload(array.tobytes()), array.nbytes)

    def __getattr__(self, name: str) -> Any:
        number = NAMES.index(name)

        def call(*arguments: Any) -> int:
            assert self._process.stdin is not None
            if self._process.stdin.closed:  # what was made there is gone with it
                return 0
            integers, real = [number], 0.0
            for argument in arguments:
                if isinstance(argument, bytes | ctypes.Array):
                    integers.append(self.upload(bytes(argument)))
                elif isinstance(argument, REFERENCE):
                    integers.append(self.upload(bytes(cast(Any, argument)._obj)))
                elif isinstance(argument, float):
                    real = argument
                else:
                    integers.append(argument or 0)
            integers += [0] * (13 - len(integers))
            (result,) = struct.unpack("<q", self._ask(struct.pack("<c13qd", b"C", *integers, real), 8))
            for array, at in self._lent:
                if array.flags.writeable:
                    array.reshape(-1).view("u1")[:] = memoryview(
                        self._ask(struct.pack("<cqq", b"R", at, array.nbytes), array.nbytes)
                    )
            self._lent.clear()
            return int(result if name in WIDE else ctypes.c_int32(result).value)

        return call
