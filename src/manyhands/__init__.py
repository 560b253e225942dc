"""manyhands: run a language model that none of your machines could hold alone, and never lose a stream.

core errors config      nouns, the exception tree, configuration
wire net                messages as bytes; links between nodes
checkpoint weights      what a model is on disk; where its bytes come from
program engine          what a span computes; the engine that computes it
worker                  a hop: sessions on a span of this node
swarm route place       the directory of nodes; which hops; which layers to host
text origin             text and ids; the owner of a request
node host_node          links and message handlers; a node that hosts spans
api member cli          HTTP; a node that is part of a swarm; the command
client                  programs and notebooks: connect, local_swarm (docs/python.md)
local testing           many nodes on one machine; the public test kit
"""

import os
from typing import TYPE_CHECKING, Any

# transformers' bars are noise where a program reports its own progress.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

__version__ = "0.1.0"

if TYPE_CHECKING:
    from manyhands.client import Client, Completion, ServedHop, TextDelta, TextStream, connect, local_swarm

__all__ = ["Client", "Completion", "ServedHop", "TextDelta", "TextStream", "__version__", "connect", "local_swarm"]


def __getattr__(name: str) -> Any:
    """What programs use (docs/python.md), loaded when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import manyhands.client

    return getattr(manyhands.client, name)


def __dir__() -> list[str]:
    """The API alone: neither what this file imports nor the packages of the tree."""
    return __all__
