"""Layers that a node would load on demand (--can-load), and how many it has."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manyhands.checkpoint.manifest import Manifest
from manyhands.core import SpanInfo
from manyhands.errors import ShardUnavailable
from manyhands.wire.message import Open
from manyhands.worker.execute import Device


@dataclass(slots=True)
class Loadable:
    """Layers that a node would load on demand (`info.is_loaded` is false), `num_loaded` of at most `max_layers` so far."""

    info: SpanInfo
    folder: Path
    manifest: Manifest
    device: Device
    max_layers: int
    num_loaded: int = 0


def find_loadable(loadables: Sequence[Loadable], message: Open, name: str) -> Loadable | None:
    """What could be loaded to serve `message`. Raises ShardUnavailable if only the limit is in the way.

    `name`: of this node, for the error.
    """
    wanted = (message.model, message.precision)
    for loadable in loadables:
        if (loadable.info.model, loadable.info.precision) == wanted and loadable.info.span.covers(message.span):
            if loadable.num_loaded + len(message.span) > loadable.max_layers:
                raise ShardUnavailable(
                    f"{name} loads at most {loadable.max_layers} layers on demand and has loaded "
                    f"{loadable.num_loaded}; layers {message.span} are too many"
                )
            return loadable
    return None
