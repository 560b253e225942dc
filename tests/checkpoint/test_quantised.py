"""What quantization_config may say, and how tensors become matrices. Hostile configs and headers are refused in one line."""

from typing import Any, NamedTuple

import pytest

from manyhands.checkpoint.folded import Folded, folded
from manyhands.checkpoint.quantised import Quantised, read_quantised
from manyhands.checkpoint.text_part import text_config
from manyhands.errors import ModelError
from tests.mxfp4_files import PACKED_MXFP4
from tests.quantised_files import MODELOPT, PACKED_FLOAT4

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": WEIGHTS}},
}

BITNET = {"quant_method": "bitnet", "linear_class": "autobitlinear"}


def scheme_of(config: dict[str, Any], **weights: Any) -> dict[str, Any]:
    return {"weights": {**config["config_groups"]["group_0"]["weights"], **weights}}


def packed_float4(**weights: Any) -> dict[str, Any]:
    return {**PACKED_FLOAT4, "config_groups": {"group_0": scheme_of(PACKED_FLOAT4, **weights)}}


def packed_mxfp4(**weights: Any) -> dict[str, Any]:
    return {**PACKED_MXFP4, "config_groups": {"group_0": scheme_of(PACKED_MXFP4, **weights)}}


BOTH_FLOAT4 = {"nv": scheme_of(PACKED_FLOAT4), "mx": scheme_of(PACKED_MXFP4)}
FLOAT8 = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}


def mixed(layer: Any) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"model.layers.0.mlp": layer},
    }


class Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]


def read(given: Any) -> Quantised | None:
    return read_quantised({"quantization_config": given})


