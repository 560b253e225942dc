"""States of convolutions and linear attention: against a definition in numpy, from any position that can be gone back to."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers.models.minimax import modeling_minimax
from transformers.models.minimax_m2 import modeling_minimax_m2
from transformers.models.step3p7 import modeling_step3p7

from manyhands.core import Span
from manyhands.engine import library
from manyhands.engine.cache import SessionCache, _new_blocks
from manyhands.engine.golden_cases import reals, stored
from manyhands.engine.golden_scan import OUT as SCAN_OUT
from manyhands.engine.golden_scan import scan_ops
from manyhands.engine.layout import STATE_BLOCK
from manyhands.engine.library import Array, Plan, Team
from manyhands.engine.states import HOST, MOST_BACK, MOST_KEPT, RECENT, States, kept_blocks
from manyhands.errors import ModelError, StateGone
from manyhands.program.families import read_program
from manyhands.testing.tiny import WITH_STATES, make_tiny
from tests.engine.oracle import LAYERS, NativePair, reader, stock_model
from tests.engine.state_layer import OUT, StateLayer

CONTEXT = 4096
PROMPT = [(37 * i * i + 11 * i) % 256 for i in range(40)]
HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH, TAPS = 6, 2, 10, 37, 4
KEYS, VALUES = KEY_HEADS * WIDTH, HEADS * VALUE_WIDTH
ENTERING = 2 * KEYS + VALUES + 2 * HEADS
FORMS: dict[str, dict[str, bool]] = {"delta": {}, "sum": {"is_sum": True}, "by channel": {"by_channel": True}}
Floats = NDArray[np.float32]


def f32(x: Any) -> Floats:
    return np.asarray(x, np.float32)


def fused(a: Any, b: Any, c: Any) -> Floats:
    """One rounding of a b + c, but for cases that numbers of this size do not meet: double holds the product."""
    return f32(np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64))


class Case:
    """A convolution of all that enters and linear attention over it, on one back end."""

    def __init__(self, back_end: str, row_type: str = "f32", form: str = "delta") -> None:
        self.layer = layer = StateLayer(HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH, TAPS, **FORMS[form])
        self.plan = Plan(back_end, row_type, layer.widths, OUT, "f32", CONTEXT)
        for op in layer.ops:
            self.plan.add(*op)
        (self.taps, self.bias), (self.rates, self.shifts), self.skips = layer.weights, layer.decays, layer.skips
        self.team, self.row_type = Team(2), row_type

    def cache(self, mark: int = 0) -> SessionCache:
        return SessionCache(self.plan, mark=mark)

    def step(
        self, caches: Sequence[SessionCache], starts: Sequence[int], rows: Sequence[Floats], threads: int = 2
    ) -> Floats:
        """Rows of each session from its start on -> what leaves."""
        segments, row = [], 0
        for cache, start, mine in zip(caches, starts, rows, strict=True):
            segments.append(cache.segment(start, row, len(mine)))
            row += len(mine)
        given = np.ascontiguousarray(stored(np.concatenate(rows), self.row_type))
        out = self.plan.run(self.team, threads, segments, given.view(np.uint8).reshape(-1), row).view(np.float32)
        for cache, start, mine in zip(caches, starts, rows, strict=True):
            cache.done(start + len(mine))
        return out

    def defined(self, x: Floats) -> Floats:
        """The same by the words of program/cached_ops.py and docs/arithmetic.md, a position after the other."""
        state, out = np.zeros((HEADS, WIDTH, VALUE_WIDTH), np.float32), []
        entering = self.layer.entering
        padded = np.concatenate([np.zeros((TAPS - 1, entering), np.float32), x])
        for p in range(len(x)):
            total = np.zeros(entering, np.float32)
            for j in range(TAPS):
                total = fused(self.taps[j], padded[p + j], total)
            mixed = library.apply("scalar", "silu", f32(total + self.bias))
            q, k, v, a, b = np.split(mixed, np.cumsum(self.layer.parts[:-1]))
            by, row = self._decays(a).reshape(HEADS, -1), []
            for head in range(HEADS):
                key, query = (part.reshape(KEY_HEADS, WIDTH)[head // (HEADS // KEY_HEADS)] for part in (k, q))
                s = f32(state[head] * by[head][:, None])
                value = v.reshape(HEADS, VALUE_WIDTH)[head]
                change = f32((value if self.skips is not None else f32(value - four_sums(key, s))) * b[head])
                state[head] = fused(key[:, None], change[None, :], s)
                found = four_sums(query, state[head])
                row.append(found if self.skips is None else f32(found + f32(value * self.skips[head])))
            out.append(np.concatenate(row))
        return np.stack(out)

    def _decays(self, a: Floats) -> Floats:
        if not self.layer.by_channel:
            return f32(np.exp(-self.rates * np.log1p(np.exp(a.astype(np.float64) + self.shifts))))
        v = f32(a + self.shifts)
        e = library.apply("scalar", "exp", -np.abs(v))
        z = f32(e / f32(2 + e))
        p = np.full_like(z, 0.28174675)
        for c in (0.27961433, 0.4002485, 0.66666317, 2.0):
            p = fused(p, f32(z * z), np.float32(c))
        soft = fused(z, p, np.maximum(v, 0))
        return library.apply("scalar", "exp", -f32(self.rates * soft))


def four_sums(by: Floats, s: Floats) -> Floats:
    """Sums of by[k] s[k] over k modulo 4, then of those."""
    sums = [np.zeros(s.shape[1], np.float32) for _ in range(4)]
    for k in range(len(by)):
        sums[k % 4] = fused(by[k], s[k], sums[k % 4])
    return f32(f32(sums[0] + sums[1]) + f32(sums[2] + sums[3]))


@pytest.mark.parametrize("has_skips", [True, False])
def test_a_selective_scan_is_what_its_definition_says(has_skips: bool) -> None:
    """In double, a position after the other: states of each column decay at rates of their own. Two sessions at once."""
    width, columns = 7, 37
    widths, ops = scan_ops(width, columns, has_skips)
    (_, bias), (skips, rates) = ops[-2][3], ops[-1][3]
    assert bias is not None and rates is not None and (skips is None) != has_skips
    x = reals(9, 150, widths[0])
    q, k, v, dt = np.split(x.astype(np.float64), np.cumsum([width, width, columns]), axis=1)
    step, state, want = np.log1p(np.exp(dt + bias)), np.zeros((width, columns)), []
    for p in range(len(x)):
        state = state * np.exp(step[p] * rates) + k[p][:, None] * (v[p] * step[p])
        want.append(q[p] @ state + (0 if skips is None else skips * v[p]))
    for back_end in library.supported():
        plan, team = Plan(back_end, "f32", widths, SCAN_OUT, "f32", CONTEXT), Team(2)
        for op in ops:
            plan.add(*op)
        caches, found = [SessionCache(plan) for _ in range(2)], [list[Floats]() for _ in range(2)]
        for start, count in ((0, 61), (61, 1), (62, 88)):
            segments = [cache.segment(start, i * count, count) for i, cache in enumerate(caches)]
            rows = np.tile(x[start : start + count], (2, 1)).view(np.uint8).reshape(-1)
            out = plan.run(team, 2, segments, rows, 2 * count).view(np.float32)
            for i, cache in enumerate(caches):
                cache.done(start + count)
                found[i].append(out[i * count : (i + 1) * count])
        for each in found:
            assert np.abs(np.concatenate(each) - np.stack(want)).max() < 2e-6 * np.abs(want).max()


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in WITH_STATES},
    "as many value heads as key heads": ("qwen3_5_text", {"linear_num_value_heads": 2, "linear_value_head_dim": 40}),
    "every layer linear": ("qwen3_next", {"layer_types": ["linear_attention"] * LAYERS, "mlp_only_layers": []}),
    "every layer a convolution": ("lfm2", {"layer_types": ["conv"] * LAYERS, "conv_L_cache": 5}),
    "no correction": ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False}),
    "Mamba without experts": ("granitemoehybrid_mamba", {"num_local_experts": 0, "mamba_n_groups": 1}),
    "Mamba, biases": ("granitemoehybrid_mamba", {"mamba_conv_bias": False, "mamba_proj_bias": True}),
    "experts in groups, with latents": ("nemotron_h", {"n_group": 4, "topk_group": 2, "moe_latent_size": 24}),
    "Nemotron-H, biases": ("nemotron_h", {"use_bias": True, "mlp_bias": True, "use_conv_bias": False, "n_groups": 1}),
    "Bamba, biases": ("bamba", {"mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True}),
    "Bamba without attention": (
        "bamba",
        {"attn_layer_indices": None, "tie_word_embeddings": True, "pad_token_id": None},
    ),
    "Mamba 1 alone, biases": ("mamba", {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False}),
    "Mamba 1 alone, sizes by default": ("mamba", {"intermediate_size": 128, "time_step_rank": "auto"}),
    "Falcon-Mamba, biases": (
        "falcon_mamba",
        {"use_bias": True, "mixer_rms_eps": 0.1, "conv_kernel": 2, "state_size": 3},
    ),
    "Mamba 2 alone, biases": ("mamba2", {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True}),
    "Mamba 2 alone, one group": ("mamba2", {"n_groups": 1, "state_size": 7, "layer_norm_epsilon": 1e-2}),
    "Falcon-H1, a norm before the gate": ("falcon_h1", {"mamba_rms_norm": True, "mamba_proj_bias": True}),
    "Falcon-H1, a norm behind the gate": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "projectors_bias": True, "mlp_bias": True},
    ),
    "Falcon-H1 without multipliers": (
        "falcon_h1",
        {"ssm_multipliers": None, "mlp_multipliers": None, "ssm_in_multiplier": 1.0, "attention_in_multiplier": 1.0},
    ),
    "layers without states or attention": (
        "nemotron_h",
        {"layers_block_type": ["mlp", "moe", "mlp", "full_attention"]},
    ),
    "LFM3 without norms behind and gates": ("lfm3", {"use_sandwich_norm": False, "use_attention_gate": False}),
    "LFM3, biases of attention alone": (
        "lfm3",
        {"attention_bias": True, "conv_bias": False, "conv_L_cache": 12, "tie_word_embeddings": False},
    ),
    "Jamba without experts, biases": (
        "jamba",
        {"num_experts": 1, "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_dt_rank": 5, "mamba_d_state": 10},
    ),
    "Jamba, attention and experts elsewhere": (
        "jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 0,
            "expert_layer_period": 3,
            "expert_layer_offset": 0,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "mamba_d_state": 3,
            "mamba_d_conv": 2,
            "mamba_expand": 1,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
        },
    ),
    "Jamba without attention": ("jamba", {"attn_layer_period": 9, "attn_layer_offset": 8, "hidden_act": "gelu"}),
    "OLMo Hybrid without positions": ("olmo_hybrid", {"rope_parameters": {"rope_theta": None}, "head_dim": 20}),
    "OLMo Hybrid, strengths up to one, biases": (
        "olmo_hybrid",
        {
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            "hidden_act": "gelu",
            "rms_norm_eps": 0.1,
            "tie_word_embeddings": True,
        },
    ),
    "OLMo Hybrid, sizes by default, attention first": (
        "olmo_hybrid",
        {
            **dict.fromkeys(f"linear_num_{kind}_heads" for kind in ("key", "value")),
            **dict.fromkeys(f"linear_{kind}_head_dim" for kind in ("key", "value")),
            "layer_types": ["full_attention", *["linear_attention"] * (LAYERS - 1)],
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
    "Kimi Linear by its publisher's lists, queries by way of latents": (
        "kimi_linear",
        {
            "layer_types": None,
            "linear_attn_config": {
                "full_attn_layers": [1, 4],
                "kda_layers": [2, 3],
                "head_dim": 33,
                "num_heads": 2,
                "short_conv_kernel_size": 2,
            },
            "q_lora_rank": 24,
            "attention_bias": True,
            "first_k_dense_replace": 3,
        },
    ),
    "Kimi Linear, experts in groups": (
        "kimi_linear",
        {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "n_shared_experts": 2, "hidden_act": "gelu"},
    ),
    "MiniMax, lightning attention first, a window, one key head, tied": (
        "minimax",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "sliding_window": 9,
            "num_key_value_heads": 1,
            "hidden_act": "gelu",
            "head_dim": None,
            "tie_word_embeddings": True,
        },
    ),
    "MiniMax, three heads, one layer of each kind, factors of one": (
        "minimax",
        {
            "layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "num_experts_per_tok": 1,
            **dict.fromkeys(("linear_attn_alpha_factor", "full_attn_beta_factor", "mlp_alpha_factor"), 1),
        },
    ),
    "Qwen4-Exp, four streams, longer n-grams, biases": (
        "qwen4_exp_text",
        {
            "hc_count": 4,
            "ngram_size": 4,
            "heads_per_ngram": 1,
            "ple_embed_dim": 48,
            "ple_conv_kernel_size": 2,
            "ple_layer_ids": [3, 1, 3],
            "attention_bias": True,
            "norm_topk_prob": False,
            "output_gate_type": None,
            "num_key_value_heads": 4,
        },
    ),
    "Qwen4-Exp, attention alone, entries of one position": (
        "qwen4_exp_text",
        {
            "layer_types": ["full_attention"] * LAYERS,
            "ple_layer_ids": None,
            "indexer_compress_ratio": 1,
            "indexer_budget": 9,
            "indexer_n_heads": 16,
            "hc_count": 2,
            "hidden_act": "gelu",
            "output_gate_type": "sigmoid",
            "num_key_value_heads": 1,
        },
    ),
    "Qwen4-Exp without attention, bigrams": (
        "qwen4_exp_text",
        {
            "layer_types": ["linear_attention"] * LAYERS,
            "ngram_size": 2,
            "split_ngram_parts": 1,
            "ple_conv_kernel_size": 1,
            "eos_token_id": [11, 3],
            **dict.fromkeys(
                f"indexer_{name}" for name in ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")
            ),
        },
    ),
    "Qwen4-Exp, few entries of many positions": (
        "qwen4_exp_text",
        {"indexer_compress_ratio": 32, "indexer_budget": 32, "head_dim": 24, "ple_layer_ids": []},
    ),
    "Ling 3.0, decays without a bound, odd widths": (
        "bailing_hybrid",
        {"kda_safe_gate": False, "linear_num_heads": 3, "linear_head_dim": 33, "short_conv_kernel_size": 2},
    ),
    "Ling 3.0, another bound, experts in groups, biases, yarn": (
        "bailing_hybrid",
        {
            "kda_lower_bound": -0.5,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale_all_dim": 0.7},
        },
    ),
    "a width as stated": ("lfm2", {"block_auto_adjust_ff_dim": False, "tie_word_embeddings": False}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_family_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    """Logits of one pass, and ids that are decoded by way of chunks and states."""
    pair = NativePair(tmp_path, *VARIANTS[name])
    ids, last = pair.greedy(PROMPT, 64, chunk=7)
    theirs, ours = pair.theirs(ids), pair.ours(ids, pair.span.new_cache(len(ids)))
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 2e-4
    assert np.array_equal(ours[-1].numpy(), last.numpy())
    assert ids[len(PROMPT) :] == theirs.argmax(-1)[len(PROMPT) - 1 : -1].tolist()


def test_heads_of_minimax_turn_as_their_publisher_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the fields of published configs, where rotary_dim is half of a head: transformers reads none of these."""
    folder = make_tiny("minimax", tmp_path, layers=4, context=512, dtype="fp32", head_dim=32)
    model = stock_model(folder, experts_implementation="eager")
    config = json.loads((folder / "config.json").read_text())
    for name, published in (("linear_attn", "linear_attention"), ("full_attn", "full_attention"), ("mlp", "mlp")):
        for kind in ("alpha", "beta"):
            config[f"layernorm_{published}_{kind}"] = config.pop(f"{name}_{kind}_factor")
    config["attn_type_list"] = [int(kind == "full_attention") for kind in config.pop("layer_types")]
    config |= {"model_type": "minimax_m1", "postnorm": True, "rotary_dim": 16, "rope_theta": 1e4}
    del config["rope_parameters"], config["block_size"]
    (folder / "config.json").write_text(json.dumps(config))
    pair = object.__new__(NativePair)
    pair.program, pair.read, pair.model = read_program(folder), reader(folder), model
    pair._hold(Span(0, 4))
    monkeypatch.setattr(modeling_minimax, "apply_rotary_pos_emb", modeling_minimax_m2.apply_rotary_pos_emb)
    model.model.rotary_emb.inv_freq = 1.0 / 1e4 ** (torch.arange(0, 16, 2) / 16)
    ids, _ = pair.greedy(PROMPT, 64, chunk=7)
    theirs, ours = pair.theirs(ids), pair.ours(ids, pair.span.new_cache(len(ids)))
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 2e-4
    assert ids[len(PROMPT) :] == theirs.argmax(-1)[len(PROMPT) - 1 : -1].tolist()


