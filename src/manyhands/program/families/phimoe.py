"""The recipe of phimoe: mixtral with layer norms, whose experts a sparse mixer weighs."""

from manyhands.program.blocks import (
    AttentionStyle,
    NormStyle,
    Ops,
    Sizes,
    TensorNames,
    attention,
    before_each,
    each_expert,
    head_scale,
    router,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import ExpertRouting, Program
from manyhands.program.rope import RopeReader


def phimoe(f: Fields) -> Program:
    """Tables of longrope have a factor of their own; the head may have a bias."""
    s, act, bias = Sizes.read(f, kv=False), f.activation(), f.flag("attention_bias")
    count = f.count("num_local_experts", 16, low=2, high=MOST_EXPERTS)
    f.only("num_experts_per_tok", 2)
    noise = f.number("router_jitter_noise", 0.01, positive=False)
    if noise < 0.0:
        raise f.refuse("router_jitter_noise", "a number from 0 is needed")
    f.ignore("input_jitter_noise")  # in training alone
    route = ExpertRouting("r", "routes", count, 2, "mixer", normalise=False, epsilon=2.0 * noise)
    norm = NormStyle("layer", f.number("rms_norm_eps", 1e-5), bias=True)
    window = f.optional_count("sliding_window")
    style = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias, window=window)
    rope, ends = RopeReader(f, theta=1000000.0, scaled=True), EndsStyle(head_bias=f.flag("lm_head_bias"))

    def layer(n: TensorNames, i: int) -> Ops:
        chosen = router(n, "block_sparse_moe.gate", s, route)
        experts = each_expert(n, "block_sparse_moe.experts", ("w1", "w3", "w2"), s, s.inner, count, act)
        return before_each(n, s, norm, attention(n, s, style, "h", "a"), (*chosen, experts))

    return assemble(f, s, norm, rope, [rope.plain(s.head)], ends, layer)
