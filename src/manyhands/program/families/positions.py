"""Recipes of gpt2, gpt_bigcode, gpt_neo, opt and biogpt, which add a learnt embedding of the position to that of the token.

No head turns. The table of positions belongs to the first layer, so that the ends give rows that depend on ids alone.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
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
    plain,
    sequential,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.gptj import UNUSED, own_sizes, without_scaling
from manyhands.program.families.unweighted import Unweighted
from manyhands.program.fields import Fields
from manyhands.program.ops import Activation, Add, Op, PositionEmbedding, Product, Program, Term, Weight

_GPT2: Final = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}
_GPT2_ENDS: Final = EndsStyle(tied=True, embed="transformer.wte", norm="transformer.ln_f", layers="transformer.h")
_OPT_ENDS: Final = EndsStyle(
    tied=True,
    embed="model.decoder.embed_tokens",
    norm="model.decoder.final_layer_norm",
    layers="model.decoder.layers",
)
_KINDS: Final = ("global", "local")  # of gpt_neo's layers, the second with a window
# Of StarCoder's own inference code.
_OF_RUNNERS: Final = tuple(
    """
    inference_runner max_batch_size max_sequence_length pad_key_length pre_allocate_kv_cache validate_runner_input
    """.split()
)
_SKIPPED: Final = 2  # rows of the tables of opt and biogpt, before that of position 0


@dataclass(frozen=True, slots=True)
class _Names:
    """Of a layer's norms and block, and of the table of positions."""

    table: str = "transformer.wpe.weight"
    norms: tuple[str, str] = ("ln_1", "ln_2")
    block: tuple[str, str] = ("mlp.c_fc", "mlp.c_proj")


_OPT: Final = _Names(
    "model.decoder.embed_positions.weight", ("self_attn_layer_norm", "final_layer_norm"), ("fc1", "fc2")
)


def gpt2(f: Fields) -> Program:
    """GPT-2. Matrices are stored [inputs, outputs], but of GGUF files and, packed, of GPTQ."""
    f.ignore("reorder_and_upcast_attn")
    s, scale = _gpt2_sizes(f)
    by_layer = f.flag("scale_attn_by_inverse_layer_idx")
    is_turned = not (f.stored("outputs_first") or f.quantised("gptq"))

    def first(n: TensorNames, i: int) -> Ops:
        style = _gpt2_style(scale / (i + 1) if by_layer else scale)
        return attention(n, s, style, "h", "a")

    act = f.activation("activation_function", "gelu_new")
    norm = NormStyle("layer", f.number("layer_norm_epsilon", 1e-5), bias=True)
    return _model(f, s, act, norm, first, _Names(), _GPT2_ENDS, turn=_turned if is_turned else None)