def test_queries_of_ling_come_from_a_latent_where_the_config_says_so(tmp_path: Path) -> None:
    """As published checkpoints have them; transformers (5.23) gets the three modules in place of its one."""
    kinds = ["linear_attention", "full_attention"]
    folder = make_tiny("bailing_hybrid", tmp_path, dtype="fp32", layers=2, layer_types=kinds)
    path, tensors = "model.layers.1.attention", load_file(folder / "model.safetensors")
    width, hidden = tensors.pop(f"{path}.q_proj.weight").shape
    given = {"q_a_proj": reals(1, 24, hidden), "q_a_layernorm": reals(2, 24, around=0), "q_b_proj": reals(3, width, 24)}
    tensors |= {f"{path}.{name}.weight": torch.from_numpy(weight) for name, weight in given.items()}
    save_file(tensors, folder / "model.safetensors")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "q_lora_rank": 24}))
    pair = NativePair(folder, None, {})
    norm = torch.nn.RMSNorm(24, 1e-6)
    query = torch.nn.Sequential(torch.nn.Linear(hidden, 24, False), norm, torch.nn.Linear(24, width, False))
    query.load_state_dict({f"{i}.weight": torch.from_numpy(weight) for i, weight in enumerate(given.values())})
    pair.model.get_submodule("model.layers.1.self_attn").register_module("q_proj", query)
    theirs, ours = pair.theirs(PROMPT), pair.ours(PROMPT, pair.span.new_cache(len(PROMPT)))
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 2e-4


