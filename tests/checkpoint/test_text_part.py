"""Multimodal configs as they are published, and names of tensors, read as those of their text parts."""

import json
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from manyhands.checkpoint.config_fields import parse_config
from manyhands.checkpoint.folder import parse_index
from manyhands.checkpoint.manifest import config_digest
from manyhands.checkpoint.partition import ModelFacts
from manyhands.checkpoint.quantised import read_quantised
from manyhands.checkpoint.text_part import text_config, text_name
from manyhands.errors import ModelError
from manyhands.program.families import build_program
from manyhands.program.ops import Attention, Copy, Rotary, Sparsify
from tests.mxfp4_files import PACKED_MXFP4

TOWER = {"hidden_size": 1152, "num_hidden_layers": 27, "model_type": "siglip_vision_model", "vision_use_head": False}
GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": TOWER,
}
GEMMA3N_E2B: dict[str, Any] = {
    "architectures": ["Gemma3nForConditionalGeneration"],
    "audio_config": {"model_type": "gemma3n_audio", "hidden_size": 1536},
    "audio_soft_tokens_per_image": 188,
    "audio_token_id": 262273,
    "boa_token_id": 256000,
    "boi_token_id": 255999,
    "eoa_token_id": 262272,
    "eoi_token_id": 262144,
    "eos_token_id": [1, 106],
    "image_token_id": 262145,
    "initializer_range": 0.02,
    "model_type": "gemma3n",
    "text_config": {
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_lr_multiplier": 1.0,
        "altup_num_inputs": 4,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2048,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": [8192] * 30,
        "laurel_rank": 64,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6,
        "max_position_embeddings": 32768,
        "model_type": "gemma3n_text",
        "num_attention_heads": 8,
        "num_hidden_layers": 30,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 10,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "use_cache": True,
        "vocab_size": 262400,
        "vocab_size_per_layer_input": 262144,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"model_type": "gemma3n_vision", "architecture": "mobilenetv5_300m_enc"},
    "vision_soft_tokens_per_image": 256,
}
MISTRAL_SMALL: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "use_cache": True,
        "vocab_size": 131072,
    },
    "vision_config": {"model_type": "pixtral", "rope_theta": 10000.0},
    "vision_feature_layer": -1,
}
QWEN25_VL_3B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "fullatt_block_indexes": [7, 15]},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}


def program(config: dict[str, Any]) -> Any:
    return build_program(parse_config(json.dumps(config).encode()))


def test_fields_that_gemma_leaves_out_are_those_of_transformers() -> None:
    ours, theirs = text_config(GEMMA3_4B), CONFIG_MAPPING["gemma3"](**GEMMA3_4B).text_config
    for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"):
        assert name not in GEMMA3_4B["text_config"] and ours[name] == getattr(theirs, name)
    bare = {**GEMMA3_4B, "text_config": {}}
    full = CONFIG_MAPPING["gemma3"](**bare).text_config
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "model_type"):
        assert text_config(bare)[name] == getattr(full, name)
    made = program(GEMMA3_4B)
    assert (made.family, made.hidden, made.vocab, made.context) == ("gemma3_text", 2560, 262208, 131072)
    assert made.head.product.parts[0].weight == made.embed.weight
    windows = [op.window for layer in made.layers for op in layer.ops if isinstance(op, Attention)]
    assert windows == [None if (i + 1) % 6 == 0 else 1024 for i in range(34)]
    assert made.ropes[0].frequencies[0] == 1 / 8 and made.ropes[1].frequencies[0] == 1.0
    assert ours["eos_token_id"] == [1, 106]


