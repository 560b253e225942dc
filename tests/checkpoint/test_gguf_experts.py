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
from tests.checkpoint.test_gguf import change
from tests.gguf_files import tiny_gguf

FAMILIES = (
    "glm4_moe", "minimax_m2", "dots1", "olmoe", "ernie4_5_moe", "hunyuan_v1_moe",
)  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("experts")
    return {name: tiny_gguf(name, folder / f"{name}.gguf", layers=3)[0].read_bytes() for name in FAMILIES}


def config(found: Gguf) -> dict[str, Any]:
    """The config of a header, of which keys that are None are absent."""
    facts = {name: value for name, value in found.facts.items() if value is not None}
    made: dict[str, Any] = json.loads(config_json(replace(found, facts=facts), lambda tensor: b""))
    return made


@pytest.mark.parametrize(
    ("family", "facts", "message"),
    [
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
    ],
)
def test_what_a_recipe_cannot_do_is_refused_by_name(
    family: str, facts: dict[str, Any], message: str, files: dict[str, bytes]
) -> None:
    with pytest.raises(ModelError, match=message):
        config(change(files[family], **facts))


@pytest.mark.parametrize("family", ["glm4_moe", "minimax_m2", "dots1", "ernie4_5_moe"])
def test_without_a_correction_experts_are_chosen_in_another_way(family: str, files: dict[str, bytes]) -> None:
    found = change(files[family])
    tensors = tuple(tensor for tensor in found.tensors if "exp_probs_b" not in tensor.name)
    with pytest.raises(ModelError, match=r"its experts are (not chosen by sigmoid|chosen without exp_probs_b)"):
        config(replace(found, tensors=tensors))


def test_a_file_of_glm_says_whether_heads_have_norms_and_products_biases(tmp_path: Path) -> None:
    file, _ = tiny_gguf("glm4_moe_air", tmp_path / "a.gguf", layers=3, attention_bias=False)
    made = config(read_gguf(file))
    assert (made["use_qk_norm"], made["attention_bias"], made["num_hidden_layers"]) == (False, False, 3)
