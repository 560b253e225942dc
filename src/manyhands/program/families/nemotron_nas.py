"""The recipe of nemotron-nas (Llama Nemotron 51B and Super 49B): llama whose layers differ, as a search has found them.
Attention has its own number of key heads, is one product, or is not there; so are blocks, with a width of their own.
Layers that lack both, as of Ultra 253B, are refused."""

from dataclasses import dataclass, replace
from typing import Final

from manyhands.program.blocks import AttentionStyle, NormStyle, Ops, Sizes, TensorNames, attention, gated, head_scale
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.fields import Fields
from manyhands.program.ops import Add, Product, Program, Term
from manyhands.program.rope import RopeReader

_MULTIPLE: Final = 256  # of columns of a block
_PLAIN: Final = (
    "sparsify",
    "mamba",
    "llama4",
    "moe",
    "window_length",
    "num_sink_tokens",
)  # null in all that are published
_OFF: Final = ("unshifted_sink", "use_prefill_window_in_sink_attention")
LINEAR: Final = -1


@dataclass(frozen=True, slots=True)
class _Kind:
    """A layer: key heads of its attention, and columns of its block; 0: there is none, LINEAR: it is one product."""

    kv_heads: int
    inner: int


def nemotron_nas(f: Fields) -> Program:
    """Tensors of what a layer lacks are not there, norms before it included."""
    f.only("num_key_value_heads", None)
    f.only("intermediate_size", None)
    s = _sizes(f)
    kinds, norm, act = _kinds(f, s), NormStyle("rms", f.number("rms_norm_eps", 1e-5)), f.activation()
    bias, block_bias, rope = f.flag("attention_bias"), f.flag("mlp_bias"), RopeReader(f)
    linear = "self_attn.o_proj" if f.stored("linear_as_output") else "self_attn.linear_attn"
    style = AttentionStyle(head_scale(s.head), pairs=f.stored("interleaved_rope"), bias=bias, out_bias=bias)

    def layer(n: TensorNames, i: int) -> Ops:
        kv_heads, inner = kinds[i].kv_heads, kinds[i].inner
        first = (
            (Product("h", (n.part("a", linear, s.hidden, s.hidden, False),)),)
            if kv_heads == LINEAR
            else attention(n, replace(s, kv_heads=kv_heads or 1), style, "h", "a")
        )
        second = (
            (Product("h", (n.part("m", "mlp.linear_mlp", s.hidden, s.hidden, False),)),)
            if inner == LINEAR
            else gated(n, "mlp", s.hidden, inner or 1, act, "h", "m", bias=block_bias)
        )
        before, after = (
            norm.op(n, name, s.hidden, "x", "h") for name in ("input_layernorm", "post_attention_layernorm")
        )
        return (
            *((before, *first, Add((Term("a"),))) if kv_heads else ()),
            *((after, *second, Add((Term("m"),))) if inner else ()),
        )

    return assemble(f, s, norm, rope, [rope.plain(s.head)], EndsStyle(), layer)


def _sizes(f: Fields) -> Sizes:
    hidden, heads = f.count("hidden_size", high=1 << 17), f.count("num_attention_heads", high=4096)
    if hidden % heads:
        raise f.refuse("num_attention_heads", f"a divisor of hidden_size {hidden} is needed")
    layers, vocab = f.count("num_hidden_layers", high=1024), f.count("vocab_size", high=1 << 22)
    f.only("head_dim", hidden // heads)
    return Sizes(layers, hidden, vocab, heads, heads, hidden // heads, 0)


def _kinds(f: Fields, s: Sizes) -> list[_Kind]:
    given = f.raw("block_configs")
    if not isinstance(given, list) or len(given) != s.layers or not all(isinstance(one, dict) for one in given):
        raise f.refuse("block_configs", f"an object for each of the {s.layers} layers is needed")
    kinds = []
    for i, one in enumerate(given):
        where = f"{f.where}: block_configs[{i}]"
        if set(one) != {"attention", "ffn"} or not all(isinstance(part, dict) for part in one.values()):
            raise f.refuse("block_configs", f"attention and ffn are needed of layer {i}, each an object")
        kinds.append(_Kind(_kv_heads(Fields(one["attention"], where), s), _inner(Fields(one["ffn"], where), s)))
    if _Kind(0, 0) in kinds:  # a checkpoint has no tensor of it, by which the parts of a folder are known
        raise f.refuse("block_configs", f"attention or a block is needed of layer {kinds.index(_Kind(0, 0))}")
    return kinds


def _is_plain(f: Fields) -> int | None:
    """0 for what is not there, LINEAR for a product; None for what is as usual. Raises ModelError for other kinds."""
    for name in _PLAIN:
        f.only(name, None)
    for name in _OFF:
        f.only(name, False, None)
    if f.flag("no_op"):
        return 0
    return LINEAR if f.flag("replace_with_linear") else None


def _kv_heads(f: Fields, s: Sizes) -> int:
    kind = _is_plain(f)
    if kind is None:
        group = f.count("n_heads_in_group", high=s.heads)
        if s.heads % group:
            raise f.refuse("n_heads_in_group", f"a divisor of the {s.heads} heads is needed")
        kind = s.heads // group
    f.ignore("n_heads_in_group", "replace_with_linear", "hidden_act")
    f.finish()
    return kind


def _inner(f: Fields, s: Sizes) -> int:
    """By a multiple of the hidden size, of which two thirds are meant, up to a multiple of 256; or as it is said."""
    kind = _is_plain(f)
    if kind is None:
        width = f.optional_count("intermediate_size")
        if width is None:
            width = -(-int(2 * f.number("ffn_mult") * s.hidden / 3) // _MULTIPLE) * _MULTIPLE
        if not 1 <= width <= 1 << 20:
            raise f.refuse("ffn_mult", f"a block of 1 to {1 << 20} columns is needed")
        kind = width
    f.ignore("ffn_mult", "intermediate_size", "replace_with_linear", "hidden_act")
    f.finish()
    return kind
