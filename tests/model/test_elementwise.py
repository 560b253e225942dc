"""manyhands.model.elementwise: a function of each element alone, whose bits do not depend on where the element lies."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.model.elementwise import InvariantActivation, InvariantMode, elementwise, guard, is_tail_free
from tests.model.pipeline import threads

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "cos": torch.cos,
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_tails_and_threads_change_no_bit(name: str, dtype: torch.dtype) -> None:
    """Any number of rows of any width, below and above the size that torch splits among threads."""
    function = FUNCTIONS[name]
    for width, count in ((88, 40), (101, 9), (64, 33), (257, 130), (2816, 30)):
        x = normal(count, width).to(dtype)
        with threads(1):
            want = elementwise(function, x)
        for num_threads in (1, 2, 3):
            with threads(num_threads):
                for rows in {1, 2, 3, 5, count - 1, count}:
                    assert torch.equal(elementwise(function, x[:rows]), want[:rows]), f"{rows} x {width}"
                assert torch.equal(elementwise(function, x[3:5]), want[3:5])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_shapes_are_those_of_the_function(name: str) -> None:
    """Padding and pieces are invisible, also for tensors that are not contiguous."""
    function = FUNCTIONS[name]
    for x in (normal(7, 3, 11), normal(33, 65).t(), normal(1, 40_001), normal(5), normal(0, 8)):
        got = elementwise(function, x)
        assert got.shape == x.shape
        torch.testing.assert_close(got, function(x))


@pytest.mark.parametrize(
    ("count", "num_threads", "expected"),
    [
        (64, 1, True),
        (63, 1, False),
        (65, 2, False),
        (16384, 8, True),
        (16384 + 64, 1, True),
        (16384 + 64, 2, False),
        (32768 + 128, 2, True),
        (32768 + 128, 3, False),
        (3 * 32768, 8, True),
        (3 * 32768 - 64, 8, False),
    ],
)
def test_a_range_is_tail_free_where_every_threads_part_is(count: int, num_threads: int, expected: bool) -> None:
    """torch splits a range beyond 32768 elements (GELU: 16384) into as many equal parts as threads or grains there are."""
    assert is_tail_free(count, num_threads) is expected


def test_plain_functions_would_not_be_invariant() -> None:
    """Why all this: torch computes the elements behind the last whole vector with another exp."""
    x = normal(64, 61)
    assert not torch.equal(torch.cat([F.silu(row[None]) for row in x]), F.silu(x))
    assert torch.equal(torch.cat([elementwise(F.silu, row[None]) for row in x]), elementwise(F.silu, x))


class Block(nn.Module):
    """What guard must find: an activation module, a rotary embedding by its name, a router with a bare matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()
        self.rotary = TinyRotary()
        self.router = Router()
        self.proj = nn.Linear(8, 8)


class TinyRotary(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cos()


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(5, 2048, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).sigmoid()


def test_guard_makes_a_modules_own_arithmetic_invariant() -> None:
    """Whatever a family computes outside its linears is covered without naming the family."""
    block = Block()
    router, x = Router(), normal(9, 2048)
    block.router = router
    guard(block)
    assert isinstance(block.act_fn, InvariantActivation)
    with torch.inference_mode():
        angles, gates = normal(7, 61), block.router(x)
        assert torch.equal(torch.cat([block.rotary(row[None]) for row in angles]), block.rotary(angles))
        assert torch.equal(torch.cat([block.router(row[None]) for row in x]), gates)
        torch.testing.assert_close(gates, (x @ router.weight.t()).sigmoid())
        assert torch.equal(torch.cat([block.act_fn(row[None]) for row in angles]), block.act_fn(angles))


def test_the_mode_reaches_calls_with_options() -> None:
    """Keyword and positional options go through; other functions are left alone."""
    x = normal(3, 61)
    with InvariantMode():
        gelu, added, soft = F.gelu(x, approximate="tanh"), x + 1, F.softplus(x, 2.0)
    torch.testing.assert_close(gelu, F.gelu(x, approximate="tanh"))
    torch.testing.assert_close(soft, F.softplus(x, 2.0))
    assert torch.equal(added, x + 1)