def test_limits_of_lings_gates_are_those_of_steps(tmp_path: Path) -> None:
    """transformers reads none of Ling 3.0: it computes them with the functions of Step-3.7 in their place."""
    limits = {"expert_swiglu_limit_list": [0, 0.25, 0, 0.1], "share_expert_swiglu_limit_list": [0, 0, 0.5, 0.25]}
    pair = NativePair(tmp_path, "bailing_hybrid", {**limits, "num_nextn_predict_layers": 0})
    ids, _ = pair.greedy(PROMPT, 8, chunk=7)
    ours, unlimited = pair.ours(ids, pair.span.new_cache(len(ids))), pair.theirs(ids)
    for layer, own, beside in zip(pair.model.model.layers, *limits.values(), strict=True):
        for name, limit in (("experts", own), ("shared_experts", beside)):
            if (block := getattr(layer.mlp, name, None)) is not None:
                limited = modeling_step3p7.Step3p7MLP if name == "shared_experts" else modeling_step3p7.Step3p7Experts
                block.__class__ = limited
                block.limit = limit or float("inf")
    theirs = pair.theirs(ids)
    largest = theirs.abs().max()
    assert float((ours - theirs).abs().max() / largest) < 1e-4 < float((unlimited - theirs).abs().max() / largest)


