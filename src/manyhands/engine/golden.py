"""Golden digests: SHA-256 of what every operation computes for fixed input, the same on every CPU (golden.json).

A back end is used only after it reproduced them (choose), so machines of different makes check each other through the
repository. A digest changes only together with docs/arithmetic.md, and with it the arithmetic class. Digests of whole models
stand beside those of operations (golden_models.py); tests reproduce both, a node that starts and `doctor` operations alone.
Run `python -m manyhands.engine.golden` to see what this machine's back ends fail to reproduce; `--write` stores scalar's.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from manyhands.engine import library
from manyhands.engine.golden_cache import CASES as CACHE_CASES
from manyhands.engine.golden_cases import CASES, BackEnd
from manyhands.engine.golden_small import CASES as SMALL_CASES
from manyhands.engine.library import Team
from manyhands.errors import ModelError

FILE: Final = Path(__file__).with_name("golden.json")
SMALL_FILE: Final = FILE.with_name("golden_small.json")  # of small weights: other classes do not depend on them
CACHE_FILE: Final = FILE.with_name("golden_cache.json")  # of caches of 8 bit: other classes do not depend on them


ALL: Final = {**CASES, **SMALL_CASES, **CACHE_CASES}


def digests(back_end: str, cases: Mapping[str, Callable[[BackEnd], bytes]] = ALL) -> dict[str, str]:
    """What a back end computes, case by case."""
    team = Team(2)
    try:
        return {name: hashlib.sha256(case(BackEnd(back_end, team))).hexdigest() for name, case in cases.items()}
    finally:
        team.close()


def recorded() -> dict[str, str]:
    """What every back end must compute."""
    found: dict[str, str] = {}
    for file in (FILE, SMALL_FILE, CACHE_FILE):
        found |= json.loads(file.read_text())
    return found


def is_small(name: str) -> bool:
    """Whether a digest is one of small weights."""
    return name.startswith("small ") or name.endswith((" w8", " w4"))


def file_of(name: str) -> Path:
    """Where a digest is stored."""
    return CACHE_FILE if name in CACHE_CASES else SMALL_FILE if is_small(name) else FILE


@cache
def failures(back_end: str) -> tuple[str, ...]:
    """The cases whose digests a back end does not reproduce here; empty if it may be used. Without the cases of caches."""
    return _unlike(back_end, {**CASES, **SMALL_CASES})


@cache
def cache_failures(back_end: str) -> tuple[str, ...]:
    """The same for the cases of caches of 8 bit, which only a process that has such caches proves."""
    return _unlike(back_end, CACHE_CASES)


def _unlike(back_end: str, cases: Mapping[str, Callable[[BackEnd], bytes]]) -> tuple[str, ...]:
    right = recorded()
    return tuple(name for name, digest in digests(back_end, cases).items() if right.get(name) != digest)


def check_caches(back_end: str) -> None:
    """Raises ModelError where a back end does not reproduce the digests of caches of 8 bit here."""
    if wrong := cache_failures(back_end):
        raise ModelError(
            f"{back_end} does not reproduce {', '.join(wrong)} here: leave --cache-dtype out; please report this CPU"
        )


def arithmetic(*, is_small: bool = False, has_codes: bool = False) -> str:
    """The name of the arithmetic that all back ends share: a hash of the digests; of small weights, and of caches of codes, of
    theirs too."""
    files = [FILE, *([SMALL_FILE] if is_small else []), *([CACHE_FILE] if has_codes else [])]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def choose() -> str:
    """The back end of this process: the one MANYHANDS_ENGINE names, else the best that reproduces the digests.

    Raises ModelError where the named one does not, or none does: nothing is replaced silently.
    """
    return _chosen(library.forced())


@cache
def _chosen(named: str | None) -> str:
    for name in [named] if named else library.supported():
        if not failures(name):
            return name
    wrong = {name: failures(name) for name in ([named] if named else library.supported())}
    raise ModelError(f"no back end reproduces the golden digests here: {wrong}; please report this CPU")


def main(arguments: list[str]) -> int:
    """Says which digests each back end does not reproduce; or stores scalar's."""
    from manyhands.engine import golden_models

    if "--write" in arguments:
        found = {**recorded(), **digests("scalar"), **dict(golden_models.digests("scalar"))}
        for file in (FILE, SMALL_FILE, CACHE_FILE):
            part = {name: digest for name, digest in found.items() if file_of(name) == file}
            file.write_text(json.dumps(part, indent=1) + "\n")
        failures.cache_clear()
        cache_failures.cache_clear()
    wrong = {
        name: [*failures(name), *cache_failures(name), *golden_models.failures(name)] for name in library.supported()
    }
    sys.stdout.write(json.dumps(wrong, indent=1) + "\n")
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
