"""Recipes of gemma4_text (Gemma 4 26B-A4B and 31B; E2B and E4B, whose rows are those of layer_inputs.py) and
gemma4_unified_text (12B, which reads images and sound without towers)."""

from dataclasses import dataclass, replace

from manyhands.program.blocks import AttentionStyle, NormStyle, Ops, Sizes, TensorNames, gated
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import stacked_experts
from manyhands.program.families.layer_inputs import (
    RowLayout,
    input_added,
    inputs_made,
    sharing_attention,
    table,
    with_rows,
)
from manyhands.program.fields import MOST_EXPERTS, WIDEST, Fields
from manyhands.program.ops import (
    Activation,
    Add,
    Copy,
    ExpertRouting,
    Multiply,
    Norm,
    Product,
    Program,
    Term,
)
from manyhands.program.rope import RopeReader

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}


def gemma4_unified_text(f: Fields) -> Program:
    """The same without experts; fields of these, and of embeddings for each layer, are in published configs and not read."""
    f.only("enable_moe_block", False)
    f.only("hidden_size_per_layer_input", 0)
    f.only("num_kv_shared_layers", 0)
    f.assume(hidden_size_per_layer_input=0)
    return gemma4_text(f, window=1024)


def gemma4_text(f: Fields, window: int = 512) -> Program:
    """Norms before and behind; wider heads and perhaps one product of keys and values in full layers; each layer's result
    times a stored number; in some models experts beside the dense block, in others inputs for each layer, and late layers
    with the keys and values of earlier ones and, perhaps, twice the width."""
    f.only("use_bidirectional_attention", None, "vision", False)  # of images alone
    f.ignore("hidden_act")  # not read by transformers
    f.assume(rope_parameters=_ROPES)
    f.only("rope_theta", 1000000.0)  # transformers reads the new form alone
    f.only("rope_scaling", None)
    s, rope, bias = Sizes.read(f, head=256), RopeReader(f), f.flag("attention_bias")
    eps, act = f.number("rms_norm_eps", 1e-6), f.activation("hidden_activation", "gelu_pytorch_tanh")
    default = [_FULL if i % 6 == 5 else _SLIDING for i in range(s.layers)]
    kinds = [*f.per_layer("layer_types", s.layers, default, (_FULL, _SLIDING))[:-1], _FULL]
    is_shared, window = f.flag("attention_k_eq_v"), f.count("sliding_window", window)
    wide = _full_sizes(f, s, [str(i) for i in range(s.layers) if kinds[i] == _FULL], is_shared)
    ropes = [rope.by_type(_FULL, wide.head, theta=1000000.0, scaled=True)]
    ropes.append(rope.by_type(_SLIDING, s.head, theta=10000.0, scaled=False))
    norm = NormStyle("rms", eps)
    usual = AttentionStyle(1.0, 1, bias=bias, out_bias=bias, window=window, head_norm=norm, value_eps=eps)
    full = replace(usual, rope=0, window=None, is_value_key=is_shared)
    experts = _Mixture.read(f, act) if f.flag("enable_moe_block") else None
    if experts is None:
        f.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
    at = _layout(f, kinds, s, wide)
    widened = 2 if f.flag("use_double_wide_mlp") else 1
    row = "y" if at.input else "x"  # the residual stream, a part of "x" where a row has more

    def layer(n: TensorNames, i: int) -> Ops:
        sizes, style = (wide, full) if kinds[i] == _FULL else (s, usual)
        inner = s.inner * (widened if i >= at.first_sharing else 1)
        last = n.vector("layer_scalar", 1)
        result, added = ("f", input_added(n, at, norm, act, i, row)) if at.input else ("m", ())
        return (
            *(inputs_made(at, norm) if at.input and i == 0 else ()),
            *((Copy("x", row, 0, s.hidden),) if at.input else ()),
            norm.op(n, "input_layernorm", s.hidden, row, "h"),
            *sharing_attention(n, sizes, style, at, i, kinds[i]),
            norm.op(n, "post_attention_layernorm", s.hidden, "a", "a"),
            Add((Term("a"),), target=row),
            norm.op(n, "pre_feedforward_layernorm", s.hidden, row, "h"),
            *gated(n, "mlp", s.hidden, inner, act, "h", "m"),
            *(experts.beside(n, s, norm, row) if experts else ()),
            norm.op(n, "post_feedforward_layernorm", s.hidden, "m", "m"),
            *((Add((Term("m"),), target=row), *added) if at.input else ()),
            Multiply(row, last, row),
            Multiply(result, last, result),
            Add((Term(result),), target=row),
            *((Copy(row, "x", 0, s.hidden, at=0),) if at.input else ()),
        )

    ends = EndsStyle(
        tied=True, embed_scale=s.hidden**0.5, round_scale=True, soft_cap=f.optional("final_logit_softcapping")
    )
    beside = table(f, at, s.vocab) if at.input else None
    program = assemble(f, s, norm, rope, ropes, ends, layer)
    return program if beside is None else with_rows(program, at, beside, (Copy("x", "u", 0, s.hidden),))


