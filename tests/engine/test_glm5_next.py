"""GLM-5.3-Flash (glm5_next) against transformers: logits in fp32 by every back end; bits whatever the cuts and steps."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, Glm5NextForConditionalGeneration

from manyhands.core import Precision, Span
from manyhands.engine import library
from manyhands.engine.span import Piece
from manyhands.engine.torch import TorchEnds, TorchSpan
from manyhands.errors import ContextOverflow, ModelError
from manyhands.program.families import build_program, read_program
from manyhands.testing.tiny import make_tiny
from tests.engine.test_kimi_k3 import native

PROMPT = [(37 * i * i + 11 * i) % 256 for i in range(75)]
TOLERANCE = 6e-5  # of the largest logit: fp32 sums in other orders; seen are 0.6e-5 to 4e-5
TEXT: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 0,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"],
    "layer_types": [
        "linear_attention",
        "indexed_attention",
        "linear_attention",
        "indexed_attention",
        "linear_attention",
    ],
    "index_topk": 72,
    "index_head_dim": 24,
    "index_n_heads": 5,
    "index_kpool": 8,
    "swiglu_limit": 0.7,
    "linear_head_dim": 20,
    "linear_num_heads": 3,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 5,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
    "projection_intermediate_size": 16,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "groups of experts": {"n_group": 4, "topk_group": 2},
    "two streams, biases": {"hc_mult": 2, "attention_bias": True, "index_kpool": 4, "index_topk": 76},
}


def stock(**overrides: Any) -> Any:
    """transformers' model, each tensor random by its name."""
    config = AutoConfig.for_model("glm5_next", text_config={**TEXT, **overrides}, vision_config=VISION)
    config._attn_implementation = "eager"
    model = Glm5NextForConditionalGeneration(config).eval()
    for number, (name, tensor) in enumerate(sorted(model.state_dict().items())):
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
        near_one = name.endswith(("norm.weight", "layernorm.weight", "hc.scale"))
        tensor.copy_(
            1 + 0.2 * noise if near_one else noise * (1.6 / tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else 0.4)
        )
    return model


def published(model: Any) -> dict[str, Tensor]:
    """The tensors of its text part as the publisher's checkpoints have them, which transformers reads."""
    out = dict[str, Tensor]()
    for name, tensor in model.state_dict().items():
        name = name.replace(".forget_gate.", ".").replace(".attn_hc.", ".hc_attn_").replace(".ffn_hc.", ".hc_ffn_")
        path, _, part = name.rpartition(".")
        if ".visual." in name:
            continue
        if name.endswith(".conv1d.weight"):
            parts = zip("qkv", tensor.chunk(3), strict=True)
            out |= {name.replace("conv1d", f"{kind}_conv1d"): each.clone() for kind, each in parts}
        elif part == "gate_up_proj":
            for i, both in enumerate(tensor):
                out |= {
                    f"{path}.{i}.{kind}_proj.weight": half.clone()
                    for kind, half in zip(("gate", "up"), both.chunk(2), strict=True)
                }
        elif part == "down_proj" and path.endswith(".experts"):
            out |= {f"{path}.{i}.down_proj.weight": one.clone() for i, one in enumerate(tensor)}
        else:
            out[name] = tensor.clone()
    return out


def make(folder: Path, model: Any, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """A checkpoint of the model in `folder`."""
    make_tiny("llama", folder)
    save_file({name: tensor.to(dtype) for name, tensor in published(model).items()}, folder / "model.safetensors")
    text = {**TEXT, **overrides, "model_type": "glm5_next_text"}
    whole = {"architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next", "text_config": text}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("back_end", library.supported())
def test_logits_are_those_of_transformers(variant: str, back_end: str, tmp_path: Path) -> None:
    model = stock(**VARIANTS[variant])
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPT]), use_cache=False).logits[0].numpy()
    ours = native(make(tmp_path, model, **VARIANTS[variant]), PROMPT, back_end=back_end)
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < TOLERANCE
    assert ours.argmax(-1).tolist() == theirs.argmax(-1).tolist()


@pytest.mark.parametrize("kept", ["bf16", "fp32", "w8", "w4"])
def test_bits_depend_neither_on_cuts_nor_on_steps(kept: Precision, tmp_path: Path) -> None:
    folder = make(tmp_path, stock(), torch.bfloat16)
    whole = native(folder, PROMPT, kept=kept)
    for cuts, chunk in (((2,), 75), ((1, 4), 75), ((2, 3), 7), ((), 1)):
        assert native(folder, PROMPT, cuts=cuts, chunk=chunk, kept=kept).tobytes() == whole.tobytes()


def test_torch_computes_layers_of_attention_the_same(tmp_path: Path) -> None:
    """It computes no states: a model all of whose layers have latent attention."""
    kinds: dict[str, Any] = {"layer_types": ["indexed_attention"] * 5}
    model = stock(**kinds)
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    program = read_program(make(tmp_path, model, **kinds))
    read = {name.replace(".language_model.", "."): tensor for name, tensor in published(model).items()}.__getitem__
    ends, span = TorchEnds(program, read), TorchSpan(program, Span(0, 5), read)
    piece = Piece(span.new_cache(len(PROMPT)), 0, len(PROMPT))
    ours = ends.logits(span.step(ends.embed(torch.tensor(PROMPT)), [piece]))
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < TOLERANCE


def test_the_context_is_that_in_which_all_positions_are_chosen(tmp_path: Path) -> None:
    """A row sees nine entries of eight positions, and up to seven behind them."""
    program = build_program({**TEXT, "model_type": "glm5_next_text"})
    assert program.context == 79
    model, ids = stock(), [*PROMPT, 1, 2, 3, 4]
    with torch.inference_mode():
        theirs = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    folder = make(tmp_path, model)
    ours = native(folder, ids)
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < TOLERANCE
    with pytest.raises(ContextOverflow):
        native(folder, [*ids, 5])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"index_topk": 73}, "index_topk is 73, a multiple of index_kpool, 8"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail is False"),
        ({"qk_rope_head_dim": 8}, "qk_rope_head_dim is 8, 0, and a q_lora_rank, are needed"),
        ({"linear_lower_bound": 1.0}, "linear_lower_bound is 1.0, a number below zero"),
        ({"linear_attn_config": {"safe_gate": False}}, "safe_gate is False"),
        ({"hc_mult": 9}, "hc_mult is 9"),
    ],
)
def test_what_is_wrong_of_a_config_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        build_program({**TEXT, "model_type": "glm5_next_text", **changes})


@pytest.mark.parametrize("field", TEXT)
def test_a_damaged_config_gives_a_program_or_one_line(field: str) -> None:
    values: tuple[Any, ...] = (None, True, -1, 0, 1.5, "x", [1], 1 << 40, {})
    for value in values:
        try:
            build_program({**TEXT, "model_type": "glm5_next_text", field: value})
        except ModelError as error:
            assert "\n" not in str(error)
