"""Recipes of families with experts beside a block that every row takes, or none: glm4_moe, dots1, mellum, ernie4_5_moe,
hunyuan_v1_moe."""

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
    gated,
    head_scale,
    router,
    sequential,
    sliding,
    windows,
)
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.experts import GATE_UP_DOWN, stacked_experts, top_k
from manyhands.program.families.llama import hunyuan_attention
from manyhands.program.fields import LARGEST, MOST_EXPERTS, Fields
from manyhands.program.ops import Activation, Add, ExpertRouting, Experts, Gating, Product, Program, Rope, Term, Weight
from manyhands.program.rope import RopeReader


def grouped_route(
    f: Fields, experts: str = "n_routed_experts", methods: Sequence[str] = ("noaux_tc",)
) -> ExpertRouting:
    """deepseek_v3's choice: sigmoids, groups, a correction of ranks. `experts` is the field that counts them, `methods` the
    names for it."""
    f.only("scoring_func", "sigmoid", "noaux_tc")  # dots.llm1 names the method here
    f.only("topk_method", *methods)
    count = f.count(experts, 256, high=MOST_EXPERTS)
    f.only("num_local_experts", count)
    groups = f.count("n_group", 8, high=count)
    if count % groups or count // groups < 2:
        raise f.refuse("n_group", f"groups of at least two of the {count} experts are needed")
    best = f.count("topk_group", 4, high=groups)
    return ExpertRouting(
        source="r",
        target="routes",
        experts=count,
        top_k=f.count("num_experts_per_tok", 8, high=best * (count // groups)),
        score="sigmoid",
        normalise=f.flag("norm_topk_prob", True),
        scale=1.0 if f.is_null("routed_scaling_factor") else f.number("routed_scaling_factor", 2.5),
        groups=groups,
        top_groups=best,
    )


def from_layer(f: Fields, s: Sizes) -> list[bool]:
    """Which layers have experts: all but the first ones."""
    dense = f.count("first_k_dense_replace", low=0)
    return [i >= dense for i in range(s.layers)]


@dataclass(frozen=True, slots=True)
class LatentExperts:
    """Products beside `path` take rows to so many columns before routed experts, and back behind them; `norm` of their sum."""

    width: int
    path: str
    norm: NormStyle | None


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """DeepSeek's blocks: experts beside shared ones, which are one block; layers that are not sparse have another alone."""

    act: Activation | Gating  # a gating has limits of its own
    route: ExpertRouting  # sigmoids are corrected
    inner: int  # columns of an expert
    shared: int  # of them, in one block; 0: none
    sparse: Sequence[bool]
    bias: bool = False  # of shared experts and dense blocks
    gate: str = "mlp.gate"
    correction: str | None = "mlp.gate.e_score_correction_bias"
    beside: str = "mlp.shared_experts"
    experts: str = "mlp.experts"
    parts: Sequence[str] = GATE_UP_DOWN  # of each expert
    is_stacked: bool = False  # the matrices of all experts lie in one tensor of each part
    beside_inner: int | None = None  # columns of the shared ones, if others than those of `shared` experts
    after: str | None = None  # the norm of what experts and shared ones give together
    limit: float | None = None  # of gates and ups of experts, not of shared ones (Gating)
    limits_activated: bool = False  # ... of activated gates
    beside_limit: float | None = None  # of activated gates and ups of shared ones and of dense blocks
    latent: LatentExperts | None = None

    @classmethod
    def read(
        cls,
        f: Fields,
        route: ExpertRouting,
        sparse: Sequence[bool],
        shared: str = "n_shared_experts",
        act: Gating | None = None,
    ) -> "ExpertBlocks":
        """What is not of the choice of experts; `shared` is the field that counts those that every row takes."""
        f.only("moe_layer_freq", 1)
        inner = f.count("moe_intermediate_size", 2048, high=1 << 20)
        return cls(act or f.activation(), route, inner, f.count(shared, 1, high=4096), sparse)

    def branch(self, n: TensorNames, s: Sizes, norm: NormStyle, i: int) -> Branch:
        """The block of layer `i`, with the norm before it."""
        if not self.sparse[i]:
            return _mixed(n, s, norm, self._dense(n, "mlp", s.hidden, s.inner, "m"), ())
        correction = None if self.route.score == "softmax" else self.correction
        routed: Ops = (*router(n, self.gate, s, self.route, correction=correction), *self._routed(n, s))
        if not self.shared:
            return _mixed(n, s, norm, routed, ())
        width = self.beside_inner or self.inner * self.shared
        beside = self._dense(n, self.beside, s.hidden, width, "s")
        if self.after is None:
            return _mixed(n, s, norm, routed, beside)
        whole = (*routed, *beside, Add((Term("s"),), "m"), norm.op(n, self.after, s.hidden, "m", "m"))
        return _mixed(n, s, norm, whole, ())

    def _routed(self, n: TensorNames, s: Sizes) -> Ops:
        """From "h" by "routes" to "m"."""
        if self.latent is None:
            return (self._experts(n, s),)
        path, width, norm = self.latent.path, self.latent.width, self.latent.norm
        return (
            Product("h", (n.part("l", f"{path}_down_proj", width, s.hidden, False),)),
            replace(self._experts(n, replace(s, hidden=width)), source="l"),
            *(() if norm is None else (norm.op(n, f"{path}_norm", width, "m", "m"),)),
            Product("m", (n.part("m", f"{path}_up_proj", s.hidden, width, False),)),
        )

    def _dense(self, n: TensorNames, path: str, hidden: int, inner: int, target: str) -> Ops:
        act = self.act
        gating = act if isinstance(act, Gating) else Gating(act, limit=self.beside_limit, limits_activated=True)
        return gated(n, path, hidden, inner, gating, "h", target, bias=self.bias)

    def _experts(self, n: TensorNames, s: Sizes) -> Experts:
        act, count = self.act, self.route.experts
        gating = (
            act if isinstance(act, Gating) else Gating(act, limit=self.limit, limits_activated=self.limits_activated)
        )
        if self.is_stacked:
            return stacked_experts(n, self.experts, s, self.inner, count, gating, parts=tuple(self.parts))
        return each_expert(n, self.experts, self.parts, s, self.inner, count, gating)


def limited_blocks(f: Fields, blocks: ExpertBlocks, experts: str, beside: str) -> list[ExpertBlocks]:
    """The blocks of each layer. Lists limit activated gates and ups: `experts` those of experts, `beside` those of shared ones
    and of dense blocks."""
    limits = (_limits(f, name, len(blocks.sparse)) for name in (experts, beside))
    return [
        replace(blocks, limit=own, limits_activated=True, beside_limit=other)
        for own, other in zip(*limits, strict=True)
    ]


def _limits(f: Fields, name: str, layers: int) -> list[float | None]:
    value = f.raw(name, [0] * layers)
    each = value if isinstance(value, list) else []
    if len(each) != layers or not all(
        one is None or (type(one) in (int, float) and 0 <= one <= LARGEST) for one in each
    ):
        raise f.refuse(name, f"a number from 0 to {LARGEST:g}, or null, for each of the {layers} layers is needed")
    return [float(one) if one else None for one in each]


def with_blocks(
    f: Fields,
    s: Sizes,
    norm: NormStyle,
    rope: RopeReader,
    styles: Sequence[AttentionStyle],
    blocks: ExpertBlocks | None = None,
    ropes: list[Rope] | None = None,
    *,
    partial: bool = False,
) -> Program:
    """A family of ExpertBlocks (None: those of glm4_moe), with one style of attention a layer, and one table unless `ropes`:
    with `partial` of a part of a head."""
    blocks = blocks or ExpertBlocks.read(f, grouped_route(f), from_layer(f, s))

    def layer(n: TensorNames, i: int) -> Ops:
        before = norm.op(n, "input_layernorm", s.hidden, "x", "h")
        first = Branch(attention(n, s, styles[i], "h", "a"), "a", before)
        return sequential(first, blocks.branch(n, s, norm, i))

    return assemble(f, s, norm, rope, ropes or [rope.plain(s.head, partial=partial)], EndsStyle(), layer)


def glm4_moe(f: Fields) -> Program:
    """Norms of heads, if switched on; the first half of a head turns."""
    f.assume(n_routed_experts=128, moe_intermediate_size=1408, first_k_dense_replace=1, n_group=1, topk_group=1)
    f.assume(routed_scaling_factor=1.0)
    s, norm = Sizes.read(f), NormStyle("rms", f.number("rms_norm_eps", 1e-5))
    heads = norm if f.flag("use_qk_norm") else None
    fused = "self_attn.qkv_proj" if f.stored("qkv_by_part") else None
    style = AttentionStyle(head_scale(s.head), bias=f.flag("attention_bias"), head_norm=heads, fused=fused)
    rope = RopeReader(f, fraction=f.number("partial_rotary_factor", 0.5))
    return with_blocks(f, s, norm, rope, [style] * s.layers, partial=True)


def dots1(f: Fields) -> Program:
    """Norms of heads; windows from layer max_window_layers on."""
    for name in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok"):
        if not f.has(name):
            raise f.refuse(name, "it must be given")
    f.assume(moe_intermediate_size=1408, first_k_dense_replace=0, n_group=1, topk_group=1)
    f.assume(norm_topk_prob=False, routed_scaling_factor=1.0)
    s, norm, bias = Sizes.read(f), NormStyle("rms", f.number("rms_norm_eps", 1e-6)), f.flag("attention_bias")
    window, first = f.optional_count("sliding_window", 4096), f.count("max_window_layers", 62, low=0)
    full = range(s.layers if window is None else min(first, s.layers))
    styles = [
        AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias, head_norm=norm, window=found)
        for found in windows(f, s.layers, sliding(s.layers, full), window)
    ]
    return with_blocks(f, s, norm, RopeReader(f), styles)


def mellum(f: Fields) -> Program:
    """Norms of heads; softmaxes choose; lists say which layers are dense, and which have a window and a table of their own."""
    f.assume(rope_parameters={"full_attention": {"rope_theta": 500000.0}, "sliding_attention": {"rope_theta": 10000.0}})
    f.only("rope_theta", 500000.0)  # transformers does not read these two here
    f.only("rope_scaling", None)
    s, norm, bias = Sizes.read(f, head=128), NormStyle("rms", f.number("rms_norm_eps", 1e-6)), f.flag("attention_bias")
    found = windows(f, s.layers, ["full_attention"] * s.layers, f.optional_count("sliding_window", 1024))
    kinds = f.per_layer("mlp_layer_types", s.layers, ["sparse"] * s.layers, ("dense", "sparse"))
    base = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias, head_norm=norm)
    styles = [replace(base, rope=0 if window is None else 1, window=window) for window in found]
    blocks, rope = _softmax_blocks(f, [kind == "sparse" for kind in kinds]), RopeReader(f)
    ropes = [
        rope.by_type("full_attention", s.head, theta=500000.0, scaled=True),
        rope.by_type("sliding_attention", s.head, theta=10000.0, scaled=True),
    ]
    f.ignore("mtp_layer_types", "mtp_mlp_layer_types")
    return with_blocks(f, s, norm, rope, styles, blocks, ropes)


