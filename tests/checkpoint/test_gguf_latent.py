"""Hostile metadata of the families that gguf_latent.py and its like read: one line, and nothing is made of it."""

import json
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

from manyhands.checkpoint.gguf import Gguf, GgufTensor
from manyhands.checkpoint.gguf_model import config_json, tensor_entries
from manyhands.errors import ModelError
from manyhands.program.families import build_program
from tests.checkpoint.test_gguf import change
from tests.gguf_files import tiny_gguf

FAMILIES = (
    "glm_moe_dsa",
    "dots3_note_text",
    "hy_v4",
    "glm5_next",
    "mistral4",
    "kimi_linear",
    "kimi_k3",
    "deepseek_v4",
    "mimo_v2_flash",
    "jamba",
    "mamba",
    "mamba2",
    "gemma3n_text",
    "apertus",
)
HUGE = 1 << 60
FEW = np.array([1, 0], np.int32)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("latent")
    return {name: tiny_gguf(name, folder / f"{name}.gguf", layers=4)[0].read_bytes() for name in FAMILIES}


def config(found: Gguf) -> dict[str, Any]:
    """The config of a header, of which keys that are None are absent."""
    facts = {name: value for name, value in found.facts.items() if value is not None}
    ones = b"\0\0\x80\x3f"  # of rope_freqs
    made: dict[str, Any] = json.loads(config_json(replace(found, facts=facts), lambda tensor: ones * tensor.shape[0]))
    return made