def _layout(f: Fields, kinds: list[str], s: Sizes, wide: Sizes) -> RowLayout:
    """Of a model without inputs of layers, which shares no keys either, it is the residual stream alone."""
    own, shared = 0, 0
    if not f.is_null("hidden_size_per_layer_input"):
        own = f.count("hidden_size_per_layer_input", 256, low=0, high=WIDEST)
    if own:
        shared = f.count("num_kv_shared_layers", 0, low=0)
    else:
        f.only("num_kv_shared_layers", 0)  # transformers (5.23) cannot compute it either
        f.ignore("vocab_size_per_layer_input")
    kv = {_FULL: wide.kv_heads * wide.head, _SLIDING: s.kv_heads * s.head}
    return RowLayout.read(f, s, kinds, kv, streams=1, own=own, shared=shared)


def _full_sizes(f: Fields, s: Sizes, full: list[str], is_shared: bool) -> Sizes:
    """Of full layers: global_head_dim and, with shared products, num_global_key_value_heads; or as transformers writes them,
    `per_layer_config`, with the same for each of these layers."""
    head, kv_heads = f.count("global_head_dim", 512, high=1 << 14), s.kv_heads
    found = f.optional_count("num_global_key_value_heads")
    if is_shared and found is not None:
        kv_heads = found
    given = f.raw("per_layer_config")
    if given == {} or f.is_null("per_layer_config"):  # they have the sizes of the others
        return s
    if given is not None:
        each = list(given.values()) if isinstance(given, dict) and sorted(given) == sorted(full) else []
        if not each or any(one != each[0] for one in each) or not isinstance(each[0], dict):
            raise f.refuse("per_layer_config", f"the same sizes for each of the layers {', '.join(full)} are needed")
        own = Fields(each[0], f"{f.where}: per_layer_config")
        head = own.count("head_dim", s.head, high=1 << 14)
        kv_heads = own.count("num_key_value_heads", s.kv_heads, high=4096)
        own.finish()
    if s.heads % kv_heads:
        raise f.refuse("num_global_key_value_heads", f"a divisor of the {s.heads} attention heads is needed")
    return replace(s, head=head, kv_heads=kv_heads)


@dataclass(frozen=True, slots=True)
class _Mixture:
    """The experts beside the dense block: they and their router read the residual stream, each through a norm of its own."""

    count: int
    top_k: int
    inner: int
    activation: Activation

    @classmethod
    def read(cls, f: Fields, activation: Activation) -> "_Mixture":
        """Raises ModelError."""
        count = f.count("num_experts", high=MOST_EXPERTS)
        top_k, inner = f.count("top_k_experts", high=count), f.count("moe_intermediate_size", high=1 << 20)
        return cls(count, top_k, inner, activation)

    def beside(self, n: TensorNames, s: Sizes, norm: NormStyle, row: str) -> Ops:
        """What joins "m", which holds the dense block's result; `row`: the residual stream."""
        experts = stacked_experts(n, "experts", s, self.inner, self.count, self.activation)
        return (
            norm.op(n, "post_feedforward_layernorm_1", s.hidden, "m", "m"),
            Norm(row, "t", "rms", norm.eps, (n.vector("router.scale", s.hidden),)),
            Product("t", (n.part("r", "router.proj", self.count, s.hidden, False),)),
            Multiply("r", s.hidden**-0.5, "r"),
            ExpertRouting(
                source="r",
                target="routes",
                experts=self.count,
                top_k=self.top_k,
                score="softmax",
                normalise=True,
                factors=n.vector("router.per_expert_scale", self.count),
            ),
            norm.op(n, "pre_feedforward_layernorm_2", s.hidden, row, "h"),
            replace(experts, target="s"),
            norm.op(n, "post_feedforward_layernorm_2", s.hidden, "s", "s"),
            Add((Term("s"),), target="m"),
        )
