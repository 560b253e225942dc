"""Python programs and notebooks as clients of a swarm (docs/python.md): `manyhands.connect` and `manyhands.local_swarm`.

client.py    Client and TextStream: sync and async faces of one event loop in a thread
held.py      the thread that keeps a client's answers open
backend.py   where answers come from: this process as the origin of a ticket's swarm, or a gateway
layers.py    hidden states and logits, from either
"""

from manyhands.client.backend import Completion, TextDelta
from manyhands.client.client import Client, TextStream, connect, local_swarm
from manyhands.client.layers import LayerStates, ServedHop

__all__ = ["Client", "Completion", "LayerStates", "ServedHop", "TextDelta", "TextStream", "connect", "local_swarm"]