@pytest.mark.parametrize(
    ("family", "facts", "message"),
    [
        ("glm_moe_dsa", {"attention__indexer__top_k": None}, "indexer.top_k is None; a whole number from 1"),
        ("glm_moe_dsa", {"attention__indexer__head_count": HUGE}, "index_n_heads is 1152921504606846976"),
        ("glm_moe_dsa", {"attention__indexer__types": FEW}, "a switch for each of 4 layers"),
        ("glm_moe_dsa", {"attention__indexer__kpool": 4}, "indexer.kpool' is not known here"),
        ("glm_moe_dsa", {"expert_gating_func": 1}, "not chosen by sigmoid"),
        ("dots3_note_text", {"attention__indexer__types": None}, "are not those without a window"),
        ("dots3_note_text", {"attention__indexer__types": np.array([True] * 4)}, "are not those without a window"),
        ("dots3_note_text", {"attention__sliding_window_pattern": None}, "which layers have a window"),
        ("dots3_note_text", {"attention__sliding_window": HUGE}, "sliding_window is 1152921504606846976"),
        ("dots3_note_text", {"attention__head_count": FEW}, "a whole number from 0 for each of 5 layers"),
        (
            "dots3_note_text",
            {"attention__head_count": np.array([4, 3, 2, 2, 2])},
            "of full_attention have 4 heads, and 3",
        ),
        ("dots3_note_text", {"attention__kv_lora_rank_swa": None}, "kv_lora_rank_swa is None; a whole number"),
        ("dots3_note_text", {"attention__key_length_mla_swa": 8}, "qk_nope_head_dim is 0"),
        ("dots3_note_text", {"attention__value_length_mla_swa": HUGE}, "v_head_dim is 1152921504606846976"),
        ("dots3_note_text", {"attention__q_lora_rank": 0}, "queries of this family come from a latent"),
        ("dots3_note_text", {"rope__dimension_count_swa": 4}, "dimension_count_swa is 4; served is 8"),
        ("dots3_note_text", {"rope__freq_base_swa": None}, "freq_base_swa is None; a number is needed"),
        (
            "dots3_note_text",
            {"rope__scaling__type": "yarn", "rope__scaling__yarn_log_multiplier": 0.1},
            "rope_scaling is",
        ),
        ("dots3_note_text", {"expert_gating_func": 1}, "not chosen by sigmoid"),
        ("hy_v4", {"attention__indexer__types": None}, "which layers have an indexer"),
        ("hy_v4", {"attention__indexer__types": FEW}, "a switch for each of 4 layers"),
        (
            "hy_v4",
            {"attention__indexer__types": np.array([False, True, True, True])},
            "with an indexer, full, is needed",
        ),
        ("hy_v4", {"attention__indexer__top_k": None}, "indexer.top_k is None; a whole number from 1"),
        ("hy_v4", {"attention__q_lora_rank": 0}, "queries of this family come from a latent"),
        (
            "hy_v4",
            {"rope__scaling__type": "yarn", "rope__scaling__yarn_log_multiplier": 0.1},
            "its positions are scaled",
        ),
        ("hy_v4", {"swiglu_clamp_exp": None}, "one number for all layers"),
        ("hy_v4", {"swiglu_clamp_exp": np.array([1, 2], np.float32)}, "one number for all layers"),
        ("hy_v4", {"swiglu_clamp_exp": np.array([0.0], np.float32)}, "swiglu_limit is 0.0"),
        ("hy_v4", {"swiglu_clamp_shexp": np.array([1.0], np.float32)}, "swiglu_clamp_shexp' is not known here"),
        ("hy_v4", {"hyper_connection__count": 64}, "hc_mult is 64"),
        ("hy_v4", {"hyper_connection__magnitude": None}, "magnitude is None; a number is needed"),
        ("hy_v4", {"hyper_connection__sinkhorn_iterations": 4}, "sinkhorn_iterations' is not known here"),
        ("hy_v4", {"expert_gating_func": 1}, "not chosen by sigmoid"),
        ("glm5_next", {"attention__indexer__kpool": None}, "indexer.kpool is None; a whole number from 1"),
        ("glm5_next", {"attention__indexer__kpool": 3}, "index_kpool is 3, one of 1, 2, 4, 8, 16, 32 is needed"),
        ("glm5_next", {"attention__indexer__top_k": 20}, "index_topk is 20, a multiple of index_kpool, 8"),
        ("glm5_next", {"attention__indexer__kpool_select_tail": False}, "index_kpool_always_select_tail is False"),
        ("glm5_next", {"attention__indexer__kpool_select_tail": 1}, "select_tail is 1; true or false is needed"),
        ("glm5_next", {"attention__indexer__types": FEW}, "a switch for each of 4 layers"),
        (
            "glm5_next",
            {"attention__indexer__types": np.array([True, True, True, False])},
            "an indexer in each layer of attention",
        ),
        ("glm5_next", {"attention__indexer__block_size": 8}, "indexer.block_size' is not known here"),
        ("glm5_next", {"attention__layer_norm_epsilon": 1e-5}, "layer_norm_epsilon is 1e-05; the indexer's norm has"),
        ("glm5_next", {"attention__head_count_kv": FEW}, "a whole number from 0 for each of 5 layers"),
        ("glm5_next", {"attention__q_lora_rank": 0}, "qk_rope_head_dim is 0, 0, and a q_lora_rank, are needed"),
        ("glm5_next", {"rope__dimension_count": 8}, "qk_rope_head_dim is 8, 0, and a q_lora_rank, are needed"),
        ("glm5_next", {"kda__gate_lower_bound": None}, "kda.gate_lower_bound is None; a number is needed"),
        ("glm5_next", {"kda__gate_lower_bound": 5.0}, "linear_lower_bound is 5.0, a number below zero is needed"),
        ("glm5_next", {"kda__head_dim": HUGE}, "head_dim is 1152921504606846976"),
        ("glm5_next", {"kda__safe_gate": True}, "kda.safe_gate' is not known here"),
        ("glm5_next", {"ssm__conv_kernel": None}, "ssm.conv_kernel is None; a whole number from 1"),
        ("glm5_next", {"swiglu_clamp_exp": None}, "one number for all layers"),
        ("glm5_next", {"swiglu_clamp_shexp": np.array([1.0], np.float32)}, "one number for all layers"),
        ("glm5_next", {"hyper_connection__count": 64}, "hc_mult is 64"),
        ("glm5_next", {"hyper_connection__sinkhorn_iterations": None}, "sinkhorn_iterations is None; a whole number"),
        ("glm5_next", {"expert_gating_func": 1}, "not chosen by sigmoid"),
        ("glm5_next", {"expert_shared_feed_forward_length": 48}, "shared_feed_forward_length is 48; served is 32"),
        ("mistral4", {"expert_gating_func": 2}, r"not chosen by softmax \(expert_gating_func 1\), as in mistral4"),
        ("mistral4", {"expert_group_count": 2}, "by softmax in groups, which mistral4 does not"),
        ("mistral4", {"attention__temperature_length": 9}, "temperature_length is 9; served is 8"),
        ("mistral4", {"attention__temperature_scale": "x"}, "temperature_scale is 'x'; a number is needed"),
        ("mistral4", {"rope__scaling__yarn_log_multiplier": None}, "without rope.scaling.yarn_log_multiplier"),
        ("kimi_linear", {"kda__head_dim": None}, "kda.head_dim is None; a whole number"),
        ("kimi_linear", {"kda__head_dim": HUGE}, "head_dim is 1152921504606846976"),
        ("kimi_linear", {"kda__gate_lower_bound": -5.0}, "kda.gate_lower_bound' is not known here"),
        ("kimi_linear", {"attention__head_count_kv": FEW}, "a whole number from 0 for each of 4 layers"),
        ("kimi_linear", {"expert_weights_norm": False}, "expert_weights_norm is False; served is True"),
        ("kimi_k3", {"expert_gating_func": 1}, "not chosen by sigmoid"),
        ("kimi_k3", {"activation__situ_beta": None}, "activation.situ_beta is None; a number is needed"),
        ("kimi_k3", {"activation__situ_beta": 0.0}, "activation_situ_beta is 0.0"),
        ("kimi_k3", {"activation__situ_linear_beta": None}, "situ_linear_beta is None; a number is needed"),
        ("kimi_k3", {"attn_res__block_size": 0}, "attn_res.block_size is 0; a whole number from 1"),
        ("kimi_k3", {"attn_res__block_size": None}, "attn_res.block_size is None; a whole number from 1"),
        ("kimi_k3", {"expert_latent_length": -1}, "expert_latent_length is -1; a whole number from 0"),
        ("kimi_k3", {"expert_latent_length": HUGE}, "routed_expert_hidden_size is 1152921504606846976"),
        ("kimi_k3", {"expert_shared_count": 0}, "expert_shared_count is 0; a whole number from 1"),
        ("kimi_k3", {"kda__gate_lower_bound": "x"}, "kda.gate_lower_bound is 'x'; a number is needed"),
        ("kimi_k3", {"kda__gate_lower_bound": 5.0}, "gate_lower_bound is 5.0, a number below zero is needed"),
        ("kimi_k3", {"kda__head_dim": HUGE}, "head_dim is 1152921504606846976"),
        ("kimi_k3", {"kda__safe_gate": True}, "kda.safe_gate' is not known here"),
        ("kimi_k3", {"attention__head_count_kv": FEW}, "a whole number from 0 for each of 4 layers"),
        ("deepseek_v4", {"expert_gating_func": 2}, r"root of softplus \(expert_gating_func 4\)"),
        ("deepseek_v4", {"expert_shared_count": 2}, "expert_shared_count is 2; served is 1"),
        ("deepseek_v4", {"attention__compress_ratios": FEW}, "not a number for each of 4 layers"),
        ("deepseek_v4", {"attention__compress_ratios": np.array([4, 4, 8, 0], np.int32)}, "0, 4 or 128 for each"),
        ("deepseek_v4", {"hyper_connection__count": 64}, "hc_mult is 64"),
        ("deepseek_v4", {"swiglu_clamp_exp": np.array([1, 2], np.float32)}, "one number for all layers"),
        ("deepseek_v4", {"swiglu_clamp_shexp": np.array([2.0], np.float32)}, "one number for all layers"),
        ("deepseek_v4", {"attention__indexer__top_k": HUGE}, "index_topk is 1152921504606846976"),
        ("mimo_v2_flash", {"attention__sliding_window_pattern": None}, "are not twice as many in layers with a window"),
        ("mimo_v2_flash", {"attention__head_count_kv": 3}, "are not twice as many in layers with a window"),
        ("mimo_v2_flash", {"attention__sliding_window": HUGE}, "sliding_window is 1152921504606846977"),
        ("mimo_v2_flash", {"attention__value_length": HUGE}, "v_head_dim is 1152921504606846976"),
        ("jamba", {"ssm__inner_size": 100}, "Mamba are 100 wide, no multiple of 64"),
        ("jamba", {"ssm__state_size": HUGE}, "mamba_d_state is 1152921504606846976"),
        ("jamba", {"ssm__dt_b_c_rms": True}, "ssm.dt_b_c_rms' is not known here"),
        ("jamba", {"attention__head_count_kv": np.array([2, 2, 0, 2], np.int32)}, "attn_layer_period of jamba"),
        ("mamba", {"attention__head_count": 4}, "it has heads of attention, which no layer of Mamba has"),
        ("mamba", {"attention__head_count_kv": 4}, "it has heads of attention, which no layer of Mamba has"),
        ("mamba", {"ssm__group_count": 2}, "ssm.group_count' is not known here"),
        ("mamba", {"ssm__inner_size": HUGE}, "intermediate_size is 1152921504606846976"),
        ("mamba", {"ssm__state_size": HUGE}, "state_size is 1152921504606846976"),
        ("mamba", {"ssm__time_step_rank": None}, "ssm.time_step_rank"),
        ("mamba2", {"ssm__inner_size": 96}, "Mamba are 96 wide, no multiple of 64"),
        ("mamba2", {"ssm__group_count": 3}, "n_groups is 3"),
        ("mamba2", {"ssm__time_step_rank": HUGE}, "no multiple of their 1152921504606846976 heads"),
        ("gemma3n_text", {"attention__sliding_window_pattern": None}, "lacks one of attention.sliding_window_pattern"),
        ("gemma3n_text", {"activation_sparsity_scale": FEW}, "activation_sparsity_scale is not a number for each of 4"),
        (
            "gemma3n_text",
            {"activation_sparsity_scale": np.array([9, 0, 0, 0], np.float32)},
            "activation_sparsity_pattern is",
        ),
        (
            "gemma3n_text",
            {"activation_sparsity_scale": np.array([np.nan] * 4, np.float32)},
            "is not a number for each of 4",
        ),
        ("gemma3n_text", {"attention__shared_kv_layers": 1.5}, "shared_kv_layers is 1.5; a whole number is needed"),
        ("gemma3n_text", {"attention__shared_kv_layers": -1}, "num_kv_shared_layers is -1"),
        ("gemma3n_text", {"altup__num_inputs": HUGE}, "altup_num_inputs is 1152921504606846976"),
        ("gemma3n_text", {"attention__shared_kv_layers": HUGE}, "num_kv_shared_layers is 11529215"),
        (
            "gemma3n_text",
            {"embedding_length_per_layer_input": HUGE},
            "hidden_size_per_layer_input is 1152921504606846976",
        ),
        ("apertus", {"attention__key_length": 8, "attention__value_length": 9}, "heads of different widths"),
    ],
)
def test_hostile_metadata_is_one_line_and_makes_nothing(
    family: str, facts: dict[str, Any], message: str, files: dict[str, bytes]
) -> None:
    found = change(files[family])
    arch = found.facts["general.architecture"]
    build_program(config(found))  # imports the recipe
    found = change(files[family], **{f"{arch}__{name}": value for name, value in facts.items()})
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=message) as caught:
            build_program(config(found))
        assert "\n" not in str(caught.value) and tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_is_needed_or_has_a_meaning_where_it_is_absent(family: str, files: dict[str, bytes]) -> None:
    """Without any one key a header is refused in one line, or is of a model all the same."""
    found = change(files[family])
    for name in [name for name in found.facts if name.startswith(found.facts["general.architecture"])]:
        try:
            build_program(config(replace(found, facts={**found.facts, name: None})))
        except ModelError as error:
            assert "\n" not in str(error)


