"""Rotary tables: our exp and log, and every scaling against transformers' own functions."""

import copy
import itertools
import json
import math
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from manyhands.errors import ModelError
from manyhands.program.families import FAMILIES, build_program
from manyhands.program.fields import Fields
from manyhands.program.ops import ScaleByPosition
from manyhands.program.rope import RopeReader, exp, log

YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": YARN,
    "yarn with scales": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 24, "beta_slow": 2},
    "yarn, not truncated": {**YARN, "truncate": False, "factor": 32.0},
    "longrope": {**LONG, "short_factor": [1.0 + i / 64 for i in range(64)], "long_factor": [2.0] * 64},
}


@given(st.floats(-690, 690))
def test_exp_is_within_two_roundings(x: float) -> None:
    assert exp(x) == pytest.approx(math.exp(x), rel=1e-15 * max(1.0, abs(x) / 4))


@given(st.floats(1e-300, 1e300))
def test_log_is_within_two_roundings(x: float) -> None:
    assert log(x) == pytest.approx(math.log(x), rel=5e-16, abs=5e-16)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0, 8000000.0])
def test_frequencies_are_those_of_transformers(name: str, theta: float) -> None:
    """To a few units of fp32's last place: pow rounds otherwise, and the sum of yarn's two parts cancels in fp32."""
    parameters = {**SCALINGS[name], "rope_theta": theta}
    shape = {"hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 163840}
    config = LlamaConfig(**shape, rope_parameters=dict(parameters))
    theirs, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    reader = RopeReader(Fields({**shape, "rope_parameters": parameters}))
    ours = reader.plain(128)
    assert ours.factor == pytest.approx(factor, rel=1e-12)
    assert torch.tensor(ours.frequencies).tolist() == list(ours.frequencies), "frequencies are fp32 values"
    torch.testing.assert_close(torch.tensor(ours.frequencies), theirs, rtol=3e-6 if "yarn" in name else 3e-7, atol=0)


def test_the_old_form_means_the_same() -> None:
    old = {"rope_theta": 500000.0, "rope_scaling": {**SCALINGS["linear"], "type": "linear"}}
    del old["rope_scaling"]["rope_type"]  # type: ignore[attr-defined]
    new = {"rope_parameters": {**SCALINGS["linear"], "rope_theta": 500000.0}}
    assert RopeReader(Fields(old)).plain(64) == RopeReader(Fields(new)).plain(64)


def test_queries_that_grow_are_scaled_from_the_original_length_on() -> None:
    """Ministral 3: from position 16,384 on queries are multiplied by a number above 1, over the whole context."""
    scaling = {**YARN, "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1, "type": "yarn"}
    config = {"max_position_embeddings": 262144, "rope_parameters": scaling}
    reader = RopeReader(Fields(config), growing=True)
    reader.plain(128)
    assert reader.context == 262144
    assert reader.query_scale() == ScaleByPosition("q", 0.1, 16384)
    with pytest.raises(ModelError, match="llama_4_scaling_beta"):
        RopeReader(Fields(config)).plain(128)
    with pytest.raises(ModelError, match="llama_4_scaling_beta is None"):
        RopeReader(Fields({"rope_parameters": YARN}), growing=True).query_scale()
    with pytest.raises(ModelError, match=r"llama_4_scaling_beta is -0\.1, a number from 0 is needed"):
        RopeReader(Fields({"rope_parameters": {**scaling, "llama_4_scaling_beta": -0.1}}), growing=True).query_scale()
    unscaled = {"rope_parameters": {**scaling, "llama_4_scaling_beta": 0}}
    assert RopeReader(Fields(unscaled), growing=True).query_scale() is None


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_an_original_length_outside_counts_where_transformers_reads_it(kind: str) -> None:
    """Within rotary fields of ministral3, beside them, in both places, in none, which transformers cannot compute."""
    scaling = {**SCALINGS.get(kind, {}), "rope_type": kind, "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
    del scaling["original_max_position_embeddings" if kind in ("llama3", "yarn") else "rope_theta"]
    for inside, outside in itertools.product(({"original_max_position_embeddings": 64}, {}), (32, None)):
        given: dict[str, Any] = {"max_position_embeddings": 4096, "rope_parameters": {**scaling, **inside}}
        given |= {} if outside is None else {"original_max_position_embeddings": outside}
        theirs = CONFIG_MAPPING["ministral3"](**copy.deepcopy(given))
        theirs.standardize_rope_params()  # as the model does, before it computes its table
        reader = RopeReader(Fields(given), growing=True)
        if length := theirs.rope_parameters.get("original_max_position_embeddings"):
            assert reader.query_scale() == ScaleByPosition("q", 0.1, length)
        else:
            with pytest.raises(ModelError, match="original_max_position_embeddings is None, a whole number from 1"):
                reader.query_scale()


def test_an_original_length_outside_is_not_that_of_tables_by_type() -> None:
    scaling = {**YARN, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    given: dict[str, Any] = {"max_position_embeddings": 4096, "original_max_position_embeddings": 32}
    given["rope_parameters"] = {"full_attention": scaling}
    theirs = CONFIG_MAPPING["mellum"](**copy.deepcopy(given), head_dim=64, layer_types=["full_attention"] * 28)
    wanted, _ = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"), layer_type="full_attention")
    ours = RopeReader(Fields(given)).by_type("full_attention", 64, theta=1e4, scaled=True)
    torch.testing.assert_close(torch.tensor(ours.frequencies), wanted, rtol=3e-6, atol=0)


def test_a_length_before_a_scaling_is_not_guessed_of_one_by_lings_name() -> None:
    """transformers reads model_max_length behind rotary fields, for which the family's own length counts then."""
    from manyhands.testing.tiny import tiny_config

    config = json.loads(tiny_config("bailing_hybrid", layers=3, context=512).to_json_string())
    config["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    del config["model_max_length"]
    given = {**config, "max_position_embeddings": 512}
    for name, length in (("max_position_embeddings", 512), ("model_max_length", 1 << 18)):
        theirs = CONFIG_MAPPING["bailing_hybrid"].from_dict(copy.deepcopy({**config, name: 512}))
        assert theirs.rope_parameters["original_max_position_embeddings"] == length
    stated = {**given["rope_parameters"], "original_max_position_embeddings": 512}
    assert build_program(given) == build_program({**given, "rope_parameters": stated})
    with pytest.raises(ModelError, match="original_max_position_embeddings is None, a whole number from 1"):
        build_program({**config, "model_max_length": 512})


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_scalings_that_switch_hold_the_model_to_the_length_before(kind: str) -> None:
    given = {"rope_type": kind, "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    given = given if kind == "longrope" else {"rope_type": kind, "factor": 4.0}
    fields = Fields(
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 1024, "rope_scaling": given},
    )
    reader = RopeReader(fields)
    reader.plain(16)
    assert reader.context == 1024


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rope_type": "spiral"}, "rope_type is 'spiral', supported are default, linear"),
        ({"rope_type": ["yarn"]}, "rope_type is"),
        ({"rope_type": "linear"}, "factor is None, a number from 1e-30 to 1e+15 is needed"),
        ({"rope_type": "linear", "factor": -1}, "factor is -1"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_theta": 0.5}, "rope_theta is 0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"mrope_section": [1, 2]}, "mrope_section is"),
        ({**LONG, "short_factor": [1.0, 2.0]}, "short_factor is .*, a list of 8 positive numbers"),
        ({**LONG, "short_factor": "x" * 8}, "short_factor is .*, a list of 8 positive numbers"),
        ({"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings is None"),
        ({**LONG, "short_factor": [1.0] * 8}, "factor is None"),
        (
            {**LONG, "short_factor": [1.0] * 8, "factor": 2.0, "original_max_position_embeddings": 1},
            "original_max_position_embeddings is 1, a whole number from 2 is needed",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match="rope_parameters: " + message.replace("+", "[+]")):
        RopeReader(Fields({"rope_parameters": given})).plain(16)


# The last two are read by ministral3 and mistral4 alone.
LINEAR: dict[str, Any] = {
    "rope_type": "linear",
    "factor": 2.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.1,
}
# As configs write them: fields beside the others, in an object, in both.
PLACES: dict[str, dict[str, Any]] = {
    "nowhere": {},
    "beside": {"rope_theta": 12345.0},
    "without a base": {"rope_parameters": LINEAR},
    "old": {"rope_theta": 12345.0, "rope_scaling": LINEAR},
    "new": {"rope_parameters": {**LINEAR, "rope_theta": 12345.0}},
    "in both": {"rope_theta": 777.0, "rope_parameters": {**LINEAR, "rope_theta": 12345.0}},
}
# Where a family has a base frequency of another name or tables by type of layer: one line says so.
REFUSED = {
    "beam": set(PLACES) - {"nowhere"},
    "codegen": set(PLACES) - {"nowhere"},
    "cohere_compass_text": set(PLACES),
    "dots3_note_text": {"without a base", "old", "new", "in both"},
    "gptj": set(PLACES) - {"nowhere"},
    "gpt_neox": {"beside", "old", "in both"},
    "gemma3_text": {"without a base", "new", "in both"},
    "gemma3n_text": {"without a base", "new", "in both"},
    "gemma4_text": set(PLACES) - {"nowhere"},
    "gemma4_unified_text": set(PLACES) - {"nowhere"},
    "laguna": set(PLACES) - {"nowhere"},
    "lfm3": set(PLACES) - {"nowhere", "beside"},
    "mellum": set(PLACES) - {"nowhere"},
    "cohere2_moe": {"old"},
    "mimo_v2_flash": set(PLACES) - {"nowhere"},
    "muse_spark_text": {"beside"},
    "olmo3": {"without a base", "new", "in both"},
    "inkling_text": set(PLACES) - {"nowhere"},
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2"), set(PLACES) - {"nowhere"}),
    **dict.fromkeys(("biogpt", "bloom", "mpt", "gpt2", "gpt_bigcode", "gpt_neo", "opt"), set(PLACES) - {"nowhere"}),
    "jamba": {"old", "without a base", "new", "in both"},
    "nemotron_h": {"old", "without a base", "new", "in both"},
    "phi3": set(PLACES) - {"nowhere", "beside"},
    "phimoe": set(PLACES) - {"nowhere", "beside"},
    "step3p5": {"without a base", "new", "in both"},
}


@pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "family",
    sorted(
        FAMILIES.keys() - {"glm5_next_text", "kimi_k2", "minimax_m1", "minimax_text_01", "nanbeige", "nemotron-nas"}
    ),
)
def test_rotary_fields_mean_what_transformers_makes_of_them(family: str, place: str) -> None:
    """The tables of a config, wherever it has the fields, are those of the config as transformers normalises it."""
    from manyhands.testing.tiny import tiny_config

    config = json.loads(tiny_config(family, layers=3, context=512).to_json_string())
    config = {key: value for key, value in config.items() if not key.startswith(("rope_", "time_step_", "layer_rope_"))}
    config |= copy.deepcopy(PLACES[place])
    if family not in ("ministral3", "mistral4"):
        for field in ("rope_scaling", "rope_parameters"):
            config.get(field, {}).pop("llama_4_scaling_beta", None)
    try:
        normal = CONFIG_MAPPING[family].from_dict(copy.deepcopy(config)).to_dict()
        ours = build_program(config)
    except (ModelError, StrictDataclassError) as error:
        assert place in REFUSED.get(family, ()), error
        return
    assert place not in REFUSED.get(family, ())
    assert ours.ropes == build_program(normal).ropes


TABLES: dict[str, dict[str, Any]] = {
    "full_attention": {"rope_type": "default", "rope_theta": 54321.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 4321.0},
}
# Where families with a table for each type of layer may have rotary fields.
BY_TYPE: dict[str, dict[str, Any]] = {
    "no tables": {"rope_parameters": {}},
    "one table": {"rope_parameters": {"sliding_attention": TABLES["sliding_attention"]}},
    "a null table": {"rope_parameters": {**TABLES, "full_attention": None}},
    "tables and a scaling": {"rope_parameters": TABLES, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "a scaling by an old name": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "a table by an old name": {"rope_parameters": {**TABLES, "full_attention": {"type": "linear", "factor": 4.0}}},
    "a base beside": {"rope_theta": 777.0},
    "a base beside tables": {"rope_theta": 777.0, "rope_parameters": TABLES},
    "a base beside tables without": {
        "rope_theta": 777.0,
        "rope_parameters": {kind: {"rope_type": "default"} for kind in TABLES},
    },
}


@pytest.mark.parametrize("place", BY_TYPE)
@pytest.mark.parametrize("family", ["gemma3_text", "gemma3n_text", "olmo3"])
def test_tables_by_type_mean_what_transformers_makes_of_them(family: str, place: str) -> None:
    from manyhands.testing.tiny import tiny_config

    config = json.loads(tiny_config(family, layers=4, context=512).to_json_string())
    config = {key: value for key, value in config.items() if not key.startswith("rope_")}
    config |= copy.deepcopy(BY_TYPE[place])
    normal = CONFIG_MAPPING[family].from_dict(copy.deepcopy(config)).to_dict()
    assert build_program(config).ropes == build_program(normal).ropes


@pytest.mark.parametrize("family", ["gemma4_text", "gemma4_unified_text", "mellum", "mimo_v2_flash"])
def test_a_scaling_beside_tables_is_refused_where_transformers_takes_it_for_all_of_them(family: str) -> None:
    from manyhands.testing.tiny import tiny_config

    config = json.loads(tiny_config(family, layers=4, context=512).to_json_string())
    with pytest.raises(ModelError, match=r"rope_scaling is \{.*, only None is supported"):
        build_program({**config, "rope_scaling": TABLES})


@pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated")
@pytest.mark.parametrize("family", ["beam", "cohere_compass_text"])
@pytest.mark.parametrize("beside", [{}, {"rope_parameters": TABLES}])
def test_a_scaling_is_refused_where_transformers_takes_it_as_it_stands_for_the_tables(
    family: str, beside: dict[str, Any]
) -> None:
    from manyhands.testing.tiny import tiny_config

    config = json.loads(tiny_config(family, layers=4, context=512).to_json_string())
    config = {name: value for name, value in config.items() if name != "rope_parameters"} | copy.deepcopy(beside)
    other = {kind: {**table, "rope_theta": 99.0} for kind, table in TABLES.items()}
    theirs = CONFIG_MAPPING[family].from_dict(copy.deepcopy({**config, "rope_scaling": other}))
    assert theirs.rope_parameters == other
    with pytest.raises(ModelError, match=r"rope_scaling is \{.*, only None is supported"):
        build_program({**config, "rope_scaling": other})


@pytest.mark.parametrize(
    ("family", "is_read"),
    [
        ("dots1", False),
        ("exaone_moe", False),
        ("glm4_moe", True),
        ("hy_v3", False),
        ("minimax", False),
        ("solar_open", True),
    ],
)
def test_a_part_of_a_head_turns_where_the_class_in_transformers_reads_it(family: str, is_read: bool) -> None:
    """Elsewhere whole heads turn there, whatever their rotary fields say of a part."""
    from manyhands.testing.tiny import tiny_config

    rotary = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    made = tiny_config(family, layers=3, context=512, head_dim=16, rope_parameters=rotary)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(made).model.rotary_emb.inv_freq
    config = json.loads(made.to_json_string())
    assert len(theirs) == (4 if is_read else 8)
    if is_read:
        assert len(build_program(config).ropes[0].frequencies) == 4
        return
    with pytest.raises(ModelError, match=r"partial_rotary_factor is 0\.5, only 1\.0 is supported"):
        build_program(config)


@pytest.mark.parametrize("family", ["glm4_moe", "minimax_m3_vl_text", "qwen4_exp_text"])
def test_a_part_that_turns_in_proportion_may_stand_outside(family: str) -> None:
    from manyhands.testing.tiny import tiny_config

    config = json.loads(tiny_config(family, layers=3, context=512).to_json_string())
    config |= {"partial_rotary_factor": 0.25, "rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}
    made = CONFIG_MAPPING[family].from_dict(copy.deepcopy(config))
    wanted, factor = ROPE_INIT_FUNCTIONS["proportional"](made, torch.device("cpu"))
    (ours,) = build_program(config).ropes
    assert factor == ours.factor == 1.0 and 0.0 in ours.frequencies
    torch.testing.assert_close(torch.tensor(ours.frequencies), wanted, rtol=3e-7, atol=0)
