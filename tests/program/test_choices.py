"""Rows that bring the positions that a layer chose to the layers behind it."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.core import Precision, Span
from manyhands.engine.cpu import CpuSpan
from manyhands.engine.golden_models import configs
from manyhands.engine.library import Team
from manyhands.engine.span import Piece
from manyhands.errors import ModelError
from manyhands.program.families import build_program
from manyhands.program.families.choices import ChoiceColumns, parts_of
from manyhands.program.fields import WIDEST
from manyhands.program.ops import RESIDUAL, Add, Constant, Copy, Layer, Op, Program, Term

HIDDEN, FAMILY = 64, "glm_moe_dsa_shared"


def stepped(program: Program, layer: int, rows: NDArray[np.uint8], precision: Precision) -> NDArray[np.uint8]:
    span = CpuSpan(program, Span(layer, layer + 1), lambda name: pytest.fail(name), precision, Team(1))
    return span.step(rows.tobytes(), [Piece(span.new_cache(), 0, 1)], 1)


def numbers(rows: NDArray[np.uint8], precision: Precision) -> NDArray[np.float32]:
    return (
        rows.view(np.float32)
        if precision == "fp32"
        else (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    )


def errors(positions: list[int], parts: int, precision: Precision) -> NDArray[np.float32]:
    """What a layer takes from a row less what the layer before, on another node, chose."""
    columns, chosen = ChoiceColumns(HIDDEN, len(positions), parts), tuple(map(float, positions))
    kept: tuple[Op, ...] = (Constant("chosen", chosen), *columns.kept())
    less: tuple[Op, ...] = (Constant("wanted", chosen), Add((Term("wanted", -1.0),), "chosen"))
    taken = (*columns.taken(), *less, Copy("chosen", RESIDUAL, 0, len(positions), at=0))
    program = replace(build_program(configs()[FAMILY]), hidden=columns.end, layers=(Layer(kept), Layer(taken)))
    rows = np.zeros((1, columns.end * (4 if precision == "fp32" else 2)), np.uint8)
    between = stepped(program, 0, rows, precision)
    assert np.abs(numbers(between, precision)).max() <= 2.0**-6  # far less than what rows hold beside it
    out = stepped(program, 1, between, precision)
    return numbers(out, precision).reshape(-1)[: len(positions)]


@pytest.mark.parametrize("precision", ["bf16", "fp32", "w4"])
@pytest.mark.parametrize("context", [2, 256, 257, 4096, 1 << 17, (1 << 17) + 1, 1 << 20, 1 << 24])
def test_every_position_arrives_as_it_was_chosen(context: int, precision: Precision) -> None:
    drawn = np.random.default_rng(3).integers(0, context, 48).tolist()
    edges = [p for k in range(25) for p in ((1 << k) - 1, (1 << k) + 1, 3 << k) if p < context]
    positions = [0, context - 1, *drawn, *edges][:HIDDEN]
    assert not errors(positions, parts_of(context), precision).any()


@pytest.mark.parametrize(("position", "parts"), [(257, 1), ((1 << 17) + 513, 2)])
def test_one_part_less_would_name_other_positions(position: int, parts: int) -> None:
    assert parts_of(position + 1) == parts + 1 and errors([position], parts, "bf16")[0] != 0


def test_rows_wider_than_is_served_are_refused() -> None:
    config = {**configs()[FAMILY], "max_position_embeddings": 1 << 20}
    most = (WIDEST - config["hidden_size"]) // 3
    assert build_program({**config, "index_topk": most}).hidden <= WIDEST
    with pytest.raises(
        ModelError, match=rf"index_topk is {most + 1}, rows of \d+ columns follow: at most {WIDEST} are served"
    ):
        build_program({**config, "index_topk": most + 1})


@pytest.mark.parametrize("family", ["glm_moe_dsa_shared", "hy_v4_shared", "mistral_large4_text"])
def test_the_first_layer_has_no_choice_to_share(family: str) -> None:
    kinds = ["shared", "full", "full", "full"]
    with pytest.raises(ModelError, match=r"indexer_types is .* a first layer with an indexer, full, is needed"):
        build_program({**configs()[family], "indexer_types": kinds})


def test_only_a_layer_with_an_indexer_caches_its_keys() -> None:
    layers = build_program(configs()[FAMILY]).layers
    assert [len(layer.cache_widths) for layer in layers] == [3, 2, 2, 3]