@pytest.fixture(params=library.supported())
def back_end(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=FORMS)
def case(back_end: str, request: pytest.FixtureRequest) -> Case:
    return Case(back_end, form=request.param)


X = reals(9, 300, ENTERING, around=0)


def test_what_leaves_is_as_defined(case: Case) -> None:
    x = reals(9, 70, case.layer.entering, around=0)
    assert np.array_equal(case.step([case.cache()], [0], [x]), case.defined(x))


def test_decays_of_channels_are_exact_to_some_roundings() -> None:
    """Of all sizes; near one, which a long memory has, and far from it."""
    v, rates = np.linspace(-60, 60, 5001).astype(np.float32), np.array([1e-3, 0.3, 1, 16], np.float32)
    exact = np.exp(-rates[:, None].astype(np.float64) * np.logaddexp(0, v.astype(np.float64)))
    for back_end in library.supported():
        for rate, right in zip(rates, exact, strict=True):
            plan = Plan(back_end, "f32", [len(v)] * 2, 1, "f32", 4)
            plan.add(library.DECAY, (0, 1, 1), (), (np.full(len(v), rate), np.zeros_like(v)))
            cache = SessionCache(plan)
            found = plan.run(Team(1), 1, [cache.segment(0, 0, 1)], v.view(np.uint8), 1).view(np.float32)[0]
            normal = right > 1e-37
            error = np.abs(found[normal] / right[normal] - 1)
            assert (error < 2e-7 * (1 - np.log(right[normal]))).all() and (found[~normal] < 2e-37).all()