def test_a_row_of_gemma3n_has_all_that_later_layers_need() -> None:
    """Streams, inputs for each layer, and the keys and values of the last layer of each type before those that share."""
    made = program(GEMMA3N_E2B)
    assert (made.family, made.vocab, made.context) == ("gemma3n_text", 262400, 32768)
    assert made.hidden == 4 * 2048 + 30 * 256 + 2 * 2 * 2 * 256
    kept = {
        i: [op for op in layer.ops if isinstance(op, Copy) and op.source in "kv"] for i, layer in enumerate(made.layers)
    }
    assert {i for i, ops in kept.items() if ops} == {18, 19}
    assert sorted(op.at or 0 for ops in kept.values() for op in ops) == [15872, 16384, 16896, 17408]
    for i, layer in enumerate(made.layers):
        taken = {op.target: op.start for op in layer.ops if isinstance(op, Copy) and op.target in ("k", "v")}
        source = kept[19 if i % 5 == 4 else 18]
        assert taken == ({op.source: op.at for op in source} if i >= 20 else {})
        assert sum(layer.cache_widths) == 2 * 2 * 256
    windows = [op.window for layer in made.layers for op in layer.ops if isinstance(op, Attention)]
    assert windows == [None if i % 5 == 4 else 512 for i in range(30)]
    cuts = [op.by for layer in made.layers for op in layer.ops if isinstance(op, Sparsify)]
    assert cuts == pytest.approx([1.6448536269514722] * 10, rel=1e-12)


def test_published_configs_of_mistral_and_qwen() -> None:
    mistral, qwen = program(MISTRAL_SMALL), program(QWEN25_VL_3B)
    assert (mistral.family, len(mistral.layers), mistral.context) == ("mistral", 40, 131072)
    assert mistral.head.product.parts[0].weight.name == "lm_head.weight"
    assert (qwen.family, len(qwen.layers), qwen.context) == ("qwen2", 36, 128000)
    assert qwen.head.product.parts[0].weight == qwen.embed.weight
    rotary = [op for op in qwen.layers[0].ops if isinstance(op, Rotary)]
    assert len(qwen.ropes) == 1 and not any(op.pairs for op in rotary)
    facts = ModelFacts.from_config(text_config(GEMMA3_4B))
    assert facts == ModelFacts("gemma3_text", "Gemma3ForConditionalGeneration", 34, 2560, 262208, 131072)


def test_fields_that_qwen_leaves_out_are_those_of_transformers() -> None:
    for name, left_out in (("qwen2_5_vl", ("rms_norm_eps",)), ("qwen3_vl", ())):
        outer = {"model_type": name, "text_config": {"use_sliding_window": False, "rope_scaling": None}}
        ours, theirs = text_config(outer), CONFIG_MAPPING[name](**outer).text_config
        assert ours["rope_theta"] == theirs.rope_parameters["rope_theta"]
        for each in left_out:
            assert ours[each] == getattr(theirs, each)


def test_fields_that_experts_leave_out_are_those_of_transformers() -> None:
    outer: dict[str, Any] = {"model_type": "qwen3_vl_moe", "text_config": {"norm_topk_prob": False}}
    ours, theirs = text_config(outer), CONFIG_MAPPING["qwen3_vl_moe"](**outer).text_config
    assert ours["norm_topk_prob"] is True  # transformers divides by the sum whatever the field says
    assert ours["rope_theta"] == theirs.rope_parameters["rope_theta"]
    assert ours["num_experts_per_tok"] == theirs.num_experts_per_tok
    assert ours["moe_intermediate_size"] == theirs.moe_intermediate_size
    outer = {"model_type": "glm4v_moe", "text_config": {"model_type": "glm4v_moe_text"}}
    assert text_config(outer)["attention_bias"] is CONFIG_MAPPING["glm4v_moe"](**outer).text_config.attention_bias
    outer = {"model_type": "glm4v", "text_config": {"model_type": "glm4v_text"}}
    assert text_config(outer)["rms_norm_eps"] == CONFIG_MAPPING["glm4v"](**outer).text_config.rms_norm_eps
    for name in ("deepseek_v3", "kimi_k2"):
        assert text_config({"model_type": "kimi_k25", "text_config": {"model_type": name}})["model_type"] == name
    media = {"media_placeholder_token_id": 163605, "use_unified_vision_chunk": True, "ignore_index": -100}
    silent = text_config({"model_type": "kimi_k25", "text_config": {}, "vision_config": {}, **media})
    assert silent == {"model_type": "deepseek_v3"}


