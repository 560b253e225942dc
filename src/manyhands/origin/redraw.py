"""Tokens that were drawn before, perhaps by another origin: drawn again, from the rows that the last hop sends again.

rows ─ logits, 32 rows at a time ─ draw ─► ledger           anything else than rows of these tokens: the hop is lost
"""

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import Corruption, ProtocolError
from manyhands.origin.ends_batch import EndsBatcher
from manyhands.origin.intake import Intake
from manyhands.origin.sampler import Drawn, Sampler
from manyhands.origin.session import HopLost, Session
from manyhands.wire.message import Step
from manyhands.wire.rows import read_ids, read_rows
from manyhands.worker.bounds import RowBounds
from manyhands.worker.log import pieces

# Rows whose logits are made at once: 20 MB for 152,000 tokens.
REDRAWN_ROWS = 32


async def redraw(
    count: int, session: Session, intake: Intake, ends: EndsBatcher | None, sampler: Sampler, ledger: list[int]
) -> list[Drawn]:
    """The first `count` tokens of the answer, appended to `ledger`, which holds the prompt.

    None if a hop is lost meanwhile, or sends what cannot be and so loses its place: then the session begins at the end of the
    prompt. Of `count` tokens only the last may end the text. Raises what ends the session.
    """
    prompt_length, drawn, bounds = len(ledger), list[Drawn](), RowBounds()
    session.returns.sent_until = prompt_length + count - 1

    def decide(logits_TV: NDArray[np.float32]) -> list[int]:
        for row_V in logits_TV:
            drawn.append(sampler.draw(row_V, len(ledger), ledger, prompt_length))
            ledger.append(drawn[-1].token)
        return []

    try:
        while len(drawn) < count:
            for part in [part for step in await intake.rows() for part in pieces(step, REDRAWN_ROWS)]:
                if ends is not None:
                    assert part.payload is not None, "Intake gives rows"
                    await ends.turn(read_rows(part.payload, part.count), decide, bounds)
                else:
                    drawn += (ids := _read(part, sampler.vocab_size))
                    ledger += [each.token for each in ids]
        if any(sampler.is_stop_id(each.token) for each in drawn[:-1]):
            raise Corruption("the text of rows that came again ends before they do")
    except HopLost:
        pass
    except (Corruption, ProtocolError) as error:
        session.lose(len(session.route.hops) - 1, f"sent what cannot be: {error}", untrusted=True)
    else:
        return drawn
    del ledger[prompt_length:]
    session.begins_at = min(session.begins_at, prompt_length - 1)
    return []


def _read(part: Step, vocab_size: int) -> list[Drawn]:
    """Tokens that the last hop has drawn. Raises Corruption for what is none of the vocabulary."""
    assert part.payload is not None, "Intake gives rows"
    ids = read_ids(part.payload, part.count)
    if part.content != "ids" or not all(0 <= i < vocab_size for i in ids):
        raise Corruption(f"{part.content} {ids} came again where token ids below {vocab_size} were due")
    return [Drawn(i, None, None) for i in ids]