@pytest.mark.parametrize("bound", [-5.0, -0.25, -60.0])
def test_bounded_decays_are_exact_to_some_roundings(bound: float) -> None:
    """Of all sizes, near one and near the bound."""
    v, rates = np.linspace(-60, 60, 5001).astype(np.float32), np.array([1e-3, 0.3, 1, 16], np.float32)
    for back_end in library.supported():
        for rate in rates:
            plan = Plan(back_end, "f32", [len(v)] * 2, 1, "f32", 4)
            plan.add(library.DECAY, (0, 1, 2), (bound,), (np.full(len(v), rate), np.zeros_like(v)))
            cache = SessionCache(plan)
            found = plan.run(Team(1), 1, [cache.segment(0, 0, 1)], v.view(np.uint8), 1).view(np.float32)[0]
            inner = (rate * v).astype(np.float64)  # rounded as there, since steep sigmoids make a rounding larger
            exact = np.exp(bound / (1 + np.exp(np.minimum(-inner, 700))))
            assert (np.abs(found / exact - 1) < 3e-7 * (1 - np.log(exact))).all()


def test_cuts_company_and_threads_enter_no_bit(case: Case) -> None:
    X = reals(9, 300, case.layer.entering, around=0)
    whole = case.step([case.cache()], [0], [X])
    caches, chance, at = [case.cache(), case.cache()], random.Random(1), [0, 0]
    found: list[list[Floats]] = [[], []]
    while min(at) < len(X):
        counts = [min(chance.choice([1, 2, 31, 33, 60]), len(X) - done) for done in at]
        used = [i for i in (0, 1) if counts[i]]
        rows = case.step(
            [caches[i] for i in used], [at[i] for i in used], [X[at[i] : at[i] + counts[i]] for i in used], 1
        )
        for i in used:
            found[i].append(rows[: counts[i]])
            rows, at[i] = rows[counts[i] :], at[i] + counts[i]
    for parts in found:
        assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("row_type", ["f32", "bf16"])
