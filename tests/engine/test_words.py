"""What qwen4_exp alone has: n-grams of ids, values that streams admit, attention to the positions of chosen entries."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.checkpoint.config_fields import parse_config
from manyhands.core import Span
from manyhands.engine import library
from manyhands.engine.cache import SessionCache, bytes_per_position, state_bytes
from manyhands.engine.cpu import CpuEnds, CpuSpan
from manyhands.engine.cuda.operations import check
from manyhands.engine.filed import Given, TableParts
from manyhands.engine.golden_cases import product, reals
from manyhands.engine.layout import STATE_BLOCK
from manyhands.engine.library import Plan, Team
from manyhands.engine.mapped import MappedTensors
from manyhands.engine.span import Piece
from manyhands.engine.states import MOST_BACK
from manyhands.engine.weights import Stored
from manyhands.errors import ModelError
from manyhands.program.families import build_program, read_program
from manyhands.program.families.qwen4_exp import _primes
from manyhands.program.ops import Ngrams
from manyhands.testing.tiny import make_tiny, tiny_config
from tests.engine.oracle import NativePair
from tests.worker.pipeline import Loader

Floats = NDArray[np.float32]
IDS = [(37 * i * i + 11 * i + i // 7) % 250 for i in range(260)]


def run(x: Floats, widths: list[int], ops: list[Any], out: int, back_end: str) -> Floats:
    """Rows of one session through operations."""
    plan = Plan(back_end, "f32", [x.shape[1], *widths], out, "f32", 1024)
    for op in ops:
        plan.add(*op)
    cache, rows = SessionCache(plan), np.ascontiguousarray(x).view(np.uint8).reshape(-1)
    return plan.run(Team(1), 1, [cache.segment(0, 0, len(x))], rows, len(x)).view(np.float32)


@pytest.mark.parametrize("back_end", library.supported())
def test_attention_goes_over_the_positions_of_chosen_entries_alone(back_end: str) -> None:
    """By the words of cached_ops.py, in double."""
    heads, key_heads, width, value, rate, many, wide, most = 4, 2, 10, 7, 4, 2, 6, 3
    widths = [heads * width, key_heads * width, key_heads * value, many * wide, wide, many, most, heads * value]
    ops: list[Any] = [product(10 + 2 * i, 0, i + 1, n, 9) for i, n in enumerate(widths[:6])]
    ops.append((library.INDEX, (4, 5, 6, 7, many, wide, rate), (), ()))
    ops.append((library.ATTENTION, (1, 2, 3, 8, heads, key_heads, width, value, rate, 0, 0, 7), (0.3, 0.0), ()))
    x = reals(5, 90, 9)
    q, k, v, iq, ik, iw = (run(x, widths, ops, i, back_end).astype(np.float64) for i in range(1, 7))
    got = run(x, widths, ops, 8, back_end)
    for p in range(len(x)):
        entries = (p + 1) // rate
        last = ik[rate - 1 :: rate][:entries]  # in the row of its last position
        scores = (np.maximum(iq[p].reshape(many, wide) @ last.T, 0) * iw[p][:, None]).sum(0)
        best = sorted(np.argsort(-scores, kind="stable")[:most])
        seen = [entry * rate + i for entry in best for i in range(rate)] + list(range(entries * rate, p + 1))
        for head in range(heads):
            of = head // (heads // key_heads)
            keys, values = (a.reshape(len(x), key_heads, -1)[seen, of] for a in (k, v))
            scores = keys @ q[p].reshape(heads, width)[head] * 0.3
            weights = np.exp(scores - scores.max())
            right = weights @ values / weights.sum()
            assert np.abs(got[p].reshape(heads, value)[head] - right).max() < 1e-5 * np.abs(v).max(), (p, head)


@pytest.mark.parametrize("back_end", library.supported())
def test_streams_admit_a_value_by_the_root_of_a_product(back_end: str) -> None:
    keys, queries, value = reals(1, 9, 36), reals(2, 9, 36), reals(3, 9, 12)
    keys[1], keys[2] = 0, keys[2] * np.float32(1e-9)
    ops: list[Any] = [
        (library.COPY, (0, i + 1, start, 0, count, 1, 0, 0), (), ())
        for i, (start, count) in enumerate(((0, 36), (36, 36), (72, 12)))
    ]
    ops.append((library.ADMIT, (1, 2, 3, 4, 3), (0.25,), ()))
    got = run(np.concatenate([keys, queries, value], 1), [36, 36, 12, 36], ops, 4, back_end)
    v = (keys.astype(np.float64) * queries).reshape(9, 3, 12).sum(-1) * 0.25
    gate = 1 / (1 + np.exp(-np.sign(v) * np.sqrt(np.maximum(np.abs(v), 1e-6))))
    right = (gate[:, :, None] * value[:, None]).reshape(9, 36)
    assert np.abs(got - right).max() < 1e-6 * np.abs(right).max()


def test_rows_of_n_grams_are_those_of_the_last_ids(tmp_path: Path) -> None:
    """Tokens before an end, and before the first, count as ends; of an id of three digits all are read."""
    pair = NativePair(tmp_path, "qwen4_exp_text", {"vocab_size": 70_000, "layers": 1, "eos_token_id": [258, 7]})
    ids = [69_999, 258, 5, 258, 258, 65_536, 9, 255, 256, 7, 8]
    theirs, ours = pair.theirs(ids), pair.ours(ids, pair.span.new_cache(len(ids)))
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 2e-4
    op = next(op for op in pair.program.layers[0].ops if isinstance(op, Ngrams))
    assert op.end == 258 and op.vocab == 70_000


def test_n_grams_end_at_the_text_parts_own_token() -> None:
    """A generation may end at others, which the config outside of the text part may name."""
    text = tiny_config("qwen4_exp_text", layers=1).to_dict() | {"eos_token_id": [31, 3]}
    whole = {"model_type": "qwen4_exp", "eos_token_id": [99, 98], "text_config": text}
    program = build_program(parse_config(json.dumps(whole).encode()))
    assert next(op for op in program.layers[0].ops if isinstance(op, Ngrams)).end == 31


def test_where_n_grams_end_is_read_of_no_field_that_transformers_does_not_read() -> None:
    """By that name the recipe is told the text part's own; a plain config that had it was believed."""
    text = tiny_config("qwen4_exp_text", layers=1).to_dict() | {"eos_token_id": 31, "ngram_eos_token_id": 7}
    program = build_program(parse_config(json.dumps(text).encode()))
    assert next(op for op in program.layers[0].ops if isinstance(op, Ngrams)).end == 31


