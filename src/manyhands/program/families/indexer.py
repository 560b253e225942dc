"""The indexer of latent attention, which chooses positions: its fields, products and operations."""

from dataclasses import dataclass
from typing import Final, Self

from manyhands.program.blocks import NormStyle, Ops, Sizes, TensorNames
from manyhands.program.fields import Fields
from manyhands.program.ops import EntryIndex, Index, Norm, Part, Rotary

INDEXED: Final = ("indexed_attention", "deepseek_sparse_attention")  # names of layers with an indexer
RATES: Final = (1, 2, 4, 8, 16, 32)  # positions of an entry whose key a state makes
MOST_CHOSEN: Final = (
    1 << 16
)  # positions that an indexer chooses: each row of a step keeps their numbers, four bytes each


@dataclass(frozen=True, slots=True)
class IndexStyle:
    """An indexer: its heads, and how columns of each turn."""

    heads: int
    width: int
    top_k: int
    pairs: bool
    eps: float = 1e-6  # of the norm of keys
    offset: int = 0  # of what turns of a head
    rate: int = 1  # positions of an entry, where entries are chosen

    @classmethod
    def read(cls, f: Fields, rotary: int, context: int, *, pairs: bool) -> Self:
        """For heads of which `rotary` columns turn. Raises ModelError."""
        top_k = min(f.count("index_topk", 2048), context)
        if top_k > MOST_CHOSEN:
            raise f.refuse("index_topk", f"at most {MOST_CHOSEN} of the {context} positions can be chosen")
        heads, width = f.count("index_n_heads", high=4096), f.count("index_head_dim", 128, low=rotary, high=1 << 14)
        return cls(heads, width, top_k, pairs)

    def early(self, n: TensorNames, s: Sizes) -> tuple[Part, ...]:
        """Products of "h": the key, and the weights of heads."""
        return (
            n.part("ik", "self_attn.indexer.wk", self.width, s.hidden, False),
            n.part("iw", "self_attn.indexer.weights_proj", self.heads, s.hidden, False),
        )

    def query(self, n: TensorNames, rank: int) -> Part:
        """Queries, of the latent that attention's are made of."""
        return n.part("iq", "self_attn.indexer.wq_b", self.heads * self.width, rank, False)

    def late(self, n: TensorNames) -> Ops:
        """What follows the products."""
        return (self.key_norm(n), *self.turned())

    def key_norm(self, n: TensorNames) -> Norm:
        """Of keys, before they turn."""
        return NormStyle("layer", self.eps, bias=True).op(n, "self_attn.indexer.k_norm", self.width, "ik", "ik")

    def turned(self) -> Ops:
        """Rotary embedding of queries and keys."""
        return tuple(
            Rotary(register, heads, self.width, 0, self.offset, self.pairs)
            for register, heads in (("iq", self.heads), ("ik", 1))
        )

    def op(self) -> Index | EntryIndex:
        """What chooses, by these registers."""
        return Index("iq", "ik", "iw", self.heads, self.width, self.top_k)
