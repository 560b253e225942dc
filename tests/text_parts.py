"""What the native engine computes of the text part of a multimodal checkpoint: shared by the tests that compare it."""

from pathlib import Path
from typing import Final

import numpy as np

from manyhands.checkpoint.folder import read_entries
from manyhands.checkpoint.verify import ignore
from manyhands.core import Span
from manyhands.engine.cpu import CpuEnds, CpuSpan, Piece
from manyhands.engine.library import Team
from manyhands.engine.mapped import MappedTensors
from manyhands.program.families import read_program
from manyhands.program.ops import Program
from manyhands.program.tensors import ends_tensors, layer_tensors, with_stacked_experts

PROMPT: Final = [(37 * i * i + 11 * i) % 256 for i in range(40)]


def greedy(folder: Path, team: Team) -> tuple[Program, list[int], np.ndarray]:
    """The program of `folder`, PROMPT and 65 greedy ids after it, and logits (104, vocab) in fp32 of all but the last.

    The layers are cut after the first; the tensors read from headers must be exactly those that the program needs.
    """
    shapes = {entry.name: entry.shape for entry in read_entries(folder)}
    program = with_stacked_experts(read_program(folder), shapes)
    needed = ends_tensors(program, embed=True, head=True)
    for layer in program.layers:
        needed |= layer_tensors(layer)
    assert shapes == needed
    with MappedTensors(folder, ignore) as tensors:
        ends = CpuEnds(program, tensors.read, "fp32", team)
        cuts = (Span(0, 1), Span(1, len(program.layers)))
        spans = [CpuSpan(program, span, tensors.read, "fp32", team) for span in cuts]
    caches, ids, ours = [span.new_cache() for span in spans], list(PROMPT), []
    for start, count in ((0, 33), (33, 7), *((40 + i, 1) for i in range(64))):
        rows = ends.embed(ids[start : start + count])
        for span, cache in zip(spans, caches, strict=True):
            rows = span.step(rows, [Piece(cache, start, count)], 2)
        ours.append(ends.logits(rows, count, 2))
        if start + count == len(ids):
            ids.append(int(ours[-1][-1].argmax()))
    return program, ids, np.concatenate(ours)