def spans(folder: Path, precision: Any, cuts: list[int], back_end: str) -> tuple[CpuEnds, list[CpuSpan]]:
    """A model in spans that begin at these layers."""
    program = read_program(folder)
    with MappedTensors(folder, lambda entry, raw: None) as tensors:
        ends = CpuEnds(program, tensors.read, precision, Team(2), back_end)
        parts = zip(cuts, [*cuts[1:], len(program.layers)], strict=True)
        return ends, [CpuSpan(program, Span(*cut), tensors.read, precision, Team(2), back_end) for cut in parts]


@pytest.mark.parametrize("precision", ["bf16", "fp32", "w4"])
def test_cuts_chunks_company_rollbacks_and_back_ends_change_no_bit(precision: str, tmp_path: Path) -> None:
    """Two sessions in random steps, sharing some, through any cut; 1, 2 and 4 threads."""
    folder, chance = make_tiny("qwen4_exp_text", tmp_path, layers=4, dtype="fp32"), random.Random(3)
    ends, [whole] = spans(folder, precision, [0], "scalar")
    right = whole.step(ends.embed(IDS).tobytes(), [Piece(whole.new_cache(len(IDS)), 0, len(IDS))], 1)
    for back_end in library.supported():
        for cuts in ([0], [0, 1, 2, 3], [0, 2]):
            ends, parts = spans(folder, precision, cuts, back_end)
            caches = [[part.new_cache() for part in parts] for _ in range(2)]
            lengths = [0, 0]
            for _ in range(40):
                used = chance.choice([[0], [1], [0, 1]])
                pieces: list[tuple[int, int, int]] = []
                for i in used:
                    back = max(
                        0, lengths[i] - chance.choice([0, 0, 0, 0, 0, 0, 1, 9, 33] + [MOST_BACK] * (lengths[i] > 120))
                    )
                    start = min(cache.reachable(back) for cache in caches[i])
                    count = min(chance.choice([1, 2, 7, 30, 60]), len(IDS) - start)
                    pieces += [(i, start, count)] if count else []
                rows = b"".join(ends.embed(IDS[start : start + count]).tobytes() for _, start, count in pieces)
                if not pieces:
                    continue
                for number, part in enumerate(parts):
                    out = part.step(
                        rows,
                        [Piece(caches[i][number], start, count) for i, start, count in pieces],
                        chance.choice([1, 2, 4]),
                    )
                    rows = out.tobytes()
                at = 0
                for i, start, count in pieces:
                    assert np.array_equal(out[at : at + count], right[start : start + count]), (back_end, cuts, start)
                    at, lengths[i] = at + count, start + count
            assert max(lengths) > 80