def test_a_file_of_glm_5_3_flash_says_all_of_its_published_config(files: dict[str, bytes]) -> None:
    """A header of its sizes gives the program of transformers' config; without its switch rows see what is behind entries."""
    published: dict[str, Any] = {
        "block_count": 46, "context_length": 1 << 20, "embedding_length": 4096, "feed_forward_length": 12288,
        "attention.head_count": 64, "attention.head_count_kv": np.array([i % 4 == 3 or i == 45 for i in range(46)], np.int32),
        "attention.q_lora_rank": 1536, "attention.kv_lora_rank": 512, "attention.key_length_mla": 256,
        "attention.value_length_mla": 256, "attention.indexer.head_count": 32, "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 2048, "attention.indexer.kpool": 4, "attention.indexer.kpool_select_tail": None,
        "kda.head_dim": 128, "expert_count": 288, "expert_used_count": 8, "expert_feed_forward_length": 2048,
        "expert_shared_feed_forward_length": 2048, "leading_dense_block_count": 3,
        "swiglu_clamp_exp": np.array([10.0] * 46, np.float32), "swiglu_clamp_shexp": np.array([10.0] * 46, np.float32),
        "hyper_connection.sinkhorn_iterations": 20,
    }  # fmt: skip
    found = change(files["glm5_next"])
    made = config(
        replace(found, facts={**found.facts, **{f"glm5-next.{name}": one for name, one in published.items()}})
    )
    plain = {name: one for name, one in made.items() if name != "quantization_config"}
    theirs = Glm5NextTextConfig(index_kpool=4, vocab_size=plain["vocab_size"]).to_dict()
    assert build_program(plain) == build_program(theirs)
    assert made["quantization_config"].keys() == {"quant_method", "negative_rates", "split_kv_b"}


