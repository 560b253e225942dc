"""`manyhands config`: what is set, and where each value came from."""

import json
from typing import Any

import typer

from manyhands.cli import options
from manyhands.config_file import SECRETS, SECTIONS, Setting


def config(as_json: options.Json = False) -> None:
    """Print the configuration in force, each value with its source, in the form of a manyhands.toml."""
    found = options.settings()
    if as_json:
        told = [{"section": s.section, "key": s.key, "value": _value(s), "source": s.source} for s in found.all]
        typer.echo(json.dumps({"file": None if found.file is None else str(found.file), "settings": told}))
        return
    typer.echo(f"# file: {found.file or 'none'}")
    for section in SECTIONS:
        typer.echo(f"\n[{section}]")
        for setting in found.all:
            if setting.section == section:
                typer.echo(f"{_line(setting):<40} # {setting.source}")


def _line(setting: Setting) -> str:
    """One line of TOML; a comment where there is no value, or one that is not to be shown."""
    value = _value(setting)
    if value is None:
        return f"# {setting.key} ="
    if (setting.section, setting.key) in SECRETS and setting.value:
        return f"# {setting.key} = {value}"
    return f"{setting.key} = {json.dumps(value, ensure_ascii=False)}"  # of these types, JSON is TOML


def _value(setting: Setting) -> Any:
    is_secret = (setting.section, setting.key) in SECRETS and setting.value
    return "(hidden)" if is_secret else setting.value