def test_caches_and_states_are_counted_as_the_engine_has_them(tmp_path: Path) -> None:
    folder = make_tiny("qwen4_exp_text", tmp_path, layers=3)
    program = read_program(folder)
    _, parts = spans(folder, "bf16", [0, 1, 2], "scalar")
    assert [part.bytes_per_token for part in parts] == [bytes_per_position(layer, 2) for layer in program.layers]
    assert [part.session_bytes for part in parts] == [state_bytes(layer, 2) for layer in program.layers]
    assert STATE_BLOCK == 32 and parts[1].bytes_per_token


def test_numbers_that_do_not_follow_from_the_config_are_refused(tmp_path: Path) -> None:
    folder = make_tiny("qwen4_exp_text", tmp_path, layers=1, dtype="fp32")
    program = read_program(folder)
    with MappedTensors(folder, lambda entry, raw: None) as tensors:

        def read(name: str) -> Stored:
            found = tensors.read(name)
            return Stored(found.type, found.array + 2) if name.endswith("layer_multipliers") else found

        with pytest.raises(
            ModelError, match=r"layer_multipliers has other numbers than qwen4_exp_text makes of its con"
        ):
            CpuSpan(program, Span(0, 1), read, "fp32", Team(1))


def test_primes_are_those_that_division_finds() -> None:
    for least in (2, 3, 50, 20_000_000, 65_521):
        found, number = list[int](), least
        while len(found) < 20:
            if number > 1 and all(number % i for i in range(2, int(number**0.5) + 1)):
                found.append(number)
            number += 1
        assert list(_primes(least, 20)) == found


def test_the_released_multipliers_follow_from_the_config() -> None:
    """Those that transformers makes, of whatever seed; of the published config they are the ones in its checkpoint."""
    from transformers.models.qwen4_exp.modeling_qwen4_exp import _build_layer_multipliers, _find_nth_prime_after

    for seed, vocab in ((1234, 248_320), (0, 264), (1 << 40, 300)):
        config = tiny_config("qwen4_exp_text", layers=4, vocab=vocab, seed=seed).to_dict()
        for index, layer in enumerate((0, 2)):
            op = next(op for op in build_program(config).layers[layer].ops if isinstance(op, Ngrams))
            assert list(op.multipliers) == _build_layer_multipliers(vocab, 3, index, seed).tolist()
            assert list(op.sizes) == [_find_nth_prime_after(49, 4 * index + head + 1) for head in range(4)]
    op = next(
        op
        for op in build_program({**config, "vocab_size": 248_320, "seed": 1234}).layers[0].ops
        if isinstance(op, Ngrams)
    )
    assert op.multipliers == (23703573157769, 20109073645365, 8052911324071)


PART = np.zeros((16, 8), np.float32)
NGRAMS, ADMIT = [1, 2, 3, 2, 2, 16, 9, 4096, 1, 1], [3, 3, 4, 5, 3]
ATTEND, CHOSEN = [6, 7, 8, 9, 4, 2, 5, 6, 4, 0, 0, 10], library.ATTENTION


