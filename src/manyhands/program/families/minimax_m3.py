"""The recipe of minimax_m3_vl_text, the text part of MiniMax-M3: attention over blocks of positions that an indexer chooses for
each key head, clamped gates, experts that sigmoids choose beside a shared block."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from manyhands.program.blocks import (
    AttentionStyle,
    Branch,
    NormStyle,
    Ops,
    Sizes,
    TensorNames,
    attention,
    each_expert,
    head_scale,
    router,
    sequential,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import top_k
from manyhands.program.families.indexer import MOST_CHOSEN
from manyhands.program.fields import MOST_EXPERTS, Fields
from manyhands.program.ops import (
    Attention,
    BlockIndex,
    ExpertRouting,
    Gate,
    Gating,
    Product,
    Program,
    Rotary,
)
from manyhands.program.rope import RopeReader

_SPARSE, _FULL = "minimax_m3_sparse", "full_attention"
_BLOCK = 64  # of a cache: an index of blocks chooses whole ones
# By the name that transformers has for them, what published configs call the indexer's sizes.
_LEGACY = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}


def minimax_m3_vl_text(f: Fields) -> Program:
    """Norms of heads; weights of norms have an offset of one. Tensors have the names of the publisher's checkpoints."""
    f.assume(num_key_value_heads=4, intermediate_size=3072)
    offset = 0.0 if f.stored("norms_plus_one") else 1.0
    s, norm = Sizes.read(f, head=128), NormStyle("rms", f.number("rms_norm_eps", 1e-6), offset)
    rope = RopeReader(f, theta=5000000.0, fraction=f.number("partial_rotary_factor", 1.0))
    table = rope.plain(s.head, partial=True)
    f.only("rotary_dim", table.width)
    kinds = _layer_kinds(f, s)
    index = _index(f, s, table.width) if _SPARSE in kinds else None
    f.ignore(*_LEGACY)
    blocks, style = _Blocks.read(f, s), AttentionStyle(head_scale(s.head), head_norm=norm)
    _as_trained(f)

    def layer(n: TensorNames, i: int) -> Ops:
        ops = attention(n, s, style, "h", "a")
        ops = _indexed(n, s, norm, index, ops) if index and kinds[i] == _SPARSE else ops
        before = norm.op(n, "input_layernorm", s.hidden, "x", "h")
        return sequential(Branch(ops, "a", before), blocks.branch(n, s, norm, i))

    return assemble(f, s, norm, rope, [table], EndsStyle(), layer)


def _layer_kinds(f: Fields, s: Sizes) -> list[str]:
    """Which layers have an indexer; sparse_attention_config, of published configs, is read where there is no list of kinds."""
    inner = _sparse_config(f)
    kinds = _by_layer(f, s, inner, "sparse_attention_freq", "layer_types", (_FULL, _SPARSE), _FULL)
    inner.only("use_sparse_attention", True)
    inner.only("sparse_score_type", "max")
    inner.only("sparse_init_block", 0)
    inner.only("sparse_disable_index_value", [int(kind == _SPARSE) for kind in kinds])
    inner.ignore(*_LEGACY.values())
    inner.finish()
    return kinds


def _by_layer(
    f: Fields, s: Sizes, given: Fields, marks_name: str, name: str, kinds: tuple[str, str], default: str
) -> list[str]:
    """One of two kinds for each layer, by a list of them or by one of marks: if there are both, they must agree."""
    marks = given.whole_numbers(marks_name)
    marked = [kinds[mark != 0] for mark in marks] or [default] * s.layers
    if len(marked) != s.layers:
        raise given.refuse(marks_name, f"a mark for each of the {s.layers} layers is needed")
    found = f.per_layer(name, s.layers, marked, kinds)
    if marks and marked != found:
        raise given.refuse(marks_name, f"{name} says otherwise of the layers")
    return found


def _sparse_config(f: Fields) -> Fields:
    given = f.raw("sparse_attention_config", {})
    if not isinstance(given, dict):
        raise f.refuse("sparse_attention_config", "an object is needed")
    return Fields(given, f"{f.where}: sparse_attention_config")


def _index(f: Fields, s: Sizes, turned: int) -> BlockIndex:
    """The index of every layer that has one. Raises ModelError for blocks that are not those of a cache."""
    given = _sparse_config(f)

    def named(name: str) -> tuple[Fields, str]:
        return (given, _LEGACY[name]) if given.has(_LEGACY[name]) else (f, name)

    def size(name: str, default: int, low: int, high: int) -> int:
        fields, own = named(name)
        return fields.count(own, default, low=low, high=high)

    heads = size("index_n_heads", 4, s.kv_heads, s.kv_heads)
    width = size("index_head_dim", 128, turned, 1 << 14)
    block, best = size("index_block_size", 128, 1, 1 << 24), size("index_topk_blocks", 16, 1, 1 << 20)
    if block % _BLOCK:
        fields, own = named("index_block_size")
        raise fields.refuse(own, f"a multiple of {_BLOCK} is needed, the positions of a block of a cache")
    local = size("index_local_blocks", 1, 0, best)
    if heads * best * block > MOST_CHOSEN * _BLOCK:
        fields, own = named("index_topk_blocks")
        raise fields.refuse(own, f"{heads} heads can choose {MOST_CHOSEN} blocks of {_BLOCK} positions in all")
    return BlockIndex("iq", "ik", heads, width, block, best, local)


