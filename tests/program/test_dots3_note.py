"""dots3_note_text: fields as they were published and as transformers writes them, and what is refused."""

import json
from typing import Any

import pytest
from transformers import AutoConfig

from manyhands.checkpoint.text_part import text_config
from manyhands.errors import ModelError
from manyhands.program.families import build_program
from manyhands.program.ops import LatentAttention, Program
from manyhands.testing.tiny import tiny_config
from manyhands.testing.tiny_latent import dots3

PLAIN = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
}
PUBLISHED: dict[str, Any] = {
    **PLAIN,
    **dots3(64),
    "model_type": "dots3_note",
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,
    "max_position_embeddings": 512,
    "moe_shared_expert_intermediate_size": 40,
    "num_nextn_predict_layers": 1,
    "rope_theta": 8e6,
    "scoring_func": "sigmoid",
    "sliding_window_size": 12,
    "swa_rope_theta": 3e4,
    "topk_method": "noaux_tc",
    "use_dsa": True,
    "use_sliding_window": True,
    "vision_config": {"model_type": "dots3_note_vision_encoder"},
}
BASE = {"rope_type": "default", "rope_theta": 8e6}
del PUBLISHED["sliding_window"], PUBLISHED["shared_experts_intermediate_size"]


def of_transformers(**changes: Any) -> dict[str, Any]:
    """The text part's config as transformers writes what is published."""
    fields = {
        name: value for name, value in {**PUBLISHED, **changes}.items() if name not in ("model_type", "vision_config")
    }
    made: dict[str, Any] = json.loads(AutoConfig.for_model("dots3_note_text", **fields).to_json_string())
    return made


def built(config: dict[str, Any]) -> Program:
    return build_program(text_config(config))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_dsa": False},
        {"use_sliding_window": False},
        {"moe_layer_freq": [1, 0, 1, 0, 1, 1], "first_k_dense_replace": 0},
        {"layer_types": ["full_attention", "sliding_attention"] * 3},
        {"swa_qk_rope_head_dim": 14, "attention_bias": True},
    ],
)
def test_published_fields_are_those_that_transformers_makes_of_them(changes: dict[str, Any]) -> None:
    ours = built({**PUBLISHED, **changes})
    assert ours == built(of_transformers(**changes))
    assert ours == built({"model_type": "dots3_note", "text_config": of_transformers(**changes)})


def test_layers_differ_as_published() -> None:
    """By default the first two and the second of each four others have an indexer, and no window."""
    attends = [op for layer in built(PUBLISHED).layers for op in layer.ops if isinstance(op, LatentAttention)]
    assert [op.window for op in attends] == [None, None, 12, 12, 12, None]
    assert [op.index is not None for op in attends] == [True, True, False, False, False, True]
    assert {(op.heads, op.rank, op.rotary_width) for op in attends if op.window} == {(2, 20, 14)}


def test_the_defaults_are_those_of_transformers() -> None:
    """Of fields that published configs leave out."""
    sizes = {**PLAIN, "model_type": "dots3_note_text", "num_key_value_heads": 4, "vocab_size": 264}
    assert built(sizes) == built(json.loads(AutoConfig.for_model(**sizes).to_json_string()))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", ["indexed_attention", "full_attention", *["sliding_attention"] * 4]),
        ("mlp_bias", True),
        ("moe_layer_freq", 0),
        ("moe_layer_freq", [1, 0]),
        ("n_group", 3),
        ("per_layer_config", {"0": {}}),
        ("per_layer_config", [1]),
        ("q_lora_rank", None),
        ("rope_parameters", {}),
        ("rope_parameters", {"indexed_attention": BASE}),
        ("rope_parameters", {"indexed_attention": BASE, "sliding_attention": {"rope_type": "default"}}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}),
        ("surprise", 1),
    ],
)
def test_what_is_not_computed_is_refused(field: str, value: object) -> None:
    config = json.loads(tiny_config("dots3_note_text", layers=6, context=512).to_json_string())
    with pytest.raises(ModelError, match=field):
        built({**config, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("swa_head_dim", 25), ("swa_head_dim", 10), ("swa_kv_lora_rank", 0), ("swa_num_key_value_heads", 1)],
)
def test_widths_of_a_window_that_do_not_fit_are_refused(field: str, value: object) -> None:
    with pytest.raises(ModelError, match="layers with a window"):
        built({**PUBLISHED, "swa_qk_rope_head_dim": 14, field: value})


def test_layers_with_a_window_that_differ_are_refused() -> None:
    config = of_transformers()
    config["per_layer_config"]["3"] = {**config["per_layer_config"]["3"], "v_head_dim": 17}
    with pytest.raises(
        ModelError, match=r"per_layer_config is .*, the same object for each of the layers 2, 3, 4 is needed"
    ):
        built(config)
