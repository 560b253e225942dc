"""Models with an indexer: configs as they are published, and layers that share what another has chosen."""

import math
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from manyhands.errors import ModelError
from manyhands.program.families import build_program
from manyhands.program.families.indexer import MOST_CHOSEN
from manyhands.program.ops import Index, LatentAttention, Program, SharedIndex
from manyhands.program.tensors import layer_tensors, with_stacked_experts
from tests.program.test_families import DEEPSEEK_V3
from tests.program.test_published import tiny

FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
DEEPSEEK_V32 = {
    **{name: value for name, value in DEEPSEEK_V3.items() if name != "auto_map"},
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "model_type": "deepseek_v32",
    "quantization_config": FP8,
    "transformers_version": "4.44.2",
}
GLM_51: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "pretraining_tp": 1,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "5.4.0",
    "use_cache": True,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
GLM_52 = {
    **GLM_51,
    "head_dim": 192,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "max_position_embeddings": 1048576,
    "moe_router_dtype": "float32",
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}

HY_4: dict[str, Any] = {  # Hy4-preview
    "attention_bias": False,
    "enable_ihc": True,
    "enable_lm_head_fp32": True,
    "gated_mla": True,
    "gating_type": "elementwise",
    "hc_eps": 1e-06,
    "hc_magnitude": 2.0,
    "hc_mult": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_types": ["full" if i == 0 or i % 4 == 1 else "shared" for i in range(78)],
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "layer_types": ["deepseek_sparse_attention"] * 78,
    "learnable_sink": True,
    "learnable_sink_init": 0.0,
    "max_position_embeddings": 1048576,
    "mlp_layer_types": ["dense", *["sparse"] * 77],
    "model_type": "hy_v4",
    "moe_intermediate_size": 2048,
    "mtp_loss_factor": 0.1,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "routed_scaling_factor": 2.827,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_dsa": True,
    "use_mla": True,
    "v_head_dim": 256,
    "vocab_size": 120832,
}


def indexed_layers(program: Program) -> int:
    return sum(
        isinstance(op, LatentAttention) and isinstance(op.index, Index) for one in program.layers for op in one.ops
    )


@pytest.mark.parametrize(
    ("config", "context", "indexed", "hidden"),
    [
        (DEEPSEEK_V32, 163840, 61, 7168),
        (GLM_51, 202752, 78, 6144),
        (GLM_52, 1048576, 21, 6144 + 3 * 2048),
        (HY_4, 1048576, 21, 4 * 6144 + 3 * 2048),
        ({**HY_4, "indexer_types": ["full"] * 78}, 1048576, 78, 4 * 6144),
    ],
    ids=["DeepSeek-V3.2", "GLM-5.1", "GLM-5.2", "Hy4", "Hy4 with an indexer in each layer"],
)
def test_published_configs_are_read(config: dict[str, Any], context: int, indexed: int, hidden: int) -> None:
    """Rows bring the choice to layers that share it, of 1,048,576 positions in three parts."""
    program = build_program(config)
    assert (program.context, indexed_layers(program), program.hidden) == (context, indexed, hidden)
    assert len(program.layers) == config["num_hidden_layers"] and program.has_index
    assert program.holds_numbers == (indexed < len(program.layers))


def test_layers_of_hy4_share_a_choice_by_default_as_published() -> None:
    config = {name: value for name, value in HY_4.items() if name not in ("indexer_types", "layer_types")}
    assert CONFIG_MAPPING["hy_v4"](**config).indexer_types == HY_4["indexer_types"]
    assert build_program(config) == build_program(HY_4)


def test_experts_of_hy4_lie_in_one_tensor_or_by_themselves() -> None:
    """In the publisher's checkpoints of 16 bits, and in those of FP8."""
    shapes = {
        "model.layers.1.mlp.experts.gate_up_proj": (256, 4096, 6144),
        "model.layers.1.mlp.experts.down_proj": (256, 6144, 2048),
    }
    program = with_stacked_experts(build_program(HY_4), shapes)
    assert layer_tensors(program.layers[1]).items() >= shapes.items()
    assert layer_tensors(program.layers[2])["model.layers.2.mlp.experts.255.up_proj.weight"] == (2048, 6144)


def test_an_indexer_has_the_published_sizes() -> None:
    """Of a layer of DeepSeek-V3.2: 1536 x 64 x 128, 7168 x 128, 7168 x 64 and a norm with bias."""
    shapes = layer_tensors(build_program(DEEPSEEK_V32).layers[5])
    sizes = {name.split("indexer.")[1]: math.prod(shape) for name, shape in shapes.items() if "indexer" in name}
    assert sizes == {
        "wq_b.weight": 1536 * 64 * 128,
        "wk.weight": 7168 * 128,
        "weights_proj.weight": 7168 * 64,
        "k_norm.weight": 128,
        "k_norm.bias": 128,
    }


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"index_topk_freq": 1},
        {"index_topk_freq": 0},
        {"index_topk_freq": 2},
        {"index_topk_freq": 2, "index_skip_topk_offset": 3},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
        {"index_topk_pattern": "FFF"},
        {"index_topk_pattern": "FSF", "index_topk_freq": 1},
        {"index_topk_pattern": ["full", "full", "shared"]},
        {"index_topk_pattern": "FSS", "indexer_types": ["full"] * 3},
    ],
    ids=str,
)
def test_which_layers_share_a_choice_is_what_transformers_says(given: dict[str, Any]) -> None:
    config = {name: value for name, value in tiny("glm_moe_dsa").items() if name != "indexer_types"} | given
    theirs = CONFIG_MAPPING["glm_moe_dsa"](**config).indexer_types
    program = build_program(config)
    attending = [layer.attention for layer in program.layers]
    kinds = [isinstance(op, LatentAttention) and isinstance(op.index, SharedIndex) for op in attending]
    assert [{False: "full", True: "shared"}[kind] for kind in kinds] == theirs
    assert program.context == config["max_position_embeddings"]


def test_no_more_is_chosen_than_there_are_positions() -> None:
    """The register of chosen positions is as wide as the context at most."""
    for family in ("deepseek_v32", "glm_moe_dsa"):
        program = build_program({**tiny(family), "index_topk": 1 << 24})
        chosen = {
            op.index.top_k
            for layer in program.layers
            for op in layer.ops
            if isinstance(op, LatentAttention) and op.index is not None
        }
        assert chosen == {program.context}
    with pytest.raises(ModelError, match="index_topk is 16777217, a whole number from 1 to 16777216 is needed"):
        build_program({**tiny("deepseek_v32"), "index_topk": (1 << 24) + 1})


def test_more_positions_than_a_row_may_keep_the_numbers_of_are_refused() -> None:
    """No tensor is as large as index_topk says: a config alone would have each row of a step take up to 64 MiB."""
    given = {**tiny("deepseek_v32"), "max_position_embeddings": 1 << 20}
    assert indexed_layers(build_program({**given, "index_topk": MOST_CHOSEN})) == 3
    with pytest.raises(ModelError, match="index_topk is 65537, at most 65536 of the 1048576 positions can be chosen"):
        build_program({**given, "index_topk": MOST_CHOSEN + 1})
