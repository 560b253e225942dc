"""What an origin keeps on its own machine: the ends of the model, and the whole of it for emergencies."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.core import NodeAddr, Span

if TYPE_CHECKING:
    from manyhands.origin import Origin
    from manyhands.worker.execute import Device

LOOPBACK = NodeAddr("127.0.0.1", 0)


async def keep_layers(origin: "Origin", device: "Device", fetch: Callable[[Span], Awaitable[Path]]) -> None:
    """Serve the origin what its configuration keeps here ([request] own_first, own_last, fallback).

    `fetch` gives a folder with the layers of a span. A node that does not listen does so on loopback, to reach itself.
    Raises ModelError.
    """
    spans, config = origin.own_spans, origin.node.request
    if not spans and not config.fallback:
        return
    if origin.node.address is None:
        await origin.node.listen(LOOPBACK)
    for span in spans:
        await origin.host_own(await fetch(span), span, device)
    if config.fallback:
        await origin.add_fallback(await fetch(Span(0, origin.model.num_layers)), device)
