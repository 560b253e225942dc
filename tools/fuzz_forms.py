"""Random forms of config.json of every family, without weights: what we read of each is what transformers makes of it.

    PYTHONPATH=src .venv/bin/python -m tools.fuzz_forms --count 3000 --seed 1

Each draw takes the config.json of a tiny model and leaves fields out, makes them null, gives other activations, and puts the
rotary fields where old and new configs have them. transformers reads it and writes it again with all that it takes for granted:
the Programs of both must be equal. Counted apart are forms that transformers or we refuse, and those of which we refuse what
transformers writes ("doubtful"); --all prints the two of them that are ours. Prints one JSON line for each draw that fails,
with the form, and a summary as the last line; exits with 1 if any failed.
"""

import argparse
import copy
import json
import random
import sys
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.utils import logging

from manyhands.checkpoint.config_fields import parse_config
from manyhands.errors import ModelError
from manyhands.program.families import build_program
from manyhands.program.fields import ACTIVATIONS, HARMLESS
from manyhands.program.ops import Program
from manyhands.testing.tiny import EVERY_FAMILY, NAMED_ANEW, tiny_config

Config = dict[str, Any]
LAYERS = 4
WITHOUT_ROTARY = frozenset(  # fields, that is
    "biogpt bloom codegen falcon_mamba gpt2 gpt_bigcode gpt_neo gptj mamba mamba2 mpt opt".split()
)
ROTARY = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
STATED = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
KINDS = ("default", "default", "linear", "dynamic", "llama3", "yarn", "longrope")
TYPES = ("full_attention", "sliding_attention")
# Activations of transformers that we do not have, which must be refused by name.
UNKNOWN_ACTIVATIONS = ("quick_gelu", "mish")


