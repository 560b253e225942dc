"""The recipe of hy_v4: deepseek_v4's residual streams, each of which goes on as it is; latent attention with sinks and gates,
over positions that an indexer chooses; experts with clamps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from manyhands.program.blocks import NormStyle, Ops, Sizes, TensorNames
from manyhands.program.ends import EndsStyle, assemble, with_streams
from manyhands.program.families.choices import FULL, SHARED, with_choices
from manyhands.program.families.experts import listed_sparse
from manyhands.program.families.indexer import INDEXED, IndexStyle
from manyhands.program.families.latent import LatentSizes, latent_attention, latent_scale, sizes
from manyhands.program.families.shared import ExpertBlocks, grouped_route
from manyhands.program.fields import Fields
from manyhands.program.ops import Add, Collapse, Gate, Gating, Program, Spread, Term, Weight
from manyhands.program.rope import RopeReader


@dataclass(frozen=True, slots=True)
class _Streams:
    """How many, of how many columns; epsilons of their norm and of sigmoids."""

    count: int
    width: int
    norm_epsilon: float
    epsilon: float
    magnitude: float

    def collapse(self, path: str, columns: int, scales: int, magnitude: float | None) -> Collapse:
        """Into "u", by the tensors that begin with `path`."""
        mix = Weight(f"{path}fn", (columns, self.count * self.width))
        base, scale = Weight(f"{path}base", (columns,)), Weight(f"{path}scale", (scales,))
        numbers = self.count, mix, base, scale, self.norm_epsilon, self.epsilon
        return Collapse("x", "u", "hc", *numbers, magnitude=magnitude)

    def around(self, path: str, body: Ops, target: str) -> Ops:
        """Streams collapse, `body` makes `target` of that, and each takes it up."""
        first = self.collapse(f"{path}.hc_pre.hc_", 2 * self.count, 2, self.magnitude)
        return (first, *body, Spread(target, "hc", self.count))


def hy_v4(f: Fields) -> Program:
    """Columns turn by pairs, as the publisher serves them (vLLM, llama.cpp); transformers (5.23) takes them for halves. Layers
    may use what the one before has chosen."""
    _defaults(f)
    s, norm, bias = sizes(f), NormStyle("rms", f.number("rms_norm_eps", 1e-5)), f.flag("attention_bias")
    z = LatentSizes.read(f, s, query_rank=1536, rank=512, plain=192, rotary=64, value=256, kv=False)
    if z.query_rank is None:
        raise f.refuse("q_lora_rank", "a whole number is needed: queries of this family come from a latent")
    rope, blocks, split = RopeReader(f), _blocks(f, s), f.stored("split_kv_b")
    kinds, scale = _choosing(f, s), latent_scale(rope, z.plain + z.rotary)
    index = _index(f, z, rope, norm.eps)
    numbers = f.count("hc_mult", 4, high=8), s.hidden, norm.eps, f.number("hc_eps", 1e-6), f.number("hc_magnitude", 2.0)
    streams = _Streams(*numbers)
    _as_trained(f)

    def layer(n: TensorNames, i: int) -> Ops:
        gate = n.part("g", "self_attn.linear_gate", s.heads * z.value, s.hidden, False)
        gated, sinks = (gate, Gate("g", "a", "a", Gating("sigmoid"))), "self_attn.learnable_sink_param"
        own: dict[str, Any] = {"split": split, "gate": gated, "sinks": sinks}
        own["index"] = index if kinds[i] == FULL else None
        attend = latent_attention(n, s, z, scale, pairs=True, bias=bias, **own)
        block = blocks.branch(n, s, norm, i)
        joined: Ops = (Add((Term("s"),), "m"),) if "s" in block.terms else ()
        after = norm.op(n, "post_attention_layernorm", s.hidden, "u", "h")
        return (
            *streams.around(
                f"{n.path}hc_attn_layer", (norm.op(n, "input_layernorm", s.hidden, "u", "h"), *attend), "a"
            ),
            *streams.around(f"{n.path}hc_mlp_layer", (after, *block.body, *joined), "m"),
        )

    program = assemble(f, s, norm, rope, [rope.plain(z.rotary)], EndsStyle(), layer)
    program = with_streams(program, streams.collapse("model.hc_head.hc_head_", streams.count, 1, None))
    return with_choices(f, program, kinds)


def _defaults(f: Fields) -> None:
    f.rename(n_routed_experts="num_local_experts")
    f.assume(index_n_heads=16, n_group=1, topk_group=1, moe_intermediate_size=768, routed_scaling_factor=2.827)


def _blocks(f: Fields, s: Sizes) -> ExpertBlocks:
    """Experts are clamped, the shared ones and dense blocks are not."""
    limit = f.number("swiglu_limit", 10.0)  # transformers (5.23) clamps to zero where the publisher does not clamp
    f.only("hidden_act", "silu", "swish")  # which experts have whatever is said
    blocks = ExpertBlocks.read(f, grouped_route(f), listed_sparse(f, s.layers, 1))
    return replace(blocks, limit=limit)


def _choosing(f: Fields, s: Sizes) -> Sequence[str]:
    """Which layers have an indexer, and which use the choice of the one before."""
    default = [SHARED if i and (i - 1) % 4 else FULL for i in range(s.layers)]
    f.per_layer("layer_types", s.layers, [INDEXED[0]] * s.layers, INDEXED)
    return f.per_layer("indexer_types", s.layers, default, (FULL, SHARED))


def _index(f: Fields, z: LatentSizes, rope: RopeReader, eps: float) -> IndexStyle:
    index = IndexStyle.read(f, z.rotary, rope.context, pairs=True)
    return replace(index, eps=eps, offset=index.width - z.rotary)


def _as_trained(f: Fields) -> None:
    """Fields of published configs that transformers does not read: each must say what it computes."""
    for name in ("enable_ihc", "gated_mla", "learnable_sink", "use_dsa", "use_mla"):
        f.only(name, True)
    f.only("gating_type", "elementwise")
    f.ignore("bitwise_backward_align", "enable_lm_head_fp32", "learnable_sink_init", "mtp_loss_factor")
