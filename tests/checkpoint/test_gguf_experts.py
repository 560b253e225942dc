"""GGUF files of models whose blocks are experts: the family that a file is of, and what is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyhands.checkpoint.gguf import Gguf
from manyhands.checkpoint.gguf_model import config_json
from manyhands.checkpoint.gguf_parts import read_gguf
from manyhands.errors import ModelError
from manyhands.program.families import build_program
from manyhands.program.ops import ExpertRouting
from tests.checkpoint.test_gguf import change
from tests.gguf_files import tiny_gguf

FAMILIES = (
    "deepseek_v3", "deepseek_v2", "glm4_moe_lite", "glm4_moe", "minimax_m2", "dots1", "olmoe", "ernie4_5_moe", "hunyuan_v1_moe",
    "hy_v3", "afmoe", "laguna", "mellum", "cohere2_moe", "bailing_hybrid", "step3p5_plain",
    "glm4_moe_fused", "minimax_m3_vl_text", "minimax", "phimoe", "phimoe_plain",
)  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("experts")
    layers = dict.fromkeys(FAMILIES, 3) | {"laguna": 4, "mellum": 4, "step3p5_plain": 4}
    return {name: tiny_gguf(name, folder / f"{name}.gguf", layers=layers[name])[0].read_bytes() for name in FAMILIES}


def config(found: Gguf) -> dict[str, Any]:
    """The config of a header, of which keys that are None are absent."""
    facts = {name: value for name, value in found.facts.items() if value is not None}
    made: dict[str, Any] = json.loads(config_json(replace(found, facts=facts), lambda tensor: b""))
    return made


@pytest.mark.parametrize(
    ("family", "facts", "message"),
    [
        (
            "deepseek_v3",
            {"deepseek2__expert_gating_func": 1},
            r"by softmax \(expert_gating_func 1 or none\) with exp_probs_b",
        ),
        ("deepseek_v3", {"deepseek2__expert_gating_func": None}, "chosen by softmax .* with exp_probs_b"),
        ("deepseek_v3", {"deepseek2__expert_gating_func": 3}, "not chosen by sigmoid"),
        (
            "deepseek_v2",
            {"deepseek2__expert_gating_func": 2},
            r"not chosen by sigmoid \(expert_gating_func 2\) with exp",
        ),
        ("deepseek_v2", {"deepseek2__nextn_predict_layers": "x"}, "nextn_predict_layers is 'x'; a whole number from 0"),
        ("glm4_moe", {"glm4moe__expert_gating_func": 1}, "not chosen by sigmoid"),
        ("glm4_moe", {"glm4moe__expert_shared_count": 0}, "expert_shared_count is 0; a whole number from 1"),
        ("glm4_moe", {"glm4moe__expert_weights_norm": 1}, "expert_weights_norm is 1; true or false"),
        ("glm4_moe", {"glm4moe__nextn_predict_layers": -1}, "nextn_predict_layers is -1; a whole number from 0"),
        (
            "glm4_moe",
            {"glm4moe__rope__dimension_sections": np.array([1, 1, 1, 1], np.int32)},
            r"dimension_sections \[1, 1, 1, 1\] are not the 4 pairs of columns that turn",
        ),
        ("minimax_m2", {"minimax-m2__expert_gating_func": None}, "not chosen by sigmoid"),
        ("minimax_m2", {"minimax-m2__expert_feed_forward_length": 32}, "feed_forward_length is 32; served is 96"),
        ("minimax_m2", {"minimax-m2__expert_weights_scale": 2.0}, "expert_weights_scale' is not known here"),
        ("dots1", {"dots1__expert_gating_func": None}, "not chosen by sigmoid"),
        ("dots1", {"dots1__attention__sliding_window": 24}, "sliding_window' is not known here"),
        ("olmoe", {"olmoe__attention__clamp_kqv": 8.0}, "clamp_kqv' is not known here"),
        ("olmoe", {"olmoe__expert_used_count": 0}, "expert_used_count is 0; a whole number from 1"),
        ("ernie4_5_moe", {"ernie4_5-moe__interleave_moe_layer_step": 2}, "moe_layer_step is 2; served is 1"),
        ("ernie4_5_moe", {"ernie4_5-moe__expert_shared_feed_forward_length": 32}, "length is 32; served is 64"),
        ("hunyuan_v1_moe", {"hunyuan-moe__expert_shared_count": 2}, "expert_shared_count is 2; served is 1"),
        ("hunyuan_v1_moe", {"hunyuan-moe__expert_group_count": 2}, "expert_group_count is 2; served is 0"),
        ("hunyuan_v1_moe", {"hunyuan-moe__expert_feed_forward_length": 32}, "feed_forward_length is 32; served is 96"),
        ("hunyuan_v1_moe", {"hunyuan-moe__expert_shared_feed_forward_length": 192}, "length is 192; served is 96"),
        ("glm4_moe_fused", {"bailingmoe2__expert_gating_func": None}, "not chosen by sigmoid"),
        ("glm4_moe_fused", {"bailingmoe2__expert_shared_feed_forward_length": 64}, "length is 64; served is 32"),
        ("minimax_m3_vl_text", {"minimax-m3__expert_weights_norm": False}, "weights_norm is False; served is True"),
        ("minimax_m3_vl_text", {"minimax-m3__attention__indexer__top_k": 0}, "top_k is 0; a whole number from 1"),
        ("minimax_m3_vl_text", {"minimax-m3__attention__indexer__types": 1}, "indexer.types' is not known here"),
        ("phimoe_plain", {"phimoe__rope__scaling__factor": 2.0}, "scaled otherwise than those of Phi-3.5-MoE"),
        ("minimax", {"minimax-01__residual_scale": None}, "residual_scale is None; a number is needed"),
        ("minimax", {"minimax-01__attention__recurrent_layers": None}, r"attn_qkv \[1\] are not those of lightning"),
        ("minimax", {"minimax-01__attention__recurrent_layers": np.array([True])}, "a switch for each of 3 layers"),
        ("minimax", {"minimax-01__full_attention_interval": 0}, "interval is 0; a whole number from 1"),
        ("minimax", {"minimax-01__expert_weights_scale": 2.0}, "expert_weights_scale is 2.0; served is 1.0"),
        ("hy_v3", {"hy_v3__expert_gating_func": 1}, "not chosen by sigmoid"),
        ("hy_v3", {"hy_v3__expert_weights_norm": False}, "expert_weights_norm is False; served is True"),
        ("hy_v3", {"hy_v3__expert_shared_feed_forward_length": 33}, "33 wide together, no multiple of 32"),
        ("hy_v3", {"hy_v3__nextn_predict_layers": "x"}, "nextn_predict_layers is 'x'; a whole number from 0"),
        ("afmoe", {"afmoe__attention__sliding_window_pattern": 3}, "sliding_window_pattern is 3; served is 4"),
        ("afmoe", {"afmoe__attention__sliding_window": None}, "sliding_window is None; a whole number from 1"),
        ("afmoe", {"afmoe__expert_group_count": 2}, "expert_group_count is 2; served is 1"),
        ("afmoe", {"afmoe__rope__freq_base_swa": 5e5}, "rope.freq_base_swa' is not known here"),
        (
            "laguna",
            {"laguna__attention__head_count": 4},
            "attn_gate has neither a row for each head of a layer nor one",
        ),
        ("laguna", {"laguna__attention__head_count": np.array([6], np.int32)}, "a whole number from 0 for each of 4"),
        ("laguna", {"laguna__expert_shared_count": 2}, "expert_shared_count is 2; served is 1"),
        ("laguna", {"laguna__attention__sliding_window_pattern": np.array([True])}, "a switch for each of 4 layers"),
        ("step3p5_plain", {"step35__attention__head_count": np.array([4, 6, 4, 2], np.int32)}, "have 6 heads, and 2"),
        (
            "step3p5_plain",
            {"step35__attention__sliding_window_pattern": None},
            "does not say .* which layers have a window",
        ),
        ("step3p5_plain", {"step35__expert_weights_norm": False}, "expert_weights_norm is False; served is True"),
        ("step3p5_plain", {"step35__moe_every_n_layers": 2}, "moe_every_n_layers is 2; served is 1"),
        ("step3p5_plain", {"step35__swiglu_clamp_exp": np.array([7.0], np.float32)}, "a number for each of 4 layers"),
        ("step3p5_plain", {"step35__swiglu_clamp_shexp": "x"}, "swiglu_clamp_shexp is 'x'; a number for each of 4"),
        ("bailing_hybrid", {"bailingmoe3__kda__safe_gate": False}, "kda.safe_gate is False; served is True"),
        (
            "bailing_hybrid",
            {"bailingmoe3__kda__gate_lower_bound": None},
            "gate_lower_bound is None; a number is needed",
        ),
        ("bailing_hybrid", {"bailingmoe3__swiglu_clamp_exp": np.array([7.0], np.float32)}, "a number for each of 3"),
        ("bailing_hybrid", {"bailingmoe3__expert_shared_feed_forward_length": 33}, "length is 33; served is 32"),
        ("mellum", {"mellum__attention__sliding_window": None}, "it has one of attention.sliding_window and"),
        ("mellum", {"mellum__attention__sliding_window_pattern": None}, "it has one of attention.sliding_window and"),
        (
            "cohere2_moe",
            {"cohere2moe__expert_gating_func": 4},
            "expert_gating_func is 4; 1 .softmax. or 2 .sigmoid. is",
        ),
        ("cohere2_moe", {"cohere2moe__expert_weights_scale": 2.0}, "expert_weights_scale is 2.0; served is 1.0"),
        (
            "cohere2_moe",
            {"cohere2moe__attention__sliding_window_pattern": None},
            "does not say .* which layers have a window",
        ),
    ],
)
def test_what_a_recipe_cannot_do_is_refused_by_name(
    family: str, facts: dict[str, Any], message: str, files: dict[str, bytes]
) -> None:
    with pytest.raises(ModelError, match=message):
        config(change(files[family], **facts))


@pytest.mark.parametrize(
    "family",
    [
        "glm4_moe",
        "minimax_m2",
        "dots1",
        "ernie4_5_moe",
        "glm4_moe_lite",
        "hy_v3",
        "afmoe",
        "laguna",
        "step3p5_plain",
        "bailing_hybrid",
        "minimax_m3_vl_text",
    ],
)
def test_without_a_correction_experts_are_chosen_in_another_way(family: str, files: dict[str, bytes]) -> None:
    found = change(files[family])
    tensors = tuple(tensor for tensor in found.tensors if "exp_probs_b" not in tensor.name)
    with pytest.raises(ModelError, match=r"its experts are (not chosen by sigmoid|chosen without exp_probs_b)"):
        config(replace(found, tensors=tensors))


def test_weights_of_deepseek_v2_are_not_normalised(files: dict[str, bytes]) -> None:
    with pytest.raises(ModelError, match="norm_topk_prob is True, only False is supported"):
        build_program(config(change(files["deepseek_v2"], deepseek2__expert_weights_norm=True)))


def test_groups_of_deepseek_v2_rank_by_their_best_expert(files: dict[str, bytes]) -> None:
    facts = {"deepseek2__expert_group_count": 4, "deepseek2__expert_group_used_count": 2}
    programs = [build_program(config(change(files["deepseek_v2"], **more))) for more in (facts, {})]
    (grouped, *_), (plain, *_) = (
        [op for layer in program.layers for op in layer.ops if isinstance(op, ExpertRouting)] for program in programs
    )
    assert (grouped.groups, grouped.top_groups, grouped.is_by_best) == (4, 2, True)
    assert (plain.groups, plain.top_groups, plain.is_by_best) == (1, 1, False)


@pytest.mark.parametrize(("layers", "tokens"), [(47, 154880), (48, 154880), (46, 154880), (47, 154879)])
def test_the_first_files_of_glm_4_7_flash_do_not_say_that_sigmoids_choose(
    layers: int, tokens: int, files: dict[str, bytes]
) -> None:
    """They are known by their size, as llama.cpp knows them; of others without the key softmax chooses."""
    facts = {"deepseek2__expert_gating_func": None, "deepseek2__block_count": layers}
    found = change(files["glm4_moe_lite"], **facts, deepseek2__nextn_predict_layers=max(layers - 47, 0))
    tensors = tuple(
        replace(tensor, shape=(tokens, tensor.shape[1])) if tensor.name == "token_embd.weight" else tensor
        for tensor in found.tensors
    )
    found = replace(found, tensors=tensors)
    if layers < 47 or tokens < 154880:
        with pytest.raises(ModelError, match="chosen by softmax"):
            config(found)
        return
    assert (config(found)["model_type"], config(found)["num_hidden_layers"]) == ("deepseek_v3", 47)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2"])
def test_the_choice_of_experts_says_which_deepseek_a_file_is_of(family: str, files: dict[str, bytes]) -> None:
    assert config(change(files[family]))["model_type"] == family


@pytest.mark.parametrize(
    "facts",
    [
        {"phimoe__context_length": 65536},
        {"phimoe__rope__scaling__original_context_length": 2048},
        {"phimoe__rope__scaling__attn_factor": 1.25},
    ],
)
def test_a_scaling_of_phimoe_whose_factor_is_not_known_is_refused(
    facts: dict[str, Any], files: dict[str, bytes]
) -> None:
    """Files state another factor than checkpoints, and these state the same one once."""
    raw = files["phimoe"]
    made = config_json(change(raw), lambda tensor: raw[tensor.start : tensor.end])
    assert build_program(json.loads(made)).ropes[0].factor == 1.243163121016122
    with pytest.raises(ModelError, match=r"scaled otherwise than those of Phi-3\.5-MoE, whose factor no file states"):
        config_json(change(raw, **facts), lambda tensor: raw[tensor.start : tensor.end])


def test_a_file_of_glm_says_whether_heads_have_norms_and_products_biases(tmp_path: Path) -> None:
    file, _ = tiny_gguf("glm4_moe_air", tmp_path / "a.gguf", layers=3, attention_bias=False)
    made = config(read_gguf(file))
    assert (made["use_qk_norm"], made["attention_bias"], made["num_hidden_layers"]) == (False, False, 3)
