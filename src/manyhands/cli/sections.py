"""Options in --help, in sections; those that SECTIONS does not name stand under Options."""

import re
from collections import Counter, defaultdict
from typing import Any, Final

from typer.core import TyperCommand

SECTIONS: Final = {
    "Layers": ("layers", "memory", "spare", "can-load", "max-pipes", "strategy", "ends", "nodes", "cut", "spares"),
    "Network": ("listen", "advertise", "key", "scope", "relay", "allow", "deny", "directory"),
    "API": ("insecure", "allow-host", "cors", "job-file", "trace"),
    "Sampling": "max-tokens temperature top-p top-k min-p seed repetition-penalty stop deterministic".split(),
    "Routes of requests": (
        *("path", "standby", "policy", "allow-self", "sticky", "own-first", "own-last", "fallback", "mix-classes"),
        *("max-shards-per-request", "audit"),
    ),
    "Limits": ("max-sessions", "cache-tokens", "log-bytes", "evict-after"),
    "Faults": ("kill", "freeze", "slow", "poison", "drain"),
}
_OF: Final = {f"--{option}": section for section, options in SECTIONS.items() for option in options}
_TYPE: Final = re.compile(r" <[\w\[\]]+>$")  # of Python's, which typer adds to arguments
FEWEST: Final = 3  # options that make a section of their own


class SectionedCommand(TyperCommand):
    """A command whose help lists arguments, then Options, then the sections that it has at least FEWEST options of."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        shown = [(_section(each), *record) for each in self.get_params(ctx) if (record := each.get_help_record(ctx))]
        count = Counter(section for section, _, _ in shown)
        found: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for section, name, what in shown:
            is_small = section in SECTIONS and count[section] < FEWEST
            plain = _TYPE.sub("", name)
            found["Options" if is_small else section].append((plain, what))
        for section in ("Arguments", "Options", *SECTIONS):
            if found[section]:
                with formatter.section(section):
                    formatter.write_dl(found[section])


def _section(parameter: Any) -> str:
    if parameter.param_type_name != "option":
        return "Arguments"
    return next((_OF[name] for name in parameter.opts if name in _OF), "Options")
