"""TOML files, which may come with a folder of another's: read within bounds of bytes, time and numbers."""

from pathlib import Path
from typing import Any, Final

from manyhands.errors import BadRequest
from manyhands.files import read_plain

MAX_BYTES: Final = 1 << 18  # 0.8 s at most; a thousand machines have some 100 KiB
# In one line: the parts of a key take tomllib a time that grows as their square, 40,000 of them a minute.
MAX_DOTS: Final = 512
_INTEGERS: Final = range(-(1 << 63), 1 << 63)  # what TOML says that they are; Python shows none of 4,300 digits


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file. Raises BadRequest, in one line, for what cannot be read or is no TOML."""
    import tomllib  # help and most commands need none

    try:
        text = read_plain(path, MAX_BYTES).decode("utf-8-sig")  # editors of Windows begin it with a mark
        _check_lines(text, path)
        content = tomllib.loads(text)
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{path} is not TOML: {str(error)[:200]}") from error
    _check_integers(content, path)
    return content


def _check_lines(text: str, path: Path) -> None:
    for number, line in enumerate(text.split("\n"), 1):
        if (dots := line.count(".")) > MAX_DOTS:
            raise BadRequest(
                f"{path}: line {number} has {dots} dots; at most {MAX_DOTS} are read: break it into several"
            )


def _check_integers(content: dict[str, Any], path: Path) -> None:
    waiting: list[tuple[str, Any]] = [*content.items()]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(name, each) for each in value]
        elif type(value) is int and value not in _INTEGERS:
            raise BadRequest(f"{path}: {name[:80]!a} is an integer of {value.bit_length()} bits; at most 64 are read")
