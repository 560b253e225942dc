"""What a machine can do, and the TOML file that lists machines.

origin = "desk"             # whose prompts they are; default: the first machine
[[machine]]
name = "desk"
memory = "16GB"             # may be used for the model: weights, cache, process
layer_ms = 1.2              # one layer of a decode step; default: as measured here, times 1 / speed
row_ms = 0.05               # one layer of one prefill row; given so, a chunk takes no more than its rows do
ends_ms = 4                 # embedding, head, sampling (matters for the origin only)
speed = 1                   # relative to this machine, where the three above are not given
rtt_ms = 0                  # round trip to the origin
uplink_mbit = 100           # default: no limit
[[link]]
between = ["laptop", "nas"] # default: the sum of both round trips to the origin (each has its own last mile)
rtt_ms = 2
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from manyhands.errors import BadRequest
from manyhands.route.cost import HOP_OVERHEAD_S, Leg
from manyhands.toml_file import read_toml

_UNITS: Final = {"": 1, "B": 1} | {
    f"{letter}{tail}": base**power
    for power, letter in enumerate("KMGT", 1)
    for tail, base in (("", 1000), ("B", 1000), ("iB", 1024))
}

# A core that waits for so long is still awake; for so long, dozes as deeply as it will (measured: place/measure.py).
AWAKE_S: Final = 0.004
DOZE_S: Final = 0.032
# What a request takes its origin beside the round trips, the hops and the ends, where it was not measured (cli/rehearsal.py):
# to find a route, sign the Opens, make the session, and hand the prompt to the device to be embedded.
BEGIN_S: Final = 0.0046
# What each hop beyond the first adds to that, likewise; of an AMD EPYC: to sign its Open, send it and take the answer.
OPEN_S: Final = 0.0018
# What the first step of a session takes a hop beyond its compute and what any step takes it; of a Xeon with AMX.
NEW_S: Final = 0.0006

MAX_S: Final = 1e6  # of any figure in seconds
# Of a file: a search among so many takes some 12 s for 80 layers, and its time grows faster than their number.
MAX_MACHINES: Final = 256


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine. Seconds of one layer: `layer_s` of a decode step; of a prefill chunk `pass_s`, and `row_s` for each of its
    rows; `ends_s` of embedding, head and sampling of a token; `overhead_s`: what a hop there adds beyond its layers. All
    with cores that waited for AWAKE_S; after DOZE_S or more they take `doze` times as long. `begin_s`: of a request at its
    origin, after a pause, before its prompt is on its way to one hop; `open_s`: what each further hop adds to that;
    `new_s`: what the first step of a session costs a hop more than others, whose cache has been used before.

    `memory_bytes` may be used for the model, all told. `rtt_s`: round trip to the origin. Raises BadRequest naming machine,
    value and limits.
    """

    name: str
    memory_bytes: int
    layer_s: float
    row_s: float = 0.0
    ends_s: float = 0.0
    overhead_s: float = HOP_OVERHEAD_S
    rtt_s: float = 0.0
    uplink_Bps: float = math.inf
    cores: int = 1
    doze: float = 1.0
    begin_s: float = BEGIN_S
    open_s: float = OPEN_S
    new_s: float = NEW_S
    pass_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable() or len(self.name) > 64:
            raise BadRequest(f"machine name {self.name[:64]!r}: 1 to 64 printable characters")
        if self.memory_bytes <= 0:
            raise BadRequest(f"machine {self.name}: memory is {self.memory_bytes}; give what it may use, as in 8GB")
        for name, low in (
            ("layer_s", 0),
            ("row_s", 0),
            ("ends_s", 0),
            ("begin_s", 0),
            ("open_s", 0),
            ("new_s", 0),
            ("pass_s", 0),
            ("overhead_s", 0),
            ("rtt_s", 0),
            ("cores", 1),
            ("doze", 1),
        ):
            value = getattr(self, name)
            if not low <= value <= MAX_S:  # also refuses NaN
                raise BadRequest(f"machine {self.name}: {name} is {value}; it must be between {low} and {MAX_S:.0f}")
        if not self.layer_s > 0:
            raise BadRequest(f"machine {self.name}: layer_s is 0; leave it out to have it measured, or give its speed")
        if not self.uplink_Bps > 0:
            raise BadRequest(f"machine {self.name}: its uplink is {self.uplink_Bps} bytes/s; it must be more than 0")

    def slowed(self, rest_s: float) -> float:
        """How many times longer work takes that begins after `rest_s` without any: cores doze off, caches are taken."""
        depth = math.log(max(rest_s, AWAKE_S) / AWAKE_S) / math.log(DOZE_S / AWAKE_S)
        return 1 + (self.doze - 1) * min(1.0, depth)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Machines, the origin among them, and round trips measured between pairs.

    Raises BadRequest: no machine, a name twice, an origin or a pair that is not among them.
    """

    machines: tuple[Machine, ...]
    origin: str
    rtts: Mapping[frozenset[str], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [machine.name for machine in self.machines]
        if not names:
            raise BadRequest(
                "no machines: list at least one [[machine]], or leave --machines out to plan with this one"
            )
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise BadRequest(f"machine {twice[0]} is listed twice: give each its own name")
        if unknown := ({self.origin} | {name for pair in self.rtts for name in pair}) - set(names):
            raise BadRequest(f"{min(unknown)!r} is no machine listed: there are {', '.join(names)}")
        for pair, rtt_s in self.rtts.items():
            if len(pair) != 2 or not 0 <= rtt_s <= 1e6:
                raise BadRequest(f"link {' - '.join(sorted(pair))}: rtt is {rtt_s}; two machines and 0 or more seconds")

    def get_machine(self, name: str) -> Machine:
        return next(machine for machine in self.machines if machine.name == name)

    def leg(self, sender: Machine, receiver: Machine) -> Leg:
        """The way from one to the other. A pair that was not measured: the sum of their ways to the origin."""
        rtt_s = self.rtts.get(frozenset((sender.name, receiver.name)), -1.0)
        if sender.name == receiver.name:
            return Leg(0.0)
        if rtt_s < 0:
            rtt_s = sum(machine.rtt_s for machine in (sender, receiver) if machine.name != self.origin)
        return Leg(rtt_s, sender.uplink_Bps)

    def seen_from(self, origin: str) -> "Fleet":
        """The same machines and the same ways between them, with another origin."""
        rtts = {frozenset((a.name, b.name)): self.leg(a, b).rtt_s for a, b in itertools.combinations(self.machines, 2)}
        return Fleet(self.machines, origin, rtts)

    def with_machines(self, more: Sequence[Machine]) -> "Fleet":
        """These machines and `more`."""
        return replace(self, machines=(*self.machines, *more))


def parse_bytes(text: str | int) -> int:
    """Bytes of "8GB", "512MiB", "1.5 G" or a plain number. Raises BadRequest."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([KMGT]?(?:i?B)?)\s*", str(text), re.ASCII)
    if match is None or match[2] not in _UNITS or isinstance(text, bool):
        raise BadRequest(f"memory {str(text)[:40]!r} is not a size: write 8GB, 512MiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_what_if(text: str, like: Machine) -> Machine:
    """Read "laptop:8GB@40ms", or "laptop:8GB@40ms*0.5" for half the speed of `like` (else as fast). Raises BadRequest."""
    match = re.fullmatch(r"([^:@*]{1,64}):([^:@*]+)(?:@(\d{1,6}(?:\.\d{1,6})?)ms)?(?:\*(\d{1,6}(?:\.\d{1,6})?))?", text)
    if match is None:
        raise BadRequest(
            f'{text!r} describes no machine: write "laptop:8GB@40ms", or with its speed "laptop:8GB@40ms*0.5"'
        )
    table = {
        "name": match[1].strip(),
        "memory": match[2],
        "rtt_ms": float(match[3] or 0),
        "speed": float(match[4] or 1),
    }
    return _machine(table, like)


_NUMBERS: Final = {"layer_ms", "row_ms", "ends_ms", "speed", "rtt_ms", "uplink_mbit", "cores"}


def needs_measuring(tables: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a machine's speed is given only relative to this one."""
    return any(not isinstance(table, Mapping) or "layer_ms" not in table for table in tables)


def read_machines_file(path: Path) -> dict[str, Any]:
    """The parsed file: "machine" and "link" are lists of tables. Raises BadRequest naming what is wrong with it."""
    content = read_toml(path)
    _refuse_unknown(content, {"origin", "machine", "link"}, str(path))
    for name in ("machine", "link"):
        if not isinstance(content.setdefault(name, []), list) or not all(isinstance(t, dict) for t in content[name]):
            raise BadRequest(f"{path}: {name} is written as [[{name}]], once for each")
    if (count := len(content["machine"])) > MAX_MACHINES:
        raise BadRequest(f"{path} lists {count} machines; at most {MAX_MACHINES} are planned for: leave some out")
    return content


def fleet_of(content: Mapping[str, Any], here: Machine | None) -> Fleet:
    """Machines of a parsed file. `here`: this machine as measured, for those without a speed of their own.

    Raises BadRequest naming machine and key.
    """
    machines = tuple(_machine(table, here) for table in content["machine"])
    if not machines:
        return Fleet((), "")  # which says what to do
    rtts: dict[frozenset[str], float] = {}
    for table in content["link"]:
        _refuse_unknown(table, {"between", "rtt_ms"}, "a [[link]]")
        between = table.get("between")
        if not isinstance(between, list) or len(between) != 2 or not all(isinstance(name, str) for name in between):
            raise BadRequest(f'a [[link]] is between two machines: between = ["a", "b"], not {between!r}')
        rtts[frozenset(between)] = _number(table, "rtt_ms", f"link {between[0]} - {between[1]}", 0.0) / 1e3
    origin = content.get("origin", machines[0].name)
    return Fleet(machines, str(origin), rtts)


def _machine(table: Mapping[str, Any], like: Machine | None) -> Machine:
    """One [[machine]]. Whatever its table does not say is as in `like`, at its speed."""
    name = table.get("name")
    if not isinstance(name, str):
        raise BadRequest(f"a [[machine]] has no name: {str(dict(table))[:80]}")
    where = f"machine {name}"
    _refuse_unknown(table, _NUMBERS | {"name", "memory"}, where)
    if "memory" not in table:
        raise BadRequest(f'{where} has no memory: give what it may use, as in memory = "8GB"')
    speed = _number(table, "speed", where, 1.0)
    if not speed > 0:
        raise BadRequest(f"{where}: speed is {speed}; it must be more than 0 (1 is as fast as this machine)")
    if like is None and "layer_ms" not in table:
        raise BadRequest(f"{where} has no layer_ms, and nothing was measured that it could be taken from")
    known = like or Machine(name, 1, 1.0)
    timed = {key: _number(table, f"{key}_ms", where, math.nan) / 1e3 for key in ("layer", "row", "ends")}
    seconds = {
        f"{key}_s": value if f"{key}_ms" in table else (getattr(known, f"{key}_s") / speed if like else 0.0)
        for key, value in timed.items()
    }
    uplink = _number(table, "uplink_mbit", where, math.inf) * 1e6 / 8
    return Machine(
        name,
        parse_bytes(table["memory"]),
        **seconds,
        overhead_s=known.overhead_s / speed if like else HOP_OVERHEAD_S,
        rtt_s=_number(table, "rtt_ms", where, 0.0) / 1e3,
        uplink_Bps=uplink,
        cores=int(_number(table, "cores", where, known.cores)),
        doze=known.doze,
        begin_s=known.begin_s / speed,
        open_s=known.open_s / speed,
        new_s=known.new_s / speed,
        pass_s=0.0 if "row_ms" in table else known.pass_s / speed,
    )


def _number(table: Mapping[str, Any], key: str, where: str, default: float) -> float:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"{where}: {key} is {value!r}; it must be a number")
    if key in table and not 0 <= value <= 1e9:  # also refuses NaN
        raise BadRequest(f"{where}: {key} is {value}; it must be between 0 and 1000000000")
    return float(value)


def _refuse_unknown(table: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(table) - known):
        raise BadRequest(f"{where}: {unknown[0]!r} is unknown; there are {', '.join(sorted(known))}")
