"""Options of a command that stand together in a dataclass (options.py)."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer: each parameter whose default is a dataclass stands for options, one for each of its fields.

    The fields of that default are the defaults of the options; the command gets an instance with the values given.
    """
    signature = inspect.signature(command)
    groups: dict[str, Any] = {name: p.default for name, p in signature.parameters.items() if is_dataclass(p.default)}

    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = replace(group, **{each.name: values.pop(each.name) for each in fields(group)})
        command(**values)

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        keyword = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        parameters += _options_of(groups[name]) if name in groups else [keyword]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options_of(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(type(group), include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(each.name, kind, default=getattr(group, each.name), annotation=hints[each.name])
        for each in fields(group)
    ]