def test_how_experts_of_kimi_k3_are_stored_is_read_in_its_text_config() -> None:
    outer = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "ignore_index": -100}
    images = {
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": 163605,
        "vision_config": {},
    }
    text = {"model_type": "kimi_linear", "hidden_act": "situ", "quantization_config": PACKED_MXFP4}
    assert text_config({**outer, **images, "text_config": text}) == {**text, "architectures": outer["architectures"]}
    assert read_quantised(text_config({**outer, "text_config": text})) == read_quantised(text)


@pytest.mark.parametrize("config", [GEMMA3_4B, GEMMA3N_E2B, MISTRAL_SMALL, QWEN25_VL_3B])
def test_what_is_known_of_images_makes_no_other_model_and_what_is_unknown_is_refused(config: dict[str, Any]) -> None:
    digest = config_digest(json.dumps(config).encode())
    other = {**config, "vision_config": {"hidden_size": 5}, "image_token_id": 3, "spatial_merge_size": 9}
    other["language_model_only"] = False
    assert config_digest(json.dumps(other).encode()) == digest
    for outer in ({"surprise": 2}, {"rope_scaling": {"factor": 2.0, "surprise": 2}}):
        with pytest.raises(ModelError, match="surprise is 2"):
            program({**config, **outer, "text_config": {**config.get("text_config", {}), **outer}})
    with pytest.raises(ModelError, match="surprise is 2"):
        program({**config, "surprise": 2})


def test_hyperclova_is_known_by_its_published_name() -> None:
    text = {"model_type": "hyperclovax", "hidden_size": 64}
    for outer in ("vlm", "hyperclovax_vision_v2"):
        assert text_config({"model_type": outer, "text_config": text, "vision_config": {}, "image_token_id": 9}) == text


def test_nemotrons_text_config_is_found_under_its_published_name() -> None:
    text = {"model_type": "nemotron_h", "hidden_size": 64}
    images = {"sound_config": {"model_type": "parakeet"}, "vit_hidden_size": 1280, "img_context_token_id": 18}
    outer = {"model_type": "nemotron_h_omni", "downsample_ratio": 0.5, "vision_config": {}, **images}
    assert text_config({**outer, "llm_config": text}) == text_config({**outer, "text_config": text}) == text


def test_fields_of_images_count_as_such_beside_the_text_config_alone() -> None:
    """There "image_size" can only be an image's; within, it is unknown, and so refused."""
    text = {"model_type": "qwen3_5_text", "hidden_size": 64}
    config = {"model_type": "minicpmv4_6", "text_config": text, "image_size": 448, "merge_kernel_size": [2, 2]}
    assert text_config(config) == text
    assert text_config({**config, "text_config": {**text, "image_size": 9}}) == {**text, "image_size": 9}


def test_windows_that_transformers_does_not_read_in_qwen3_vl_are_not_read() -> None:
    text = {"use_sliding_window": True, "sliding_window": 9, "hidden_size": 64}
    assert (
        not {"use_sliding_window", "sliding_window"}
        & text_config({"model_type": "qwen3_vl", "text_config": text}).keys()
    )


