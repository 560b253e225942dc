"""tools/five_bits.py: blocks hold what is meant, and what comes out of a rounded model changes little."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from bench.acceptance import Whole
from manyhands.engine.blocks import dequantise
from manyhands.errors import ModelError
from manyhands.testing.tiny import make_tiny
from tools.five_bits import GROUP, TYPE, blocks_of, codes_of, round_model, rounded, step_and_least, write


def test_blocks_hold_each_code_times_its_step() -> None:
    rng = np.random.default_rng(1)
    rows = torch.from_numpy(rng.standard_normal((50, GROUP)))
    step, least = step_and_least(rows)
    codes = codes_of(rows, step, least)
    held = dequantise(blocks_of(codes.numpy().astype(np.uint8), step, least), TYPE)
    assert np.array_equal(held, (codes * step[:, None] + least[:, None]).float().numpy())
    assert np.abs(held - rows.numpy()).max() < 0.2


def test_outputs_change_less_than_where_each_weight_is_rounded_by_itself() -> None:
    rng = np.random.default_rng(2)
    inputs = rng.standard_normal((500, 4)) @ rng.standard_normal((4, 64)) + 0.1 * rng.standard_normal((500, 64))
    weights = torch.from_numpy(rng.standard_normal((20, 64)))
    products = {"alike": torch.from_numpy(inputs.T @ inputs), "apart": torch.eye(64)}
    off = {
        name: np.square((dequantise(rounded(weights, each), TYPE) - weights.numpy()) @ inputs.T).mean()
        for name, each in products.items()
    }
    assert off["alike"] < 0.3 * off["apart"]


def test_a_rounded_model_computes_what_is_stored(tmp_path: Path) -> None:
    """Its embedding is read from the model that it was made of."""
    source = make_tiny("llama", tmp_path / "source", layers=2, hidden=64, seed=1)
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    folder = tmp_path / "rounded"
    model.to(torch.bfloat16).save_pretrained(folder)
    ids = torch.from_numpy(np.random.default_rng(3).integers(0, model.config.vocab_size, (8, 20)))
    write(folder, round_model(model.float(), ids))
    with pytest.raises(ModelError, match=r"lacks model\.embed_tokens\.weight"):
        Whole(folder)
    whole = Whole(folder, source)
    with torch.no_grad():
        wanted = model(ids[:1], use_cache=False).logits[0].numpy()
    assert whole.logits(whole.read(ids[0].tolist())) == pytest.approx(wanted, abs=0.05 * float(np.abs(wanted).max()))
