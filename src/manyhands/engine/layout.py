"""Structs and limits that native/plan.h has too, and the check that both are the same (native/layout.c)."""

import ctypes
from typing import Final

NUMBERS: Final = 12  # of an operation, at most
REALS: Final = 3
TENSORS: Final = 6
STATE_BLOCK: Final = 32  # positions of a block of states


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


def difference(library: ctypes.CDLL, kinds: int) -> str:
    """How the layouts differ, for an error; "" if they do not. `kinds`: how many kinds of operations Python knows."""
    ours = {"NUMBERS": NUMBERS, "REALS": REALS, "TENSORS": TENSORS, "kinds": kinds, "STATE_BLOCK": STATE_BLOCK}
    layout = {
        label: value
        for struct in (Tensor, Segment)
        for label, value in (
            (f"sizeof {struct.__name__}", ctypes.sizeof(struct)),
            *((f"{struct.__name__}.{name}", getattr(struct, name).offset) for name, *_ in struct._fields_),
        )
    }
    ours = {**layout, **ours}
    library.mh_layout.restype, library.mh_layout.argtypes = ctypes.c_int64, [ctypes.c_void_p, ctypes.c_int64]
    theirs = (ctypes.c_int64 * len(ours))()
    count = library.mh_layout(theirs, len(ours))
    if count != len(ours):
        return f"it lists {count} figures, not {len(ours)}"
    return ", ".join(
        f"{label} is {there}, not {here}"
        for (label, here), there in zip(ours.items(), theirs, strict=True)
        if here != there
    )
