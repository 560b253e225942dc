"""The recipe of falcon (Falcon 7B, 40B, 180B, Falcon 2 11B): attention and a plain block side by side, with few key heads."""

from typing import Final

from manyhands.program.blocks import (
    AttentionStyle,
    Branch,
    NormStyle,
    Ops,
    Sizes,
    TensorNames,
    attention,
    before_each,
    head_scale,
    parallel,
    plain,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.gptj import own_sizes
from manyhands.program.fields import Fields
from manyhands.program.ops import Op, Product, Program, Rows
from manyhands.program.rope import RopeReader

_QKV: Final = "self_attention.query_key_value"
_ENDS: Final = EndsStyle(
    tied=True, embed="transformer.word_embeddings", norm="transformer.ln_f", layers="transformer.h"
)


def falcon(f: Fields) -> Program:
    """One tensor holds, for each key head, its queries, its key and its value. Those with alibi are refused."""
    f.only("alibi", False, None)
    f.only("apply_residual_connection_post_layernorm", False)
    f.ignore("ff_factor")  # of Falcon 2, beside ffn_hidden_size
    s, is_new = _sizes(f)
    bias, act, beside = f.flag("bias"), f.activation("activation", "gelu"), f.flag("parallel_attn", True)
    norms = _norms(f, beside, is_new)
    norm, rope = NormStyle("layer", f.number("layer_norm_epsilon", 1e-5), bias=True), RopeReader(f)
    style = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias, out_name="self_attention.dense", fused=_QKV)
    by_part = f.stored("qkv_by_part")

    def layer(n: TensorNames, i: int) -> Ops:
        first: Ops = attention(n, s, style, "h", "a")
        first = first if by_part else (_by_key_head(n, s, bias), *first[1:])
        second = plain(n, ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"), s, act, "h", "m", bias=bias)
        if not beside:
            return before_each(n, s, norm, first, second)
        before = [norm.op(n, name, s.hidden, "x", "h") for name in norms]
        return parallel(Branch(first, "a", before[0]), Branch(second, "m", before[1] if len(before) > 1 else None))

    return assemble(f, s, norm, rope, [rope.plain(s.head)], _ENDS, layer)


def _sizes(f: Fields) -> tuple[Sizes, bool]:
    """And whether it is of the newer kind, which has several key heads; others have one, or one for each head."""
    is_new, stated = f.flag("new_decoder_architecture"), f.optional_count("num_kv_heads")
    heads = f.count("num_attention_heads", 71, high=4096)
    is_one = f.flag("multi_query", True) and not is_new
    kv_heads = 1 if is_one else stated or heads
    if heads % kv_heads or not (is_one or is_new or kv_heads == heads):
        needed = f"a divisor of the {heads} heads is needed, without multi_query as many as these"
        raise f.refuse("num_kv_heads", needed)
    return own_sizes(f, 4544, heads, kv_heads, 32, 65024, f.optional_count("ffn_hidden_size")), is_new


def _norms(f: Fields, beside: bool, is_new: bool) -> list[str]:
    """Before attention, and before the block where it has its own. Raises ModelError for what transformers cannot compute."""
    count = f.optional_count("num_ln_in_parallel_attn") or (2 if is_new else 1)
    if is_new and not beside:
        raise f.refuse("parallel_attn", "true is needed with new_decoder_architecture")
    if beside and count not in ((1, 2) if is_new else (1,)):
        needed = "1 or 2 is needed" if is_new else "1 is needed without new_decoder_architecture"
        raise f.refuse("num_ln_in_parallel_attn", needed)
    one = "ln_mlp" if f.stored("norm_as_ln_mlp") else "input_layernorm"
    return ["ln_attn", "ln_mlp"] if count == 2 else [one]


def _by_key_head(n: TensorNames, s: Sizes, bias: bool) -> Op:
    """Queries, keys and values of "h", by key head."""
    width = s.heads // s.kv_heads * s.head
    step, places = width + 2 * s.head, {"q": (0, width), "k": (width, s.head), "v": (width + s.head, s.head)}
    total = step * s.kv_heads
    rows = {target: Rows(start, count, step, s.kv_heads) for target, (start, count) in places.items()}
    return Product("h", tuple(n.part(target, _QKV, total, s.hidden, bias, each) for target, each in rows.items()))
