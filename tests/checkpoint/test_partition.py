"""Which tensor belongs where."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from manyhands.checkpoint import partition
from manyhands.checkpoint.partition import (
    ModelFacts,
    end_role,
    ends_bytes,
    ends_tensors,
    is_tied,
    layer_bytes,
    layer_of,
    longest_run,
    needed_tensors,
    span_tensors,
    tensor_bytes,
    whole_layers,
)
from manyhands.core import Precision, Span
from manyhands.engine import golden_models
from manyhands.errors import CutError, ModelError
from manyhands.program.families import build_program
from manyhands.program.tensors import ends_tensors as of_ends
from manyhands.program.tensors import layer_tensors

GOLDEN: dict[str, dict[str, Any]] = json.loads(golden_models.FILE.read_text())
ENDS = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
LAYERS = [f"model.layers.{index}.{part}.weight" for index in range(12) for part in ("attn", "mlp")]
NAMES = ENDS + LAYERS


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.11.self_attn.q_proj.weight", 11),
        ("transformer.h.3.attn.bias", 3),
        ("h.3.ln.weight", 3),
        ("blocks.0.w", 0),
        ("gpt_neox.layers.2.w", 2),
        ("model.layers.3.mlp.experts.7.w1.weight", 3),
        ("model.decoder.layers.5.w", 5),
        ("model.norm.weight", None),
        ("lm_head.weight", None),
        ("mtp.layers.0.w", None),
        ("model.mtp.layers.0.w", None),
        ("mtp_dspark.layers.0.w", None),
        ("lerope.alpha", None),
        ("model.xlayers.2.w", None),
        ("model.altup_projections.2.weight", 0),  # of Gemma 3n
        ("model.per_layer_model_projection.weight", 0),
        ("model.per_layer_projection_norm.weight", 0),
        ("model.layers.3.per_layer_projection.weight", 3),
        ("model.altup_unembed_projections.2.weight", None),
        ("model.embed_tokens_per_layer.weight", None),
        ("model.llm.embed_norm.weight", 0),  # of Inkling
        ("transformer.wpe.weight", 0),
        ("transformer.word_embeddings_layernorm.bias", 0),
        ("transformer.word_embeddings.weight", None),
        ("model.decoder.embed_positions.weight", 0),
        ("biogpt.embed_positions.weight", 0),
        ("model.decoder.embed_tokens.weight", None),
    ],
)
def test_layer_is_read_from_the_name(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.embed_tokens.weight", "embed"),
        ("transformer.wte.weight", "embed"),
        ("gpt_neox.embed_in.weight", "embed"),
        ("embed_out.weight", "head"),  # not an embedding, in spite of its name
        ("lm_head.weight", "head"),
        ("output_projection.weight", "head"),  # BioGPT
        ("model.norm.weight", "norm"),
        ("transformer.ln_f.bias", "norm"),
        ("model.something_new.weight", "norm"),
        ("model.embed_tokens_per_layer.weight", "embed"),
        ("model.altup_unembed_projections.0.weight", "norm"),
        ("model.embedding_norm.weight", "norm"),  # of LFM2, in spite of its name
        ("model.llm.embed.weight", "embed"),
        ("model.llm.unembed.weight", "head"),
    ],
)
def test_roles_of_the_ends(name: str, role: str) -> None:
    assert end_role(name) == role


def test_span_takes_its_layers_only() -> None:
    assert span_tensors(NAMES, Span(1, 2)) == ["model.layers.1.attn.weight", "model.layers.1.mlp.weight"]
    assert len(span_tensors(NAMES, Span(10, 12))) == 4


def test_what_all_layers_have_in_common_belongs_to_every_span_and_to_no_end() -> None:
    """Learnt factors of rotary frequencies (Mistral Large 4)."""
    names = ["lerope.alpha", *NAMES]
    for span in (Span(0, 1), Span(3, 7)):
        assert span_tensors(names, span) == ["lerope.alpha", *span_tensors(NAMES, span)]
        assert needed_tensors(names, 12, span, False) == ["lerope.alpha", *needed_tensors(NAMES, 12, span, False)]
    assert ends_tensors(names) == ends_tensors(NAMES)
    assert needed_tensors(names, 12, None, True) == sorted(names)
    assert whole_layers(names, set(NAMES), 12) == [] and whole_layers(names, set(names), 12) == [Span(0, 12)]
    with pytest.raises(ModelError, match="layer 12"):
        span_tensors(names, Span(12, 13))


def test_whole_layers_are_those_of_which_every_tensor_is_held() -> None:
    held = set(NAMES) - {"model.layers.3.attn.weight", "model.layers.11.mlp.weight", "model.norm.weight"}
    assert whole_layers(NAMES, held, 12) == [Span(0, 3), Span(4, 11)]
    assert whole_layers(NAMES, set(), 12) == []
    with pytest.raises(ModelError, match=r"no tensors of layer 12 \(as in model\.layers\.12"):
        whole_layers(NAMES, held, 1 << 32)


def test_each_name_is_looked_at_once_to_find_whole_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 449,000 names and 4,096 layers each was for every layer: twenty minutes."""
    looked: list[str] = []

    def noted(name: str) -> int | None:
        looked.append(name)
        return layer_of(name)

    monkeypatch.setattr(partition, "layer_of", noted)
    assert whole_layers(NAMES, set(NAMES), 12) == [Span(0, 12)]
    assert looked == NAMES


def test_missing_layer_is_named() -> None:
    names = [name for name in NAMES if ".7." not in name]
    with pytest.raises(ModelError, match=r"layer 7 .*model\.layers\.7"):
        span_tensors(names, Span(6, 9))


