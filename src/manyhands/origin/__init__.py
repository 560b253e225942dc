"""A request from text to text.

text ─ ids ─ route ─ session ─ loop ─ ids ─ text        (text/ · routes.py · node.py · generate/ · text/)

origin.py   one model's requests on a node: checked, streamed, answered     model.py    what the origin holds of the model
routes.py   who may serve them, and the best route                          answer.py   what the consumer gets
"""

from manyhands.origin.answer import Answer, Timings, Token
from manyhands.origin.model import OriginModel
from manyhands.origin.origin import Origin

__all__ = ["Answer", "Origin", "OriginModel", "Timings", "Token"]
