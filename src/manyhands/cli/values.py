"""Reads the values of options and arguments without pydantic, which takes 0.1 s of CPU to load: as long as all else.

typer loads it to turn the first word of a command line into a value. Our commands have words, numbers, paths, flags and
lists of them; `read_plainly` gives each such parameter a reader of ours. One of another type keeps typer's.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args, get_origin

import typer

HELP: Final = ["--help", "-h"]
_YES: Final = ("1", "true", "t", "yes", "y", "on")
_NO: Final = ("", "0", "false", "f", "no", "n", "off")


def read_plainly(command: Any) -> None:
    """Give the parameters of `command` (click's) readers of ours. Does nothing to a typer that has no such readers."""
    for parameter in command.get_params(
        typer.Context(command, help_option_names=HELP)
    ):  # with --help, which is made for it
        descriptor = getattr(parameter, "type_descriptor", None)
        if getattr(parameter, "_runtime_param", "") is None and descriptor is not None:
            parameter._runtime_param = reader_of(descriptor.annotation, parameter)
            is_option = parameter.param_type_name == "option"
            shown = _shown(parameter._runtime_param) if is_option else str(parameter.name).upper()
            parameter.metavar = parameter.metavar or shown
            if not is_option and parameter.required:  # typer would write {MODEL}
                parameter.get_usage_pieces = partial(_usage, parameter.metavar)


def _usage(name: str, ctx: Any) -> list[str]:
    """A required argument in the usage line."""
    return [name]


def _shown(reader: "PlainReader | None") -> str | None:
    """How --help shows the value of an option: what a person writes, and no type of Python's. None: as typer has it."""
    return None if reader is None else {str: "TEXT", int: "N", float: "X", Path: "FILE"}.get(reader.kind)


def reader_of(annotation: Any, parameter: Any) -> "PlainReader | None":
    """The reader of a parameter of this type; None for one that typer must read."""
    of_list = get_origin(annotation) is list
    kind = get_args(annotation)[0] if of_list else annotation
    if kind not in (str, int, float, bool, Path):
        return None
    info = parameter.type_descriptor.parameter_info
    if info.parser is not None or any(getattr(info, name, False) for name in ("clamp", "exists", "resolve_path")):
        return None
    return PlainReader(kind, of_list, info.min, info.max)


@dataclass(frozen=True, slots=True)
class PlainReader:
    """Text, or a value of the configuration, as one of `kind` within its bounds, or as a list of such."""

    kind: type
    of_list: bool
    least: float | None = None
    most: float | None = None

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """What typer asks for. Raises typer.BadParameter."""
        try:
            if not self.of_list:
                return None if value is None else self._read(value)
            return [self._read(each) for each in ((value,) if isinstance(value, str) else value or ())]
        except ValueError as error:
            raise typer.BadParameter(str(error), ctx=ctx, param=param) from error

    def _read(self, value: Any) -> Any:
        if self.kind in (str, Path):
            return self.kind(value)
        return _flag(value) if self.kind is bool else self._bounded(_number(self.kind, value))

    def _bounded(self, value: float) -> float:
        if self.least is not None and not value >= self.least:  # also refuses NaN
            raise ValueError(f"{value} is less than {self.least}, the least there may be")
        if self.most is not None and not value <= self.most:
            raise ValueError(f"{value} is more than {self.most}, the most there may be")
        return value


def _number(kind: type, value: Any) -> Any:
    try:
        if isinstance(value, float) and kind is int and value != math.floor(value):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError, OverflowError) as error:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{value!r:.80} is not {what}") from error


def _flag(value: Any) -> bool:
    word = str(value).strip().lower()
    if word in _YES:
        return True
    if word in _NO:
        return False
    raise ValueError(f"{value!r:.80} is neither true nor false")
