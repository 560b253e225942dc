"""The verification of drafts. Pure. Plain decoding is a window without drafts."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from manyhands.origin.sampler import Drawn, Sampler


def verify(
    sampler: Sampler, logits_TV: NDArray[np.float32], ids: Sequence[int], drafts: Sequence[int], prompt_length: int
) -> list[Drawn]:
    """Draw the tokens that follow `ids`, one per row of logits, as far as the drafts were right.

    Row 0 holds the logits after the last of `ids`, row i those after draft i - 1. A draft is accepted iff it is the very
    token drawn (docs/exactness.md), so the result is what decoding one by one would give: at least one token, at most
    len(drafts) + 1.
    """
    drawn: list[Drawn] = []
    history = list(ids)
    for row in range(logits_TV.shape[0]):
        drawn.append(sampler.draw(logits_TV[row], len(history), history, prompt_length))
        if row >= len(drafts) or drafts[row] != drawn[-1].token:
            break
        history.append(drawn[-1].token)
    return drawn
