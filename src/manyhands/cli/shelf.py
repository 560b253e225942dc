"""`manyhands pull`, `list`, `rm`, `show`: the models of this machine, and who in the swarm has which layers."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli import options
from manyhands.cli.lines import columns, fitted
from manyhands.cli.progress import doing
from manyhands.config import home_from_env
from manyhands.errors import BadRequest, ManyhandsError
from manyhands.plain import one_line, size_of

if TYPE_CHECKING:
    from manyhands.weights.shelf import Shelved

Name = Annotated[str, typer.Argument(help="As `manyhands list` shows it.")]
SWARM_S = 2.0  # to ask a node of this machine for its view of the swarm


def pull(model: options.Model, as_json: options.Json = False) -> None:
    """Fetch a model to this machine, whole. What came before an interruption from the hub is not fetched again."""
    with doing(f"looking for {model}") as screen:
        from manyhands.weights.fetch import resolve_model
        from manyhands.weights.names import label

        home = home_from_env()
        try:
            folder = resolve_model(model, None, True, home, screen)
        except KeyboardInterrupt:
            screen.end()
            typer.echo(f"interrupted: `manyhands pull {model}` goes on with what is here", err=True)
            raise
    told = json.dumps({"model": label(model), "folder": str(folder)})
    typer.echo(told if as_json else f"{one_line(label(model))} is here: manyhands up {model}")


def list_(as_json: options.Json = False) -> None:
    """The models of this machine: how large, which layers, where; and which nodes of the swarm hold what."""
    from manyhands.weights.shelf import on_shelf

    with doing("looking at the models of this machine"):
        found = on_shelf(home_from_env())
        swarm = _swarm()
    if as_json:
        typer.echo(json.dumps({"models": [_object(each) for each in found], "swarm": _holders(swarm)}))
        return
    for line in (*columns([("NAME", "SIZE", "LAYERS", "WHERE"), *map(_row, found)]), *_said_of(swarm), *_absent(found)):
        typer.echo(fitted(line, sys.stdout))


def rm(model: Name, as_json: options.Json = False) -> None:
    """Remove a model from this machine. One that is being served is refused, and so is a file of yours."""
    from manyhands.weights.shelf import find, remove

    found = find(model, home_from_env())
    if len(found) > 1:
        raise BadRequest(f"{model!r} is {len(found)} models: name one of {', '.join(str(e.where) for e in found)}")
    remove(found[0])
    if as_json:
        typer.echo(json.dumps({"removed": found[0].name, "bytes": found[0].size}))
    elif found[0].kind == "file":
        typer.echo(f"{one_line(found[0].name)} is forgotten; its file is yours: {found[0].where}")
    else:
        typer.echo(f"{one_line(found[0].name)} is removed: {size_of(found[0].size)}")


def show(model: options.Model, as_json: options.Json = False) -> None:
    """What a model is, how much memory it takes, what of it lies here, and which nodes hold it."""
    from manyhands.weights.names import label

    with doing(f"looking at {model}") as screen:
        facts = _facts(model, screen)
        named = label(model)
        here = [each for each in _shelf() if each.name.partition("@")[0] == named.partition("@")[0]]
        held = {name: nodes for name, nodes in _holders(_swarm()).items() if name == named}
    if as_json:
        typer.echo(json.dumps({"model": named, **facts, "here": [_object(e) for e in here], "swarm": held}))
        return
    sizes = ", ".join(f"{name} {size_of(row['total'])}" for name, row in facts["bytes"].items())
    rows = [
        ("model", named),
        ("family", f"{facts['family']}, {facts['num_layers']} layers, {facts['context']} tokens of context"),
        ("weights in memory", sizes),
        ("id", facts["model_id"]),
        *(("here", f"{_layers(each)}, {size_of(each.size)}, {each.where}") for each in here),
        *(("held by", _nodes(nodes)) for nodes in held.values()),
    ]
    for line in columns([(name, one_line(text, 400)) for name, text in rows]):
        typer.echo(fitted(line, sys.stdout))


# -- what is known ----------------------------------------------------------------------------------------------------


def _shelf() -> "list[Shelved]":
    from manyhands.weights.shelf import on_shelf

    return on_shelf(home_from_env())


def _facts(model: str, progress: Any) -> dict[str, Any]:
    from manyhands.checkpoint.config_fields import parse_config
    from manyhands.checkpoint.folder import read_config
    from manyhands.checkpoint.manifest import build_manifest
    from manyhands.cli.model import describe
    from manyhands.core import Span
    from manyhands.weights.fetch import resolve_model

    folder = resolve_model(model, Span(0, 1), False, home_from_env(), progress)  # the manifest has the rest
    manifest = build_manifest(folder, progress, called=model)
    return describe(parse_config(read_config(folder)), manifest)


def _swarm() -> Mapping[str, Any] | None:
    """The view of a member that runs here, None if none does."""
    from manyhands.cli.client import call
    from manyhands.member.home import list_running

    for running in list_running(home_from_env()):
        if running.api:
            try:
                view: Mapping[str, Any] = call(running.api, "", "GET", "/api/swarm", timeout_s=SWARM_S)
            except ManyhandsError:  # it is going away, or asks for a key: the list is of this machine
                continue
            return view
    return None


def _holders(view: Mapping[str, Any] | None) -> dict[str, dict[str, list[str]]]:
    """Model -> node -> the layers that it serves."""
    found: dict[str, dict[str, list[str]]] = {}
    for node in [] if view is None else view["nodes"]:
        for span in node["spans"]:
            found.setdefault(span["model"], {}).setdefault(node["name"], []).append(span["layers"])
    return found


# -- lines ------------------------------------------------------------------------------------------------------------


def _row(each: "Shelved") -> tuple[str, str, str, str]:
    where = {"bundled": "comes with manyhands", "swarm": "from a swarm"}.get(each.kind, str(each.where))
    return one_line(each.name, 80), size_of(each.size), _layers(each), one_line(where, 300)


def _layers(each: "Shelved") -> str:
    if each.num_layers == 0:
        return "not whole yet" if each.kind == "short name" and each.where.is_dir() else "cannot be read"
    if each.is_whole or not each.layers:
        return f"{'all' if each.is_whole else 'none of'} {each.num_layers}"
    is_one = sum(map(len, each.layers)) == 1
    return f"{'layer' if is_one else 'layers'} {','.join(map(str, each.layers))} of {each.num_layers}"


def _said_of(view: Mapping[str, Any] | None) -> list[str]:
    holders = _holders(view)
    if view is None or not holders:
        return []
    name = one_line(view["swarm"])  # that of `local` and `serve` has none
    lines = ["", f"in swarm {name}:" if name else "served here:"]
    return lines + [f"  {one_line(model, 80)}  {_nodes(nodes)}" for model, nodes in sorted(holders.items())]


def _nodes(nodes: Mapping[str, Sequence[str]]) -> str:
    return " · ".join(one_line(f"{name} {','.join(layers)}", 120) for name, layers in sorted(nodes.items()))


def _absent(found: "Sequence[Shelved]") -> list[str]:
    """Short names that could be fetched."""
    from manyhands.weights.catalogue import SHORT_NAMES

    here = {each.name for each in found}
    absent = [short for name, short in SHORT_NAMES.items() if name not in here]
    lines = [f"  manyhands pull {each.name}   {size_of(each.size)}, {each.about}" for each in absent]
    return ["", "not here yet:", *lines] if lines else []


def _object(each: "Shelved") -> dict[str, Any]:
    told = {key: value for key, value in asdict(each).items() if key not in ("folders", "layers")}
    return {**told, "where": str(each.where), "layers": [str(span) for span in each.layers]}
