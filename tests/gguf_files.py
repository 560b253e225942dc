"""Tiny checkpoints as GGUF files, as llama.cpp's converter would write them; quantised by the `gguf` package."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from manyhands.checkpoint.dtypes import BLOCKS
from manyhands.checkpoint.gguf_architecture import Architecture
from manyhands.checkpoint.gguf_architectures import ARCHITECTURES, VARIANTS
from manyhands.checkpoint.gguf_configs import PAIRS, PLUS_ONE, SCALED, STRETCHED, TILED
from manyhands.engine.golden_small import put_half
from manyhands.testing.gguf import Written, write_gguf
from manyhands.testing.tiny import CHAT_TEMPLATE, EVERY_FAMILY, make_tiny
from tests.gguf_dense import dense_facts, falcon_piece, scaled_norms, shared_keys, still_columns, xielu_lists
from tests.gguf_experts import (
    EXPERT_FAMILIES,
    EXPERTS_FIXED,
    EXPERTS_MORE,
    SAME_FILES,
    SPLIT_FAMILIES,
    expert_facts,
    fused_scores,
    kimi_k3_layers,
    layer_ahead,
)
from tests.gguf_hybrids import (
    falcon_pieces,
    granite_pieces,
    hybrid_facts,
    linear_pieces,
    mamba_facts,
    mamba_layers,
    nemotron_pieces,
    rates_and_kernels,
)
from tests.gguf_indexed import of_layer, stretched
from tests.gguf_qwen4 import QWEN4_FIXED, QWEN4_MORE, qwen4_facts, qwen4_pieces, without_words, word_table
from tests.glm5_next import first_layers, make, stock
from tests.kimi_k3 import make_kimi_k3

# Files of the same recipe under another name.
OTHER_NAMES = {
    "glm4_moe_fused": "bailingmoe2",
    "llama_exaone": "exaone",
    "llama_internlm": "internlm2",
    "llama_pangu": "pangu-embedded",
    "granite_minicpm": "minicpm",
    "hunyuan_v1_dense_maincoder": "maincoder",
    "stablelm_orion": "orion",
    "llama_nanbeige": "nanbeige",
    "llama_nanbeige_plain": "nanbeige",
    "kimi_k3": "kimi-k3",
    "kimi_k3_plain": "kimi-k3",
}
FAMILIES = (
    *EXPERT_FAMILIES,
    "llama", "llama_tied", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe", "gpt_oss",
    "deepseek_v3", "deepseek_v3_old", "qwen2_moe", "glm4", "granite", "smollm3", "olmo2", "olmo3", "cohere2", "ernie4_5",
    "minicpm3", "phi", "phi_fused", "starcoder2", "stablelm", "stablelm_12b", "gpt_neox", "nemotron", "qwen3_next",
    "qwen3_next_old", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe", "granitemoe", "granitemoehybrid",
    "granitemoehybrid_mamba", "granitemoehybrid_mamba_dense", "nemotron_h", "nemotron_h_dense", "nemotron_h_latent",
    "falcon_h1", "falcon_h1_norm",
    "ministral3", "ministral3_plain", "gemma4_text", "gemma4_text_dense", "gemma4_text_e4b",
    "seed_oss", "seed_oss_plain",
    "hunyuan_v1_dense", "exaone4", "exaone4_plain", "arcee", "glm", "glm_fused",
    "qwen2_vl", "qwen3_vl", "cohere", "cohere_norm", "olmo", "jamba", "jamba_dense",
    "gemma3n_text", "gemma3n_text_plain", "apertus", "jais2", "granite_swa", "granitemoe_swa", "muse_glimmer_text",
    "bitnet", "bitnet_plain", "falcon", "falcon_plain", "mamba", "mamba_plain", "falcon_mamba", "mamba2", "gpt2",
    "gpt_bigcode", "gpt_bigcode_plain", "bloom", "mpt",
    *QWEN4_FIXED,
    *OTHER_NAMES,
)  # fmt: skip
# What gpt2, bloom and mpt call sizes.
GPT2_NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}
# What a GGUF file cannot say otherwise.
_HEADS = {"linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 16}  # 3 for each key head
_FIXED: dict[str, dict[str, Any]] = {
    **EXPERTS_FIXED,
    "qwen3_next": {**_HEADS, "mlp_only_layers": []},
    "qwen3_5_text": _HEADS,
    "qwen3_5_moe_text": _HEADS,
    **QWEN4_FIXED,
    "lfm2": {"conv_bias": False},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "granitemoehybrid": {"num_experts_per_tok": 0},
    "granitemoehybrid_mamba_dense": {
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96, "position_embedding_type": "rope",
        "mamba_n_groups": 1,
    },
    "granite_swa": {"layer_rope_theta": [0.0, 10000.0, 0.0, 10000.0]},
    "mamba": {"tie_word_embeddings": False, "intermediate_size": 128},
    "mamba_plain": {"tie_word_embeddings": True, "intermediate_size": 128},
    "falcon_mamba": {"tie_word_embeddings": False, "intermediate_size": 128},
    "bitnet": {"tie_word_embeddings": True},
    "bitnet_plain": {"tie_word_embeddings": True, "hidden_act": "silu", "num_key_value_heads": 4},
    "falcon_plain": {
        "new_decoder_architecture": False, "num_key_value_heads": 1, "num_kv_heads": 1, "tie_word_embeddings": False,
    },
    "gpt2": {"n_inner": None, "num_key_value_heads": 4},
    "gpt_bigcode": {"n_inner": None, "num_key_value_heads": 1},
    "gpt_bigcode_plain": {"n_inner": 96, "num_key_value_heads": 1, "tie_word_embeddings": False},
    "granite_minicpm": {"attention_multiplier": 0.25},
    "llama_pangu": {"attention_bias": True},
    "hunyuan_v1_dense_maincoder": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": True,
    },
    "stablelm_orion": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
    "gemma3n_text": {"intermediate_size": 96},
    "gemma3n_text_plain": {  # what llama.cpp takes for granted: all of the first layers cut gates off, and none shares keys
        "num_hidden_layers": 4, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.95] * 4, "intermediate_size": 96,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 264, "laurel_rank": 64,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "jamba_dense": {"num_experts": 1, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1},
    "falcon_h1_norm": {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    "nemotron_h_dense": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "mlp_bias": True,
    },
    "nemotron_h_latent": {
        "layers_block_type": ["moe", "linear_attention", "full_attention"], "moe_latent_size": 32, "norm_topk_prob": False,
    },
    "arcee": {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
    }},  # as AFM-4.5B
    "glm": {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True},
    "exaone4": {"num_hidden_layers": 64, "sliding_window_pattern": 4},
    "exaone4_plain": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "seed_oss_plain": {"attention_bias": False},
    "gemma4_text": {"final_logit_softcapping": 30.0},  # llama.cpp caps at 30 also where the file says no number
    "gemma4_text_dense": {
        "enable_moe_block": False, "num_experts": None, "attention_k_eq_v": False, "num_global_key_value_heads": None,
        "final_logit_softcapping": 30.0,
    },
    "ministral3_plain": {"rope_parameters": {
        "rope_type": "default", "rope_theta": 1e6, "original_max_position_embeddings": 256, "llama_4_scaling_beta": 0.0,
    }},
    "starcoder2": {"sliding_window": None},
    "minicpm3": {"dim_model_base": 256},
    "stablelm_12b": {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True},
    "cohere2": {"sliding_window_pattern": 4},
    "cohere_norm": {"use_qk_norm": True, "num_hidden_layers": 64},  # llama.cpp reads norms of heads from 64 layers on
    "olmo3": {"rope_parameters": {
        "full_attention": {
            "rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0, "original_max_position_embeddings": 256,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    }},
}  # fmt: skip
# Types that the gguf package does not write: byte of a block -> the fp16 that stands there, or the exponent of MXFP4.
_UNWRITTEN: dict[str, dict[int, float | int]] = {
    "Q4_K": {0: 0.0005, 2: 0.003},
    "Q5_K": {0: 0.00025, 2: 0.003},
    "Q6_K": {208: 0.00005},
    "MXFP4": {0: 122},
    "IQ4_NL": {0: 0.0004},
    "IQ4_XS": {0: 0.00002},
    "Q3_K": {108: 0.0006},
    "Q2_K": {80: 0.001, 82: 0.0015},
    "IQ3_S": {0: 0.00015},
    "IQ3_XXS": {0: 0.00015},
    "IQ2_S": {0: 0.0003},
    "IQ2_XS": {0: 0.0003},
    "IQ2_XXS": {0: 0.0003},
    "IQ1_S": {0: 0.003},
    "IQ1_M": {0: 0.003},
    "TQ1_0": {52: 0.03},
    "TQ2_0": {64: 0.03},
    "Q1_0": {0: 0.03},
    "Q2_0": {0: 0.03},
    "PQ2_0": {0: 0.03},
    "NVFP4": {0: 8, 1: 12, 2: 3, 3: 15},
}
_YARN = {
    "type": "rope_type", "factor": "factor", "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
}  # fmt: skip
# Keys that an architecture's files have besides the usual ones, and the fields that they stand for.
_WINDOW = {"attention.sliding_window": "sliding_window"}
_WIDTHS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_LINEAR = {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
}  # fmt: skip
_MULTIPLIERS = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
_MORE: dict[str, dict[str, str]] = {
    **EXPERTS_MORE,
    **dict.fromkeys(("granite", "granitemoe", "granitehybrid", "granite_swa"), _MULTIPLIERS),
    "minicpm": {key: field for key, field in _MULTIPLIERS.items() if key != "attention.scale"},
    **dict.fromkeys(("gemma2", "gemma3", "olmo2"), _WINDOW),
    "cohere2": {**_WINDOW, "logit_scale": "logit_scale"},
    "qwen2moe": _WIDTHS,
    "gptneox": {"use_parallel_residual": "use_parallel_residual"},
    "stablelm": {"use_parallel_residual": "use_parallel_residual"},
    "qwen3next": {**_WIDTHS, **_LINEAR},
    "qwen35": _LINEAR,
    "qwen35moe": {**_WIDTHS, **_LINEAR},
    "qwen4exp": {**_WIDTHS, **_LINEAR, **QWEN4_MORE},
    "lfm2": {"shortconv.l_cache": "conv_L_cache"},
    "lfm2moe": {
        "shortconv.l_cache": "conv_L_cache", "expert_feed_forward_length": "moe_intermediate_size",
        "leading_dense_block_count": "num_dense_layers",
    },
    "nemotron_h_moe": {
        "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "n_shared_experts",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size", "expert_group_count": "n_group",
        "expert_weights_norm": "norm_topk_prob", "expert_weights_scale": "routed_scaling_factor",
        "moe_latent_size": "moe_latent_size",
    },
}  # fmt: skip
Choose = Callable[[str, tuple[int, ...]], str]


def tiny_gguf(family: str, path: Path, dtype: str | Choose = "F32", **sizes: Any) -> tuple[Path, Path]:
    """A GGUF file of a tiny model, and the folder of safetensors (fp32) that it was made of.

    `dtype`: of matrices; vectors are F32. A callable chooses by name and shape.
    """
    name = family
    is_split = family in SPLIT_FAMILIES
    if family not in EVERY_FAMILY:
        family = re.sub(
            "_(old|12b|fused|dense|latent|norm|plain|air|alone|vl|shared|exaone|internlm|minicpm|pangu|limited|part|maincoder|orion|nanbeige|nanbeige_plain)$",
            "",
            family,
        )
    folder = path.parent / f"{path.stem}-{family}"
    fixed = _FIXED.get(name, _FIXED.get(family, {}))
    if family == "kimi_k3":
        layers = kimi_k3_layers(sizes.pop("layers"), is_bounded=name == family)
        make_kimi_k3(folder, **{**fixed, **layers, **sizes})
    elif family == "glm5_next":
        given = {**first_layers(sizes.pop("layers")), **fixed, **sizes}
        make(folder, stock(**given), **given)
    else:
        make_tiny(family, folder, dtype="fp32", **{**fixed, **sizes})
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config) | {
        "is_split": is_split,
        "is_fused": name.endswith("_fused"),
    }
    config |= {GPT2_NAMES[key]: value for key, value in config.items() if key in GPT2_NAMES}
    config |= {"is_old": name == "qwen3_next_old", "tiny_family": name}
    if config["model_type"] in ("bloom", "mpt", "gpt2", "gpt_bigcode"):
        config["intermediate_size"] = config.get("n_inner") or 4 * config["hidden_size"]
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("layer_norm_eps", 1e-5)  # olmo's config does not say it
    if "num_experts_per_token" in config:  # of kimi_linear
        config["num_experts_per_tok"] = config["num_experts_per_token"]
    config.setdefault("intermediate_size", config.get("moe_intermediate_size"))
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type", ())))
    pick: Choose = dtype if callable(dtype) else lambda name, shape: str(dtype) if len(shape) > 1 else "F32"
    stored = load_file(folder / "model.safetensors")
    tensors = fused_scores({name.replace("language_model.", ""): array for name, array in stored.items()})
    arch, _ = _architecture(config)
    renamed = [*_renamed(without_words(tensors), config, arch), *word_table(tensors)]
    renamed += (
        layer_ahead(renamed, config["num_hidden_layers"], config["hidden_size"])
        if name in ("glm4_moe", "glm_moe_dsa", "glm5_next")
        else []
    )
    if name in ("gemma3n_text", "gemma4_text_e4b"):
        renamed += shared_keys(dict(renamed), config["layer_types"])
    if arch == "muse-glimmer":
        renamed += scaled_norms(config)
    made = [_written(name, array, pick) for name, array in renamed]
    if name in ("llama_tied", "apertus", "step3p5") or arch == "gemma4":
        factors = still_columns(config) if arch == "gemma4" else _frequencies(config)
        made.append(("rope_freqs.weight", "F32", factors.shape, factors))
    made += [
        (f"rope_factors_{kind}.weight", "F32", (len(found),), np.array(found, np.float32))
        for kind in ("long", "short")
        if (found := (config.get("rope_parameters") or {}).get(f"{kind}_factor"))
    ]
    lists = xielu_lists(tensors, config["num_hidden_layers"]) if arch == "apertus" else {}
    if arch == "qwen4exp":
        lists = {f"qwen4exp.{name}": value for name, value in qwen4_facts(config, folder).items()}
    return write_gguf(path, {**_facts(config, arch), **tokenizer_facts(folder, arch), **lists}, made), folder


def _architecture(config: dict[str, Any]) -> tuple[str, Architecture]:
    """The name of the model's architecture, and that."""
    if config["model_type"] == "granitemoehybrid" and not config["num_local_experts"]:
        arch = "granitehybrid" if True in mamba_layers(config) else "granite"
        return arch, ARCHITECTURES[arch]
    if config["model_type"] == "nemotron_h":
        arch = "nemotron_h_moe" if "moe" in config["layers_block_type"] else "nemotron_h"
        return arch, ARCHITECTURES[arch]
    if config["tiny_family"] in OTHER_NAMES:
        arch = OTHER_NAMES[config["tiny_family"]]
        return arch, ARCHITECTURES[arch]
    if config["model_type"] == "cohere2_moe" and not config.get("rms_norm_eps"):
        return "cohere2moe", ARCHITECTURES["cohere2moe"]
    usual = {
        one.model_type: (arch, one) for arch, one in list(ARCHITECTURES.items())[::-1]
    }  # of some, the first counts
    if config["tiny_family"].endswith("_vl"):
        arch = {"qwen2": "qwen2vl", "qwen3": "qwen3vl", "qwen3_moe": "qwen3vlmoe"}[config["model_type"]]
        return arch, ARCHITECTURES[arch]
    found = usual | {one.model_type: (arch, one) for arch, (_, one) in VARIANTS.items()}
    return found[SAME_FILES.get(config["model_type"], config["model_type"])]