def scaling(draw: random.Random, width: int) -> Config:
    """A random rotary scaling for heads of `width` columns."""
    factor, original = draw.choice([1.0, 1.5, 4.0, 32.0]), draw.choice([32, 64, 128])
    kind = draw.choice(KINDS)
    out: Config = {"rope_type": kind, "rope_theta": draw.choice([1e3, 1e4, 5e5])}
    if kind != "default":
        out["factor"] = factor
    if kind in ("llama3", "yarn", "longrope"):
        out["original_max_position_embeddings"] = original
    if kind == "llama3":
        out |= {"low_freq_factor": 1.0, "high_freq_factor": draw.choice([2.0, 4.0])}
    if kind == "yarn" and draw.random() < 0.5:
        out |= {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.8, "mscale_all_dim": draw.choice([0.0, 1.1])}
    if kind == "longrope":
        out |= {"short_factor": [1.0 + i / 8 for i in range(width // 2)], "long_factor": [4.0] * (width // 2)}
    return out


def rewritten(draw: random.Random, config: Mapping[str, Any]) -> Config:
    """Another form of `config`: rotary fields elsewhere, fields absent, null or by another name, another activation."""
    out = copy.deepcopy(dict(config))
    if draw.random() < 0.6 and config["model_type"] not in WITHOUT_ROTARY:
        _place_rotary(draw, out)
    for name in sorted(out.keys() - HARMLESS - {*ROTARY, *STATED}):
        if draw.random() < 0.06:
            out[name] = None
            if draw.random() < 0.6 or not _may_be_null(config, name):
                del out[name]
    for name in ("hidden_act", "hidden_activation", "mlp_hidden_act"):
        if isinstance(out.get(name), str) and draw.random() < 0.3:
            out[name] = draw.choice([*ACTIVATIONS, *UNKNOWN_ACTIVATIONS])
    for alias, name in sorted(CONFIG_MAPPING[_theirs(config)].attribute_map.items()):
        if name in out and draw.random() < 0.1:
            out[alias] = out.pop(name)
    if draw.random() < 0.5:
        out["torch_dtype"] = out.pop("dtype", None)
    return out


def _place_rotary(draw: random.Random, config: Config) -> None:
    """Rotary fields in one of the places that configs have had for them, complete or not."""
    given = config.get("rope_parameters") or {}
    tables = [one for one in given.values() if isinstance(one, dict)]
    table = _table(draw, config, (tables or [given])[0])
    for name in ROTARY:
        config.pop(name, None)
    if draw.random() < 0.3:
        config["rope_theta"] = table.pop("rope_theta", None) if draw.random() < 0.6 else 777.0
    if draw.random() < 0.1:
        place = config if draw.random() < 0.5 else table
        place["partial_rotary_factor"] = draw.choice([0.25, 0.5, 1.0, None])
    new, old = ({name: table} for name in ("rope_parameters", "rope_scaling"))
    places: list[Config] = [new, new, old, old, {}, {"rope_scaling": None}, {"rope_parameters": None}]
    places += [{"rope_parameters": {}}, {**new, "rope_scaling": None}, {**old, "rope_parameters": None}]
    places += [{**old, "rope_parameters": copy.deepcopy(given)}]
    if tables:
        by_type = {kind: {**copy.deepcopy(table), **draw.choice([{}, {"rope_theta": 333.0}])} for kind in TYPES}
        places += [{"rope_parameters": by_type}, {"rope_parameters": {**by_type, draw.choice(TYPES): None}}] * 4
        places += [{"rope_scaling": by_type}]
    config |= draw.choice(places)


def _table(draw: random.Random, config: Config, given: Config) -> Config:
    """The fields `given` or others, perhaps without some or with the old name of the kind."""
    width = config.get("qk_rope_head_dim") or config.get("head_dim")
    width = width or config["hidden_size"] // (config.get("num_attention_heads") or 1)
    table = {"rope_type": "default", **copy.deepcopy(given)} if draw.random() < 0.3 else scaling(draw, width)
    for name in sorted(table.keys() - {"rope_type"}):
        if draw.random() < 0.1:
            table[name] = None
            if name == "rope_theta" or draw.random() < 0.7:
                del table[name]
    if draw.random() < 0.3:
        table["type"] = table["rope_type"] if draw.random() < 0.5 else table.pop("rope_type")
    return table


def normalised(config: Mapping[str, Any]) -> Config:
    """`config` as transformers reads and writes it, with the fields that it takes for granted."""
    theirs = _theirs(config)
    read = CONFIG_MAPPING[theirs].from_dict(copy.deepcopy({**config, "model_type": theirs}))
    out: Config = json.loads(read.to_json_string(use_diff=False))
    null = {name: None for name, value in config.items() if value is None}  # of which some are not written
    return {**null, **out, "model_type": config["model_type"]}


def _theirs(config: Mapping[str, Any]) -> str:
    """What transformers calls the family of a config."""
    return NAMED_ANEW.get(config["model_type"], str(config["model_type"]))


def _may_be_null(config: Mapping[str, Any], name: str) -> bool:
    """Whether transformers accepts null for a field, or does not know it."""
    known = CONFIG_MAPPING[_theirs(config)].__dataclass_fields__.get(name)
    return known is None or "None" in str(known.type)


def program_of(config: Mapping[str, Any]) -> Program:
    """What we make of a config.json. Raises ModelError."""
    return build_program(parse_config(json.dumps(config).encode()))


def outcome(config: Mapping[str, Any]) -> tuple[str, str]:
    """("same" | "refused" | "invalid" | "doubtful" | "different" | "crash", details) of one form."""
    try:
        normal = normalised(config)
    except Exception as error:  # transformers refuses with many kinds of errors
        return "invalid", f"{type(error).__name__}: {str(error).strip()[-200:]}"
    try:
        theirs: Program | ModelError = program_of(normal)
    except ModelError as error:
        theirs = error
    except Exception as error:
        return "crash", f"of the normal form: {error!r}"
    try:
        ours = program_of(config)
    except ModelError as error:
        return ("refused", str(error)) if isinstance(theirs, Program) else ("invalid", str(theirs))
    except Exception as error:
        return "crash", repr(error)
    if isinstance(theirs, ModelError):
        return "doubtful", f"the normal form is refused: {theirs}"
    return ("same", "") if ours == theirs else ("different", difference(ours, theirs))


def difference(ours: Program, theirs: Program) -> str:
    """The first part in which two programs differ."""
    for name in ("family", "hidden", "vocab", "context", "ropes", "embed", "head"):
        if getattr(ours, name) != getattr(theirs, name):
            return f"{name}: {getattr(ours, name)!s:.300} in place of {getattr(theirs, name)!s:.300}"
    for number, (one, other) in enumerate(zip(ours.layers, theirs.layers, strict=False)):
        for mine, normal in zip(one.ops, other.ops, strict=False):
            if mine != normal:
                return f"layer {number}: {mine!s:.400} in place of {normal!s:.400}"
    return "layers"


def main() -> int:
    """Draws --count forms from --seed on. See the module's text."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--count", type=int, default=1000)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--family", choices=EVERY_FAMILY)
    arguments.add_argument("--all", action="store_true")
    given = arguments.parse_args()
    logging.set_verbosity(logging.CRITICAL)
    tally: Counter[str] = Counter()
    for number in range(given.seed, given.seed + given.count):
        draw = random.Random(number)
        family = given.family or draw.choice(EVERY_FAMILY)
        config = rewritten(draw, plain_config(family))
        kind, details = outcome(config)
        tally[kind] += 1
        if kind in ("different", "crash") or (kind in ("refused", "doubtful") and given.all):
            shown = {"seed": number, "family": family, "outcome": kind, "details": details, "config": config}
            sys.stdout.write(json.dumps(shown) + "\n")
    sys.stdout.write(json.dumps(tally) + "\n")
    return 1 if tally["different"] or tally["crash"] else 0


@cache
def plain_config(family: str) -> Config:
    """The config.json of a tiny model without options."""
    return config_of(family, {})


def config_of(family: str, options: Config) -> Config:
    """The config.json of a tiny model with `options`, those of make_tiny, as transformers writes it."""
    given = {"layers": LAYERS, "context": 512, **options}
    given.pop("seed", None)
    config: Config = json.loads(tiny_config(family, **given).to_json_string(use_diff=False))
    config |= {"model_type": family} if family in NAMED_ANEW else {}
    if isinstance(config.get("time_step_limit"), list):  # transformers reads its infinity from files alone
        del config["time_step_limit"]
    return config


if __name__ == "__main__":
    sys.exit(main())