def gpt_bigcode(f: Fields) -> Program:
    """StarCoder, SantaCoder: gpt2 with one key head; without `multi_query` queries, key and value lie head by head."""
    f.ignore(*_OF_RUNNERS, "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    is_one = f.flag("multi_query", True)
    s, scale = _gpt2_sizes(f, is_one)
    style = replace(_gpt2_style(scale), interleaved=not f.stored("qkv_by_part") and not is_one)
    act = f.activation("activation_function", "gelu_pytorch_tanh")
    norm = NormStyle("layer", f.number("layer_norm_epsilon", 1e-5), bias=True)
    return _model(f, s, act, norm, _alike(s, style), _Names(), _GPT2_ENDS)


def gpt_neo(f: Fields) -> Program:
    """GPT-Neo: scores are not scaled, and every other layer has a window."""
    f.rename(num_attention_heads="num_heads", num_hidden_layers="num_layers")
    f.ignore(*UNUSED, "embed_dropout", "resid_dropout")
    heads = f.count("num_attention_heads", 16, high=4096)
    s = own_sizes(f, 2048, heads, heads, 24, 50257, f.optional_count("intermediate_size"))
    window, kinds = f.count("window_size", 256), _layer_kinds(f, s.layers)
    style = AttentionStyle(1.0, rope=None, out_bias=True, path="attn.attention", out_name="attn.attention.out_proj")

    def first(n: TensorNames, i: int) -> Ops:
        return attention(n, s, replace(style, window=window if kinds[i] == "local" else None), "h", "a")

    act = f.activation("activation_function", "gelu_new")
    norm = NormStyle("layer", f.number("layer_norm_epsilon", 1e-5), bias=True)
    return _model(f, s, act, norm, first, _Names(), _GPT2_ENDS, context=2048)


def opt(f: Fields) -> Program:
    """OPT, Galactica. Those with norms behind attention and block, or whose embeddings are narrower than rows (OPT-350M), are
    refused."""
    f.only("do_layer_norm_before", True)
    f.only("_remove_final_layer_norm", False)
    f.only("learned_embeddings", True)
    f.only("scale_embeddings", False)
    f.ignore("activation_dropout", "dropout", "init_std", "layerdrop", "output_projection")
    heads = f.count("num_attention_heads", 12, high=4096)
    s = own_sizes(f, 768, heads, heads, 12, 50272, f.count("ffn_dim", 3072, high=1 << 20))
    f.only("word_embed_proj_dim", s.hidden, None)
    bias, act = f.flag("enable_bias", True), f.activation("activation_function", "relu")
    has_weights = f.flag("layer_norm_elementwise_affine", True)
    norm = NormStyle("layer", 1e-5, bias=True) if has_weights else Unweighted("layer", 1e-5)
    style = AttentionStyle(head_scale(s.head), rope=None, bias=bias, out_bias=bias, out_name="self_attn.out_proj")
    return _model(f, s, act, norm, _alike(s, style), _OPT, _OPT_ENDS, context=2048, offset=_SKIPPED, bias=bias)


def biogpt(f: Fields) -> Program:
    """BioGPT: opt whose embeddings are scaled. Its epsilon is not the one that its config names."""
    f.ignore("activation_dropout", "hidden_dropout_prob", "layer_norm_eps", "layerdrop", "type_vocab_size")
    heads = f.count("num_attention_heads", 16, high=4096)
    s = own_sizes(f, 1024, heads, heads, 24, 42384, f.count("intermediate_size", 4096, high=1 << 20))
    style = AttentionStyle(head_scale(s.head), rope=None, bias=True, out_bias=True, out_name="self_attn.out_proj")
    ends = EndsStyle(
        tied=True,
        embed="biogpt.embed_tokens",
        norm="biogpt.layer_norm",
        head="output_projection",
        layers="biogpt.layers",
        embed_scale=math.sqrt(s.hidden) if f.flag("scale_embedding", True) else 1.0,
    )
    names, act = replace(_OPT, table="biogpt.embed_positions.weight"), f.activation("hidden_act", "gelu")
    return _model(f, s, act, NormStyle("layer", 1e-5, bias=True), _alike(s, style), names, ends, offset=_SKIPPED)


def _alike(s: Sizes, style: AttentionStyle) -> Callable[[TensorNames, int], Ops]:
    return lambda n, i: attention(n, s, style, "h", "a")


def _gpt2_sizes(f: Fields, is_one: bool = False) -> tuple[Sizes, float]:
    """Sizes, and what scores are multiplied by. `is_one`: there is one key head."""
    f.rename(**_GPT2)
    f.ignore(*UNUSED)
    heads = f.count("num_attention_heads", 12, high=4096)
    s = own_sizes(f, 768, heads, 1 if is_one else heads, 12, 50257, f.optional_count("n_inner"))
    return s, head_scale(s.head) if f.flag("scale_attn_weights", True) else 1.0


def _gpt2_style(scale: float) -> AttentionStyle:
    return AttentionStyle(scale, rope=None, bias=True, out_bias=True, out_name="attn.c_proj", fused="attn.c_attn")


def _model(
    f: Fields,
    s: Sizes,
    act: Activation,
    norm: NormStyle,
    first: Callable[[TensorNames, int], Ops],
    names: _Names,
    ends: EndsStyle,
    *,
    context: int = 1024,
    offset: int = 0,
    bias: bool = True,
    turn: Callable[[Op], Op] | None = None,
) -> Program:
    """`context`: where the config says none. `first`: attention, of which and of the block's products `turn` makes others."""
    f.assume(max_position_embeddings=context)
    rope = without_scaling(f)
    table = Weight(names.table, (rope.context + offset, s.hidden))

    def layer(n: TensorNames, i: int) -> Ops:
        norms = [norm.op(n, name, s.hidden, "x", "h") for name in names.norms]
        block = plain(n, names.block, s, act, "h", "m", bias=bias)
        bodies = [tuple(map(turn, ops)) if turn else ops for ops in (first(n, i), block)]
        ops = sequential(Branch(bodies[0], "a", norms[0]), Branch(bodies[1], "m", norms[1]))
        return ops if i else (PositionEmbedding("p", table, offset), Add((Term("p"),)), *ops)

    return assemble(f, s, norm, rope, [], ends, layer)


def _turned(op: Op) -> Op:
    """With matrices that are stored the other way round."""
    if not isinstance(op, Product):
        return op
    weights = (replace(part.weight, shape=part.weight.shape[::-1], transposed=True) for part in op.parts)
    return replace(op, parts=tuple(replace(part, weight=w) for part, w in zip(op.parts, weights, strict=True)))


def _layer_kinds(f: Fields, layers: int) -> list[str]:
    """Which layers of gpt_neo have a window. Raises ModelError."""
    needed = "a list of lists of global and local, each with how often it comes, is needed"
    given, kinds = f.raw("attention_types", [[[*_KINDS], 12]]), list[str]()
    for item in given if isinstance(given, list) else [None]:
        match item:
            case [list(names), int(count)] if 0 < count <= layers and set(map(str, names)) <= set(_KINDS):
                kinds += [str(name) for name in names][:layers] * count
                if len(kinds) > layers:
                    break
            case _:
                raise f.refuse("attention_types", needed)
    if len(kinds) != layers:
        raise f.refuse("attention_types", f"{layers} layers are needed, these are {len(kinds)}")
    f.only("attention_layers", kinds, None)
    return kinds
