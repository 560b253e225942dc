"""The recipe of dots3_note_text (dots3-note): deepseek_v32 in some layers; in most latent attention with widths of its own in a
window. Normed latents are scaled by the root of how much narrower than rows they are; rotary keys are normed, heads gated."""

from dataclasses import dataclass, replace
from typing import Any, Final

from manyhands.program.blocks import Branch, NormStyle, Ops, Sizes, TensorNames, head_scale, sequential
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.indexer import INDEXED, IndexStyle
from manyhands.program.families.latent import LatentSizes, latent_attention, sizes
from manyhands.program.families.shared import ExpertBlocks, grouped_route
from manyhands.program.fields import Fields
from manyhands.program.ops import Multiply, Part, Program, Rope
from manyhands.program.rope import RopeReader

_INDEXED, _FULL, _SLIDING = INDEXED[0], "full_attention", "sliding_attention"
# What attention in a window has of its own: with "swa_" before it in published configs, and where those say nothing.
_OWN: Final[dict[str, int]] = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}
_ROTARY: Final = "qk_rope_head_dim"
_UNREAD: Final = ("partial_rotary_factor",)  # of a table: transformers makes it of the widths, whatever is said


@dataclass(frozen=True, slots=True)
class _Kind:
    """The attention of a type of layers. `table`: the number of its rotary embedding."""

    s: Sizes
    z: LatentSizes
    table: int = 0
    window: int | None = None
    index: IndexStyle | None = None


def dots3_note_text(f: Fields) -> Program:
    """Fields as they were published, or as transformers writes them."""
    _own_names(f)
    s, norm, rope = sizes(f), NormStyle("rms", f.number("rms_norm_eps", 1e-5)), RopeReader(f)
    types, bias = _types(f, s.layers), f.flag("attention_bias")
    split, is_stretched = f.stored("split_kv_b"), f.stored("stretched_norms")
    full, blocks = _full(f, s, norm, rope), _blocks(f, s)
    sliding = _sliding(f, types, full)
    kinds = {_INDEXED: full, _FULL: replace(full, index=None), _SLIDING: sliding}
    tables = _tables(f, rope, types, full.z.rotary, sliding.z.rotary)

    def layer(n: TensorNames, i: int) -> Ops:
        before = norm.op(n, "input_layernorm", s.hidden, "x", "h")
        first = Branch(_attention(n, kinds[types[i]], bias, split, is_stretched), "a", before)
        return sequential(first, blocks.branch(n, s, norm, i))

    return assemble(f, s, norm, rope, tables, EndsStyle(), layer)


def _own_names(f: Fields) -> None:
    f.rename(sliding_window="sliding_window_size", n_routed_experts="num_local_experts")
    f.rename(shared_experts_intermediate_size="moe_shared_expert_intermediate_size")
    f.assume(q_lora_rank=1024, head_dim=256, index_n_heads=64, max_position_embeddings=1 << 19)
    f.assume(n_routed_experts=256, moe_intermediate_size=1536, n_group=1, topk_group=1, routed_scaling_factor=1.0)
    for name, kept in (("mlp_bias", False), ("rope_interleave", True), ("rope_scaling", None)):
        f.only(name, kept)


def _types(f: Fields, layers: int) -> list[str]:
    """The type of each layer. `use_dsa` says whether those without a window have an indexer, where it says anything."""
    is_said = f.has("use_dsa") or not f.has("per_layer_config")
    full = _INDEXED if f.flag("use_dsa", True) else _FULL
    slides = f.flag("use_sliding_window", True)
    default = [full if not slides or i < 2 or i % 4 == 1 else _SLIDING for i in range(layers)]
    types = [
        _INDEXED if kind in INDEXED else kind
        for kind in f.per_layer("layer_types", layers, default, (*INDEXED, _FULL, _SLIDING))
    ]
    if is_said:
        types = [kind if kind == _SLIDING else full for kind in types]
    if {_INDEXED, _FULL} <= set(types):
        raise f.refuse("layer_types", "an indexer in all layers without a window, or in none, is needed")
    return types


def _full(f: Fields, s: Sizes, norm: NormStyle, rope: RopeReader) -> _Kind:
    z = LatentSizes.read(f, s, query_rank=1024, rank=512, plain=128, rotary=64, value=128)
    if z.query_rank is None:
        raise f.refuse("q_lora_rank", "a whole number is needed: queries of this family come from a latent")
    return _Kind(s, replace(z, norm=norm), index=IndexStyle.read(f, z.rotary, rope.context, pairs=True))


def _sliding(f: Fields, types: list[str], full: _Kind) -> _Kind:
    if _SLIDING not in types:
        f.ignore("per_layer_config", "sliding_window", *(f"swa_{name}" for name in (*_OWN, _ROTARY)))
        return full
    own = Fields(_own_fields(f, types, full), f"{f.where}: layers with a window")
    heads = own.count("num_attention_heads", high=4096)
    s = replace(full.s, heads=heads, kv_heads=heads)
    z = LatentSizes.read(own, s, query_rank=None, rank=0, plain=0, rotary=0, value=0)
    if z.query_rank is None:
        raise own.refuse("q_lora_rank", "a whole number is needed: queries of this family come from a latent")
    own.only("head_dim", z.plain + z.rotary)
    own.finish()
    return _Kind(s, replace(z, norm=full.z.norm), 1, f.count("sliding_window", 512))


