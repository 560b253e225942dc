"""The owner of a request: from text to text, over a route of hops that may die on the way.

text ─ ids ─ route ─ session ─ loop ─ ids ─ text

origin.py   one model's requests on a node                 model.py    tokenizer, embedding and head of the model
node.py     a node with every role                     sessions.py the open sessions of a node
loop.py     the one place where a request advances         session.py  the open hops of a request: send, receive, reshape
routes.py   the best route through the known nodes         route.py    a session's hops, their places and what they owe
queue.py    requests that wait for a free node             answer.py   what the consumer gets
sampler.py  a token from a row of logits                   ends_batch.py  embedding and head for all requests at once
draft.py, depth.py, speculate.py  guessed tokens: made, how many, verified
route_costs.py, step_costs.py  what rounds and steps of a route take, beside others too
fault.py, pace.py   which hop to replace, and when         repair_plan.py, repair.py  the new route: decided, carried out
alone.py    what a repair spends on the local fallback
standby.py, standby_search.py  hops kept warm beside others
first_rows.py  prompts as steps        growth.py   leases that grow        intake.py   what comes back (returns.py)
request_routes.py, opener.py, attempts.py  a request's own routes, the first of them, what attempts have shown
offers.py, trust.py, apart.py, reaching.py  records to offers, whom rules let take part, pairs that cannot meet, dials
reuse.py, conversations.py  sessions that begin where an earlier one got to
adoption.py, received.py, redraw.py  streams that another origin began
probe.py     hops asked how far they are       room.py, relief.py  hops without room: waited for, replaced
give_back.py, eviction.py  leaving a spare, and an evicted node
draft_model.py  a small model as drafter       sampling.py  draws on the last hop
layers.py    layers run by themselves
audit.py, auditing.py  what other nodes compute of an answer again: compared, which answers
lossy.py, loss_guard.py  rows sent with loss: which, and whether what it does is too much
"""

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from manyhands.origin.answer import Answer, Timings, Token
    from manyhands.origin.model import OriginModel
    from manyhands.origin.origin import Origin

# Imported when they are used: a node that only hosts spans draws tokens (sampler.py) and loads nothing else of this package.
_HOMES: Final = {"Answer": "answer", "Origin": "origin", "OriginModel": "model", "Timings": "answer", "Token": "answer"}
__all__ = ["Answer", "Origin", "OriginModel", "Timings", "Token"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
