"""`manyhands model`: look into a model, compare two, cut one into parts, make a tiny one."""

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from manyhands.cli.lines import columns, fitted, rows_within, width_of
from manyhands.cli.options import Model
from manyhands.cli.progress import doing
from manyhands.cli.quality import quality
from manyhands.config import home_from_env
from manyhands.core import PRECISIONS, Precision, Span, caches_codes, even_cut, parse_cut
from manyhands.errors import BadRequest, DiskFull, ModelError
from manyhands.plain import figure_of, size_of

if TYPE_CHECKING:  # help is instant: the hub's client is imported inside the commands
    from manyhands.checkpoint.manifest import Manifest, TensorDigest
    from manyhands.checkpoint.partition import ModelFacts
    from manyhands.program.ops import Program

# What weights are held in; no CPU serves fp16.
HELD = tuple(each for each in PRECISIONS if not caches_codes(each) and each != "fp16")
SIZES: Final = ("held as", "smallest layer", "largest layer", "embedding and head", "all", "tokens/s here")
NUM_FIRST: Final = 3  # columns that stand in a line of their own on a narrow terminal
app = typer.Typer(no_args_is_help=True, help="Look into a model, compare two, cut one into parts, make a tiny one.")
app.command()(quality)

Out = Annotated[Path, typer.Argument(help="A folder that does not exist yet.")]


@app.command()
def inspect(
    model: Model,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Say what a model is: family, form, sizes, id."""
    with doing(f"reading {model}") as progress:
        from manyhands.checkpoint.config_fields import parse_config
        from manyhands.checkpoint.folder import read_config
        from manyhands.checkpoint.manifest import build_manifest
        from manyhands.place.kernels import predict_here
        from manyhands.weights.fetch import resolve_model
        from manyhands.weights.names import label

        folder = resolve_model(model, Span(0, 1), False, home_from_env(), progress)  # the manifest lists the rest
        manifest = build_manifest(folder, progress, called=label(model))
        config = parse_config(read_config(folder))
        predicted = predict_here(config, manifest.tensors, home_from_env())
    facts = describe(config, manifest)
    facts["tokens_per_s"] = {name: round(each.tokens_per_s, 2) for name, each in predicted.items()}
    if as_json:
        typer.echo(json.dumps({"model": model, **facts}))
    else:
        _show(model, facts)


def describe(config: Mapping[str, Any], manifest: "Manifest") -> dict[str, Any]:
    """Everything `inspect` says of a model with this config.json; bytes are those of memory, once it is loaded."""
    from manyhands.checkpoint.folded import folded
    from manyhands.checkpoint.partition import ModelFacts, is_tied
    from manyhands.program.tensors import wide_weights

    facts, matrices, program = ModelFacts.from_config(config), folded(manifest.tensors, config), _program(config)
    wide = frozenset[str]().union(*map(wide_weights, program.layers)) if program else frozenset[str]()
    return {
        **asdict(facts),
        "context": program.context if program else facts.context,
        "tied": is_tied(manifest.names),
        "stored": stored_as(manifest.tensors),
        "bytes": {precision: _sizes(facts, matrices, precision, wide) for precision in HELD},
        "model_id": manifest.id,
    }


def stored_as(tensors: "Iterable[TensorDigest]") -> dict[str, int]:
    """Bytes of the tensors of each stored type, the most first."""
    from manyhands.checkpoint.dtypes import stored_bytes

    found: dict[str, int] = {}
    for tensor in tensors:
        found[tensor.dtype] = found.get(tensor.dtype, 0) + stored_bytes(tensor.dtype, tensor.shape)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _program(config: Mapping[str, Any]) -> "Program | None":
    """None of a model that no command serves."""
    from manyhands.program.families import build_program

    try:
        return build_program(config)
    except ModelError:
        return None


def _sizes(
    facts: "ModelFacts", matrices: "Sequence[Any]", precision: Precision, wide: frozenset[str]
) -> dict[str, int]:
    from manyhands.checkpoint.partition import ends_bytes, layer_bytes

    layers = layer_bytes(matrices, facts.num_layers, precision, wide)
    ends = ends_bytes(matrices, precision, wide)
    return {"layer_min": min(layers), "layer_max": max(layers), "ends": ends, "total": sum(layers) + ends}


def _show(model: str, facts: dict[str, Any]) -> None:
    keys = ("family", "architecture", "num_layers", "hidden_size", "context", "vocab_size", "tied", "model_id")
    about = [("model", model), *((key.replace("_", " "), str(facts[key])) for key in keys)]
    about.append(("stored as", ", ".join(f"{dtype} {size_of(held)}" for dtype, held in facts["stored"].items())))
    sizes = list[tuple[str, ...]]()
    for name, row in facts["bytes"].items():
        speed = facts["tokens_per_s"].get(name)
        told = "-" if speed is None else figure_of(speed)
        sizes.append((name, *(size_of(row[key]) for key in ("layer_min", "layer_max", "ends", "total")), told))
    table = rows_within(width_of(sys.stdout), SIZES, sizes, NUM_FIRST, of_numbers=True)
    for line in (*columns(about), "", *table):
        typer.echo(fitted(line, sys.stdout))


@app.command()
def split(
    model: Model,
    out: Out,
    cut: Annotated[str | None, typer.Option(help="Layers of each part, as in 0-3,4-7.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Cut evenly into this many parts.")] = None,
) -> None:
    """Cut a model into folders that can each be served alone."""
    if (cut is None) == (nodes is None):
        raise BadRequest("give either --cut 0-3,4-7 or --nodes 2")
    with doing(f"reading {model}") as progress:
        from manyhands.checkpoint.config_fields import read_facts
        from manyhands.checkpoint.split import split_model
        from manyhands.weights.fetch import resolve_model

        folder = resolve_model(model, None, True, home_from_env(), progress)
        num_layers = read_facts(folder).num_layers
        spans = parse_cut(cut, num_layers) if cut is not None else even_cut(num_layers, nodes or 0)
        parts = split_model(folder, spans, out, progress)
    for part in parts:
        typer.echo(str(part))


@app.command()
def tiny(
    out: Out,
    family: Annotated[str, typer.Option(help="One of the families that manyhands serves.")] = "llama",
    layers: Annotated[int, typer.Option(min=1, help="How many.")] = 6,
    hidden: Annotated[int, typer.Option(min=64, help="Columns of a row.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same weights.")] = 0,
    shard_mb: Annotated[
        float | None,
        typer.Option(min=0.001, max=1e9, help="Cut the weights into files of this size; default: one file."),
    ] = None,
) -> None:
    """Make a tiny model with random weights, for tests."""
    if out.exists():
        raise BadRequest(f"{out} exists already; name a folder that does not")
    shard_bytes = None if shard_mb is None else int(shard_mb * 1e6)
    with doing(f"making a tiny {family} of {layers} layers in {out}"):
        from manyhands.worker.choice import needing

        with needing("a tiny model", "torch, transformers and safetensors", "test"):
            from manyhands.testing.tiny import make_tiny
        try:
            make_tiny(family, out, layers=layers, hidden=hidden, seed=seed, max_shard_bytes=shard_bytes)
        except BaseException as error:  # a full disk, Ctrl-C: half a model would be taken for one
            shutil.rmtree(out, ignore_errors=True)
            if "No space left" in str(error):  # safetensors has an error of its own for it
                raise DiskFull(
                    f"{out} cannot be written (No space left on device): make room, or name another"
                ) from error
            raise
    typer.echo(str(out))
