"""Kimi K3's attention residuals (arXiv 2603.15031): what attention and blocks read is a mix of earlier residual streams.

A row that goes from layer to layer is several streams beside each other: the present one, and that with which each block of
`block` layers began, from layer 0 on. A layer that begins a block stores the present stream, which starts anew with what
attention gives. Streams that are not stored yet hold the embedding; nothing reads them.
"""

from dataclasses import dataclass

from manyhands.program.blocks import Branch, NormStyle, Ops, Sizes, TensorNames
from manyhands.program.ends import with_streams
from manyhands.program.fields import Fields
from manyhands.program.ops import Add, AttendStreams, Copy, Program, Term, Weight

_MOST_STREAMS = 64  # that ATTEND_STREAMS takes (engine/native/compressed.h)


@dataclass(frozen=True, slots=True)
class Residuals:
    """`is_fused`: of a norm and a product of one row the checkpoint has the product of both vectors, as GGUF files do."""

    block: int
    layers: int
    hidden: int
    norm: NormStyle
    is_fused: bool

    @classmethod
    def read(cls, f: Fields, s: Sizes, norm: NormStyle) -> "Residuals | None":
        """None where there are none. Raises ModelError where there are too many blocks."""
        block = f.optional_count("attn_res_block_size")
        if block is None:
            return None
        if -(-s.layers // block) >= _MOST_STREAMS:
            raise f.refuse(
                "attn_res_block_size", f"at most {_MOST_STREAMS - 1} blocks of the {s.layers} layers are needed"
            )
        return cls(block, s.layers, s.hidden, norm, f.stored("fused_scores"))

    def layer(self, n: TensorNames, i: int, attention: Ops, second: Branch) -> Ops:
        """Layer `i`: `attention` goes from "h" to "a", the body of `second` from "h" to its terms."""
        first = Copy("a", "x", 0, self.hidden, at=0)
        return (
            *self._begun(n, i),
            self.norm.op(n, "input_layernorm", self.hidden, "u", "h"),
            *attention,
            *(self._added((Term("a"),)) if i % self.block else (first,)),
            self._mixed(f"{n.path}mlp_res", 2 + i // self.block),
            self.norm.op(n, "post_attention_layernorm", self.hidden, "u", "h"),
            *second.body,
            *self._added(second.joined(1.0)),
        )

    def _begun(self, n: TensorNames, i: int) -> Ops:
        """What attention of layer `i` reads, "u"; a layer that begins a block stores the present stream."""
        mixed = (self._mixed(f"{n.path}self_attention_res", 1 - (-i // self.block)),) if i else self._present("u")
        stored = Copy("held", "x", 0, self.hidden, at=(1 + i // self.block) * self.hidden)
        return mixed if i % self.block else (*mixed, *self._present("held"), stored)

    def whole(self, program: Program) -> Program:
        """The program of such layers, whose rows have all streams, which the head mixes."""
        return with_streams(program, self._mixed("model.output_attn_res", 1 - (-self.layers // self.block)))

    def _present(self, target: str) -> Ops:
        return (Copy("x", target, 0, self.hidden),)

    def _mixed(self, path: str, streams: int) -> AttendStreams:
        """Into "u"."""
        shapes = {"_score": (self.hidden,)} if self.is_fused else {"_norm": (self.hidden,), "_proj": (1, self.hidden)}
        weights = tuple(Weight(f"{path}{end}.weight", shape) for end, shape in shapes.items())
        return AttendStreams("x", "u", streams, weights, self.norm.eps)

    def _added(self, terms: tuple[Term, ...]) -> Ops:
        """To the present stream."""
        return (*self._present("now"), Add(terms, target="now"), Copy("now", "x", 0, self.hidden, at=0))
