"""Whether a config describes the tensors in its folder, found out before memory is taken for either."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from manyhands.errors import ModelError

SLACK: Final = 1 << 20  # parameters that no file holds, such as what a family makes itself


def check_agreement(
    make: type[PreTrainedModel], config: PreTrainedConfig, shapes: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    """Raise ModelError unless the model that `make` builds from `config` has the `shapes` of the tensors to fill it with.

    Names that upstream converts (fused experts) are compared by their number of elements.
    """
    try:
        with torch.device("meta"):
            wanted = {name: tuple(parameter.shape) for name, parameter in make(config).named_parameters()}
    except Exception as error:  # whatever upstream's code makes of odd numbers: ZeroDivisionError, RuntimeError, ...
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelError(f"{folder}/config.json describes no model that can be built: {reason}") from error
    for name in sorted(wanted.keys() & shapes.keys()):
        if wanted[name] != shapes[name]:
            raise ModelError(
                f"{folder}: tensor {name} is {list(shapes[name])}, config.json makes it {list(wanted[name])}"
                f"{_hint(config, wanted[name], shapes[name])}"
            )
    described, held = (sum(map(math.prod, every.values())) for every in (wanted, shapes))
    if described > 2 * held + SLACK:
        raise ModelError(f"{folder}: config.json describes {described} parameters here, its files hold {held}")


def _hint(config: PreTrainedConfig, wanted: tuple[int, ...], stored: tuple[int, ...]) -> str:
    """The fields that are the sizes in question."""
    wrong = {size for size, other in zip(wanted, stored, strict=False) if size != other}
    fields = [f"{name} = {value}" for name, value in config.to_dict().items() if type(value) is int and value in wrong]
    return f" ({', '.join(fields[:3])})" if fields else ""