@pytest.mark.parametrize("form", ["delta", "by channel"])
def test_going_back_and_forks_change_no_bit(form: str, row_type: str) -> None:
    """Random steps of a session and its forks, each from a position that it says can be gone back to."""
    case, chance = Case(library.supported()[0], row_type, form), random.Random(2)
    other = reals(10, 600, case.layer.entering, around=0)
    sessions: list[tuple[SessionCache, Floats]] = [(case.cache(mark=70), other[:0])]
    for turn in range(300):
        cache, ids = sessions[chance.randrange(len(sessions))]
        length = len(ids)
        wanted = max(0, length - chance.choice([0, 0, 0, 1, 5, 32, 64, 95, 200]))
        start = cache.reachable(wanted)
        assert start == wanted or length - wanted > MOST_BACK or start < wanted
        if chance.random() < 0.2 and len(sessions) < 6:
            fork = cache.fork(start, 0, mark=chance.choice([0, start, 40]))
            sessions.append((fork, ids[:start].copy()))
            continue
        count = min(chance.choice([1, 1, 3, 20, 70]), CONTEXT - start)
        at = chance.randrange(500)
        rows = other[at : at + count]
        ids = np.concatenate([ids[:start], rows])
        out = case.step([cache], [start], [rows])
        again = case.step([case.cache()], [0], [ids])
        assert np.array_equal(out, again[start:]), (turn, start)
        sessions = [(c, ids if c is cache else mine) for c, mine in sessions]
        if len(ids) > 700:
            sessions = [(c, mine) for c, mine in sessions if c is not cache] or [(case.cache(), other[:0])]


def test_the_last_positions_can_be_gone_back_to_and_memory_is_bounded() -> None:
    case, cache = Case(library.supported()[0]), None
    cache = case.cache(mark=500)
    at = 0
    while at < 3000:
        count = 1 if at % 500 else 130
        case.step([cache], [at], [np.resize(X, (count, ENTERING))])
        at += count
        assert cache.num_bytes <= (MOST_KEPT + 1) * case.plan.state_bytes + case.plan.now_bytes
        for back in range(0, MOST_BACK + 1, 7):
            assert cache.reachable(max(0, at - back)) == max(0, at - back)
    assert 480 <= cache.reachable(495) <= 512 and cache.reachable(500 - 8) == 492  # near its mark
    assert cache.reachable(STATE_BLOCK) == 0 and cache.reachable(0) == 0
    with pytest.raises(StateGone, match="position 33 was left long ago"):
        cache.segment(33, 0, 1)
    assert cache.reachable(at) == at  # nothing changed
    with pytest.raises(StateGone):
        cache.segment(at + 1, 0, 1)


