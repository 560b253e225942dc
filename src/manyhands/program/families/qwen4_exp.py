"""The recipe of qwen4_exp_text: Qwen3.8-Flash-Next and its kin.

A row on the wire holds hc_count residual streams, and with ple_layer_ids its token's id, so that any node looks up n-grams.
Branches read the mean of gated streams, and all streams take up what they give. Tables of n-grams belong to the layers that
read them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from manyhands.program.blocks import AttentionStyle, NormStyle, Ops, Sizes, TensorNames, attention, head_scale
from manyhands.program.ends import EndsStyle, assemble
from manyhands.program.families.indexer import MOST_CHOSEN, RATES
from manyhands.program.families.linear import LinearStyle, experts_beside, linear_attention
from manyhands.program.fields import WIDEST, Fields
from manyhands.program.ops import (
    EXPERT,
    Activation,
    Add,
    Admit,
    Attention,
    Convolution,
    Copy,
    EntryIndex,
    Gate,
    Gating,
    Mix,
    Multiply,
    Ngrams,
    Norm,
    Op,
    Part,
    Product,
    Program,
    Rotary,
    Rows,
    Taps,
    Term,
    Weight,
)
from manyhands.program.rope import RopeReader

_LINEAR, _INDEXED = "linear_attention", "indexed_attention"
_KINDS: Final = (_LINEAR, _INDEXED, "full_attention")  # the last is indexed, too
_GATES: Final[Mapping[str, Activation]] = {"sigmoid": "sigmoid", "silu": "silu", "swish": "silu"}
_DIGITS: Final = 4  # of a token's id
_MOST_HEADS, _MOST_LAYERS, _MOST_ROWS = 64, 64, 1 << 24  # of n-grams, of layers with them, of a part of a table
_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class _Streams:
    """How streams become the row that a branch reads, "h", and take its result up. They are in "p" within a layer."""

    s: Sizes
    count: int
    rank: int
    norm: NormStyle

    @property
    def width(self) -> int:
        return self.count * self.s.hidden

    def normed(self, n: TensorNames, name: str, source: str, target: str) -> Norm:
        """Each stream by itself, with weights of its own."""
        rows = (Rows(i * self.s.hidden, self.s.hidden) for i in range(self.count))
        weights = tuple(Weight(f"{n.path}{name}.weight", (self.width,), one) for one in rows)
        return Norm(source, target, "rms", self.norm.eps, weights, (), self.norm.offset, self.count)

    def mixed(self, n: TensorNames, path: str, *, is_last: bool = False) -> Ops:
        """From streams normed, "t", to "h", the mean of streams, all gated; and "inject", by which they take up."""
        down = n.linear(f"{path}.input_mix_weight_down", self.rank, self.width)
        up = n.linear(f"{path}.input_mix_weight_up", self.width, self.rank)
        inject = n.linear(f"{path}.block_inject_weight", self.count, self.width)
        parts = (Part("r", down, activation="silu"), Part("inject", inject, activation="sigmoid"))
        return (
            Multiply("t", 1.0 / self.count, "t"),
            Product("t", parts[:1] if is_last else parts),
            Product("r", (Part("w", up, activation="sigmoid"),)),
            Gate("w", "t", "w", Gating("none")),
            Copy("w", "h", 0, self.s.hidden),
            Mix("w", None, "h", self.s.hidden, self.count - 1, 1, start=self.s.hidden),
        )

    def around(self, n: TensorNames, path: str, body: Ops, target: str) -> Ops:
        """`body`, from "h" to `target`, which all streams take up."""
        before = (self.normed(n, f"{path}.hc_norm", "p", "t"), *self.mixed(n, path))
        return (
            *before,
            *body,
            Multiply("inject", 2.0, "inject"),
            Mix(target, "inject", "p", self.s.hidden, 1, self.count),
        )


@dataclass(frozen=True, slots=True)
class _Words:
    """Embeddings of n-grams: layers (from 0) that have them, and what those have in common."""

    layers: tuple[int, ...]
    longest: int
    width: int
    parts: int
    taps: int
    end: int
    multipliers: tuple[tuple[int, ...], ...]  # of each of the layers
    sizes: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]


def qwen4_exp_text(f: Fields) -> Program:
    """Streams; the gated delta rule in most layers; attention to positions that an indexer chooses in the others; experts in
    all, beside one that every row takes; embeddings of n-grams in some."""
    f.assume(intermediate_size=1, num_experts_per_tok=10)  # the first is of no layer
    f.only("mamba_ssm_dtype", "float32")
    f.only("attn_output_gate", True)
    f.ignore("mtp", "number_of_conv_states", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    s, act, part = Sizes.read(f, head=256), f.activation(), f.number("partial_rotary_factor", 1.0)
    rope = RopeReader(f, sectioned=True, fraction=part)
    eps, bias = f.number("rms_norm_eps", 1e-6), f.flag("attention_bias")
    norm = NormStyle("rms", eps, offset=0.0 if f.stored("norms_plus_one") else 1.0)
    table, is_apart = rope.plain(s.head, partial=True), f.stored("separate_index")
    every = f.count("full_attention_interval", 4)
    kinds = f.per_layer("layer_types", s.layers, [_KINDS[(i + 1) % every == 0] for i in range(s.layers)], _KINDS)
    linear = replace(LinearStyle.read(f, act, eps, is_grouped=False), gate=_gate(f))
    style = AttentionStyle(head_scale(s.head), bias=bias, out_bias=bias, head_norm=norm, is_gated=True)
    index = _index(f, table.width, rope.context) if set(kinds) - {_LINEAR} else None
    experts, streams = experts_beside(f, s, act, f.flag("norm_topk_prob", True), 512), _streams(f, s, norm)
    f.ignore(*(f"indexer_{name}" for name in ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")))
    words = _words(f, s, kinds)

    def layer(n: TensorNames, i: int) -> Ops:
        if kinds[i] == _LINEAR:
            first = linear_attention(n, s, linear, "h", "a")
        else:
            assert index is not None
            first = _attention(n, s, style, norm, *index, is_apart=is_apart)
        block = (*experts(n), Add((Term("s"),), "m"))
        return (
            Copy("x", "p", 0, streams.width),
            *(_admitted(n, streams, words, words.layers.index(i), s.vocab) if i in words.layers else ()),
            *streams.around(n, "attn_hyper_connection", first, "a"),
            *streams.around(n, "mlp_hyper_connection", block, "m"),
            Copy("p", "x", 0, streams.width, at=0),
        )

    program = assemble(f, s, norm, rope, [table], EndsStyle(), layer)
    return _with_streams(program, streams, bool(words.layers))


def _with_streams(program: Program, streams: _Streams, has_ids: bool) -> Program:
    names, path = TensorNames("model."), "hyper_connection_mixer"
    last = streams.normed(names, f"{path}.hc_norm", "t", "t")
    mixed, before = streams.mixed(names, path, is_last=True), (Copy("x", "t", 0, streams.width),)
    return replace(
        program,
        hidden=streams.width + has_ids * _DIGITS,
        embed=replace(program.embed, streams=streams.count, has_ids=has_ids),
        head=replace(program.head, before=before, norm=last, behind=mixed),
    )


def _gate(f: Fields) -> Activation:
    name = f.raw("output_gate_type") or f.raw("hidden_act", "silu")
    if not isinstance(name, str) or name not in _GATES:
        raise f.refuse("output_gate_type", f"supported are {', '.join(_GATES)}")
    return _GATES[name]


def _streams(f: Fields, s: Sizes, norm: NormStyle) -> _Streams:
    count, rank = f.count("hc_count", 4, low=2, high=8), f.count("hc_lowrank", 320, high=WIDEST)
    if count * s.hidden > WIDEST - _DIGITS:
        raise f.refuse("hc_count", f"streams of {s.hidden} columns are too wide: at most {WIDEST} together are served")
    return _Streams(s, count, rank, norm)


def _index(f: Fields, turned: int, context: int) -> tuple[EntryIndex, int]:
    """What chooses entries, and how many positions each has."""
    f.only("indexer_kv_heads", 1)
    heads, width = f.count("indexer_n_heads", high=4096), f.count("indexer_head_dim", low=turned, high=1 << 14)
    rate, budget = f.count("indexer_compress_ratio"), f.count("indexer_budget")
    if rate not in RATES:
        raise f.refuse("indexer_compress_ratio", f"one of {', '.join(map(str, RATES))} is needed")
    if budget % rate:
        raise f.refuse("indexer_budget", f"a multiple of indexer_compress_ratio, {rate}, is needed")
    chosen = min(budget, -(-context // rate) * rate) // rate
    if chosen > MOST_CHOSEN:
        raise f.refuse("indexer_budget", f"at most {MOST_CHOSEN} entries of {rate} positions can be chosen")
    return EntryIndex("iq", "ie", "iw", heads, width, chosen), rate


def _index_parts(n: TensorNames, s: Sizes, path: str, index: EntryIndex, is_apart: bool) -> tuple[Part, Part]:
    """Queries, "iq", and keys, "ik", of an index: of one tensor, in GGUF files (`is_apart`) of two."""
    queries, keys = index.heads * index.width, index.width
    if is_apart:
        query, key = ((f"{path}.{one}_proj", rows, s.hidden, False) for one, rows in (("q", queries), ("k", keys)))
        return n.part("iq", *query), n.part("ik", *key)
    name, columns = f"{path}.index_qk_proj", queries + keys
    return (
        n.part("iq", name, columns, s.hidden, False, Rows(0, queries)),
        n.part("ik", name, columns, s.hidden, False, Rows(queries, keys)),
    )


def _attention(
    n: TensorNames,
    s: Sizes,
    style: AttentionStyle,
    norm: NormStyle,
    index: EntryIndex,
    rate: int,
    *,
    is_apart: bool,
) -> Ops:
    """From "h" to "a". An entry is the mean of its positions' index keys, normed, at the first of them."""
    heads, width, path = index.heads, index.width, "self_attn.indexer"
    choosing: list[Op] = [
        Product("h", _index_parts(n, s, path, index, is_apart)),
        norm.op(n, f"{path}.q_layernorm", width, "iq", "iq", heads),
        Rotary("iq", heads, width, 0),
        Convolution("ik", "ie", rate, Taps(width, (1.0 / rate,) * rate)),
        norm.op(n, f"{path}.k_layernorm", width, "ie", "ie"),
        Rotary("ie", 1, width, 0, back=rate - 1),
        Copy("iq", "iw", 0, heads),  # the same weight of all heads: 1/2
        Multiply("iw", 0.0, "iw"),
        Gate("iw", "iw", "iw", Gating("sigmoid", up_offset=1.0)),
    ]
    usual = attention(n, s, style, "h", "a")
    return (*choosing, *(replace(op, index=index, rate=rate) if isinstance(op, Attention) else op for op in usual))


