"""The model in a GGUF file as a checkpoint in bf16, with groups that do not lie on the grid that the file stored them on.

Weights that were stored with 4 bits lie on a grid: to round them to the same groups would cost next to nothing. So channels
change places: of the residual stream, of the gated block's inner rows, and of each value head, all by 16. A group of 32 then
is half of one stored group and half of the next. The model computes the same, but for the order of sums.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from manyhands.checkpoint.folder import read_entries
from manyhands.checkpoint.gguf_configs import PAIRS
from manyhands.checkpoint.verify import ignore
from manyhands.engine.mapped import MappedTensors
from manyhands.engine.weights import as_fp32

BY = 16


def shifted(folder: Path, out: Path) -> Path:
    """The llama model of a GGUF file's folder as a checkpoint in bf16 in the folder `out`, which is made."""
    config = json.loads((folder / "config.json").read_bytes())
    conventions = config.pop("quantization_config")
    out.mkdir(parents=True)
    for file in folder.glob("*.json"):
        shutil.copy(file, out)
    (out / "config.json").write_text(json.dumps(config))
    with MappedTensors(folder, ignore) as tensors:
        names = [entry.name for entry in read_entries(folder)]
        found = {name: torch.from_numpy(as_fp32(tensors.read(name)).copy()) for name in names}
    for name, tensor in found.items():
        if conventions.get(PAIRS) and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _halves(tensor, config["head_dim"])
        found[name] = _moved(name, tensor, config["head_dim"]).bfloat16().contiguous()
    save_file(found, out / "model.safetensors", metadata={"format": "pt"})
    return out


def _halves(weight_NK: Tensor, width: int) -> Tensor:
    """Rotary pairs that lie side by side, as llama.cpp has them, to where transformers has them."""
    return weight_NK.view(-1, width // 2, 2, weight_NK.shape[1]).transpose(1, 2).reshape(weight_NK.shape)


def _moved(name: str, tensor: Tensor, width: int) -> Tensor:
    """A tensor of the model whose channels moved by BY."""
    kind = name.removesuffix(".weight").rpartition(".")[2]
    if kind == "down_proj":
        return tensor.roll((BY, BY), (0, 1))
    if kind in ("gate_proj", "up_proj"):
        return tensor.roll((BY, BY), (0, 1))
    if kind == "v_proj":
        return _heads_moved(tensor.roll(BY, 1).T, width).T
    if kind == "o_proj":
        return _heads_moved(tensor.roll(BY, 0), width)
    return tensor.roll(BY, -1)  # norms, embedding, head, queries, keys: what they read or hold of the residual stream


def _heads_moved(tensor_NK: Tensor, width: int) -> Tensor:
    """Columns of each head."""
    return tensor_NK.reshape(len(tensor_NK), -1, width).roll(BY, 2).reshape(tensor_NK.shape)