def _softmax_blocks(f: Fields, sparse: Sequence[bool]) -> ExpertBlocks:
    """Experts of mellum, with none beside them."""
    count = f.count("num_local_experts" if f.has("num_local_experts") else "num_experts", 64, high=MOST_EXPERTS)
    f.only("num_experts", count)
    chosen, inner = top_k(f, count, 8), f.count("moe_intermediate_size", 896, high=1 << 20)
    route = ExpertRouting("r", "routes", count, chosen, "softmax", f.flag("norm_topk_prob", True))
    return ExpertBlocks(f.activation(), route, inner, 0, sparse)


def _mixed(n: TensorNames, s: Sizes, norm: NormStyle, routed: Ops, shared: Ops) -> Branch:
    """A block of experts, to "m", beside one that every row takes, to "s" (perhaps nothing)."""
    before = norm.op(n, "post_attention_layernorm", s.hidden, "x", "h")
    return Branch((*routed, *shared), "m", before, terms=("m", "s") if shared else ("m",))


def ernie4_5_moe(f: Fields) -> Program:
    """Pairs turn; experts in a run of layers, ranked by corrected softmax."""
    s, act = Sizes.read(f), f.activation()
    count, inner = (
        f.count("moe_num_experts", 64, high=MOST_EXPERTS),
        f.count("moe_intermediate_size", 1536, high=1 << 20),
    )
    shared = f.count("moe_num_shared_experts", 2, low=0, high=4096)
    step, first = f.count("moe_layer_interval", 1), f.count("moe_layer_start_index", 1, low=0)
    last = f.count("moe_layer_end_index", -1, low=-1)
    _ernie_as_trained(f)
    chosen = f.count("moe_k", 6, high=count)
    norm, rope = NormStyle("rms", f.number("rms_norm_eps", 1e-5)), RopeReader(f, theta=500000.0)
    style = AttentionStyle(head_scale(s.head), pairs=True)

    def block(n: TensorNames, i: int) -> Branch:
        if (i + 1) % step or not first <= i <= (s.layers if last < 0 else last):
            return _mixed(n, s, norm, gated(n, "mlp", s.hidden, s.inner, act, "h", "m"), ())
        # Stored as one row.
        correction = Weight(f"{n.path}mlp.moe_statics.e_score_correction_bias", (1, count), stacked=True)
        route = ExpertRouting("r", "routes", count, chosen, "softmax", normalise=True, correction=correction)
        routed = (*router(n, "mlp.gate", s, route), each_expert(n, "mlp.experts", GATE_UP_DOWN, s, inner, count, act))
        beside = gated(n, "mlp.shared_experts", s.hidden, inner * shared, act, "h", "s") if shared else ()
        return _mixed(n, s, norm, routed, beside)

    def layer(n: TensorNames, i: int) -> Ops:
        before = norm.op(n, "input_layernorm", s.hidden, "x", "h")
        return sequential(Branch(attention(n, s, style, "h", "a"), "a", before), block(n, i))

    return assemble(f, s, norm, rope, [rope.plain(s.head)], EndsStyle(tied=True), layer)


