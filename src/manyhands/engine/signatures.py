"""The functions of the native library as ctypes calls them (native/*.c: EXPORT)."""

import ctypes
from typing import Any, Final

_POINTER: Final = ctypes.c_void_p
_COUNT: Final = ctypes.c_int64
_REAL: Final = ctypes.c_double
# By function: its result, and its arguments.
SIGNATURES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "mh_supports": (ctypes.c_int, [_COUNT]),
    "mh_calls": (ctypes.c_uint64, [_COUNT]),
    "mh_packed_size": (_COUNT, [_COUNT, _COUNT]),
    "mh_pack": (ctypes.c_int, [_COUNT, _COUNT, _POINTER, *([_COUNT] * 5), _POINTER, _POINTER, _COUNT]),
    "mh_packed_bytes": (_COUNT, [_COUNT, _COUNT, _COUNT]),
    "mh_round": (ctypes.c_int, [*([_COUNT] * 3), _POINTER, *([_COUNT] * 5), _POINTER, _POINTER, _COUNT]),
    "mh_pack_blocks": (ctypes.c_int, [_COUNT, _POINTER, *([_COUNT] * 3), _POINTER, _POINTER, _COUNT, _POINTER, _COUNT]),
    "mh_apply": (ctypes.c_int, [_COUNT, _COUNT, _REAL, _POINTER, _POINTER, _COUNT]),
    "mh_embed": (
        ctypes.c_int,
        [_COUNT, _COUNT, _POINTER, *([_COUNT] * 3), _POINTER, _COUNT, _COUNT, _POINTER, _COUNT, _COUNT, _REAL],
    ),
    "mh_rope": (ctypes.c_int, [_POINTER, _COUNT, _REAL, _COUNT, _COUNT, _POINTER, _POINTER]),
    "mh_norms": (ctypes.c_int, [_COUNT, _POINTER, _COUNT, _COUNT, _POINTER]),
    "mh_double": (ctypes.c_int, [_COUNT, _POINTER, _REAL, _POINTER, _COUNT]),
    "mh_plan_new": (_POINTER, [_COUNT, _COUNT, _POINTER, _POINTER, _COUNT, _COUNT, _COUNT, _COUNT]),
    "mh_plan_add": (ctypes.c_int, [_POINTER, _COUNT, _POINTER, _POINTER, _POINTER]),
    "mh_plan_block_bytes": (_COUNT, [_POINTER]),
    "mh_plan_state_bytes": (_COUNT, [_POINTER]),
    "mh_plan_now_bytes": (_COUNT, [_POINTER]),
    "mh_plan_run": (
        ctypes.c_int,
        [_POINTER, _POINTER, _COUNT, _POINTER, _COUNT, _POINTER, _COUNT, _POINTER, _COUNT, _COUNT],
    ),
    "mh_plan_release": (None, [_POINTER]),
    "mh_plan_free": (None, [_POINTER]),
    "mh_team_start": (_POINTER, [_COUNT]),
    "mh_team_stop": (None, [_POINTER]),
}