def test_a_file_of_kimi_k3_says_what_it_has_of_what_is_new_in_it(files: dict[str, bytes]) -> None:
    """Without a bound decays are kimi_linear's; without a key experts are as wide as rows; norms and gates are tensors."""
    found = change(files["kimi_k3"])
    made, linear = config(found), config(found)["linear_attn_config"]
    assert linear["gate_lower_bound"] == -5.0 and made["routed_expert_hidden_size"] < 64
    assert sorted(linear["full_attn_layers"] + linear["kda_layers"]) == [1, 2, 3, 4]
    assert made["latent_moe_use_norm"] and made["mla_use_output_gate"] and made["moe_renormalize"]
    assert (made["activation_situ_beta"], made["activation_situ_linear_beta"]) == (4.0, 25.0)
    absent = ("expert_latent_length", "kda.gate_lower_bound", "expert_weights_norm")
    without = ("ffn_routed_norm.weight", "attn_gate.weight")
    plain = replace(
        found,
        facts={**found.facts, **{f"kimi-k3.{name}": None for name in absent}},
        tensors=tuple(tensor for tensor in found.tensors if not tensor.name.endswith(without)),
    )
    other = config(replace(plain, facts={**plain.facts, "kimi-k3.activation.situ_linear_beta": 0.0}))
    assert other["activation_situ_linear_beta"] is None  # so llama.cpp reads it
    assert "gate_lower_bound" not in other["linear_attn_config"] and "routed_expert_hidden_size" not in other
    assert not (other["latent_moe_use_norm"] or other["mla_use_output_gate"] or other["moe_renormalize"])


