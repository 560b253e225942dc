"""Recipes of gemma4_text and gemma4_unified_text: the models of Gemma 4 without embeddings of their own for each layer
(26B-A4B, 31B, and 12B, which reads images and sound without towers)."""

from dataclasses import dataclass, replace

from manyhands.program.blocks import AttentionStyle, NormStyle, Ops, Sizes, TensorNames, attention, gated
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import stacked_experts
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import (
    Activation,
    Add,
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
    f.assume(hidden_size_per_layer_input=0)
    return gemma4_text(f, window=1024)


def gemma4_text(f: Fields, window: int = 512) -> Program:
    """Norms before and behind; wider heads and perhaps one product of keys and values in full layers; each layer's result
    times a stored number; in some models experts beside the dense block."""
    if f.raw("hidden_size_per_layer_input", 256) and not f.is_null("hidden_size_per_layer_input"):
        raise f.refuse(
            "hidden_size_per_layer_input", "0 is needed: embeddings for each layer (E2B, E4B) are not served"
        )
    f.only("num_kv_shared_layers", 0)
    f.only("use_bidirectional_attention", None, "vision", False)  # of images alone
    f.ignore("use_double_wide_mlp", "vocab_size_per_layer_input", "hidden_act")  # of shared and such layers
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

    def layer(n: TensorNames, i: int) -> Ops:
        sizes, style = (wide, full) if kinds[i] == _FULL else (s, usual)
        last = n.vector("layer_scalar", 1)
        return (
            norm.op(n, "input_layernorm", s.hidden, "x", "h"),
            *attention(n, sizes, style, "h", "a"),
            norm.op(n, "post_attention_layernorm", s.hidden, "a", "a"),
            Add((Term("a"),)),
            norm.op(n, "pre_feedforward_layernorm", s.hidden, "x", "h"),
            *gated(n, "mlp", s.hidden, s.inner, act, "h", "m"),
            *(experts.beside(n, s, norm) if experts else ()),
            norm.op(n, "post_feedforward_layernorm", s.hidden, "m", "m"),
            Multiply("x", last, "x"),
            Multiply("m", last, "m"),
            Add((Term("m"),)),
        )

    ends = EndsStyle(
        tied=True, embed_scale=s.hidden**0.5, round_scale=True, soft_cap=f.optional("final_logit_softcapping")
    )
    return assemble(f, s, norm, rope, ropes, ends, layer)


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

    def beside(self, n: TensorNames, s: Sizes, norm: NormStyle) -> Ops:
        """What joins "m", which holds the dense block's result."""
        experts = stacked_experts(n, "experts", s, self.inner, self.count, self.activation)
        return (
            norm.op(n, "post_feedforward_layernorm_1", s.hidden, "m", "m"),
            Norm("x", "t", "rms", norm.eps, (n.vector("router.scale", s.hidden),)),
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
            norm.op(n, "pre_feedforward_layernorm_2", s.hidden, "x", "h"),
            replace(experts, target="s"),
            norm.op(n, "post_feedforward_layernorm_2", s.hidden, "s", "s"),
            Add((Term("s"),), target="m"),
        )