@pytest.mark.parametrize(
    ("kind", "place", "value"),
    [
        *(
            (library.NGRAMS, p, v)
            for p, v in ((0, 99), (0, 11), (0, 2), (1, -1), (1, 10), (2, 1), (2, 6), (3, 0), (3, 3))
        ),
        *(
            (library.NGRAMS, p, v)
            for p, v in ((4, -1), (4, 1), (4, 5), (4, 99), (5, 0), (5, 15), (6, -1), (6, 4096), (7, 0), (8, 99), (9, 2))
        ),
        *((library.ADMIT, p, v) for p, v in ((0, 4), (1, 4), (2, 3), (3, 3), (3, 4), (4, 0), (4, 2), (4, 9), (0, 99))),
        *((CHOSEN, p, v) for p, v in ((8, 0), (8, -4), (8, 513), (9, 1), (10, 1), (11, 9), (11, 99))),
    ],
)
def test_what_does_not_fit_is_refused(kind: int, place: int, value: int) -> None:
    numbers = [np.array(each, np.int64) for each in ([3, 5, 7], [5, 7, 9, 11], [0, 5, 12, 21], [2, 2])]
    table = TableParts((PART, PART))
    shapes: dict[int, tuple[list[int], tuple[Any, ...], tuple[float, ...]]] = {
        library.NGRAMS: (NGRAMS, (*numbers[:3], table, numbers[3]), ()),
        library.ADMIT: (ADMIT, (), (0.5,)),
        CHOSEN: (ATTEND, (), (0.5, 0.0)),
    }
    plan = Plan("scalar", "f32", [8, 4, 32, 24, 8, 24, 20, 10, 12, 24, 3, 2], 5, "f32", 128)
    given, tensors, by = shapes[kind]
    plan.add(kind, given, by, tensors)
    shape = list(given)
    shape[place] = value
    with pytest.raises(ModelError, match="the engine refused"):
        plan.add(kind, shape, by, tensors)


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (0, [3, 5]),
        (1, [5, 7, 9]),
        (1, [5, 7, 9, 12]),
        (1, [5, 7, 0, 11]),
        (2, [0, 5, 12, 22]),
        (2, [-1, 5, 12, 21]),
        (3, None),
        (3, []),
        (3, [0, 512, 0, 512]),  # parts that lie nowhere
        (3, [0] * 5),
        (3, TableParts((PART,))),
        (3, TableParts((PART, PART[:-1]))),
        (3, TableParts((PART, np.zeros((17, 8), np.float32)))),
        (3, TableParts((PART, PART, PART))),
        (3, TableParts((PART.astype(np.float16), PART))),
        (4, None),
        (4, [2]),
        (4, [2, 2, 2]),
        (4, [2, 0]),
        (4, [2, -1]),
        (4, [2, 3]),
    ],
)
def test_tables_of_n_grams_are_checked(place: int, wrong: list[int] | TableParts | None) -> None:
    """Each number alone is wrong: too few, too many, another type, beyond the table."""
    numbers = [np.array(each, np.int64) for each in ([3, 5, 7], [5, 7, 9, 11], [0, 5, 12, 21], [2, 2])]
    tensors: list[Given] = [*numbers[:3], TableParts((PART, PART)), numbers[3]]
    plan = Plan("scalar", "f32", [8, 4, 32], 2, "f32", 128)
    plan.add(library.NGRAMS, NGRAMS, (), tensors)
    tensors[place] = np.array(wrong, np.int64) if isinstance(wrong, list) else wrong
    with pytest.raises(ModelError, match="a tensor has another size than its operation needs"):
        plan.add(library.NGRAMS, NGRAMS, (), tensors)


def test_gpus_and_caches_of_8_bit_are_refused(tmp_path: Path) -> None:
    for kind in (library.NGRAMS, library.ADMIT):
        with pytest.raises(ModelError, match="a GPU does not compute streams"):
            check(kind, [0] * 9)
    folder = make_tiny("qwen4_exp_text", tmp_path, layers=2)
    with pytest.raises(
        ModelError, match=r"qwen4_exp_text has an indexer.* not held in 8 bits; leave --cache-dtype out"
    ):
        Loader(folder, "bf16+c8", None)
