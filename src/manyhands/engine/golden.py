"""Golden digests: SHA-256 of what every operation computes for fixed input, the same on every CPU (golden.json).

A back end is used only after it reproduced them (choose), so machines of different makes check each other through the
repository. A digest changes only together with docs/arithmetic.md, and with it the arithmetic class. Digests of whole models
stand beside those of operations (golden_models.py); tests reproduce both, `doctor` all operations, a node that starts those
that its precision's class depends on, unless a process of the same user has done so since the machine booted (proofs.py).
Run `python -m manyhands.engine.golden` to see what this machine's back ends fail to reproduce; `--write` stores scalar's.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Final, Literal

from manyhands.core import SMALL_WEIGHTS, Precision, caches_codes, weight_precision
from manyhands.engine import library, proofs
from manyhands.engine.golden_biases import CASES as BIAS_CASES
from manyhands.engine.golden_cache import CASES as CACHE_CASES
from manyhands.engine.golden_cases import CASES, BackEnd, CompanyMatters
from manyhands.engine.golden_compressed import CASES as COMPRESSED_CASES
from manyhands.engine.golden_index import CASES as INDEX_CASES
from manyhands.engine.golden_mixes import CASES as MIX_CASES
from manyhands.engine.golden_scan import CASES as SCAN_CASES
from manyhands.engine.golden_small import CASES as SMALL_CASES
from manyhands.engine.golden_states import CASES as STATE_CASES
from manyhands.engine.golden_variants import CASES as VARIANT_CASES
from manyhands.engine.golden_words import CASES as WORD_CASES
from manyhands.engine.golden_words import SMALL as SMALL_WORDS
from manyhands.engine.library import Team
from manyhands.errors import ModelError

FILE: Final = Path(__file__).with_name("golden.json")
SMALL_FILE: Final = FILE.with_name("golden_small.json")  # of small weights: other classes do not depend on them
CACHE_FILE: Final = FILE.with_name("golden_cache.json")  # of caches of 8 bit: other classes do not depend on them

Group = Literal["wide", "small", "cache"]
GROUPS: Final[Mapping[Group, Mapping[str, Callable[[BackEnd], bytes]]]] = {
    "wide": CASES
    | STATE_CASES
    | INDEX_CASES
    | VARIANT_CASES
    | COMPRESSED_CASES
    | MIX_CASES
    | SCAN_CASES
    | WORD_CASES
    | BIAS_CASES,
    "small": SMALL_CASES | SMALL_WORDS,
    "cache": CACHE_CASES,
}
ALL: Final = {name: case for cases in GROUPS.values() for name, case in cases.items()}


def digests(back_end: str, cases: Mapping[str, Callable[[BackEnd], bytes]] = ALL) -> dict[str, str]:
    """What a back end computes, case by case."""
    team = Team(2)
    try:
        return {name: digest_of(case, BackEnd(back_end, team)) for name, case in cases.items()}
    finally:
        team.close()


def digest_of(case: Callable[[BackEnd], bytes], machine: BackEnd) -> str:
    """The digest of what a case computes on a machine; why it has none where rows are not computed by themselves."""
    try:
        return hashlib.sha256(case(machine)).hexdigest()
    except CompanyMatters as error:
        return str(error)


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


def failures(back_end: str, groups: Collection[Group] = tuple(GROUPS)) -> tuple[str, ...]:
    """The cases of `groups` whose digests a back end does not reproduce here; empty if it may be used for them."""
    return tuple(name for group in groups for name in _unlike(back_end, group))


@cache
def _unlike(back_end: str, group: Group) -> tuple[str, ...]:
    right = recorded()
    return tuple(name for name, digest in digests(back_end, GROUPS[group]).items() if right.get(name) != digest)


def groups_of(precision: Precision) -> tuple[Group, ...]:
    """The groups that the arithmetic class of a precision depends on."""
    needed: dict[Group, bool] = {
        "wide": True,
        "small": weight_precision(precision) in SMALL_WEIGHTS,
        "cache": caches_codes(precision),
    }
    return tuple(group for group, is_needed in needed.items() if is_needed)


def arithmetic(precision: Precision = "bf16") -> str:
    """The name of the arithmetic that all back ends share: a hash of the digests that `precision` depends on."""
    files: dict[Group, Path] = {"wide": FILE, "small": SMALL_FILE, "cache": CACHE_FILE}
    return hashlib.sha256(b"".join(files[group].read_bytes() for group in groups_of(precision))).hexdigest()[:12]


def choose(precision: Precision = "bf16") -> str:
    """The back end for a precision: the one MANYHANDS_ENGINE names, else the best that reproduces the digests it depends on.

    Raises ModelError where the named one does not, or none does: nothing is replaced silently.
    """
    return _chosen(library.forced(), groups_of(precision))


@cache
def _chosen(named: str | None, groups: tuple[Group, ...]) -> str:
    wrong = {}
    for name in [named] if named else library.supported():
        wrong[name] = [case for group in groups for case in _not_proven(name, group)]
        if not wrong[name]:
            return name
    fewer = "--dtype bf16 without --cache-dtype needs fewer; " if len(groups) > 1 else ""
    raise ModelError(f"no back end reproduces the golden digests here: {wrong}; {fewer}please report this CPU")


def _not_proven(back_end: str, group: Group) -> tuple[str, ...]:
    """As `failures` of a group; none where it is noted that the library reproduced its digests on this machine."""
    if (here := proofs.machine()) is None:
        return _unlike(back_end, group)
    right = {name: digest for name, digest in recorded().items() if name in GROUPS[group]}
    name = proofs.note([here, library.PATH.read_bytes(), json.dumps(right).encode(), back_end.encode()])
    if proofs.is_noted(name):
        return ()
    if not (found := _unlike(back_end, group)):
        proofs.keep(name)
    return found


def main(arguments: list[str]) -> int:
    """Says which digests each back end does not reproduce, those of models in a checkout alone; or stores scalar's."""
    from manyhands.engine import golden_models

    if "--write" in arguments:
        found = {**recorded(), **digests("scalar"), **dict(golden_models.digests(golden_models.OfCpu("scalar")))}
        for file in (FILE, SMALL_FILE, CACHE_FILE):
            part = {name: digest for name, digest in found.items() if file_of(name) == file}
            file.write_text(json.dumps(part, indent=1) + "\n")
        _unlike.cache_clear()
    wrong = {name: list(failures(name)) for name in library.supported()}
    for name in wrong if golden_models.FILE.exists() else ():
        wrong[name] += golden_models.failures(golden_models.OfCpu(name))
    sys.stdout.write(json.dumps(wrong, indent=1) + "\n")
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
