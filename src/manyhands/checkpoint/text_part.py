"""The text part of a multimodal checkpoint: its config, and its tensors under the names that a text model has.

Everything else reads configs through `text_config` (config_fields.py) and tensors through `text_name` (header.py, folder.py):
what is for images belongs to no model here, so it is neither fetched nor hashed, planned for or loaded.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

# What transformers takes for fields that published configs leave out.
_GEMMA3: Final = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
_QWEN3_MOE: Final = {
    "rope_theta": 5e5,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
}
# The sizes that transformers' classes have, by the family of the text part: Llava's configs say only what differs.
_FAMILIES: Final[Mapping[object, Mapping[str, object]]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
}
_VOXTRAL: Final = {
    "model_type": "llama",
    "vocab_size": 131072,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e8,
}
_WINDOWS: Final = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
_QWEN2: Final = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}
# For images, or of where they stand among the ids: no row of text depends on them.
_OF_IMAGES: Final = frozenset(
    """
    vision_config image_token_id image_token_index video_token_id vision_token_id vision_start_token_id vision_end_token_id
    boi_token_id boi_token_index eoi_token_id eoi_token_index mm_tokens_per_image projector_hidden_act
    multimodal_projector_bias spatial_merge_size vision_feature_layer audio_config audio_token_id boa_token_id
    eoa_token_id eoa_token_index vision_soft_tokens_per_image language_model_only vision_end_token_id
    image_start_token_id image_end_token_id video_start_token_id video_end_token_id ignore_index media_placeholder_token_id
    audio_soft_tokens_per_image use_unified_vision_chunk video_placeholder projection_hidden_size projection_layer_norm_eps
    image_grid_pinpoints image_placeholder image_seq_length img_token_compression_config merged_hidden_size num_reward_heads
    out_hidden_size process_image_mode projector_bias projector_hidden_size understand_projector_stride video_token_index
    vision_feature_select_strategy image_bos_token_id audio_bos_token_id audio_token_index vision_feature_layers
    projector_layernorm_eps spatial_pool_mode spatial_pool_stride use_image_newline_parameter video_seq_length
    vision_aspect_ratio is_composition
    """.split()
)
# Told to the recipe of qwen4_exp from here alone: transformers reads no such field.
_NGRAM_END: Final = "ngram_eos_token_id"
_ROTARY: Final = ("rope_scaling", "rope_parameters")
# How a head is cut into sections that turn by place in time and in an image: equal places, all of text, turn all alike.
_SECTIONS: Final = ("mrope_section", "mrope_interleaved", "interleaved")
_TENSOR_OF_IMAGES: Final = re.compile(
    r"(?:model\.)?(?:image_newline$|(?:visual|vision_\w+|image_tower|video_tower|audio|audio_\w+|sound_\w+|embed_vision|"
    r"embed_audio|multi_modal_projector|mm_projector|projector|connector|merger|mlp1|patch_merge_mlp|vit_large_projector|"
    r"pre_mm_projector_norm|patch_merger|talker|code2wav|token2wav)\.)"
)
# Masks and frequencies that follow from the config, which checkpoints of gpt2, gpt_neox and their time hold all the same.
_MADE: Final = re.compile(r"\.(?:attn|attention)\.(?:bias|masked_bias)$|\.rotary_emb\.inv_freq$")
_THINKER: Final = "thinker"  # what models that speak call the part that writes: in names of tensors, and of its config
_TENSOR_OF_TEXT: Final = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")
# What checkpoints without a head leave out before names: of gpt2, bloom, mpt and their kin, of opt.
_BARE: Final = {
    re.compile(r"(?:(?:h|blocks)\.\d+|wte|wpe|word_embeddings(?:_layernorm)?|ln_f|norm_f)\."): "transformer",
    re.compile(r"decoder\."): "model",
}
_WHOLE_NAMES: Final = ("lm_head.", "backbone.")  # of a text model, without "model." before them


@dataclass(frozen=True, slots=True)
class _Part:
    """`families`: the recipe for what text_config calls itself; itself if it is not there. `unread`: by transformers, of
    text_config. `images`: fields beside text_config that are for images, with names that a text model may have."""

    families: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    images: frozenset[str] = frozenset()


_DOWNSAMPLED: Final = frozenset({"downsample_factor", "downsample_ratio", "downsample_mode"})
_MINICPMV: Final = _Part(
    images=frozenset(
        """
        insert_layer_id image_size drop_vision_last_layer merge_kernel_size merger_times patch_size image_start_id image_end_id
        slice_start_id slice_end_id newline_id
        """.split()
    )
    | _DOWNSAMPLED
)
_LFM2: Final = _Part(
    images=frozenset(
        """
        projector_use_layernorm do_image_splitting encoder_patch_size max_image_tokens max_num_patches max_pixels_tolerance
        max_tiles min_image_tokens min_tiles tile_size use_image_special_tokens use_thumbnail
        """.split()
    )
    | _DOWNSAMPLED
)
_OMNI: Final = _Part(
    images=frozenset(
        """
        force_image_size vision_hidden_size video_pruning_rate video_temporal_patch_size img_context_token_id
        video_context_token_id sound_context_token_id sound_config vit_hidden_size llm_config
        """.split()
    )
    | _DOWNSAMPLED
)
_OF_SPEECH: Final = frozenset(
    """
    assistant_token_id audio_end_token_id audio_start_token_id code2wav_config enable_audio_output
    enable_talker im_end_token_id im_start_token_id init_std position_id_per_seconds seconds_per_chunk system_token_id
    talker_config token2wav_config tts_bos_token_id tts_eos_token_id tts_pad_token_id user_token_id
    """.split()
)
_TIED: Final = "tie_word_embeddings"  # where transformers reads the field beside text_config, or none
_QWEN2_OMNI: Final = _Part(
    {"qwen2_5_omni_text": "qwen2"},
    {"model_type": "qwen2_5_omni_text", "rope_theta": 1e6, "sliding_window": 32768},
    frozenset({"init_std", _TIED}),
    _OF_SPEECH,
)
_QWEN3_OMNI: Final = _Part(
    {"qwen3_omni_moe_text": "qwen3_moe"},
    {"model_type": "qwen3_omni_moe_text", "rope_theta": 1e6, "norm_topk_prob": True},
    _WINDOWS | {_TIED},
    _OF_SPEECH,
)
_IDEFICS3: Final = _Part(images=frozenset({"scale_factor", "_pad_token_id", "use_cache"}))

_LLAVA: Final = _Part(defaults={"model_type": "llama"})
_LLAVA_UNTIED: Final = _Part(defaults=_LLAVA.defaults, unread=frozenset({_TIED}))

_PARTS: Final[Mapping[str, _Part]] = {
    "aya_vision": _Part(images=_DOWNSAMPLED | {"adapter_layer_norm_eps"}),
    "cohere2_vision": _Part(images=_DOWNSAMPLED | {"alignment_intermediate_size"}),
    "cohere_compass": _Part(defaults={"model_type": "cohere_compass_text"}),
    "dots3_note": _Part(defaults={"model_type": "dots3_note_text"}),
    "exaone4_5": _Part(),
    "gemma3": _Part(defaults=_GEMMA3),
    "gemma3n": _Part(defaults={"model_type": "gemma3n_text"}),
    "gemma4": _Part(),
    "gemma4_unified": _Part(defaults={"model_type": "gemma4_unified_text"}),
    "glm5_next": _Part(defaults={"model_type": "glm5_next_text"}),
    "glm4v": _Part({"glm4v_text": "glm4"}, {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}),
    "glm4v_moe": _Part({"glm4v_moe_text": "glm4_moe"}, {"attention_bias": True}),
    "hyperclovax_vision_v2": _Part(),
    "idefics2": _Part(
        defaults={"model_type": "mistral"},
        unread=frozenset({_TIED}),
        images=frozenset({"perceiver_config", "use_cache"}),
    ),
    "idefics3": _IDEFICS3,
    "inkling_mm_model": _Part(defaults={"model_type": "inkling_text"}),
    "internvl": _Part(images=_DOWNSAMPLED),
    "kimi_k25": _Part(defaults={"model_type": "deepseek_v3"}),
    "kimi_k3": _Part(),
    "lfm2_vl": _LFM2,
    "lfm3_vl": _Part(),
    "llama4": _Part(defaults={"model_type": "llama4_text"}),
    "llava": _LLAVA,
    "llava_next": _LLAVA_UNTIED,
    "llava_next_video": _LLAVA,
    "llava_onevision": _Part(defaults={"model_type": "qwen2"}),
    "minicpmv4_6": _MINICPMV,
    "minicpmv4_7": _MINICPMV,
    "minimax_m3_vl": _Part(defaults={"model_type": "minimax_m3_vl_text"}),
    "mistral3": _Part(),
    "mistral_large4": _Part(defaults={"model_type": "mistral_large4_text"}),
    "muse_glimmer": _Part(defaults={"model_type": "muse_glimmer_text"}),
    "muse_spark": _Part(defaults={"model_type": "muse_spark_text"}),
    "nemotron_h_omni": _OMNI,
    "qwen2_5_omni": _QWEN2_OMNI,
    "qwen2_5_omni_thinker": _QWEN2_OMNI,
    "qwen2_audio": _Part(defaults={"model_type": "qwen2"}, unread=frozenset({_TIED})),
    "qwen2_vl": _Part({"qwen2_vl": "qwen2", "qwen2_vl_text": "qwen2"}, _QWEN2),
    "qwen2_5_vl": _Part({"qwen2_5_vl": "qwen2", "qwen2_5_vl_text": "qwen2"}, _QWEN2),
    "qwen3_5": _Part({"qwen3_5": "qwen3_5_text"}),
    "qwen3_5_moe": _Part({"qwen3_5_moe": "qwen3_5_moe_text"}),
    "qwen4_exp": _Part({"qwen4_exp": "qwen4_exp_text"}),
    "qwen3_omni_moe": _QWEN3_OMNI,
    "qwen3_omni_moe_thinker": _QWEN3_OMNI,
    "qwen3_vl": _Part({"qwen3_vl_text": "qwen3"}, {"rope_theta": 5e5}, _WINDOWS),
    # transformers divides by the sum whatever norm_topk_prob is.
    "qwen3_vl_moe": _Part({"qwen3_vl_moe_text": "qwen3_moe"}, _QWEN3_MOE, _WINDOWS | {"norm_topk_prob"}),
    "smolvlm": _IDEFICS3,
    "step3p7": _Part(defaults={"model_type": "step3p5"}),
    "video_llama_3": _Part(defaults={"model_type": "qwen2"}, unread=frozenset({_TIED})),
    "video_llava": _LLAVA_UNTIED,
    "vipllava": _LLAVA_UNTIED,
    "vlm": _Part(),  # as HyperCLOVA X SEED Think was published
    "voxtral": _Part(defaults=_VOXTRAL, unread=frozenset({_TIED})),
}

_THINKERS: Final = ("qwen2_5_omni", "qwen3_omni_moe")
MULTIMODAL: Final = tuple(_PARTS)  # the model_types of which the text part is served


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text part, as a text model has it; `config` itself if it is no multimodal one.

    Fields outside of text_config count where it is silent; those that are neither for images nor known to recipes are refused
    there. Of a multimodal config that is not served model_type and text_config stay.
    """
    outer, thinker = config.get("model_type"), config.get(f"{_THINKER}_config")
    if outer in _THINKERS and isinstance(thinker, dict):
        config = {
            **{key: value for key, value in config.items() if value is not thinker},
            **thinker,
            "model_type": outer,
        }
    text = config.get("text_config")
    if outer == "nemotron_h_omni" and text is None:
        text = config.get("llm_config")  # as it was published
    text = text if isinstance(text, dict) else {}
    part = _PARTS.get(outer) if isinstance(outer, str) else None
    if part is None:
        return {key: value for key, value in {**text, **config}.items() if key != _NGRAM_END}
    text = {key: value for key, value in text.items() if key not in part.unread}
    beside = {key: value for key, value in config.items() if key not in part.images}
    family = text.get("model_type", part.defaults.get("model_type", outer))
    sizes = _FAMILIES.get(family, {}) if isinstance(family, str) else {}
    whole = {**sizes, **part.defaults, **beside, **text}
    whole["model_type"] = part.families.get(family, family) if isinstance(family, str) else family
    if outer == "qwen4_exp":  # its text part looks at its own
        whole[_NGRAM_END] = text.get("eos_token_id")
    if config.get("eos_token_id") is not None:
        whole["eos_token_id"] = config["eos_token_id"]
    if part.families:
        whole |= {name: _unsectioned(whole[name]) for name in _ROTARY if isinstance(whole.get(name), dict)}
    return {key: value for key, value in whole.items() if key not in _OF_IMAGES and key != "text_config"}


def _unsectioned(rotary: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in rotary.items() if key not in _SECTIONS}
    return {
        key: "default" if key in ("type", "rope_type") and value == "mrope" else value for key, value in plain.items()
    }


def text_name(name: str) -> str | None:
    """What a text model calls the tensor `name`; None if it is for images or sound, or follows from the config.

    Old checkpoints have language_model.model.layers.0 and language_model.lm_head, new ones model.language_model.layers.0; those
    that speak have thinker.model.layers.0; those of gpt2 that were saved without a head h.0.
    """
    name = name.removeprefix(f"{_THINKER}.")
    if _TENSOR_OF_IMAGES.match(name) or _MADE.search(name):
        return None
    for part, path in _BARE.items():
        if part.match(name):
            return f"{path}.{name}"
    match = _TENSOR_OF_TEXT.match(name)
    rest = name[match.end() :] if match else ""
    return name if match is None else rest if rest.startswith(_WHOLE_NAMES) else f"model.{rest}"
