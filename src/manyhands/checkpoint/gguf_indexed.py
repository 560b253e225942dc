"""Architectures of GGUF with an indexer in latent attention: what their metadata adds to that of gguf_latent.py, and their
table."""

from collections.abc import Mapping
from typing import Final

from manyhands.checkpoint import gguf_latent_names as names
from manyhands.checkpoint.gguf_architecture import STEPS, Architecture
from manyhands.checkpoint.gguf_configs import RATES, STRETCHED, layer_types, mixed_layers, stated_windows
from manyhands.checkpoint.gguf_experts import SIGMOID, beside_shared, by_sigmoid
from manyhands.checkpoint.gguf_keys import Config, GgufKeys
from manyhands.checkpoint.gguf_latent import channel_linear, deepseek32, glm_dsa, indexer, latents, one_limit, streams
from manyhands.checkpoint.gguf_mixtures import heads_by_type

_INDEX_EPSILON: Final = 1e-6  # of glm5_next
_BIASES: Final = ((None, ("exp_probs_b", "indexer.k_norm")),)


def dots3note(keys: GgufKeys, config: Config) -> Config:
    """dots3-note (text), in the fields of its published config, without the layer that guesses tokens ahead."""
    by_sigmoid(keys)
    made, blocks = latents(keys, config), beside_shared(keys)
    windows = stated_windows(keys, made["num_hidden_layers"])
    if keys.switches("attention.indexer.types", len(windows)) != [not on for on in windows]:
        raise keys.refused("its layers with an indexer (attention.indexer.types) are not those without a window")
    kinds, inner = layer_types(windows), blocks["moe_intermediate_size"]
    heads = heads_by_type(keys, config, kinds)
    keys.only("expert_shared_feed_forward_length", inner)
    return {
        **made,
        **blocks,
        **indexer(keys),
        **_in_windows(keys, config["head_dim"], heads["num_sliding_attention_heads"], made["q_lora_rank"]),
        "shared_experts_intermediate_size": inner,
        "num_attention_heads": heads["num_attention_heads"],
        "num_key_value_heads": heads["num_attention_heads"],
        "layer_types": kinds,
        "sliding_window": keys.count("attention.sliding_window"),
    }


def _in_windows(keys: GgufKeys, rotary: int, heads: int, query_rank: int | None) -> Config:
    """Latent attention of layers with a window, of which `rotary` columns turn, as in the others."""
    for name in ("key_length_swa", "value_length_swa"):  # of heads that share keys
        keys.get(f"attention.{name}")
    keys.only("rope.dimension_count_swa", rotary)
    width = keys.count("attention.key_length_mla_swa")
    own = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": query_rank,
        "kv_lora_rank": keys.count("attention.kv_lora_rank_swa"),
        "head_dim": width,
        "qk_nope_head_dim": width - rotary,
        "qk_rope_head_dim": rotary,
        "v_head_dim": keys.count("attention.value_length_mla_swa"),
        "rope_theta": keys.number("rope.freq_base_swa"),
    }
    return {f"swa_{field}": value for field, value in own.items()}


def hy_v4(keys: GgufKeys, config: Config) -> Config:
    """Hy4. Its layers without an indexer use the choice of the one before."""
    by_sigmoid(keys)
    if "rope_scaling" in config:
        raise keys.refused("its positions are scaled, of which scores of hy_v4 take no account in llama.cpp")
    made, blocks = latents(keys, config), beside_shared(keys)
    layers, dense = made["num_hidden_layers"], blocks.pop("first_k_dense_replace")
    full = keys.switches("attention.indexer.types", layers)
    if full is None:
        raise keys.refused("it does not say by attention.indexer.types which layers have an indexer")
    return {
        **made,
        **blocks,
        **indexer(keys),
        "indexer_types": ["full" if on else "shared" for on in full],
        "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(len(full))],
        "swiglu_limit": one_limit(keys, "swiglu_clamp_exp"),
        "hc_mult": keys.count("hyper_connection.count"),
        "hc_eps": keys.number("hyper_connection.epsilon"),
        "hc_magnitude": keys.number("hyper_connection.magnitude"),
    }


def glm5_next(keys: GgufKeys, config: Config) -> Config:
    """GLM-5.3-Flash (text), in the fields of its published config: layers without key heads have linear attention."""
    by_sigmoid(keys, SIGMOID)
    made, blocks, limit = latents(keys, config), beside_shared(keys), one_limit(keys, "swiglu_clamp_exp")
    one_limit(keys, "swiglu_clamp_shexp", limit)
    kinds, dense = mixed_layers(keys, config, "linear_attention"), blocks.pop("first_k_dense_replace")
    kinds = kinds[: made["num_hidden_layers"]]
    keys.only("expert_shared_feed_forward_length", blocks["n_shared_experts"] * blocks["moe_intermediate_size"])
    return {
        **made,
        **blocks,
        **dict.fromkeys(("head_dim", "rope_theta")),  # nothing turns
        **streams(keys),
        **_entries(keys, len(kinds)),
        "layer_types": kinds,
        "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(len(kinds))],
        "linear_attn_config": channel_linear(keys, config),
        "linear_lower_bound": keys.number("kda.gate_lower_bound"),
        "swiglu_limit": limit,
    }


def _entries(keys: GgufKeys, layers: int) -> Config:
    """An indexer that chooses entries of positions. Raises ModelError for another epsilon of its norm than the family's."""
    if (eps := keys.number("attention.layer_norm_epsilon", _INDEX_EPSILON)) != _INDEX_EPSILON:
        raise keys.refused(f"its attention.layer_norm_epsilon is {eps}; the indexer's norm has {_INDEX_EPSILON}")
    full = keys.switches("attention.indexer.types", layers)
    keys.get("attention.indexer.index_share_mtp")  # of the layer that guesses tokens ahead
    return {
        **indexer(keys),
        **({} if full is None else {"indexer_types": ["full" if on else "shared" for on in full]}),
        "index_kpool": keys.count("attention.indexer.kpool"),
        "index_kpool_always_select_tail": keys.flag("attention.indexer.kpool_select_tail", True),
    }


INDEXED: Final[Mapping[str, Architecture]] = {
    "deepseek32": Architecture(
        "deepseek_v32", "DeepseekV32ForCausalLM", names.DEEPSEEK32, deepseek32, latent=True, biases=_BIASES
    ),
    "glm-dsa": Architecture(
        "glm_moe_dsa", "GlmMoeDsaForCausalLM", names.DEEPSEEK32, glm_dsa, latent=True, biases=_BIASES
    ),
    "dots3note": Architecture(
        "dots3_note_text",
        "Dots3NoteForCausalLM",
        names.DOTS3_NOTE,
        dots3note,
        (STRETCHED,),
        latent=True,
        varied=True,
        biases=_BIASES,
    ),
    "hy_v4": Architecture(
        "hy_v4", "HYV4ForCausalLM", names.HY_V4, hy_v4, latent=True, ends=names.HY_V4_ENDS, biases=_BIASES
    ),
    "glm5-next": Architecture(
        "glm5_next_text",
        "Glm5NextForCausalLM",
        names.GLM5_NEXT,
        glm5_next,
        (RATES,),
        latent=True,
        biases=(*_BIASES, *STEPS),
    ),
}