def _admitted(n: TensorNames, streams: _Streams, words: _Words, number: int, vocab: int) -> Ops:
    """Streams, "p", admit what the last tokens' n-grams give, and a convolution of it."""
    s, kernel = streams.s, Weight(f"{n.path}ple.conv1d.weight", (streams.width, 1, words.taps))
    key = n.part("k", "ple.key_proj", streams.width, words.width, False)
    value = n.part("v", "ple.value_proj", s.hidden, words.width, False)
    return (
        Copy("x", "d0", streams.width, _DIGITS),
        *_looked_up(n, words, number, vocab),
        Product("e", (key, value)),
        streams.normed(n, "ple.norm_key", "k", "k"),
        streams.normed(n, "ple.norm_query", "p", "t"),
        Admit("k", "t", "v", "z", streams.count, s.hidden**-0.5),
        streams.normed(n, "ple.norm_conv", "z", "t"),
        Convolution("t", "y", words.taps, kernel, activation="silu", step=words.longest),
        Add((Term("z"), Term("y")), "p"),
    )


def _looked_up(n: TensorNames, words: _Words, number: int, vocab: int) -> Ops:
    """By ids, "d0", rows of the table of the layer `number` of those with n-grams, to "e"."""
    rows, heads, path = words.rows[number] // words.parts, len(words.sizes[number]), "ple.ple_embedding"
    table = n.linear(f"{path}.ngram_embedding.shard_{EXPERT}", rows, words.width // heads)
    stored = (
        n.vector(f"{path}.layer_multipliers", words.longest),
        n.vector(f"{path}.ngram_heads_vocab_sizes", heads),
        n.vector(f"{path}.ngram_heads_offsets", heads),
    )
    numbers, back = (words.multipliers[number], words.sizes[number], words.end), range(1, words.longest)
    shifts = (Convolution("d0", f"d{i}", i + 1, Taps(_DIGITS, (1.0, *(0.0,) * i))) for i in back)
    tokens = tuple(f"d{i}" for i in range(words.longest))
    return (*shifts, Ngrams(tokens, "e", table, words.parts, stored, *numbers, vocab))


def _words(f: Fields, s: Sizes, kinds: list[str]) -> _Words:
    layers = _word_layers(f, kinds)
    names = "ple_embed_dim ple_conv_kernel_size ngram_size heads_per_ngram ngram_vocab_size_base seed split_ngram_parts"
    f.ignore(*names.split(), "make_ngram_vocab_size_divisible_by", "ngram_eos_token_id")
    if not layers:
        return _Words((), 2, 1, 1, 1, 0, (), (), ())
    longest, heads = f.count("ngram_size", 3, low=2, high=5), f.count("heads_per_ngram", 8, high=_MOST_HEADS)
    all_heads, width = (longest - 1) * heads, f.count("ple_embed_dim", s.hidden, high=WIDEST)
    _check_heads(f, all_heads, width)
    taps = f.count("ple_conv_kernel_size", 4, high=31 // longest + 1)
    base = f.count("ngram_vocab_size_base", 20_000_000, low=2, high=1 << 28)
    primes = _primes(base, all_heads * len(layers))
    sizes = tuple(primes[i * all_heads : (i + 1) * all_heads] for i in range(len(layers)))
    parts, seed = f.count("split_ngram_parts", 512), f.count("seed", 1234, low=0, high=1 << 62)
    by = tuple(_multipliers(seed + 10007 * i, s.vocab, longest) for i in range(len(layers)))
    return _Words(layers, longest, width, parts, taps, _end(f, s.vocab), by, sizes, _rows(f, sizes, parts))


def _word_layers(f: Fields, kinds: list[str]) -> tuple[int, ...]:
    layers = tuple(sorted({i - 1 for i in f.whole_numbers("ple_layer_ids")}))
    if len(layers) > _MOST_LAYERS or any(i < 0 or kinds[i : i + 1] != [_LINEAR] for i in layers):
        needed = f"numbers, from 1, of at most {_MOST_LAYERS} layers of linear attention are needed"
        raise f.refuse("ple_layer_ids", needed)
    return layers


def _check_heads(f: Fields, heads: int, width: int) -> None:
    if heads > _MOST_HEADS:
        raise f.refuse("heads_per_ngram", f"at most {_MOST_HEADS} of n-grams of all lengths together are served")
    if width % heads:
        raise f.refuse("ple_embed_dim", f"a multiple of the {heads} heads of n-grams is needed")


def _rows(f: Fields, sizes: tuple[tuple[int, ...], ...], parts: int) -> tuple[int, ...]:
    """Of the table of each layer, as it is padded."""
    whole = f.count("make_ngram_vocab_size_divisible_by", 128)
    rows = tuple(-(-sum(each) // whole) * whole for each in sizes)
    if any(one % parts or one // parts > _MOST_ROWS for one in rows):
        raise f.refuse("split_ngram_parts", f"equal parts of {rows[0]} rows, of at most {_MOST_ROWS}, are needed")
    return rows


def _end(f: Fields, vocab: int) -> int:
    """The id before which tokens do not count: the first of those that end a text, of the text part's own."""
    found = f.raw("ngram_eos_token_id", f.raw("eos_token_id"))
    found = found[0] if isinstance(found, list) and found else found
    if type(found) is not int or not 0 <= found < vocab:
        raise f.refuse("eos_token_id", f"with ple_layer_ids an id below {vocab} is needed")
    return found


def _primes(least: int, count: int) -> tuple[int, ...]:
    """The first `count` primes from `least` on."""
    found: list[int] = []
    while len(found) < count:
        size = 1 << 16
        sieve = bytearray([1]) * size  # of least + i
        for factor in _small_primes(math.isqrt(least + size) + 1):
            first = max(factor * factor, -(-least // factor) * factor) - least
            sieve[first::factor] = bytes(len(range(first, size, factor)))
        found += [least + i for i in range(size) if sieve[i]]
        least += size
    return tuple(found[:count])


def _small_primes(end: int) -> list[int]:
    sieve = bytearray([1]) * end
    for factor in range(2, math.isqrt(end) + 1):
        sieve[factor * factor :: factor] = bytes(len(range(factor * factor, end, factor)))
    return [i for i in range(2, end) if sieve[i]]


def _multipliers(seed: int, vocab: int, count: int) -> tuple[int, ...]:
    """Odd numbers by splitmix64, so small that no product with an id reaches 2^63."""
    half, found = max(1, ((1 << 63) - 1) // vocab // 2), list[int]()
    for i in range(1, count + 1):
        z = (seed + 0x9E3779B97F4A7C15 * (i + 1)) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        found.append(2 * ((z ^ (z >> 31)) % half) + 1)
    return tuple(found)
