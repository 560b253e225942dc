"""manyhands.model.fuse: modules that a kernel of ours computes whole, and modules that only look like them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from manyhands.core import Precision
from manyhands.model import tiles
from manyhands.model.fuse import fuse
from tests.model.pipeline import threads

pytestmark = pytest.mark.skipif(not tiles.available(), reason="no kernel of ours here")


class Mlp(nn.Module):
    def __init__(self, act: nn.Module, bias: bool = False, hidden: int = 72, inner: int = 176) -> None:
        super().__init__()
        torch.manual_seed(hidden + inner)
        self.gate_proj = nn.Linear(hidden, inner, bias)
        self.up_proj = nn.Linear(hidden, inner, bias)
        self.down_proj = nn.Linear(inner, hidden, bias)
        self.act_fn = act
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class Stacked(nn.Module):
    """As phi3 has it: gate above up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.gate_up_proj, self.down_proj = nn.Linear(64, 96, False), nn.Linear(48, 64, False)
        self.activation_fn = nn.SiLU()
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(up * self.activation_fn(gate))
        return out


class Crossed(Mlp):
    """The same parts, put together in another way."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))
        return out


def is_fused(module: nn.Module) -> bool:
    return "forward" in vars(module)


def hidden(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * scale).bfloat16()


GATED = [Mlp(nn.SiLU()), Mlp(nn.SiLU(), bias=True), Mlp(nn.GELU(approximate="tanh")), Stacked()]


@pytest.mark.parametrize("module", GATED, ids=["silu", "bias", "gelu", "stacked"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_a_gated_block_is_right(module: nn.Module, scale: float) -> None:
    """Against fp64, and no further from it than transformers' own five roundings."""
    ours = copy.deepcopy(module)
    fuse(ours, "bf16")
    assert is_fused(ours) and not [name for name, _ in ours.named_parameters()]
    x = hidden(1, 70, 72 if isinstance(module, Mlp) else 64, scale=scale)
    with torch.inference_mode():
        want = copy.deepcopy(module).double()(x.double())
        error = (ours(x).double() - want).norm() / want.norm()
        assert error < 0.004 and error <= (module(x).double() - want).norm() / want.norm()


@pytest.mark.parametrize("module", GATED, ids=["silu", "bias", "gelu", "stacked"])
def test_its_rows_do_not_know_each_other(module: nn.Module) -> None:
    ours = copy.deepcopy(module)
    fuse(ours, "bf16")
    x = hidden(150, 72 if isinstance(module, Mlp) else 64)
    x[3] *= 1e4
    x[60] = float("nan")
    with torch.inference_mode(), threads(1):
        want = ours(x)
    assert want[60].isnan().all() and want[torch.arange(150) != 60].isfinite().all()
    for count in (1, 2):
        with torch.inference_mode(), threads(count):
            for start, stop in ((0, 1), (5, 6), (0, 16), (17, 34), (20, 120)):
                assert torch.equal(ours(x[start:stop]).nan_to_num(), want[start:stop].nan_to_num())


class Clamped(Mlp):
    """As some models keep outliers in bounds: the same where nothing is large."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.act_fn(self.gate_proj(x)).clamp(max=7), self.up_proj(x).clamp(-7, 7)
        out: Tensor = self.down_proj(gate * up)
        return out


class GatedNorm(nn.Module):
    """A norm that takes more than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x * gate, (64,), self.weight, self.eps)


class Wider(Mlp):
    """Down to another width than it came from."""

    def __init__(self) -> None:
        super().__init__(nn.SiLU())
        self.down_proj = nn.Linear(176, 100, False).bfloat16()


OTHERS = {
    "relu": Mlp(nn.ReLU()),
    "exact gelu": Mlp(nn.GELU()),
    "crossed": Crossed(nn.SiLU()),
    "clamped": Clamped(nn.SiLU()),
    "not whole tiles": Mlp(nn.SiLU(), inner=100),
    "wider": Wider(),
    "fp32 block": Mlp(nn.SiLU()).float(),
    "layer norm": nn.LayerNorm(64).bfloat16(),
    "wide layer norm": nn.LayerNorm(8192, bias=False).bfloat16(),
    "cohere": CohereLayerNorm(8192).bfloat16(),
    "gated norm": GatedNorm().bfloat16(),
    "fp32 norm": LlamaRMSNorm(64),
}


@pytest.mark.parametrize("module", OTHERS.values(), ids=OTHERS.keys())
def test_what_only_looks_like_it_stays(module: nn.Module) -> None:
    ours = copy.deepcopy(module)
    fuse(ours, "bf16")
    assert not is_fused(ours) and len(list(ours.parameters())) == len(list(module.parameters()))


def test_other_precisions_stay() -> None:
    for module in (Mlp(nn.SiLU()), LlamaRMSNorm(64)):
        precision: Precision
        for precision in ("fp32",):
            fuse(module, precision)
            assert not is_fused(module)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 100, 896, 5120])
@pytest.mark.parametrize(("kind", "offset"), [(LlamaRMSNorm, 0), (GemmaRMSNorm, 1)])
def test_a_norm_is_right(kind: type[nn.Module], offset: int, width: int) -> None:
    module, weight = kind(width).bfloat16(), hidden(width)
    module.load_state_dict({"weight": weight})
    ours = copy.deepcopy(module)
    fuse(ours, "bf16")
    assert is_fused(ours)
    x = hidden(2, 9, width, scale=3.0)
    x[0, 4] = 0
    with torch.inference_mode():
        want = F.rms_norm(x.double(), (width,), weight.double() + offset, eps=1e-6)
        got = ours(x)
        assert_close(got.double(), want, atol=1e-6, rtol=2**-8)
        assert torch.equal(ours(x[1:, 3:4]), got[1:, 3:4]) and not got[0, 4].any()
        wide = hidden(30, width + 5)[:, 2 : 2 + width]
        assert torch.equal(ours(wide), ours(wide.contiguous()))


def test_large_weights_of_a_norm_are_told_from_one_more() -> None:
    """w and 1 + w differ by a hundredth."""
    for kind, offset in ((LlamaRMSNorm, 0), (GemmaRMSNorm, 1)):
        module = kind(256).bfloat16()
        module.load_state_dict({"weight": torch.full((256,), 100.0)})
        fuse(module, "bf16")
        x = hidden(5, 256)
        with torch.inference_mode():
            want = F.rms_norm(x.double(), (256,), torch.full((256,), 100.0 + offset).double(), eps=1e-6)
            assert is_fused(module) and torch.allclose(module(x).double(), want, rtol=2**-8)
            assert module(x.float()).dtype == torch.float32  # not ours: as transformers has it


def test_a_norm_refuses_what_it_would_misread() -> None:
    norm = tiles.NormKernel(torch.ones(64), 1e-6)
    for x in (torch.zeros(2, 64), hidden(2, 63)):
        with pytest.raises(TypeError, match="bf16 rows of 64"):
            norm(x)