def _own_fields(f: Fields, types: list[str], full: _Kind) -> dict[str, Any]:
    """What a config says of layers with a window. transformers leaves out what is as in the others. Raises ModelError."""
    listed = f.raw("per_layer_config")
    if listed is None:
        return _published(f)
    layers = [str(i) for i, kind in enumerate(types) if kind == _SLIDING]
    each = list(listed.values()) if isinstance(listed, dict) else []
    if not each or sorted(listed) != sorted(layers) or any(one != each[0] or not isinstance(one, dict) for one in each):
        raise f.refuse("per_layer_config", f"the same object for each of the layers {', '.join(layers)} is needed")
    heads, z = full.s.heads, full.z
    others = (heads, heads, z.query_rank, z.rank, f.raw("head_dim"), z.plain, z.value, z.rotary)
    return {**dict(zip((*_OWN, _ROTARY), others, strict=True)), **each[0]}


def _published(f: Fields) -> dict[str, Any]:
    found = {name: f.raw(f"swa_{name}", default) for name, default in _OWN.items()}
    whole, plain = found["head_dim"], found["qk_nope_head_dim"]
    rotary = whole - plain if type(whole) is type(plain) is int else None
    return {**found, _ROTARY: f.raw(f"swa_{_ROTARY}", rotary)}


def _tables(f: Fields, rope: RopeReader, types: list[str], full: int, sliding: int) -> list[Rope]:
    """The rotary embeddings of `full` columns, and of the `sliding` ones of layers with a window."""
    _check_bases(f, set(types))
    kind, base = (_FULL if _FULL in types else _INDEXED), f.number("rope_theta", 80000000.0)
    tables = [rope.by_type(kind, full, theta=base, scaled=False, unread=_UNREAD)]
    base = f.number("swa_rope_theta", 50000.0)
    if _SLIDING in types:
        tables.append(rope.by_type(_SLIDING, sliding, theta=base, scaled=False, unread=_UNREAD))
    return tables


def _check_bases(f: Fields, kinds: set[str]) -> None:
    """Raises ModelError for rope_parameters that do not say the base frequency of each of these types. (transformers takes
    rope_theta for all of them then, whatever swa_rope_theta says.)"""
    given = f.raw("rope_parameters")
    tables = [given.get(kind) for kind in kinds] if given is not None else []
    if not all(isinstance(table, dict) and table.get("rope_theta") is not None for table in tables):
        raise f.refuse("rope_parameters", f"an object with rope_theta is needed for {', '.join(sorted(kinds))}")


def _attention(n: TensorNames, kind: _Kind, bias: bool, split: bool, is_stretched: bool) -> Ops:
    """`is_stretched`: weights of the norms of latents are multiplied by the root that scales these."""
    s, z = kind.s, kind.z
    gate = Part("g", n.linear("self_attn.g_proj", s.heads, s.hidden), activation="sigmoid"), Multiply("a", "g", "a")
    stretch = (s.hidden / (z.query_rank or s.hidden)) ** 0.5, (s.hidden / z.rank) ** 0.5
    own: dict[str, Any] = {"index": kind.index, "table": kind.table, "window": kind.window}
    own |= {"key_norm": "self_attn.k_rope_only_layernorm", "gate": gate, "stretch": None if is_stretched else stretch}
    return latent_attention(n, s, z, head_scale(z.plain + z.rotary), pairs=True, bias=bias, split=split, **own)


def _blocks(f: Fields, s: Sizes) -> ExpertBlocks:
    """deepseek_v3's, with shared experts of a width of their own."""
    route, inner = grouped_route(f), f.count("moe_intermediate_size", high=1 << 20)
    shared = f.count("n_shared_experts", 1, high=4096)
    width = f.count("shared_experts_intermediate_size", 1536, high=1 << 20) * shared
    return ExpertBlocks(f.activation(), route, inner, shared, _sparse(f, s.layers), beside_inner=width)


def _sparse(f: Fields, layers: int) -> list[bool]:
    """Which layers have experts: not the first, nor those that moe_layer_freq leaves out, a step or a switch for each."""
    dense, step = f.count("first_k_dense_replace", 1, low=0), f.raw("moe_layer_freq", 1)
    is_step = type(step) is int and step > 0
    chosen = step if isinstance(step, list) else [i % step == 0 for i in range(layers)] if is_step else []
    if len(chosen) != layers or not all(type(one) in (int, bool) for one in chosen):
        raise f.refuse("moe_layer_freq", f"a whole number from 1, or a list for the {layers} layers, is needed")
    default = ["sparse" if i >= dense and one else "dense" for i, one in enumerate(chosen)]
    return [kind == "sparse" for kind in f.per_layer("mlp_layer_types", layers, default, ("dense", "sparse"))]
