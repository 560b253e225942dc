"""Layers that a node would load when no other node holds them (`--can-load`)."""

import asyncio
from pathlib import Path

from manyhands.checkpoint.config_fields import read_facts
from manyhands.checkpoint.folder import read_entries
from manyhands.checkpoint.partition import longest_run
from manyhands.core import Precision, Span
from manyhands.host_node import HostNode
from manyhands.worker.execute import Device


async def offer_folder(
    node: HostNode,
    folder: Path,
    precision: Precision,
    device: Device,
    *,
    model_name: str,
    max_layers: int,
    has_ends: bool = False,
) -> Span:
    """Offer to load at most `max_layers` of the layers in `folder`, which are returned. Raises ModelError, CutError."""
    here = await asyncio.to_thread(_layers_in, folder)
    load, most = node.worker.offer_to_load, min(max_layers, len(here))
    await load(folder, here, precision, device, model_name=model_name, max_layers=most, has_ends=has_ends)
    return here


def _layers_in(folder: Path) -> Span:
    return longest_run((entry.name for entry in read_entries(folder)), read_facts(folder).num_layers)