def test_what_is_read() -> None:
    assert read_quantised({}) is None
    assert read({"quant_method": "gguf"}) is None
    assert read(AWQ) == Quantised("awq", 4, 128)
    assert read({**GPTQ, "bits": 8, "sym": False, "checkpoint_format": "gptq_v2"}) == Quantised(
        "gptq", 8, 128, False, True
    )
    assert read(INT4) == Quantised("compressed-tensors", 4, 128)
    assert read({"quant_method": "fp8", "weight_block_size": [128, 64]}) == Quantised("fp8", 8, tile=(128, 64))
    for more in ({}, {"weight_block_size": [1, 32], "scale_fmt": "ue8m0"}):
        assert read({"quant_method": "mxfp8", **more}) == Quantised("fp8", 8, tile=(1, 32))
    assert read({"quant_method": "mxfp4"}) == Quantised("mxfp4", 4, 32, symmetric=True)
    float4 = Quantised("modelopt", 4, 16, has_float4=True)
    assert [read(each) for each in (MODELOPT, mixed({"quant_algo": "NVFP4"}))] == [float4, float4]
    assert read(mixed({"quant_algo": "FP8"})) == Quantised("modelopt", 8)
    assert read(mixed({"quant_algo": "MXFP8"})) == Quantised("modelopt", 8, tile=(1, 32))
    assert read(PACKED_FLOAT4) == Quantised("compressed-tensors", 4, 16, has_float4=True)
    mx = Quantised("compressed-tensors", 4, 32, has_float4=True)
    without_forms = {key: value for key, value in packed_mxfp4().items() if key != "format"}
    assert [read(each) for each in (PACKED_MXFP4, without_forms, packed_mxfp4(zp_dtype="torch.uint8"))] == [mx] * 3
    assert mx.is_partial and read(packed_mxfp4(actorder="static")) == mx
    beside = {"config_groups": {"group_0": scheme_of(PACKED_MXFP4), "group_1": FLOAT8}, "format": "mixed-precision"}
    assert read({**PACKED_MXFP4, **beside}) == mx
    assert read(BITNET) == Quantised("bitnet", 2, ternary="times")
    for mode in ("offline", "online"):
        found = read({"quant_method": "bitnet", "quantization_mode": mode})
        assert found == Quantised("bitnet", 2, ternary="over")
    config = {"model_type": "mistral3", "text_config": {"quantization_config": AWQ}}
    assert read_quantised(text_config(config)) == Quantised("awq", 4, 128)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            "NF4.*checkpoint in bf16 with --dtype",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]; two whole numbers"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "two whole numbers from 1 are needed"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'; read is 'e4m3'"),
        (
            {"quant_method": "hqq"},
            "read are awq, gptq, compressed-tensors, mxfp4, fp8, mxfp8, fbgemm_fp8, modelopt, bitnet, gguf",
        ),
        ({}, "quant_method is None; read are awq"),
        ({"quant_method": ["awq"]}, "read are awq"),
        ("awq", "must be an object"),
        ({**AWQ, "bits": 3}, "bits is 3; read is 4"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv'; read is 'gemm'"),
        ({**AWQ, "backend": "llm-awq"}, "backend is 'llm-awq'"),
        ({**AWQ, "zero_point": False}, "zero_point is False; read is True"),
        ({**AWQ, "group_size": 0}, "group_size is 0; -1 or a whole number from 1"),
        ({**AWQ, "group_size": 1 << 40}, "group_size is 1099511627776"),
        ({**AWQ, "group_size": "128"}, "group_size is '128'"),
        ({**GPTQ, "bits": 2}, "bits is 2; read is 4 or 8"),
        ({**GPTQ, "bits": True}, "bits is True; read is 4 or 8"),
        ({**GPTQ, "sym": "yes"}, "sym is 'yes'; true or false"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({**GPTQ, "dynamic": {"-:.*": {}}}, "modules with rules of their own"),
        ({**INT4, "format": "float-quantized"}, "format is 'float-quantized'; read is 'pack-quantized'"),
        ({**INT4, "format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'"),
        ({**INT4, "config_groups": {}}, "a group with weights is needed"),
        (
            {**INT4, "config_groups": {"g": {"weights": {**WEIGHTS, "type": "float"}}}},
            "group_size is 128; read is 32",
        ),
        ({**INT4, "config_groups": {"g": {"weights": {**WEIGHTS, "num_bits": 6}}}}, "num_bits is 6"),
        ({**INT4, "config_groups": {"g": {"weights": {**WEIGHTS, "strategy": "block"}}}}, "strategy is 'block'"),
        (
            {**INT4, "config_groups": {"a": {"weights": WEIGHTS}, "b": {"weights": {**WEIGHTS, "num_bits": 8}}}},
            "different num_bits",
        ),
        ({**INT4, "transform_config": {"config_groups": {"R1": {}}}}, "transform_config.*changes the arithmetic"),
        ({**INT4, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.*changes the arithmetic"),
        ({**PACKED_FLOAT4, "format": "pack-quantized"}, "format is 'pack-quantized'; read is 'nvfp4-pack-quantized'"),
        (packed_float4(group_size=32), "group_size is 32; read is 16"),
        (packed_float4(strategy="group"), "group_size is 16; read is 32"),
        (packed_float4(strategy="channel"), "strategy is 'channel'; read is 'tensor_group' or 'group'"),
        (packed_float4(surprise=1), r"config_groups is \['surprise'\]; fields of weights that are not known"),
        (packed_float4(num_bits=6), "num_bits is 6; read is 8 or 4"),
        (packed_mxfp4(group_size=16), "group_size is 16; read is 32"),
        (packed_mxfp4(group_size=None), "group_size is None; read is 32"),
        (packed_mxfp4(symmetric=False), "symmetric is False; read is True"),
        (packed_mxfp4(num_bits=6), "num_bits is 6; read is 8 or 4"),
        (
            packed_mxfp4(global_scale=True, a=1),
            r"config_groups is \['a', 'global_scale'\]; fields of weights that are not",
        ),
        ({**PACKED_MXFP4, "format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized'; read is 'mxfp4-pack-quantized'"),
        ({**PACKED_MXFP4, "format": "mxfp6-pack-quantized"}, "'mxfp6-pack-quantized'; read is 'mxfp4-pack-quantized'"),
        ({**PACKED_MXFP4, "format": "mixed-precision"}, "'mixed-precision'; read is 'mxfp4-pack-quantized'"),
        ({**PACKED_MXFP4, "config_groups": BOTH_FLOAT4}, "NVFP4 and MXFP4 beside each other are not read"),
        ({**MODELOPT, "quant_algo": "NVFP4_AWQ"}, "quant_algo is 'NVFP4_AWQ'; read is 'NVFP4' or 'W4A16_NVFP4'"),
        ({**MODELOPT, "quant_algo": None}, "quant_algo is None; read is"),
        ({**MODELOPT, "group_size": 32}, "group_size is 32; read is 16"),
        ({"quant_method": "modelopt", "quantization": []}, r"quantization is \[\]; an object"),
        ({**MODELOPT, "quant_algo": "MIXED_PRECISION"}, "quantized_layers is None; an object of objects"),
        (mixed({"quant_algo": "W4A8_AWQ"}), "quant_algo is 'W4A8_AWQ'; read is"),
        (mixed({"quant_algo": "MIXED_PRECISION"}), "quant_algo is 'MIXED_PRECISION'; read is"),
        (mixed({"quant_algo": "NVFP4", "group_size": 64}), "group_size is 64; read is 16"),
        (mixed("NVFP4"), "an object of objects"),
        ({**BITNET, "linear_class": "other"}, "linear_class is 'other'; read is 'bitlinear' or 'autobitlinear'"),
        ({**BITNET, "quantization_mode": None}, "quantization_mode is None; read is 'offline' or 'online'"),
        ({**BITNET, "use_rms_norm": True}, "use_rms_norm is True; read is False"),
        ({**BITNET, "quantization_mode": "online"}, "'online'; which is read of the family bitnet alone"),
    ],
)
def test_what_is_not_read_is_refused_by_name(given: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said) as error:
        read(given)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_weights_that_a_model_rounds_are_those_of_its_layers() -> None:
    """By their names: a head that is named as rounded too is refused."""
    stem, head = "model.layers.0.mlp.up_proj", Tensor("lm_head.weight", "BF16", (512, 256))
    given = {**BITNET, "quantization_mode": "online", "modules_to_not_convert": ["lm_head"]}
    config: dict[str, Any] = {"model_type": "bitnet", "quantization_config": given}
    found = folded([head, Tensor(f"{stem}.weight", "BF16", (96, 256)), Tensor(f"{stem}.bias", "BF16", (96,))], config)
    assert found[2:] == [Folded(f"{stem}.weight", "TQ2_0", (96, 256))] and len(found) == 3
    given["modules_to_not_convert"] = []
    with pytest.raises(ModelError, match=r"modules_to_not_convert is \[\]; read is \['lm_head'\]"):
        folded([head], config)


def test_parts_become_the_matrix_that_they_are() -> None:
    stem, norm = "model.layers.0.mlp.up_proj", Tensor("model.layers.0.input_layernorm.weight", "F16", (64,))
    words = [
        Tensor(f"{stem}.qweight", "I32", (64, 12)),
        Tensor(f"{stem}.qzeros", "I32", (2, 12)),
        Tensor(f"{stem}.scales", "F16", (2, 96)),
    ]
    config: dict[str, Any] = {"quantization_config": AWQ}
    assert folded([norm, *words], config) == [norm, Folded(f"{stem}.weight", "Q4_Z", (96, 64))]
    assert folded([norm], {}) == [norm]
    experts = [Tensor("model.layers.0.mlp.experts.down_proj_blocks", "U8", (2, 96, 2, 16))]
    found = folded([*experts, norm], {"quantization_config": {"quant_method": "mxfp4"}})
    assert found == [norm, *(Folded(f"model.layers.0.mlp.experts.{i}.down_proj", "MXFP4", (96, 64)) for i in range(2))]


def test_a_header_of_many_experts_makes_no_more_than_a_bound() -> None:
    blocks = Tensor("model.layers.0.mlp.experts.down_proj_blocks", "U8", (2, 0, 1, 16))
    with pytest.raises(ModelError, match="which is none of mxfp4"):
        folded([blocks], {"quantization_config": {"quant_method": "mxfp4"}})
    with pytest.raises(ModelError, match="has the shape"):
        folded([Tensor("a.qweight", "I32", ())], {"quantization_config": AWQ})
    many = Tensor("model.layers.0.mlp.experts.down_proj_blocks", "U8", (1 << 40, 1, 1, 16))
    with pytest.raises(ModelError, match="1099511627776 experts; at most 4096"):
        folded([many], {"quantization_config": {"quant_method": "mxfp4"}})


def test_many_stacks_of_experts_make_no_more_than_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest of 200 KB took 1.7 GB and held a member's event loop for 21 s; its weights need not be anywhere."""
    monkeypatch.setattr("manyhands.checkpoint.folded.MAX_MATRICES", 10_000)
    stacks = [Tensor(f"x{i}.a_blocks", "U8", (4096, 1, 1, 16)) for i in range(3)]
    assert len(folded(stacks[:2], {"quantization_config": {"quant_method": "mxfp4"}})) == 8192
    with pytest.raises(ModelError, match=r"with x2\.a_blocks more than 10000 quantised matrices"):
        folded(stacks, {"quantization_config": {"quant_method": "mxfp4"}})


def test_tables_that_stay_in_their_files_are_refused() -> None:
    """What is converted is held in memory, where plans count none of them."""
    name = "model.layers.0.ple.ple_embedding.ngram_embedding.shard_7.weight"
    stored = [Tensor(name, "F8_E4M3", (64, 32)), Tensor(f"{name}_scale_inv", "F32", (1, 1))]
    with pytest.raises(
        ModelError, match=r"shard_7\.weight is stored as F8_E4M3: bf16, fp16 or fp32 is needed of a table"
    ):
        folded(stored, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
