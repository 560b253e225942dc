"""Residual streams that collapse before attention or experts and take up what these give (deepseek_v4, glm5_next_text)."""

from dataclasses import dataclass

from manyhands.program.blocks import NormStyle, Ops, Sizes, TensorNames
from manyhands.program.fields import Fields
from manyhands.program.ops import Collapse, Spread, Weight


@dataclass(frozen=True, slots=True)
class ResidualStreams:
    """How many, of how many columns; the epsilon of their norm, that of sigmoids and sums, and how often these are shared."""

    count: int
    width: int
    norm_epsilon: float
    epsilon: float
    iterations: int

    @classmethod
    def read(cls, f: Fields, s: Sizes, norm: NormStyle) -> "ResidualStreams":
        """By the fields of deepseek_v4."""
        count, iterations = f.count("hc_mult", 4, high=8), f.count("hc_sinkhorn_iters", 20, high=1000)
        return cls(count, s.hidden, norm.eps, f.number("hc_eps", 1e-6), iterations)

    def around(self, n: TensorNames, name: str, body: Ops, target: str) -> Ops:
        """They collapse into "u", which `body` makes `target` of, and take that up."""
        columns = (2 + self.count) * self.count
        mix = Weight(f"{n.path}hc_{name}_fn", (columns, self.count * self.width))
        base, scale = n.vector(f"hc_{name}_base", columns), n.vector(f"hc_{name}_scale", 3)
        numbers = self.count, mix, base, scale, self.norm_epsilon, self.epsilon, self.iterations
        return (Collapse("x", "u", "hc", *numbers), *body, Spread(target, "hc", self.count))
