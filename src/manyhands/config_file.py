"""`manyhands.toml` and the environment, read in one place: CLI > environment > file > default.

    [worker] [request] [node] [swarm] [balance] [api] [limits]   sections are dataclasses of config.py, keys their fields
    MANYHANDS_WORKER_MAX_SESSIONS=8                every key has a variable; three have a shorter one (SHORT)

The file is the one that $MANYHANDS_CONFIG names, else ./manyhands.toml, else $MANYHANDS_HOME/manyhands.toml. What it says
wrongly is one line with file, section, key, value and remedy. Command line options are typer's: it takes what is read
here as their defaults (cli/options.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, get_type_hints

from manyhands.config import (
    ApiConfig,
    BalanceConfig,
    LimitsConfig,
    NodeConfig,
    RequestConfig,
    SwarmConfig,
    WorkerConfig,
)
from manyhands.errors import BadRequest
from manyhands.files import own_home
from manyhands.toml_file import read_toml

NAME: Final = "manyhands.toml"
SECTIONS: Final[dict[str, Any]] = {
    "worker": WorkerConfig,
    "request": RequestConfig,
    "node": NodeConfig,
    "swarm": SwarmConfig,
    "balance": BalanceConfig,
    "api": ApiConfig,
    "limits": LimitsConfig,
}
SHORT: Final = {
    ("swarm", "ticket"): "MANYHANDS_TICKET",
    ("api", "url"): "MANYHANDS_API",
    ("api", "key"): "MANYHANDS_API_KEY",
}
OTHERS: Final = ("MANYHANDS_HOME", "MANYHANDS_CONFIG", "MANYHANDS_ENGINE", "MANYHANDS_FAULT_FILE")  # not settings
SECRETS: Final = frozenset({("swarm", "ticket"), ("api", "key")})
_PREFIX: Final = "MANYHANDS_"
_WORDS: Final = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
_KINDS: Final = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: 'a text in quotes, as in "..."',
    tuple[str, ...]: 'a list of texts, as in ["..."]',
    int | None: "a whole number",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One value and where it came from: "default", the file's path, or the variable's name."""

    section: str
    key: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that is set. `file` is None where there is none; `is_of_folder`: it may have come with the folder that the
    command runs in."""

    file: Path | None
    is_of_folder: bool
    all: tuple[Setting, ...]
    worker: WorkerConfig
    request: RequestConfig
    node: NodeConfig
    swarm: SwarmConfig
    balance: BalanceConfig
    api: ApiConfig
    limits: LimitsConfig

    def get(self, section: str, key: str) -> Setting:
        return next(one for one in self.all if (one.section, one.key) == (section, key))


def variable(section: str, key: str) -> str:
    """The environment variable of a key."""
    return SHORT.get((section, key)) or f"MANYHANDS_{section}_{key}".upper()


def find_file(env: Mapping[str, str], folder: Path) -> Path | None:
    """The configuration file of a command run in `folder`, if there is one. Raises BadRequest for one named but absent."""
    if named := env.get("MANYHANDS_CONFIG"):
        if not Path(named).is_file():
            raise BadRequest(f"MANYHANDS_CONFIG names {named}, which is no file: make it, or unset the variable")
        return Path(named)
    home = own_home(env)
    found = (path for path in (folder / NAME, home / NAME) if path.is_file() or path.is_symlink() or path.is_dir())
    return next(found, None)  # a folder, or a link to nothing, is said to be one when it is read


def read_settings(env: Mapping[str, str], folder: Path) -> Settings:
    """What environment and file say, checked. Raises BadRequest naming file or variable, key, value and remedy."""
    file = find_file(env, folder)
    content = {} if file is None else read_file(file)
    found: list[Setting] = []
    sections = {}
    for section, kind in SECTIONS.items():
        mine = list(_section(section, kind, content.get(section, {}), str(file), env))
        sections[section] = _build(section, kind, [one for one in mine if one.source != "default"])
        found += [
            Setting(section, one.key, getattr(sections[section], one.key), "default")
            if one.source == "default"
            else one
            for one in mine
        ]
    _refuse_unknown_variables(env)
    return Settings(file, _is_of_folder(file, env), tuple(found), **sections)


def _is_of_folder(file: Path | None, env: Mapping[str, str]) -> bool:
    """Whether it was found in the working folder, and neither named nor the user's."""
    if file is None or env.get("MANYHANDS_CONFIG"):
        return False
    own = own_home(env) / NAME
    return file != own and not (own.exists() and file.samefile(own))