def _written(name: str, array: NDArray[np.float32], pick: Choose) -> Written:
    if name.endswith("tid2eid.weight"):
        return name, "I32", array.shape, array.astype(np.int32)
    dtype = pick(name, array.shape)
    if dtype in _UNWRITTEN:
        return name, dtype, array.shape, _random_blocks(dtype, array.shape)
    raw = gguf.quants.quantize(np.ascontiguousarray(array), gguf.GGMLQuantizationType[dtype])
    return name, dtype, array.shape, raw


def _random_blocks(dtype: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Blocks of a type that the gguf package cannot write: random, but for their factors."""
    numbers, size = BLOCKS[dtype]
    raw = np.random.default_rng(len(shape) + shape[0]).integers(
        0, 256, (int(np.prod(shape)) // numbers, size), np.uint8
    )
    for at, value in _UNWRITTEN[dtype].items():
        if isinstance(value, float):
            put_half(raw, dtype, at, np.array([value], np.float16))
        else:
            raw[:, at] = value
    return raw.reshape(*shape[:-1], -1)


def _renamed(
    tensors: dict[str, NDArray[np.float32]], config: dict[str, Any], arch: str
) -> list[tuple[str, NDArray[np.float32]]]:
    found = _architecture(config)[1]
    names = {theirs: ours for ours, theirs in found.tensors.items()}
    ends = {theirs: ours for ours, theirs in found.ends.items()}
    out: dict[str, NDArray[np.float32]] = {}
    stacks: dict[str, list[NDArray[np.float32]]] = {}
    numbered = sorted(tensors.items(), key=lambda item: [int(p) if p.isdigit() else 0 for p in item[0].split(".")])
    for name, array in (piece for tensor in numbered for piece in _pieces(*tensor, config, found.conventions)):
        if name in ends and "{" in name:
            stacks.setdefault(ends[name], []).append(array)
            continue
        if name in ends:
            out[ends[name]] = array
            continue
        if ".act_fn." in name:  # lists of the metadata
            continue
        layer, inner = name.removeprefix(f"{found.layers}.").split(".", 1)
        stem, _, last = inner.rpartition(".")
        pattern = re.sub(r"experts\.\d+\.", "experts.{expert}.", re.sub(r"norms\.\d+", "norms.{head}", stem))
        if inner in names:
            out[f"blk.{layer}.{names[inner]}".removesuffix(".")] = array
        elif pattern != stem:
            stacks.setdefault(f"blk.{layer}.{names[pattern]}.{last}", []).append(array)
        elif stem.endswith(".g_proj") and _has_attention(config, int(layer)):
            out[f"blk.{layer}.attn_gate.{last}"] = array
        else:
            out[f"blk.{layer}.{names[stem]}.{last}"] = array
    if config["is_fused"]:
        for name in [name for name in out if ".attn_q." in name]:
            out[name.replace("_q.", "_qkv.")] = np.concatenate([out.pop(name.replace("_q.", f"_{p}.")) for p in "qkv"])
    return [*out.items(), *((name, np.stack(arrays)) for name, arrays in stacks.items())]


def _has_attention(config: dict[str, Any], layer: int) -> bool:
    """Whether the layer has attention, and no linear one."""
    if "layer_types" in config:
        return bool(config["layer_types"][layer] == "full_attention")
    return layer + 1 in config["linear_attn_config"]["full_attn_layers"]


def _pieces(
    name: str, array: NDArray[np.float32], config: dict[str, Any], conventions: tuple[str, ...]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """What the converter makes of one tensor, under names of transformers."""
    path, _, last = name.rpartition(".")
    if path.endswith(".conv.conv"):
        yield name, array[:, 0]
    elif config["model_type"] == "minimax":
        yield name.replace("self_attn.out_proj", "self_attn.o_proj"), array
    elif name.endswith("kv_b_proj.weight") and config["is_split"]:
        plain, value = (of_layer(config, name)[width] for width in ("qk_nope_head_dim", "v_head_dim"))
        heads = array.reshape(-1, plain + value, array.shape[1])
        yield name.replace("kv_b", "k_b"), heads[:, :plain].swapaxes(1, 2)
        yield name.replace("kv_b", "v_b"), heads[:, plain:]
    elif STRETCHED in conventions:
        yield name, stretched(name, array, config)
    elif path.startswith("model.altup_"):
        yield re.sub(r"\d+", "{expert}", name), array
    elif last == "gate_up_proj" and config["tiny_family"] == "mistral4_air":
        for part, rows in zip(("gate", "up"), np.split(array, 2, axis=1), strict=True):
            yield f"{path}.{part}_proj", rows
    elif config["model_type"] in ("gemma4_text", "mistral4"):
        yield name, array
    elif config["model_type"] == "granitemoe_swa" and (".experts." in name or ".shared_mlp." in name):
        yield name, array
    elif config["model_type"] == "bailing_hybrid" and last == "A_log":
        yield name, np.exp(array)[:, None]
    elif last == "A_log" and config["tiny_family"].startswith("kimi_k3"):  # padded in published checkpoints
        yield name, -np.exp(array[: config["num_attention_heads"]])
    elif config["model_type"] in ("jamba", "kimi_linear", "bailing_hybrid", "glm5_next_text", "mamba", "falcon_mamba"):
        flat = config["model_type"] in ("jamba", "mamba", "falcon_mamba")
        yield name, rates_and_kernels(name, array, flat)
    elif config["model_type"] == "qwen4_exp_text" and ".linear_attn." not in name:
        yield from qwen4_pieces(name, array, config)
    elif ".linear_attn." in name:
        yield from linear_pieces(name, array, config, TILED in conventions)
    elif config["model_type"] == "falcon_h1":
        yield from falcon_pieces(name, array, config)
    elif ".mixer." in name:
        yield from nemotron_pieces(name, array, config)
    elif ".mamba." in name or path.endswith("_linear"):
        yield from granite_pieces(name, array, config)
    elif name.endswith("layernorm.weight" if SCALED in conventions else "norm.weight") and PLUS_ONE in conventions:
        yield name, array + np.float32(1)
    elif PAIRS in conventions and ("q_proj" in name or "k_proj" in name):
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        yield name, array.reshape(-1, 2, head // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    elif PAIRS in conventions and path.endswith(("query_layernorm", "key_layernorm")):  # behind the rotary embedding
        yield name, np.ascontiguousarray(array.reshape(2, -1).T).reshape(-1)
    elif last == "gate_up_proj" and config["model_type"] == "llama4_text":
        for part, rows in zip(("gate_proj", "up_proj"), np.split(array, 2, axis=2), strict=True):
            yield f"{path}.{{expert}}.{part}.weight", rows.swapaxes(1, 2)
    elif last.startswith("gate_up_proj"):  # of gpt_oss
        for at, part in enumerate(("gate_proj", "up_proj")):
            is_bias = last.endswith("_bias")
            rows = array[:, at::2] if is_bias else array[:, :, at::2].swapaxes(1, 2)
            yield f"{path}.{part}.bias" if is_bias else f"{path}.{{expert}}.{part}.weight", rows
    elif config["model_type"] == "falcon":
        yield falcon_piece(name, array, config)
    elif config["model_type"] == "gpt2" and path.endswith(("c_attn", "c_fc", "c_proj")):
        yield name, array.T
    elif path.endswith("query_key_value"):
        parts = array.reshape(config["num_attention_heads"], 3, -1, *array.shape[1:])
        yield name, parts.swapaxes(0, 1).reshape(array.shape)
    elif path.endswith("shared_expert_gate"):
        yield name, array[0]
    elif last == "down_proj":
        yield f"{path}.{{expert}}.down_proj.weight", array.swapaxes(1, 2)
    elif last == "down_proj_bias":
        yield f"{path}.down_proj.bias", array
    else:
        yield name, array


def _frequencies(config: dict[str, Any]) -> NDArray[np.float32]:
    """llama 3.1's scaling as the converter stores it: a factor a column, 1 for those that stand still."""
    rope = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    turned = int(head * rope.get("partial_rotary_factor", 1.0))
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, turned, 2) / turned)
    low, high = (rope["original_max_position_embeddings"] / rope[f"{name}_freq_factor"] for name in ("low", "high"))
    smooth = (rope["original_max_position_embeddings"] / wavelengths - rope["low_freq_factor"]) / (
        rope["high_freq_factor"] - rope["low_freq_factor"]
    )
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    found = np.where(wavelengths < high, 1.0, np.where(wavelengths > low, rope["factor"], between)).astype(np.float32)
    return np.concatenate((found, np.ones((head - turned) // 2, np.float32)))


def _facts(config: dict[str, Any], arch: str) -> dict[str, Any]:
    if arch in ("mamba", "mamba2"):
        return {
            "general.architecture": arch,
            **{f"{arch}.{name}": value for name, value in mamba_facts(config).items()},
        }
    rope = config.get("rope_parameters") or {}
    by_type = "full_attention" in rope
    usual = rope["full_attention"] if by_type else rope
    theta = usual.get("rope_theta", 10000.0)
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    keys: dict[str, Any] = {
        "context_length": config.get("max_position_embeddings") or config["model_max_length"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"] or config["num_attention_heads"],
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": int(head * usual.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(theta),
        "vocab_size": config["vocab_size"],
    }
    eps = _architecture(config)[1].eps
    keys[f"attention.layer_norm_{'rms_' * (eps == 'rms_norm_eps')}epsilon"] = float(
        config["norm_eps" if arch in ("lfm2", "lfm2moe") else "layer_norm_epsilon" if "nemotron_h" in arch else eps]
    )
    if "nemotron_h" in arch:
        keys["attention.layer_norm_epsilon"] = 0.5  # llama.cpp wants it, and uses the other
    keys |= hybrid_facts(arch, config)
    keys |= {key: config[field] for key, field in _MORE.get(arch, {}).items() if config.get(field) is not None}
    if arch == "olmo2" and "layer_types" in config:
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        keys["attention.sliding_window_pattern"] = np.array(slides)
    if arch == "qwen35moe":
        del keys["feed_forward_length"]  # of published checkpoints, whose configs do not say it
    if arch == "gemma3":
        keys["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    if usual.get("rope_type") == "yarn":
        keys |= {f"rope.scaling.{ours}": usual[theirs] for ours, theirs in _YARN.items() if theirs in usual}
    if "num_experts_per_tok" in config and arch != "nemotron_h":
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        keys["expert_count"] = next((config[name] for name in names if config.get(name)), 0)
        keys["expert_used_count"] = config["num_experts_per_tok"]
    keys |= expert_facts(arch, config["tiny_family"], config, rope)
    keys |= {"attention.max_alibi_bias": 8.0} if arch == "mpt" else dense_facts(arch, config)
    return {"general.architecture": arch, **{f"{arch}.{name}": value for name, value in keys.items()}}


def tokenizer_facts(folder: Path, arch: str = "") -> dict[str, Any]:
    body = json.loads((folder / "tokenizer.json").read_text())
    added = {token["content"]: token["id"] for token in body["added_tokens"]}
    ids = {**body["model"]["vocab"], **added}
    tokens = sorted(ids, key=lambda token: ids[token])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": {"bloom": "bloom", "mpt": "mpt", "starcoder": "starcoder"}.get(arch, "gpt-2"),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3 if token in added else 1 for token in tokens], np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": added["<|bos|>"],
        "tokenizer.ggml.eos_token_id": added["<|eos|>"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