def _indexed(n: TensorNames, s: Sizes, norm: NormStyle, index: BlockIndex, ops: Ops) -> Ops:
    """Attention whose key heads see the blocks that an index chooses: the products that it is made of come from "h" too."""
    product, *between, attend, out = ops
    assert isinstance(product, Product) and isinstance(attend, Attention)
    query = n.part("iq", "self_attn.index_q_proj", index.heads * index.width, s.hidden, False)
    key = n.part("ik", "self_attn.index_k_proj", index.width, s.hidden, False)
    return (
        replace(product, parts=(*product.parts, query, key)),
        *between,
        norm.op(n, "self_attn.index_q_norm", index.width, "iq", "iq", index.heads),
        norm.op(n, "self_attn.index_k_norm", index.width, "ik", "ik"),
        Rotary("iq", index.heads, index.width, 0),
        Rotary("ik", 1, index.width, 0),
        replace(attend, index=index),
        out,
    )


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Dense blocks, and experts beside a shared one."""

    route: ExpertRouting
    gating: Gating
    dense: int  # columns of a dense block, of the shared one
    shared: int
    sparse: Sequence[bool]

    @classmethod
    def read(cls, f: Fields, s: Sizes) -> "_Blocks":
        name = "num_local_experts" if f.has("num_local_experts") else "num_experts"
        count, scale = f.count(name, 128, high=MOST_EXPERTS), f.number("routed_scaling_factor", 2.0)
        f.only("num_experts", count)
        route = ExpertRouting("r", "routes", count, top_k(f, count, 4), "sigmoid", normalise=True, scale=scale)
        alpha, limit = f.number("swiglu_alpha", 1.702), f.number("swiglu_limit", 7.0)
        dense = f.count("dense_intermediate_size", 12288, high=1 << 20)
        shared = f.count("shared_intermediate_size", 3072, high=1 << 20)
        return cls(route, Gating("silu", alpha, limit, 1.0), dense, shared, _with_experts(f, s))

    def branch(self, n: TensorNames, s: Sizes, norm: NormStyle, i: int) -> Branch:
        """The block of layer `i`, with the norm before it."""
        before, path = norm.op(n, "post_attention_layernorm", s.hidden, "x", "h"), "block_sparse_moe"
        if not self.sparse[i]:
            return Branch(self._gated(n, s, "mlp", self.dense, "m"), "m", before)
        experts = each_expert(n, f"{path}.experts", ("w1", "w3", "w2"), s, s.inner, self.route.experts, "silu")
        routed = router(n, f"{path}.gate", s, self.route, correction=f"{path}.e_score_correction_bias")
        beside = self._gated(n, s, f"{path}.shared_experts", self.shared, "s")
        return Branch((*routed, replace(experts, gating=self.gating), *beside), "m", before, terms=("m", "s"))

    def _gated(self, n: TensorNames, s: Sizes, path: str, inner: int, target: str) -> Ops:
        gate, up = (n.part(part, f"{path}.{part}_proj", inner, s.hidden, False) for part in ("gate", "up"))
        down = n.part(target, f"{path}.down_proj", s.hidden, inner, False)
        return Product("h", (gate, up)), Gate("gate", "up", "up", self.gating), Product("up", (down,))


def _with_experts(f: Fields, s: Sizes) -> list[bool]:
    """Which layers have experts, by a list of kinds or, in published configs, of marks."""
    kinds = _by_layer(f, s, f, "moe_layer_freq", "mlp_layer_types", ("dense", "sparse"), "sparse")
    return [kind == "sparse" for kind in kinds]


def _as_trained(f: Fields) -> None:
    """Fields of published configs that transformers does not read: each must say what it computes."""
    f.only("hidden_act", "swigluoai", "silu")  # the gate is that of swiglu_alpha in either case
    f.only("swiglu_beta", 1.0)
    f.only("attention_output_gate", False)
    f.only("n_shared_experts", 1)
    f.only("qk_norm_type", "per_head")
    f.only("scoring_func", "sigmoid")
    f.only("use_gemma_norm", True)
    f.only("use_qk_norm", True)
    f.only("use_routing_bias", True)
    f.ignore("num_mtp_modules")