def test_another_multimodal_config_is_refused_by_its_own_name() -> None:
    config = {**MISTRAL_SMALL, "model_type": "gemma5"}
    with pytest.raises(ModelError, match="model_type is 'gemma5'; there are recipes for"):
        program(config)
    assert ModelFacts.from_config(text_config(config)).num_layers == 40
    with pytest.raises(ModelError, match="text_config is"):
        program({**MISTRAL_SMALL["text_config"], "text_config": {"num_hidden_layers": 3}})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("language_model.model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.layers.3.mlp.up_proj.qweight", "model.layers.3.mlp.up_proj.qweight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.language_model.altup_projections.0.weight", "model.altup_projections.0.weight"),
        ("model.language_model.layers.0.altup.correct_output_scale", "model.layers.0.altup.correct_output_scale"),
        ("model.language_model.embed_tokens_per_layer.weight", "model.embed_tokens_per_layer.weight"),
        ("model.embed_audio.embedding.weight", None),
        ("model.audio_tower.conformer.0.norm.weight", None),
        ("visual.blocks.0.attn.qkv.weight", None),
        ("model.visual.blocks.0.attn.qkv.weight", None),
        ("vision_tower.vision_model.encoder.layers.2.w", None),
        ("model.vision_tower.encoder.layers.2.w", None),
        ("vision_model.layers.2.w", None),
        ("multi_modal_projector.mm_input_projection_weight", None),
        ("model.multi_modal_projector.linear_1.weight", None),
        ("mm_projector.pre_norm.weight", None),
        ("vision_encoder.transformer.layers.0.attention.wq.weight", None),  # and those behind it of Mistral Large 4
        ("vision_language_adapter.w_in.weight", None),
        ("pre_mm_projector_norm.weight", None),
        ("patch_merger.merging_layer.weight", None),
        ("layers.0.attention.wq.weight", "layers.0.attention.wq.weight"),
        ("lerope.alpha", "lerope.alpha"),
        ("vision_tower.patch_embed.pos_emb.weight", None),
        (
            "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_packed",
            "model.layers.1.block_sparse_moe.experts.0.w1.weight_packed",
        ),
        ("language_model.model.output_attn_res_proj.weight", "model.output_attn_res_proj.weight"),
        ("model.visuals.w", "model.visuals.w"),
        ("model.language_model.model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("model.language_model.lm_head.weight", "lm_head.weight"),
        ("model.vision_projector.weight", None),
        ("language_model.backbone.layers.3.mixer.in_proj.weight", "backbone.layers.3.mixer.in_proj.weight"),
        ("mlp1.1.weight", None),
        ("sound_encoder.encoder.layers.0.w", None),
        ("sound_projection.linear1.weight", None),
        ("model.text_model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("model.connector.modality_projection.proj.weight", None),
        ("model.merger.mlp.0.weight", None),
        ("model.projector.weight", None),
        ("h.3.attn.c_attn.weight", "transformer.h.3.attn.c_attn.weight"),  # GPT-2, as it was published
        ("wpe.weight", "transformer.wpe.weight"),
        ("word_embeddings.weight", "transformer.word_embeddings.weight"),  # BLOOM
        ("word_embeddings_layernorm.bias", "transformer.word_embeddings_layernorm.bias"),
        ("h.3.attn.bias", None),
        ("transformer.h.3.attn.attention.bias", None),
        ("transformer.h.3.attn.masked_bias", None),
        ("transformer.h.3.attn.c_attn.bias", "transformer.h.3.attn.c_attn.bias"),
        ("gpt_neox.layers.3.attention.rotary_emb.inv_freq", None),
        ("gpt_neox.layers.3.attention.dense.bias", "gpt_neox.layers.3.attention.dense.bias"),
        ("decoder.layers.3.fc1.weight", "model.decoder.layers.3.fc1.weight"),  # OPT, saved without a head
        ("blocks.3.ffn.up_proj.weight", "transformer.blocks.3.ffn.up_proj.weight"),  # MPT, likewise
        ("norm_f.weight", "transformer.norm_f.weight"),
    ],
)
def test_names_of_tensors(name: str, text: str | None) -> None:
    assert text_name(name) == text


def test_an_index_that_has_a_tensor_under_both_of_its_names_is_refused() -> None:
    """Which of the two a text model has cannot be told."""
    names = {"language_model.model.norm.weight": "a.safetensors", "model.language_model.norm.weight": "b.safetensors"}
    with pytest.raises(ModelError, match=r"model\.norm\.weight is in a\.safetensors and in b\.safetensors"):
        parse_index(json.dumps({"weight_map": names}).encode())
