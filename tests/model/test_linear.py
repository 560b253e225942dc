"""manyhands.model.linear: products whose rows do not know each other, fused or not, in experts too."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from manyhands.core import Precision
from manyhands.errors import ModelError
from manyhands.model.linear import (
    DTYPES,
    EXPERTS,
    FusedPart,
    FusedProduct,
    InvariantLinear,
    Product,
    _invariant_experts,
    invariant_linear,
    pack,
    pack_experts,
    pad_rows,
    replace_linears,
)
from tests.model.pipeline import threads

PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32")
# [columns, rows of the weight]: tiny, odd, prime, and as wide as real layers (where the kernel changes below 4 rows).
SHAPES = [(64, 96), (72, 88), (101, 37), (896, 300), (2048, 64), (5632, 48), (896, 9728), (4864, 896), (16384, 128)]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrix(num_columns: int, num_rows: int, precision: Precision) -> tuple[Tensor, Tensor]:
    dtype = DTYPES[precision]
    return normal(num_rows, num_columns, seed=1, dtype=dtype) * num_columns**-0.5, normal(num_rows, seed=2, dtype=dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_product_is_right(precision: Precision, shape: tuple[int, int], has_bias: bool) -> None:
    """Against float64."""
    weight, bias = matrix(*shape, precision)
    x = normal(11, shape[0], dtype=DTYPES[precision])
    got = pack(weight, bias if has_bias else None)(x)
    want = F.linear(x.double(), weight.double(), bias.double() if has_bias else None)
    tolerance = {"bf16": 2e-2, "fp32": 1e-5}[precision]
    assert got.dtype == DTYPES[precision]
    assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_are_invariant(precision: Precision, shape: tuple[int, int]) -> None:
    """1 to 200 rows, from anywhere, on 1 and 2 threads: the bits of 200 rows on one thread."""
    product = pack(*matrix(*shape, precision))
    x = normal(200, shape[0], dtype=DTYPES[precision])
    x[17] *= 1000  # a loud row must not take precision from its neighbours
    with threads(1):
        want = product(x)
    counts = range(1, 201) if shape[0] < 128 else (1, 2, 3, 4, 5, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
    for num_threads in (1, 2):
        with threads(num_threads):
            for count in counts:
                assert torch.equal(product(x[:count]), want[:count]), f"{count} rows"
            for start in (1, 7, 16, 130):
                assert torch.equal(product(x[start : start + 5]), want[start : start + 5]), f"from row {start}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unpacked_products_are_invariant_and_keep_shapes(dtype: torch.dtype) -> None:
    """Routers use invariant_linear with tensors of any rank."""
    weight, bias = normal(5, 64, seed=1, dtype=dtype), normal(5, seed=2, dtype=dtype)
    x = normal(1, 33, 64, dtype=dtype)
    want = invariant_linear(x, weight, bias)
    assert want.shape == (1, 33, 5)
    assert invariant_linear(x[0, 0], weight).shape == (5,)
    for count in range(1, 33):
        assert torch.equal(invariant_linear(x[:, :count], weight, bias), want[:, :count])
    transposed = normal(64, 5, seed=1, dtype=dtype).t()
    assert_close(invariant_linear(x, transposed), F.linear(x, transposed), atol=0.1, rtol=0.05)


@pytest.mark.parametrize(("count", "padded"), [(1, 4), (3, 4), (4, 4), (9, 9)])
def test_rows_are_padded_with_zeros(count: int, padded: int) -> None:
    """At least MIN_ROWS rows, and never a copy where there are enough."""
    x = normal(count, 8)
    out = pad_rows(x)
    assert out.shape == (padded, 8) and torch.equal(out[:count], x) and not out[count:].any()
    assert (out is x) == (count == padded)


class Block(nn.Module):
    """Projections as layers have them: two of one input (one with a bias), one of another."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(64, 96, bias=False, dtype=dtype)
        self.gate = nn.Linear(64, 40, bias=True, dtype=dtype)
        self.down = nn.Linear(40, 64, bias=False, dtype=dtype)
        self.unused = nn.Linear(8, 8, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(x)[..., :64] + self.down(self.gate(x))
        return out


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fused_products_give_the_bits_of_separate_ones(precision: Precision) -> None:
    """q, k, v as one product compute what three would: columns do not know each other either."""
    linears = [nn.Linear(64, n, bias=n == 24, dtype=DTYPES[precision]) for n in (96, 24, 40)]
    x = normal(7, 64, dtype=DTYPES[precision])
    with torch.inference_mode():
        fused = FusedProduct(linears)
        parts = [fused.part(x, index) for index in range(3)]
        for linear, part in zip(linears, parts, strict=True):
            assert torch.equal(part, InvariantLinear(linear)(x))


def test_a_fused_product_runs_once_per_input() -> None:
    """The first part computes all, the last one forgets, and a new input is never answered with an old result."""
    fused = FusedProduct([nn.Linear(8, 8, bias=False), nn.Linear(8, 4)])
    calls: list[int] = []
    product = fused.product

    def counted(x: Tensor) -> Tensor:
        calls.append(len(x))
        return product(x)

    fused.product = cast(Product, counted)
    one, two = normal(4, 8), normal(6, 8)
    with torch.inference_mode():
        first = fused.part(one, 0), fused.part(one, 1)
        second = fused.part(two, 0)
        again = fused.part(one, 0), fused.part(one, 1)
    assert calls == [4, 6, 4] and second.shape == (6, 8)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_replacing_linears_fuses_only_neighbours_of_one_input() -> None:
    """Fusion follows the recorded calls, whatever the names; weights are dropped once packed."""
    block = Block(torch.float32)
    x = normal(5, 64)
    with torch.inference_mode():
        want = block(x)
        replace_linears(block, [(block.up, 1), (block.gate, 1), (block.down, 2)])
        assert_close(block(x), want)
    kinds = {name: type(child) for name, child in block.named_children()}
    assert kinds == {"up": FusedPart, "gate": FusedPart, "down": InvariantLinear, "unused": InvariantLinear}
    assert not list(block.parameters())


class Experts(nn.Module):
    """As transformers stores fused experts: [expert, out, in], or [expert, in, out] if transposed (gpt_oss)."""

    def __init__(self, *, transposed: bool, has_bias: bool, post_norm: bool = False) -> None:
        super().__init__()
        self.has_gate, self.is_transposed, self.has_bias = True, transposed, has_bias
        self.has_post_expert_norm = post_norm
        self.config = SimpleNamespace(_experts_implementation=None)
        up, down = normal(4, 96, 64, seed=1) * 0.1, normal(4, 64, 48, seed=2) * 0.1
        self.gate_up_proj = nn.Parameter(up.transpose(1, 2) if transposed else up)
        self.down_proj = nn.Parameter(down.transpose(1, 2) if transposed else down)
        self.gate_up_proj_bias, self.down_proj_bias = nn.Parameter(normal(4, 96)), nn.Parameter(normal(4, 64))
        self.weights = up, down

    def _apply_gate(self, x: Tensor) -> Tensor:
        return F.silu(x[..., :48]) * x[..., 48:]


def routed(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden rows, and two different experts a row with their weights."""
    generator = torch.Generator().manual_seed(6)
    top = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(count)])
    return normal(count, 64, seed=3), top, torch.rand(count, 2, generator=generator)


@pytest.mark.parametrize(("transposed", "has_bias"), [(False, False), (True, True), (False, True)])
def test_experts_mix_as_defined(transposed: bool, has_bias: bool) -> None:
    """Each token's experts, weighted, from the stored layout of either kind; the 3-D parameters are gone."""
    module = Experts(transposed=transposed, has_bias=has_bias)
    first_bias, second_bias = module.gate_up_proj_bias.detach(), module.down_proj_bias.detach()
    hidden, top, weight = routed(9)
    want = torch.zeros(9, 64)
    for row in range(9):
        for rank in range(2):
            expert = int(top[row, rank])
            y = module.weights[0][expert] @ hidden[row] + first_bias[expert] * has_bias
            y = module.weights[1][expert] @ module._apply_gate(y) + second_bias[expert] * has_bias
            want[row] += weight[row, rank] * y
    with torch.inference_mode():
        pack_experts(module)
        assert_close(_invariant_experts(module, hidden, top, weight), want)
    assert module.config._experts_implementation == EXPERTS
    assert "down_proj" not in dict(module.named_parameters())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_experts_are_row_invariant(precision: Precision) -> None:
    """How many other rows an expert got changes no bit: an expert with one row computes as with sixty."""
    module: Any = Experts(transposed=False, has_bias=False).to(DTYPES[precision])
    hidden, top, weight = routed(60)
    hidden = hidden.to(DTYPES[precision])

    def run(rows: slice) -> Tensor:
        return _invariant_experts(module, hidden[rows], top[rows], weight[rows])

    with torch.inference_mode():
        pack_experts(module)
        module._apply_gate = lambda x: x[..., :48] * x[..., 48:]
        want = run(slice(None))
        for start, count in ((0, 1), (5, 2), (17, 3), (20, 7), (3, 57)):
            assert torch.equal(run(slice(start, start + count)), want[start : start + count])


def test_experts_with_a_norm_of_their_own_are_refused() -> None:
    """A family whose arithmetic we do not reproduce is said to be unsupported, never computed wrongly."""
    with pytest.raises(ModelError, match="not supported"):
        pack_experts(Experts(transposed=False, has_bias=False, post_norm=True))
