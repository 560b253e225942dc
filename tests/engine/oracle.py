"""transformers as the oracle: a tiny checkpoint, its logits by transformers, and the same by the torch engine, or the native
one for families with states, which torch does not run."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.glm5_next import Glm5NextForConditionalGeneration
from transformers.models.hy_v4 import HYV4ForCausalLM
from transformers.models.longcat_flash import LongcatFlashForCausalLM

from manyhands.core import Span
from manyhands.engine.cpu import CpuEnds, CpuSpan
from manyhands.engine.library import Team
from manyhands.engine.span import Cache, Piece
from manyhands.engine.torch import TorchEnds, TorchSpan
from manyhands.engine.torch_memory import Read
from manyhands.engine.weights import Stored
from manyhands.program.families import read_program
from manyhands.program.ops import Program
from manyhands.testing.tiny import NAMED_ANEW, make_tiny

LAYERS = 4
CONTEXT = 512


def reader(folder: Path) -> Read:
    """Reads tensors of a checkpoint of one file by name."""
    with safe_open(folder / "model.safetensors", framework="pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}
    return tensors.__getitem__


def stock_model(folder: Path, **options: Any) -> PreTrainedModel:
    """transformers' own model of a tiny checkpoint, in fp32 with eager attention, by the name that it has for the family."""
    said = json.loads((folder / "config.json").read_text())
    theirs = NAMED_ANEW.get(said["model_type"])
    config = None if theirs is None else CONFIG_MAPPING[theirs].from_dict({**said, "model_type": theirs})
    if said["model_type"] == "longcat_flash":
        return _stock_longcat(folder, said, options)
    if said["model_type"] == "hy_v4":
        return _stock_hy(folder, said, options)
    known: Any = Glm5NextForConditionalGeneration if said["model_type"] == "glm5_next" else AutoModelForCausalLM
    model: PreTrainedModel = known.from_pretrained(
        folder, config=config, attn_implementation="eager", dtype=torch.float32, **options
    )
    return model.eval()


def _stock_longcat(folder: Path, said: dict[str, Any], options: dict[str, Any]) -> PreTrainedModel:
    """With gates and ups of the experts that give their source, which transformers (5.23) wants, uses nowhere, and publishers'
    checkpoints lack."""
    read, config = reader(folder), CONFIG_MAPPING["longcat_flash"].from_dict(said)
    with safe_open(folder / "model.safetensors", framework="pt") as handle:
        state = {name: read(name) for name in handle.keys()}
    for name in [name for name in state if ".experts.0." in name and "down_proj" not in name]:
        for i in range(config.n_routed_experts, config.n_routed_experts + config.zero_expert_num):
            state[name.replace(".experts.0.", f".experts.{i}.")] = torch.zeros_like(state[name])
    model: PreTrainedModel = LongcatFlashForCausalLM.from_pretrained(
        None, config=config, state_dict=state, attn_implementation="eager", dtype=torch.float32, **options
    )
    return model.eval()


def _stock_hy(folder: Path, said: dict[str, Any], options: dict[str, Any]) -> PreTrainedModel:
    """With experts stacked, as in publishers' checkpoints of 16 bits, which alone transformers (5.23) reads, and with columns
    that turn as halves, for which it takes them."""
    read, config, state = reader(folder), CONFIG_MAPPING["hy_v4"].from_dict(said), dict[str, Tensor]()
    with safe_open(folder / "model.safetensors", framework="pt") as handle:
        names = list(handle.keys())
    for name in names:
        path, _, part = name.partition(".experts.")
        if not part:
            state[name] = _in_halves(name, read(name), said)
        elif part == "0.gate_proj.weight":
            each = [f"{path}.experts.{i}" for i in range(config.n_routed_experts)]
            both = [torch.cat([read(f"{one}.{kind}_proj.weight") for kind in ("gate", "up")]) for one in each]
            state[f"{path}.experts.gate_up_proj"] = torch.stack(both)
            state[f"{path}.experts.down_proj"] = torch.stack([read(f"{one}.down_proj.weight") for one in each])
    model: PreTrainedModel = HYV4ForCausalLM.from_pretrained(
        None, config=config, state_dict=state, attn_implementation="eager", dtype=torch.float32, **options
    )
    return model.eval()