def _ernie_as_trained(f: Fields) -> None:
    """What the published configs say besides, which must be what is computed."""
    f.only("moe_norm_min", 1e-12)  # below it the chosen are not normalised; no softmax of a trained router gets there
    f.only("moe_gate", "topk")
    f.only("moe_gate_act", "softmax")
    f.only("moe_use_aux_free", True)
    f.only("use_rmsnorm", True)
    f.ignore("moe_capacity")


def hunyuan_v1_moe(f: Fields) -> Program:
    """hunyuan_v1_dense with experts, as wide as the block beside them, in every layer."""
    s, act = Sizes.read(f, kv=False), f.activation()
    count = _same_in_all(f, "num_experts", s, 1, high=MOST_EXPERTS)
    chosen = _same_in_all(f, "moe_topk", s, 1, high=count)
    for name, needed in (("moe_intermediate_size", s.inner), ("num_shared_expert", 1)):
        _same_in_all(f, name, s, needed, low=needed, high=needed)
    route = ExpertRouting("r", "routes", count, chosen, "softmax", normalise=True)
    style, norm, rope = hunyuan_attention(f, s)
    for name in ("group_limited_greedy", "n_group", "topk_group", "routed_scaling_factor", "use_mla"):
        f.only(name, False)
    f.only("moe_layer_num_skipped", 0)
    f.only("norm_topk_prob", True)
    f.only("use_mixed_mlp_moe", True)
    f.ignore("moe_drop_tokens", "moe_random_routing_dropped_token")

    def layer(n: TensorNames, i: int) -> Ops:
        before = norm.op(n, "input_layernorm", s.hidden, "x", "h")
        experts = each_expert(n, "mlp.experts", GATE_UP_DOWN, s, s.inner, count, act)
        beside = gated(n, "mlp.shared_mlp", s.hidden, s.inner, act, "h", "s")
        block = _mixed(n, s, norm, (*router(n, "mlp.gate.wg", s, route), experts), beside)
        return sequential(Branch(attention(n, s, style, "h", "a"), "a", before), block)

    return assemble(f, s, norm, rope, [rope.plain(s.head)], EndsStyle(), layer)


def _same_in_all(f: Fields, name: str, s: Sizes, default: int, *, low: int = 1, high: int) -> int:
    """A whole number, or a list of it for each layer."""
    value = f.raw(name, default)
    each = value if isinstance(value, list) and len(value) >= s.layers else [value]
    if type(each[0]) is not int or not low <= each[0] <= high or any(one != each[0] for one in each):
        raise f.refuse(name, f"a whole number from {low} to {high} is needed, the same in all layers")
    return each[0]