def read_file(path: Path) -> dict[str, Any]:
    """The tables of the file. Raises BadRequest if it cannot be read, is no TOML, or has a section that does not exist."""
    content = read_toml(path)
    for name, table in content.items():
        if name not in SECTIONS:
            what = f"[{name}]" if isinstance(table, dict) else f"{name} = {table!r:.60} (outside of any section)"
            raise BadRequest(f"{path}: {what} is unknown{_suggestion(name, SECTIONS, '[{}]')}")
        if not isinstance(table, dict):
            raise BadRequest(f"{path}: {name} is a section: write [{name}] on a line of its own, its keys below")
    return content


def _section(section: str, kind: Any, table: Mapping[str, Any], file: str, env: Mapping[str, str]) -> Iterator[Setting]:
    """Every key of a section with the value of highest rank; defaults come as None, to be filled in."""
    hints = get_type_hints(kind)
    for key in table:
        if key not in hints:
            where = f"{file}: [{section}] {key} = {table[key]!r:.60}"
            raise BadRequest(f"{where} is unknown{_suggestion(key, hints, '{}')}")
    for field in fields(kind):
        key, name = field.name, variable(section, field.name)
        if env.get(name):
            value = _from_text(name, hints[key], env[name])
            yield Setting(section, key, value, name)
        elif key in table:
            where = f"{file}: [{section}] {_shown(section, key, table[key])}"
            yield Setting(section, key, _checked(where, hints[key], table[key]), file)
        else:
            yield Setting(section, key, None, "default")


def _build(section: str, kind: Any, given: list[Setting]) -> Any:
    """The section's dataclass; its own complaint about a value is told with the place that value came from."""
    try:
        return kind(**{one.key: one.value for one in given})
    except BadRequest as error:
        blamed = [one for one in given if str(error).startswith(f"{one.key} ")] or given
        places = sorted({one.source for one in blamed})
        raise BadRequest(f"{', '.join(places)}: [{section}] {error}") from error


def _checked(where: str, kind: Any, value: Any) -> Any:
    """`value` of a TOML file as `kind`. Raises BadRequest."""
    match value:
        case bool():
            fits = kind is bool
        case int():
            fits = kind in (int, int | None) or (kind is float and abs(value) < 1 << 1000)
        case float():
            fits = kind is float
        case str():
            fits = kind is str
        case list():
            fits = kind == tuple[str, ...] and all(isinstance(item, str) for item in value)
        case _:
            fits = False
    if not fits:
        raise BadRequest(f"{where}; it must be {_KINDS[kind]}")
    return {float: float, tuple[str, ...]: tuple}.get(kind, lambda same: same)(value)


def _from_text(name: str, kind: Any, text: str) -> Any:
    """A variable's text as `kind`; lists are separated by commas. Raises BadRequest."""
    try:
        if kind is bool:
            return _WORDS[text.lower()]
        if kind == tuple[str, ...]:
            return tuple(item.strip() for item in text.split(",") if item.strip())
        return {float: float, str: str}.get(kind, int)(text)
    except (ValueError, KeyError):
        needs = {bool: f"one of {', '.join(_WORDS)}", tuple[str, ...]: "texts separated by commas"}
        raise BadRequest(f"{name} is {text!r:.60}; it must be {needs.get(kind) or _KINDS[kind]}") from None


def _shown(section: str, key: str, value: Any) -> str:
    return f"{key} = (hidden)" if (section, key) in SECRETS else f"{key} = {value!r:.60}"


def _suggestion(word: str, known: Mapping[str, Any], form: str) -> str:
    """ "; did you mean x?", or what there is."""
    import difflib

    close = difflib.get_close_matches(word, known, 1)
    if close:
        return f"; did you mean {form.format(close[0])}?"
    return f"; there are {', '.join(form.format(name) for name in sorted(known))}"


def _refuse_unknown_variables(env: Mapping[str, str]) -> None:
    """A variable that begins like a section's and names no key of it, or nearly has the name of one, is a slip of the pen."""
    known = {variable(section, field.name): None for section, kind in SECTIONS.items() for field in fields(kind)}
    known |= dict.fromkeys(OTHERS)
    for name in sorted(env.keys() - known.keys()):
        if name.startswith(tuple(f"{_PREFIX}{section}_".upper() for section in SECTIONS)) or _nearly(name, known):
            raise BadRequest(f"the variable {name} is unknown{_suggestion(name, known, '{}')}")


def _nearly(name: str, known: Mapping[str, Any]) -> bool:
    """Whether `name` differs from a known variable by a letter or two, which the prefix that all have does not count for."""
    if not name.startswith(_PREFIX):
        return False
    import difflib

    ends = [each.removeprefix(_PREFIX) for each in known]
    return bool(difflib.get_close_matches(name.removeprefix(_PREFIX), ends, 1, 0.8))