def test_untied_ends_split_into_embedding_and_head() -> None:
    assert ends_tensors(NAMES) == sorted(ENDS)
    assert ends_tensors(NAMES, head=False) == ["model.embed_tokens.weight"]
    assert ends_tensors(NAMES, embed=False) == ["lm_head.weight", "model.norm.weight"]
    assert not is_tied(NAMES)


@pytest.mark.parametrize("family", GOLDEN)
def test_a_node_with_a_part_has_what_its_program_reads(family: str) -> None:
    """Of every family. One that fetched the ends of LFM2, or of OLMo, whose last norm has no weights, was told that there is
    no norm."""
    program = build_program({"model_type": family, **GOLDEN[family]})
    ends = [of_ends(program, embed=embed, head=head) for embed, head in ((True, False), (False, True))]
    layers = [set(layer_tensors(layer)) for layer in program.layers]
    names = sorted({*ends[0], *ends[1]}.union(*layers))
    for i, wanted in enumerate(layers):
        assert wanted <= {*span_tensors(names, Span(i, i + 1))}
    assert {*ends[0]} <= {*ends_tensors(names, head=False)} and {*ends[1]} <= {*ends_tensors(names, embed=False)}
    assert needed_tensors(names, len(layers), None, True) == names


def test_tied_head_needs_the_embedding_once() -> None:
    tied = [name for name in NAMES if name != "lm_head.weight"]
    both = ["model.embed_tokens.weight", "model.norm.weight"]
    assert is_tied(tied)
    assert ends_tensors(tied) == both
    assert ends_tensors(tied, embed=False) == both
    assert ends_tensors(tied, head=False) == both[:1]


def test_absent_ends_are_named() -> None:
    with pytest.raises(ModelError, match="no tensor for embed"):
        ends_tensors(["model.norm.weight"], head=False)
    with pytest.raises(ModelError, match="no tensor for embed"):  # a tied head
        ends_tensors(["model.norm.weight"], embed=False)


def test_layers_past_the_count_are_needed_by_no_node() -> None:
    """DeepSeek-V3 stores its multi-token-prediction layer as layer 61 of 61, GLM-4.5-Air as 46 of 46, ERNIE 4.5 by names."""
    extra = [
        *NAMES,
        "model.layers.12.attn.weight",
        "mtp.fc.weight",
        "mtp.layers.0.w",
        "model.mtp_block.0.mlp.weight",
        "model.mtp.norm.w",
        "mtp_dspark.layers.0.attention.wq.weight",
    ]
    assert needed_tensors(extra, 12, None, True) == sorted(NAMES)


def test_needed_refuses_layers_that_do_not_exist() -> None:
    with pytest.raises(CutError, match="out of range"):
        needed_tensors(NAMES, 12, Span(11, 13), False)


def test_bytes_are_what_memory_holds() -> None:
    """Vectors are held in fp32, matrices of 16 bits as they are stored, also in fp32; a tied head is held once."""
    matrix, vector = Tensor("model.layers.1.w", "BF16", (6, 10)), Tensor("model.layers.1.n", "BF16", (6,))
    wide, embed = Tensor("model.layers.0.w", "F32", (6, 10)), Tensor("model.embed_tokens.weight", "BF16", (4, 10))
    head = Tensor("lm_head.weight", "BF16", (4, 10))
    sizes: list[tuple[Precision, int]] = [("bf16", 144), ("fp16", 144), ("fp32", 144), ("w8", 64 + 24), ("w4", 34 + 24)]
    for precision, want in sizes:
        assert layer_bytes([matrix, vector, head], 2, precision) == [0, want]
    assert [layer_bytes([wide], 1, precision) for precision in ("fp32", "bf16")] == [[240], [120]]
    assert layer_bytes([matrix, vector], 2, "w4", {matrix.name}) == [0, 120 + 24]
    assert [ends_bytes([matrix, head], p) for p in ("bf16", "fp32", "w8", "w4")] == [80, 80, 43, 43]
    assert ends_bytes([embed, head], "bf16") == 160


def test_integers_keep_their_size() -> None:
    assert tensor_bytes(Tensor("x", "I64", (3,)), "bf16") == 24
    assert tensor_bytes(Tensor("x", "U8", (3, 2)), "w8") == 6


def test_facts_are_read_from_any_common_config() -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "vocab_size": 9, "n_positions": 32}
    assert ModelFacts.from_config(gpt2) == ModelFacts("gpt2", "unknown", 2, 8, 9, 32)


@pytest.mark.parametrize("value", [None, 0, -1, "6", True, 1 << 40])
def test_config_without_layers_is_refused(value: Any) -> None:
    with pytest.raises(ModelError, match="num_hidden_layers"):
        ModelFacts.from_config({"num_hidden_layers": value, "hidden_size": 8, "vocab_size": 9})


def test_the_longest_run_of_layers_that_a_folder_holds() -> None:
    """Layers past the model's count, the ends and gaps do not count."""
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1, 4, 5, 6, 9, 12, 13, 14, 15)]
    assert longest_run(["lm_head.weight", *names], 12) == Span(4, 7)
    assert longest_run(names, 16) == Span(12, 16)
    with pytest.raises(CutError, match="holds no layers"):
        longest_run(["model.norm.weight"], 12)


def test_a_config_may_list_its_layers_and_not_count_them() -> None:
    sizes = {"hidden_size": 8, "vocab_size": 9}
    assert ModelFacts.from_config({**sizes, "layers_block_type": ["mlp", "moe", "mlp"]}).num_layers == 3
    assert ModelFacts.from_config({**sizes, "num_hidden_layers": 2, "layers_block_type": ["mlp"]}).num_layers == 2
    with pytest.raises(ModelError, match="num_hidden_layers"):
        ModelFacts.from_config({**sizes, "layers_block_type": []})
