"""A manyhands.toml in the folder that a command runs in may have come with it: what it decides about others is said, and the
user's own key does not go to a gateway that nothing but this file names.

So does npm with a project's .npmrc: it may name a registry, and a token goes to the one that it was given for. A file that
MANYHANDS_CONFIG names, or that of $MANYHANDS_HOME, is the user's own.
"""

import sys
from typing import Any, Final
from urllib.parse import urlsplit

from manyhands.api.http.hosts import is_loopback
from manyhands.cli.configured import CONFIGURED
from manyhands.cli.lines import fitted
from manyhands.config_file import Settings
from manyhands.plain import one_line

_URL, _KEY = ("api", "url"), ("api", "key")
# Who is asked, who may ask, and as whom: anything else that the file says stays on this machine.
_ABOUT_OTHERS: Final = frozenset(
    {
        _URL,
        *(("api", key) for key in ("listen", "insecure", "cors", "hosts", "debug")),
        *(("swarm", key) for key in ("ticket", "scope", "allow", "nodes")),
        *(("node", key) for key in ("key", "listen", "relay")),
    }
)
# Keys that a command reads although none of its options has them.
_MORE: Final = {"up": _ABOUT_OTHERS - {_URL}, "join": _ABOUT_OTHERS - {_URL}}
_SAID: Final = "manyhands.folder_file"  # lines, in what contexts share


def guard(command: Any) -> None:
    """Have `command` (click's) look at the file of its folder before it runs."""
    run = command.invoke

    def invoke(context: Any) -> Any:
        if isinstance(found := context.obj, Settings) and found.is_of_folder:
            _withhold_key(context, found)
            _tell(context, found)
        return run(context)

    command.invoke = invoke


def _withhold_key(context: Any, found: Settings) -> None:
    """Take the key from a call of the gateway that the file alone names, unless the key is the file's, too."""
    key_is_files = _is_default(context, "api_key") and _says(found, _KEY)
    if context.params.get("api_key") and not key_is_files and _is_default(context, "api") and _says(found, _URL):
        context.params["api_key"] = ""
        url = one_line(found.api.url, 200)
        _say(context, f"note: your key is not sent to {url}, which {found.file} alone names; to send it: --api {url}")


def _tell(context: Any, found: Settings) -> None:
    """One line if what this command takes from the file is about others."""
    name = _name_of(context)
    options = CONFIGURED.get(name, {}).items()
    used = {where for option, where in options if _is_default(context, option)} | _MORE.get(name, frozenset())
    names = [f"[{where[0]}] {where[1]}{_shown(where, found)}" for where in sorted(used) if _is_told(where, found)]
    if names:
        _say(
            context,
            f"note: {found.file}, a file of this folder, sets {', '.join(names)}; MANYHANDS_CONFIG names another",
        )


def _is_told(where: tuple[str, str], found: Settings) -> bool:
    value = found.get(*where).value
    if where == _URL or where[1] == "listen":
        return bool(value) and value != "off" and not _is_here(value) and _says(found, where)
    return where in _ABOUT_OTHERS and bool(value) and _says(found, where)


def _is_here(address: str) -> bool:
    """Whether a URL, or HOST:PORT, is of this machine alone."""
    try:
        return is_loopback(urlsplit(address if "://" in address else f"//{address}").hostname or "")
    except ValueError:
        return False


def _shown(where: tuple[str, str], found: Settings) -> str:
    return f" = {one_line(found.api.url, 200)}" if where == _URL else ""


def _name_of(context: Any) -> str:
    words: list[str] = []
    while context.parent is not None:
        words.insert(0, context.info_name)
        context = context.parent
    return " ".join(words)


def _is_default(context: Any, parameter: str) -> bool:
    """Whether neither the command line nor a variable gives it."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "DEFAULT_MAP"


def _says(found: Settings, where: tuple[str, str]) -> bool:
    return found.get(*where).source == str(found.file)


def _say(context: Any, line: str) -> None:
    """Once: a command and its subcommand may both take what the line is about."""
    said: set[str] = context.meta.setdefault(_SAID, set())
    if line not in said:
        said.add(line)
        print(fitted(line, sys.stderr), file=sys.stderr)