def test_a_session_keeps_what_a_shorter_one_kept() -> None:
    for mark in (0, 7, 700, 2000):
        for end in range(1, 5000):
            kept = kept_blocks(end, mark)
            assert len(kept) <= MOST_KEPT - 1
            newest = (end - 1) // STATE_BLOCK
            assert kept_blocks(end + 1, mark) <= kept | {newest + 1, (mark - 8) // STATE_BLOCK}
            assert {n for n in range(newest - RECENT + 1, newest + 1) if n >= 0} <= kept
    assert kept_blocks(5000, 2000) >= {(2000 - 8) // STATE_BLOCK}


def test_a_step_that_failed_leaves_nothing_that_is_used() -> None:
    """Blocks that it had begun, but perhaps not written, count for nothing."""
    case = Case(library.supported()[0])
    cache = case.cache()
    case.step([cache], [0], [X[:64]])
    cache.segment(64, 0, 40)  # begins, and never ends
    assert cache.reachable(64) == 64
    assert np.array_equal(case.step([cache], [64], [X[64:90]]), case.step([case.cache()], [0], [X[:90]])[64:])
    cache.segment(60, 0, 1)
    assert cache.reachable(90) == 60
    assert np.array_equal(case.step([cache], [60], [X[60:99]]), case.step([case.cache()], [0], [X[:99]])[60:])


def test_a_fork_goes_on_from_where_it_begins() -> None:
    """Also at the border of two blocks of which its source has the second alone."""
    case = Case(library.supported()[0])
    cache = case.cache()
    wanted = case.step([cache], [0], [X])
    for position in range(1, len(X) + 1):
        start = cache.reachable(position)
        fork = cache.fork(start, 0)
        assert fork.reachable(start) == start, position
        if start == position and position % 8 == 0 and position < len(X):
            assert np.array_equal(case.step([fork], [start], [X[start : start + 2]]), wanted[start : start + 2])


@pytest.mark.parametrize("start", [0, 64, 128])
def test_a_step_that_failed_can_be_made_anew(start: int) -> None:
    """From a block's first position, which none before it leads to any more."""
    case = Case(library.supported()[0])
    source = case.cache()
    case.step([source], [0], [X[:200]])
    for cache in (source.fork(start, 0), source):
        for _ in range(2):
            cache.segment(start, 0, 70)  # begins, and never ends
            assert cache.reachable(start) == start
        wanted = case.step([case.cache()], [0], [X])
        assert np.array_equal(case.step([cache], [start], [X[start:]]), wanted[start:])


@pytest.mark.parametrize("start", [32, 64, 70, 96, 128])
@pytest.mark.parametrize("is_fork", [False, True])
def test_a_long_step_that_failed_can_be_made_anew(start: int, is_fork: bool) -> None:
    """From where a session ends, whose last blocks a longer one does not keep. The step loses the state behind its end."""
    case = Case(library.supported()[0])
    cache = case.cache()
    case.step([cache], [0], [X[:start]])
    cache = cache.fork(start, 0) if is_fork else cache
    cache.segment(start, 0, 2000)  # begins, and never ends
    assert cache.reachable(start) == start
    assert cache.num_bytes <= (MOST_KEPT + 1) * case.plan.state_bytes + case.plan.now_bytes
    wanted = case.step([case.cache()], [0], [X])
    assert np.array_equal(case.step([cache], [start], [X[start:]]), wanted[start:])


class Scarce:
    """The host's memory, of which so many blocks are left."""

    left = 1000

    def made(self, num_bytes: int) -> Array:
        if self.left == 0:
            raise ModelError("no room")
        self.left -= 1
        return HOST.made(num_bytes)

    copy, address = staticmethod(HOST.copy), staticmethod(HOST.address)


@pytest.mark.parametrize("left", [0, 1, 2])
@pytest.mark.parametrize("start", [0, 1, 64, 70, 90])
def test_a_step_without_room_changes_nothing(left: int, start: int) -> None:
    """From nothing, of a fork whose blocks are another's too, and for some of the blocks that it needs."""
    case, memory = Case(library.supported()[0]), Scarce()
    source = SessionCache(case.plan, states=States(case.plan, memory))
    if start:
        case.step([source], [0], [X[:100]])
    for cache in [source.fork(90, 0), source] if start else [source]:
        end = cache.length
        before = [cache.reachable(position) for position in range(end + 1)]
        memory.left = left
        with pytest.raises(ModelError, match="no room"):
            cache.segment(start, 0, 200)
        assert [cache.reachable(position) for position in range(end + 1)] == before and cache.length == end
        memory.left = 1000
        wanted = case.step([case.cache()], [0], [X])
        assert np.array_equal(case.step([cache], [start], [X[start:]]), wanted[start:])


def test_memory_that_the_system_has_not_is_refused_in_one_line() -> None:
    for made in (HOST.made, lambda num_bytes: _new_blocks(num_bytes, 1)):
        with pytest.raises(
            ModelError, match=r"^the system gives no 1125899906842624 bytes for a session's cache .*: give"
        ):
            made(1 << 50)


def test_the_engine_refuses_states_that_do_not_fit() -> None:
    case = Case(library.supported()[0])
    rows = np.zeros((1, ENTERING * 4), np.uint8)
    for change in ({"from_": 7}, {"from_": -2}, {"from_": 32}, {"num_states": 0}, {"now": None}, {"states": None}):
        cache = case.cache()
        segment = cache.segment(0, 0, 1)
        for name, value in change.items():
            setattr(segment, name, value)
        with pytest.raises(ModelError):
            case.plan.run(case.team, 1, [segment], rows.reshape(-1), 1)
    cache, shared = case.cache(), case.cache()
    one, two = cache.segment(0, 0, 1), shared.segment(0, 1, 1)
    two.now = one.now
    with pytest.raises(ModelError):
        case.plan.run(case.team, 1, [one, two], np.zeros((2, ENTERING * 4), np.uint8).reshape(-1), 2)


@pytest.mark.parametrize(
    "op",
    [
        (library.CONVOLVE, (0, 0, TAPS, 0), (np.zeros((TAPS, ENTERING), np.float32),)),
        (library.CONVOLVE, (0, 1, 33, 0), (np.zeros((33, ENTERING), np.float32),)),
        (library.CONVOLVE, (0, 1, TAPS, 0), (np.zeros((TAPS, ENTERING - 1), np.float32),)),
        (library.CONVOLVE, (0, 1, TAPS, 7), (np.zeros((TAPS, ENTERING), np.float32),)),
        (library.DECAY, (5, 5), (np.zeros(HEADS, np.float32), np.zeros(HEADS, np.float32))),
        (library.DECAY, (5, 5), (np.zeros(HEADS), None)),
        (library.DECAY, (5, 5, 1), (np.zeros(HEADS), np.zeros(HEADS, np.float32))),
        (library.DECAY, (5, 5, 1), (None, np.zeros(HEADS, np.float32))),
        (library.DECAY, (5, 5, 2), (np.zeros(HEADS, np.float32), np.zeros(HEADS, np.float32))),  # without a bound
        (library.DECAY, (5, 5, 3), (np.zeros(HEADS, np.float32), np.zeros(HEADS, np.float32))),
        (library.DELTA, (2, 3, 4, 5, 6, 7, HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH, 2), ()),
        (library.DELTA, (2, 3, 4, 5, 6, 7, HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH, 3), ()),
        (
            library.DELTA,
            (2, 3, 4, 5, 6, 7, HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH, 1),
            (np.zeros(HEADS + 1, np.float32),),
        ),
        (library.DECAY, (5, 5), (None, np.zeros(HEADS + 1, np.float32))),
        (library.DELTA, (2, 3, 4, 5, 6, 4, HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH), ()),
        (library.DELTA, (2, 3, 4, 5, 6, 7, HEADS, 4, WIDTH, VALUE_WIDTH), ()),
        (library.DELTA, (2, 3, 4, 5, 6, 7, HEADS, KEY_HEADS, WIDTH + 1, VALUE_WIDTH), ()),
        (library.DELTA, (2, 3, 4, 5, 9, 7, HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH), ()),
    ],
)
def test_operations_that_do_not_fit_are_refused(op: tuple[int, Sequence[int], Sequence[Array | None]]) -> None:
    plan = Case(library.supported()[0]).plan
    before = plan.state_bytes, plan.now_bytes
    with pytest.raises(ModelError):
        plan.add(op[0], op[1], (), op[2])
    assert (plan.state_bytes, plan.now_bytes) == before


def test_states_begin_from_nothing_again() -> None:
    case = Case(library.supported()[0])
    states = States(case.plan, HOST)
    assert states.reachable(50) == 0 and states.begin(0, 10).origin == 0
    states.done(10)
    assert states.begin(10, 11).origin == -1
    states.done(11)
    assert states.begin(5, 9).origin == 0