def test_kimi_k3_has_one_product_for_the_gates_of_linear_attention(files: dict[str, bytes]) -> None:
    """kimi_linear, whose model_type it has, has two: what they would do is not computed."""
    found = change(files["kimi_k3"])
    assert {"blk.0.ssm_g.weight", "blk.1.attn_gate.weight"} <= {tensor.name for tensor in found.tensors}
    with pytest.raises(ModelError, match=r"kimi_linear has no tensor 'blk\.0\.ssm_g_a\.weight'"):
        tensor_entries(with_tensor(found, "blk.0.ssm_g_a.weight", "F32", (16, 64)))


def with_tensor(found: Gguf, name: str, dtype: str, shape: tuple[int, ...]) -> Gguf:
    return replace(found, tensors=(*found.tensors, GgufTensor(name, dtype, shape, 0, 16, found.file)))


@pytest.mark.parametrize("value", [None, 1.0, FEW, np.array([0.5], np.float32), np.array([0.5] * 4), ["x"] * 4])
def test_lists_of_apertus_have_a_number_for_each_layer(value: Any, files: dict[str, bytes]) -> None:
    found = change(files["apertus"], xielu__alpha_n=value)
    with pytest.raises(ModelError, match=r"its xielu\.alpha_n is no list of F32 with a number for each of 4 layers"):
        tensor_entries(found)
    found = change(files["apertus"], apertus__block_count=HUGE)
    with pytest.raises(ModelError, match=f"a number for each of {HUGE} layers"):
        tensor_entries(found)


