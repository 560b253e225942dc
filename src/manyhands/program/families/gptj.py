"""Recipes of gptj and codegen: attention and a plain block side by side behind one norm; pairs of first columns turn."""

from typing import Final

from manyhands.program.blocks import (
    AttentionStyle,
    Branch,
    NormStyle,
    Ops,
    Sizes,
    TensorNames,
    attention,
    head_scale,
    parallel,
    plain,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.fields import Fields
from manyhands.program.ops import Op, Product, Program, Rows
from manyhands.program.rope import RopeReader

_PARTS: Final = 4  # of codegen's one tensor, each with queries, values and keys of a quarter of the heads
_ENDS: Final = EndsStyle(embed="transformer.wte", norm="transformer.ln_f", layers="transformer.h", head_bias=True)
# Of summaries, and of training.
UNUSED: Final = tuple(
    """
    attn_pdrop n_ctx summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    """.split()
)


def gptj(f: Fields) -> Program:
    """GPT-J 6B. Biases of the block and of the head."""
    return _model(f, fused=None)


def codegen(f: Fields) -> Program:
    """CodeGen: the same with one tensor for queries, keys and values."""
    return _model(f, fused="attn.qkv_proj")


def _model(f: Fields, fused: str | None) -> Program:
    f.rename(
        hidden_size="n_embd",
        num_attention_heads="n_head",
        num_hidden_layers="n_layer",
        max_position_embeddings="n_positions",
    )
    f.ignore(*UNUSED)
    f.only("scale_attn_weights", True)
    f.only("rotary", True)
    f.only("rope_theta", 10000.0)
    heads = f.count("num_attention_heads", 16, high=4096)
    if fused and heads % _PARTS:
        raise f.refuse("num_attention_heads", f"a multiple of {_PARTS} is needed")
    s = own_sizes(f, 4096, heads, heads, 28, 50400, f.optional_count("n_inner"))
    act = f.activation("activation_function", "gelu_new")
    norm, rope = NormStyle("layer", f.number("layer_norm_epsilon", 1e-5), bias=True), without_scaling(f)
    turned = f.count("rotary_dim", 64, low=2, high=s.head)
    if turned % 2 or f.is_null("rotary_dim"):
        raise f.refuse("rotary_dim", f"an even number up to the {s.head} columns of a head is needed")
    style = AttentionStyle(head_scale(s.head), pairs=True, path="attn", out_name="attn.out_proj")

    def layer(n: TensorNames, i: int) -> Ops:
        first: Ops = attention(n, s, style, "h", "a")
        first = first if fused is None else (_in_parts(n, s, fused), *first[1:])
        block = plain(n, ("mlp.fc_in", "mlp.fc_out"), s, act, "h", "m", bias=True)
        return parallel(Branch(first, "a", norm.op(n, "ln_1", s.hidden, "x", "h")), Branch(block, "m"))

    return assemble(f, s, norm, rope, [rope.plain(turned)], _ENDS, layer)


def without_scaling(f: Fields) -> RopeReader:
    """Of families whose scaling of positions transformers does not read. Raises ModelError for a config that has one."""
    for name in ("rope_scaling", "rope_parameters"):
        f.only(name, None)
    return RopeReader(f)


def own_sizes(f: Fields, hidden: int, heads: int, kv_heads: int, layers: int, vocab: int, inner: int | None) -> Sizes:
    """Of families whose blocks are four times as wide as rows unless they say otherwise. Raises ModelError.

    `hidden`, `layers` and `vocab`: where the config does not say. Usual names of what they call otherwise are not read.
    """
    hidden = f.count("hidden_size", hidden, high=1 << 17)
    if hidden % heads:
        raise f.refuse("hidden_size", f"a multiple of the {heads} heads is needed")
    f.only("head_dim", hidden // heads, None)
    f.ignore("intermediate_size", "num_key_value_heads")
    layers, vocab = f.count("num_hidden_layers", layers, high=1024), f.count("vocab_size", vocab, high=1 << 22)
    return Sizes(layers, hidden, vocab, heads, kv_heads, hidden // heads, inner or 4 * hidden)


def _in_parts(n: TensorNames, s: Sizes, fused: str) -> Op:
    """Queries, keys and values of "h"."""
    size = s.hidden // _PARTS
    rows = {target: Rows(place * size, size, 3 * size, _PARTS) for target, place in (("q", 0), ("k", 2), ("v", 1))}
    parts = (n.part(target, fused, 3 * s.hidden, s.hidden, False, each) for target, each in rows.items())
    return Product("h", tuple(parts))
