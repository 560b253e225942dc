"""Round the products of a Llama checkpoint to 5 bits (GGUF's Q5_1), so that what comes out of them changes least (GPTQ).

Columns of a matrix are rounded one after the other; what a column's rounding has changed in the outputs, those behind it make
good as far as they can, for the inputs that they have on given texts. A layer's inputs are those behind rounded layers.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from manyhands.checkpoint.header import LENGTH_BYTES
from manyhands.engine.blocks import dequantise

TYPE, GROUP, MOST = "Q5_1", 32, 31  # numbers of a block, and the largest code
BLOCK = np.dtype([("step", "<f2"), ("least", "<f2"), ("fifths", "u1", GROUP // 8), ("fours", "u1", GROUP // 2)])
DAMPING = 0.01  # of the mean square of an input
TEXTS = 16  # that are read at once
# Matrices of a layer whose inputs are the same, in the order in which they are used.
ALIKE = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
)
ORDER = (*ALIKE, ("mlp.down_proj",))


def step_and_least(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The step and the least number of each row of a group [n, 32], of those tried the ones of the least squared error: [n]."""
    low, high = rows.amin(1), rows.amax(1)
    tried = []
    for part in np.linspace(0.8, 1.02, 12):
        for shift in np.linspace(-0.06, 0.06, 7):
            half, middle = (high - low) / 2 * part, (low + high) / 2 + (high - low) * shift
            least, step = (middle - half).half().double(), (half * 2 / MOST).half().double().clamp_min(2**-24)
            off = rows - (codes_of(rows, step, least) * step[:, None] + least[:, None])
            tried.append((off.square().sum(1), step, least))
    errors, steps, leasts = (torch.stack(each) for each in zip(*tried, strict=True))
    best = errors.argmin(0, keepdim=True)
    return steps.gather(0, best)[0], leasts.gather(0, best)[0]


def codes_of(rows: Tensor, step: Tensor, least: Tensor) -> Tensor:
    return ((rows - least[:, None]) / step[:, None]).round().clamp(0, MOST)


def blocks_of(codes: NDArray[np.uint8], step: Tensor, least: Tensor) -> NDArray[np.uint8]:
    """The bytes [n, 24] of a group of codes [n, 32]."""
    blocks = np.zeros(len(codes), BLOCK)
    blocks["step"], blocks["least"] = step.numpy(), least.numpy()
    blocks["fifths"] = np.packbits(codes >> 4, axis=1, bitorder="little")
    blocks["fours"] = codes[:, : GROUP // 2] & 15 | codes[:, GROUP // 2 :] << 4
    return blocks.view(np.uint8).reshape(len(codes), -1)


def rounded(weights: Tensor, products: Tensor) -> NDArray[np.uint8]:
    """A matrix [n, k] as blocks [n, bytes of a row]; `products` [k, k]: sums of each two inputs' products."""
    left = weights.double().clone()
    products = products.double() + DAMPING * products.diag().mean() * torch.eye(len(products), dtype=torch.double)
    follow = torch.linalg.cholesky(torch.linalg.inv(products), upper=True)
    blocks = []
    for begin in range(0, left.shape[1], GROUP):
        step, least = step_and_least(left[:, begin : begin + GROUP])
        codes = torch.zeros(len(left), GROUP)
        for at in range(begin, begin + GROUP):
            codes[:, at - begin] = codes_of(left[:, at : at + 1], step, least)[:, 0]
            off = (left[:, at] - (codes[:, at - begin] * step + least)) / follow[at, at]
            left[:, at + 1 :] -= off[:, None] * follow[at, at + 1 :]
        blocks.append(blocks_of(codes.numpy().astype(np.uint8), step, least))
    return np.concatenate(blocks, axis=1)


@torch.no_grad()
def products_of(model: LlamaForCausalLM, path: str, ids: Tensor) -> Tensor:
    """Sums [k, k] of the products of each two inputs of the module at `path`, over texts [N, L]."""
    module, sums = model.get_submodule(path), torch.zeros(())

    def add(_: torch.nn.Module, given: tuple[Tensor]) -> None:
        nonlocal sums
        rows = given[0].flatten(0, -2)
        sums = sums + rows.T @ rows

    hook = module.register_forward_pre_hook(add)
    for part in torch.split(ids, TEXTS):
        model.model(part, use_cache=False)
    hook.remove()
    return sums


def round_model(model: LlamaForCausalLM, ids: Tensor) -> dict[str, NDArray[np.uint8]]:
    """The products of a model in fp32 as blocks, by the name of their weight; the model computes with them then."""
    found = {}
    for layer in range(len(model.model.layers)):
        for names in ORDER:
            paths = [f"model.layers.{layer}.{name}" for name in names]
            products = products_of(model, paths[0], ids)
            for path in paths:
                weight = model.get_parameter(f"{path}.weight")
                found[f"{path}.weight"] = blocks = rounded(weight.detach(), products)
                weight.data = torch.from_numpy(dequantise(blocks, TYPE)).bfloat16().float()
    return found


def write(folder: Path, blocks: Mapping[str, NDArray[np.uint8]]) -> None:
    """Let the bf16 checkpoint in `folder` keep these products as blocks, and no embedding."""
    path = folder / "model.safetensors"
    plain = {name: tensor for name, tensor in load_file(path).items() if name not in blocks and "embed" not in name}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in plain.items():
        raw = tensor.bfloat16().view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    for name, array in blocks.items():
        shape = [len(array), array.shape[1] // BLOCK.itemsize * GROUP]
        header[name] = {"dtype": TYPE, "shape": shape, "data_offsets": [len(data), len(data) + array.size]}
        data += array.tobytes()
    told = json.dumps(header, separators=(",", ":")).encode()
    told += b" " * (-len(told) % LENGTH_BYTES)
    path.write_bytes(len(told).to_bytes(LENGTH_BYTES, "little") + told + data)
