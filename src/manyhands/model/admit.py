"""Which families may be served: those whose tiny likeness passes a self-test on this machine.

The likeness is made from the checkpoint's own config, shrunk; its weights are random. It must agree with transformers'
own forward pass in fp32, and three spans with prefill in chunks, a wrong guess rolled back, and another session beside
it must give, bit for bit, what the whole model gives at once. Families of the test suite have passed already.
"""

import copy
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from manyhands.checkpoint.folder import write_atomic
from manyhands.core import Precision, even_cut
from manyhands.errors import ManyhandsError, ModelError
from manyhands.model.arithmetic import arithmetic_class
from manyhands.model.cache import ShardCache, ShardSegment, StepPlan
from manyhands.model.ends import Ends
from manyhands.model.shard import Shard

# Tested by name in tests/model/test_exactness.py.
TESTED = frozenset(
    "llama qwen2 qwen3 mistral gemma2 gemma3_text phi3 minicpm3 qwen2_moe qwen3_moe mixtral gpt_oss glm4 olmo2 deepseek_v3"
    .split()
)  # fmt: skip

_LAYERS, _VOCAB, _TOKENS = 4, 300, 40
# Sizes of the likeness, by the names configs use. Small, and crossing every border: windows, heads, experts.
_SMALL = {
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "intermediate_size": 96, "ffn_dim": 96, "num_attention_heads": 4,
    "n_head": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "vocab_size": _VOCAB,
    "num_hidden_layers": _LAYERS, "n_layer": _LAYERS, "max_position_embeddings": 256, "n_positions": 256,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip

# What of a config changes no number.
_NO_OPTIONS = {"_name_or_path", "transformers_version", "dtype", "architectures", "torch_dtype"}


def admit(config: PreTrainedConfig, home: Path) -> None:
    """Raise ModelError unless the config's family is tested or passes the self-test. A pass is kept under `home`.

    Takes seconds, once per family, its options, torch and transformers version. Not for the event loop.
    """
    if config.model_type in TESTED:
        return
    mark = f"{config.model_type}/{_options(config)}/{arithmetic_class('fp32')}"
    path = home / "admitted.json"
    passed = _read(path)
    if mark in passed:
        return
    try:
        check(config)
    except ManyhandsError as error:
        raise ModelError(
            f"family {config.model_type!r} is refused: {error} (docs/models.md lists what works)"
        ) from error
    except Exception as error:  # whatever upstream's code for a strange family raises
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
        raise ModelError(f"family {config.model_type!r} is refused: its self-test failed with {reason}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(sorted([*passed, mark])).encode())


def _options(config: PreTrainedConfig) -> str:
    """A digest of what the likeness has of the config: all but sizes. (A window or a limit may decide whether it is right.)"""
    options = {key: value for key, value in shrink(config).to_dict().items() if key not in _NO_OPTIONS}
    return hashlib.blake2b(json.dumps(options, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def _read(path: Path) -> list[str]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return [mark for mark in found if isinstance(mark, str)] if isinstance(found, list) else []


def check(config: PreTrainedConfig) -> None:
    """The self-test itself. Raises ModelError naming the first difference, or whatever upstream raises."""
    small = shrink(config)
    ids_T = torch.randint(3, _VOCAB, (_TOKENS,), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory(prefix="manyhands-admit-") as name:
        folder = Path(name)
        stock_TV = _write_likeness(small, folder, ids_T)
        for precision in ("fp32", "bf16"):
            whole_TV = _run(folder, precision, 1, [_TOKENS], ids_T)
            if precision == "fp32" and not torch.allclose(whole_TV, stock_TV, rtol=1e-3, atol=1e-3 * _scale(stock_TV)):
                raise ModelError("its logits differ from transformers' own")
            for chunks in ([7] * 6, [16, 16, 16], [1] * _TOKENS):
                if not torch.equal(_run(folder, precision, 3, chunks, ids_T), whole_TV):
                    raise ModelError(
                        f"three spans with prefill in chunks of {chunks[0]} differ from the whole in {precision}"
                    )


def _scale(x: Tensor) -> float:
    return float(x.abs().max())


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same family with few and small layers."""
    small = copy.deepcopy(config)
    for name, value in _SMALL.items():
        if getattr(small, name, None) is not None:
            setattr(small, name, value)
    if getattr(small, "layer_types", None):
        kinds = list(dict.fromkeys(small.layer_types))
        small.layer_types = [kinds[i % len(kinds)] for i in range(_LAYERS)]
    return small


def _write_likeness(config: PreTrainedConfig, folder: Path, ids_T: Tensor) -> Tensor:
    """Write a random checkpoint of `config`; return transformers' own fp32 logits [T, vocab] for `ids_T`."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(
            copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32
        )
    noise = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.mul_(4.0)  # initial weights are so small that every layer would be nearly the identity
        else:
            # Ones and zeros would hide themselves.
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=noise))
        parameter.data.copy_(parameter.data.bfloat16())  # what bf16 can hold; buffers such as inv_freq stay exact
    model.save_pretrained(folder)
    with torch.inference_mode():
        logits: Tensor = model.eval()(ids_T[None]).logits[0]
    return logits


def _run(folder: Path, precision: Precision, num_spans: int, chunks: list[int], ids_T: Tensor) -> Tensor:
    """Logits of `ids_T` over `num_spans` spans; with several, another session's rows run beside every chunk."""
    ends = Ends(folder, precision)
    shards = [Shard(folder, span, precision) for span in even_cut(_LAYERS, num_spans)]
    caches = [(shard.new_cache(_TOKENS + 8), shard.new_cache(64)) for shard in shards]
    out: list[Tensor] = []
    start = 0
    for chunk in chunks:
        count = min(chunk, len(ids_T) - start)
        hidden_TD = ends.embed(ids_T[start : start + count])
        for shard, (mine, other) in zip(shards, caches, strict=True):
            if num_spans > 1:
                _step(shard, [(mine, start, hidden_TD.flip(0))])  # a guess that was wrong
            hidden_TD = _step(shard, [(mine, start, hidden_TD), (other, 0, hidden_TD[:1])])
        out.append(ends.logits(hidden_TD))
        start += count
    return torch.cat(out)


def _step(shard: Shard, parts: list[tuple[ShardCache, int, Tensor]]) -> Tensor:
    """Run the parts side by side; return the rows of the first."""
    rows = torch.cat([hidden for _, _, hidden in parts])
    segments: list[ShardSegment] = []
    for cache, start, hidden in parts:
        row = segments[-1].row + segments[-1].count if segments else 0
        segments.append(ShardSegment(cache, start, row, hidden.shape[0]))
    return shard.forward(rows, StepPlan(segments))[: parts[0][2].shape[0]]