def test_layers_without_a_window_have_no_sinks(files: dict[str, bytes]) -> None:
    found = with_tensor(change(files["mimo_v2_flash"]), "blk.0.attn_sinks.weight", "F32", (4,))
    with pytest.raises(ModelError, match="with a window, and no others, do not have attn_sinks"):
        config(found)


def test_experts_of_jamba_lie_in_a_period(files: dict[str, bytes]) -> None:
    found = with_tensor(change(files["jamba"]), "blk.0.ffn_gate_inp.weight", "F32", (4, 64))
    with pytest.raises(ModelError, match=r"its layers \[0, 1, 3\] are not one of each 1, as expert_layer_period"):
        config(found)


def test_layers_of_deepseek_4_that_guess_ahead_may_be_counted_and_absent(files: dict[str, bytes]) -> None:
    """The converter writes their number, and leaves them out; where they are there, they come last."""
    found = change(files["deepseek_v4"])
    assert found.facts["deepseek4.nextn_predict_layers"] == 1 and config(found)["num_hidden_layers"] == 4
    found = with_tensor(found, "blk.3.nextn.eh_proj.weight", "F32", (64, 128))
    assert config(found)["num_hidden_layers"] == 3
    assert {int(entry.name.split(".")[1]) for entry in tensor_entries(found) if "layers" in entry.name} == {0, 1, 2}


@pytest.mark.parametrize(("context", "kinds"), [(1024, None), (1 << 20, ["full", "full", "full", "shared"])])
def test_files_of_glm_5_2_are_known_by_their_context(
    context: int, kinds: list[str] | None, files: dict[str, bytes]
) -> None:
    """Its first ones do not say which layers use what another has chosen."""
    made = config(change(files["glm_moe_dsa"], **{"glm-dsa__context_length": context}))
    assert (made.get("indexer_types"), build_program(made).context) == (kinds, context)


@pytest.mark.parametrize(("family", "arch"), [("glm_moe_dsa", "glm-dsa"), ("glm5_next", "glm5-next")])
def test_layers_of_glm_5_that_guess_ahead_are_left_out(family: str, arch: str, files: dict[str, bytes]) -> None:
    found = change(files[family])
    assert found.facts[f"{arch}.block_count"] == 5 and config(found)["num_hidden_layers"] == 4
    assert not [entry.name for entry in tensor_entries(found) if ".layers.4." in entry.name]


def test_the_first_files_of_gemma_3n_say_in_a_float_how_many_layers_share_keys(files: dict[str, bytes]) -> None:
    found = change(files["gemma3n_text"])
    given = found.facts["gemma3n.attention.shared_kv_layers"]
    assert config(change(files["gemma3n_text"], gemma3n__attention__shared_kv_layers=float(given))) == config(found)


def test_queries_of_mistral_4_grow_also_where_a_file_does_not_say_so(files: dict[str, bytes]) -> None:
    given = {"mistral4__attention__temperature_scale": None, "mistral4__attention__temperature_length": None}
    assert config(change(files["mistral4"], **given))["rope_parameters"]["llama_4_scaling_beta"] == 0.1