def _in_halves(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """A tensor of Hy4 with the columns that turn, the last ones of a head, as halves."""
    rotary, width = config["qk_rope_head_dim"], config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    wide = {"q_b_proj": width, "kv_a_proj_with_mqa": len(tensor)}
    wide |= dict.fromkeys(("wq_b", "wk", "k_norm"), config["index_head_dim"])
    head = wide.get(name.split(".")[-2])
    if head is None:
        return tensor
    heads = tensor.reshape(-1, head, *tensor.shape[1:])
    turned = heads[:, head - rotary :]
    return torch.cat((heads[:, : head - rotary], turned[:, ::2], turned[:, 1::2]), 1).reshape(tensor.shape)


class Pair:
    """One checkpoint, held by transformers and by the torch engine (in fp32)."""

    def __init__(self, folder: Path, family: str | None, overrides: dict[str, Any]) -> None:
        """The checkpoint is made in `folder`; without a family, it is there."""
        wanted = {"layers": LAYERS, "context": CONTEXT, **overrides}
        self.folder = make_tiny(family, folder, dtype="fp32", **wanted) if family else folder
        self.program: Program = read_program(folder)
        self.read = reader(folder)
        self.model = stock_model(folder, experts_implementation="eager")
        self._hold(Span(0, len(self.program.layers)))

    def _hold(self, span: Span) -> None:
        self.ends: Any = TorchEnds(self.program, self.read)
        self.span: Any = TorchSpan(self.program, span, self.read)

    def theirs(self, ids: Sequence[int]) -> Tensor:
        """transformers' logits [T, vocab] in one pass."""
        with torch.inference_mode():
            out: Tensor = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        return out

    def exact(self, ids: Sequence[int]) -> Tensor:
        """The same computed in float64."""
        self.model.double()
        try:
            return self.theirs(ids)
        finally:
            self.model.float()

    def least_gap(self, ids: Sequence[int]) -> float:
        """How near a row's choice of positions, or blocks, comes to another, in transformers: the difference between the scores
        of the last chosen and the next, of the row's highest; infinity where nothing is left out."""
        gaps, topk, length = [math.inf], torch.Tensor.topk, len(ids)

        def watched(scores: Tensor, k: int, dim: int = -1, **options: Any) -> Any:
            if scores.dim() == 3 and scores.shape[1] == length and k < scores.shape[2]:
                best = scores[0].sort(-1, descending=True).values
                best = best[best[:, k] > -1e30]  # rows that see more than k
                gaps.append(float(((best[:, k - 1] - best[:, k]) / best[:, 0].abs()).min()))
            if scores.dim() == 4 and scores.shape[2] == length and k < scores.shape[3]:  # blocks, for each head
                best = scores[0].flatten(0, 1).sort(-1, descending=True).values
                best = best[(best[:, k] > -1e30) & (best[:, k - 1] < math.inf)]
                largest = best.where(best.abs() < 1e30, 0.0).abs().amax(-1)
                gaps.extend(((best[:, k - 1] - best[:, k]) / largest).tolist())
            if scores.dim() == 1 and k < len(scores):  # of entries, a row after the other
                best = scores.sort(descending=True).values
                gaps.append(float((best[k - 1] - best[k]) / best[0].clamp_min(1e-30)))
            return topk(scores, k, dim, **options)

        with patch.object(torch.Tensor, "topk", watched):
            self.theirs(ids)
        return min(gaps)

    def ours(self, ids: Sequence[int], cache: Cache, start: int = 0) -> Tensor:
        """Our logits [T, vocab] for ids at positions from `start` on."""
        rows = self.span.step(self.ends.embed(torch.tensor(ids)), [Piece(cache, start, len(ids))])
        found: Tensor = self.ends.logits(rows)
        return found

    def greedy(self, prompt: Sequence[int], count: int, chunk: int) -> tuple[list[int], Tensor]:
        """The prompt and `count` greedy ids (chunks, then one by one through the cache), and the last one's logits."""
        cache, ids = self.span.new_cache(len(prompt) + count), list(prompt)
        for start in range(0, len(prompt), chunk):
            logits = self.ours(prompt[start : start + chunk], cache, start)
        for _ in range(count):
            ids.append(int(logits[-1].argmax()))
            logits = self.ours(ids[-1:], cache, len(ids) - 1)
        return ids, logits[-1]


class NativePair(Pair):
    """The same with the native engine."""

    def _hold(self, span: Span) -> None:
        def read(name: str) -> Stored:
            array = self.read(name).numpy()
            return Stored("i64" if array.dtype == np.int64 else "f32", array)

        team = Team(2)
        self.ends = CpuEnds(self.program, read, "fp32", team)
        self.span = CpuSpan(self.program, span, read, "fp32", team)

    def ours(self, ids: Sequence[int], cache: Cache, start: int = 0) -> Tensor:
        rows = self.span.step(self.ends.embed(ids), [Piece(cache, start, len(ids))], 2)
        return torch.from_numpy(self.ends.logits(rows, len(ids), 2))


def pair_in(folder: Path) -> Pair:
    """The checkpoint in `folder`, with what runs it."""
    return (NativePair if read_program(folder).has_states else Pair)(folder, None, {})
