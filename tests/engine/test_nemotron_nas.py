"""nemotron-nas against plain torch (tests/nemotron_nas.py): logits in fp32 by every back end, cuts and steps, bad configs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.core import Precision
from manyhands.engine import library
from manyhands.errors import ModelError
from manyhands.program.families import build_program
from manyhands.program.ops import Product
from manyhands.testing.gguf import write_gguf
from tests.engine.test_kimi_k3 import native
from tests.engine.test_llama_cpp import IDS, their_logits
from tests.engine.test_llama_cpp import llama_cpp as llama_cpp
from tests.gguf_files import tokenizer_facts
from tests.kimi_k3 import tensors_of
from tests.nemotron_nas import CONFIG, Reference, block, make_nemotron_nas

PROMPT = [(37 * i * i + 11 * i) % 256 for i in range(40)]
TOLERANCE = 2e-5  # of the largest logit: fp32 against float64


@pytest.mark.parametrize("back_end", library.supported())
def test_logits_are_those_of_the_published_arithmetic(back_end: str, tmp_path: Path) -> None:
    theirs = Reference(CONFIG, tensors_of(CONFIG), build_program(CONFIG).ropes[0].frequencies).logits(PROMPT).numpy()
    ours = native(make_nemotron_nas(tmp_path), PROMPT, back_end=back_end)
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < TOLERANCE
    assert ours.argmax(-1).tolist() == theirs.argmax(-1).tolist()


@pytest.mark.parametrize("kept", ["bf16", "fp32", "w8", "w4"])
def test_bits_depend_neither_on_cuts_nor_on_steps(kept: Precision, tmp_path: Path) -> None:
    """Also where a span has no attention."""
    folder = make_nemotron_nas(tmp_path, torch.bfloat16)
    whole = native(folder, PROMPT, kept=kept)
    for cuts, chunk in (((4,), 64), ((2, 3, 5, 6), 64), ((1, 5), 7), ((), 1)):
        assert native(folder, PROMPT, cuts=cuts, chunk=chunk, kept=kept).tobytes() == whole.tobytes()


def test_widths_of_blocks_are_two_thirds_of_a_multiple() -> None:
    """Those of Llama-3.3-Nemotron-Super-49B: 5.25 times 8192 is that of Llama 70B, 28,672."""
    config = {**CONFIG, "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 2}
    program = build_program({**config, "block_configs": [block(8, 5.25), block(16, 2.625)]})
    ops = (op for layer in program.layers for op in layer.ops)
    downs = [op.parts[0].weight for op in ops if isinstance(op, Product) and op.source == "up"]
    assert [weight.shape for weight in downs] == [(8192, 28672), (8192, 14336)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_configs": CONFIG["block_configs"][:3]}, "an object for each of the 8 layers"),
        ({"block_configs": None}, "an object for each of the 8 layers"),
        ({"block_configs": [{"attention": {}}] * 8}, "attention and ffn are needed of layer 0"),
        ({"block_configs": [block(3, 1.0)] * 8}, "n_heads_in_group is 3, a divisor of the 4 heads"),
        ({"block_configs": [block(2, -1.0)] * 8}, "ffn_mult is -1.0"),
        ({"block_configs": [block(2, 1e9)] * 8}, "ffn_mult is 1000000000.0, a block of 1 to"),
        ({"block_configs": [block(2, 1.0)] * 5 + [block(None, None)] * 3}, "attention or a block is needed of layer 5"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4"),
        ({"hidden_size": 66}, "num_attention_heads is 4, a divisor of hidden_size 66"),
    ],
)
def test_what_is_wrong_of_a_config_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        build_program({**CONFIG, **changes})


@pytest.mark.parametrize("name", ["window_length", "sparsify", "surprise", "unshifted_sink"])
def test_what_a_layer_has_besides_is_refused(name: str) -> None:
    blocks = [block(2, 1.0) for _ in range(8)]
    blocks[5]["attention"][name] = 12
    with pytest.raises(ModelError, match=rf"block_configs\[5\]: {name} is 12"):
        build_program({**CONFIG, "block_configs": blocks})


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.linear_attn": "attn_output",
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
# llama.cpp drops what attention gives where no block follows, and knows no product in place of a block.
WRITTEN = [block(*kind) for kind in ((2, 1.3), (4, 5.25), (None, 2.0), ("linear", 2.0), (4, 1.0), (2, 1.0))]


def make_gguf(folder: Path, **more: Any) -> Path:
    """A file as llama.cpp's converter writes it of such a model."""
    made: dict[str, Any] = {
        "block_configs": WRITTEN,
        "num_hidden_layers": len(WRITTEN),
        "rope_scaling": None,
        "rope_theta": 1e4,
    }
    config = {**CONFIG, **made}
    folder = make_nemotron_nas(folder, **made)
    tensors = []
    for name, tensor in tensors_of(config).items():
        array, stem = tensor.numpy(), name.removesuffix(".weight")
        if stem.endswith((".q_proj", ".k_proj")):  # heads, halves, pairs
            array = array.reshape(-1, 2, 8, 64).swapaxes(1, 2).reshape(array.shape)
        if stem not in ENDS:
            _, _, layer, stem = stem.split(".", 3)
        own = f"{ENDS[stem]}.weight" if stem in ENDS else f"blk.{layer}.{GGUF_NAMES[stem]}.weight"
        tensors.append((own, "F32", array.shape, np.ascontiguousarray(array)))
    kinds = [(kind["attention"], kind["ffn"]) for kind in WRITTEN]
    heads = [0 if attention["no_op"] else 4 for attention, _ in kinds]
    inner = [0 if ffn["no_op"] else -(-int(2 * ffn["ffn_mult"] * 64 / 3) // 256) * 256 for _, ffn in kinds]
    facts = {
        "context_length": 512,
        "embedding_length": 64,
        "block_count": len(WRITTEN),
        "attention.head_count": np.array(heads, np.int32),
        "attention.head_count_kv": np.array([4 // (a["n_heads_in_group"] or 8) for a, _ in kinds], np.int32),
        "feed_forward_length": np.array(inner, np.int32),
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 16,
        "rope.freq_base": 1e4,
        "vocab_size": 264,
        **more,
    }
    named = {"general.architecture": "deci", **{f"deci.{name}": fact for name, fact in facts.items()}}
    return write_gguf(folder / "tiny.gguf", {**named, **tokenizer_facts(folder)}, tensors)


def test_a_gguf_file_is_the_checkpoint(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "whole")
    ours, theirs = native(gguf_folder(file, tmp_path), PROMPT), native(tmp_path / "whole", PROMPT)
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < TOLERANCE


def test_heads_that_no_layer_of_the_family_has_are_refused(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "whole", **{"attention.head_count": np.array([4, 2, 0, 4, 4, 4], np.int32)})
    with pytest.raises(ModelError, match="its layers have other numbers of heads than 0 and 4"):
        gguf_folder(file, tmp_path)


@pytest.mark.nightly
def test_a_gguf_file_is_computed_as_llama_cpp_computes_it(llama_cpp: Any, tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "whole")
    model = llama_cpp.Llama(str(file), n_ctx=64, logits_all=True, verbose=False, type_k=0, type_v=0)
    theirs, ours = their_logits(model), native(gguf_folder(file, tmp_path), IDS)
    assert np.abs(ours - theirs).max() < 2e-3 * np.abs(theirs).max()
