"""Structs, limits, and names by number that C has too, and the check that both are the same (native/layout.c)."""

import ctypes
from collections.abc import Mapping
from typing import Final

NUMBERS: Final = 13  # of an operation, at most
REALS: Final = 4
TENSORS: Final = 7
STATE_BLOCK: Final = 32  # positions of a block of states
WIDE: Final = ("bf16", "f16", "f32")
_SMALL: Final = "w8 w4 w4m w5 w5m w4k w5k w6k w4f w4z w4n w4x w3k w2k w4h w4s w4t w3s w2s".split()  # quants.py
TYPES: Final = {name: i for i, name in enumerate((*WIDE, *_SMALL))}  # by the number that C gives them


class Tensor(ctypes.Structure):
    """Bytes that Python holds."""

    _fields_ = (("data", ctypes.c_void_p), ("bytes", ctypes.c_int64))


class Segment(ctypes.Structure):
    """Rows of a step that are positions of one session (Segment in native/plan.h)."""

    _fields_ = (
        ("blocks", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_blocks", "start", "row", "count")),
        ("states", ctypes.c_void_p),
        ("now", ctypes.c_void_p),
        ("num_states", ctypes.c_int64),
        ("from_", ctypes.c_int64),
    )


def difference(library: ctypes.CDLL, kinds: int, numbers: Mapping[str, object]) -> str:
    """How the layouts differ, for an error; "" if they do not. `kinds`: how many kinds of operations Python knows; `numbers`:
    theirs, by name."""
    limits = {"NUMBERS": NUMBERS, "REALS": REALS, "TENSORS": TENSORS, "kinds": kinds, "STATE_BLOCK": STATE_BLOCK}
    layout = {
        label: value
        for struct in (Tensor, Segment)
        for label, value in (
            (f"sizeof {struct.__name__}", ctypes.sizeof(struct)),
            *((f"{struct.__name__}.{name}", getattr(struct, name).offset) for name, *_ in struct._fields_),
        )
    }
    ours = {**layout, **limits}
    library.mh_layout.restype, library.mh_layout.argtypes = ctypes.c_int64, [ctypes.c_void_p, ctypes.c_int64]
    theirs = (ctypes.c_int64 * len(ours))()
    count = library.mh_layout(theirs, len(ours))
    if count != len(ours):
        return f"it lists {count} figures, not {len(ours)}"
    library.mh_types.restype, library.mh_types.argtypes = ctypes.c_char_p, []
    named, found = " ".join(TYPES), library.mh_types().decode().lower().replace(",", "")
    pairs: list[tuple[str, object, object]] = [("types", named, found), *zip(ours, ours.values(), theirs, strict=True)]
    library.mh_kinds.restype, library.mh_kinds.argtypes = ctypes.c_char_p, []
    for number, name in enumerate(library.mh_kinds().decode().split(", ")):
        pairs.append((f"kind {name}", numbers.get(name), number))
    return ", ".join(f"{label} is {there}, not {here}" for label, here, there in pairs if here != there)
