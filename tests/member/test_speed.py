"""A span that has just been loaded is measured, whatever it keeps of a session, within what a lease could have."""

from pathlib import Path

import pytest

from manyhands.core import Span
from manyhands.errors import BadRequest
from manyhands.member.room import measured_positions
from manyhands.member.speed import POSITION, decode_layer_s
from manyhands.testing.clock import run_virtual
from manyhands.testing.swarm import memory_swarm
from manyhands.testing.tiny import make_tiny
from manyhands.worker.execute import SpanModel


@pytest.mark.parametrize("family", ["llama", "lfm2", "qwen3_next", "granitemoehybrid_mamba", "deepseek_v4"])
def test_a_step_is_measured(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / family, seed=3)
    model = SpanModel(folder, Span(1, 4), "bf16", False, 1)
    assert decode_layer_s(model, Span(1, 4), 1024) > 0
    assert decode_layer_s(model, Span(2, 3), 1024) > 0


@pytest.mark.parametrize("family", ["llama", "granitemoehybrid_mamba"])
@pytest.mark.parametrize("context", [1, 2, POSITION, POSITION + 1])
def test_a_model_of_a_short_context_is_measured_within_it(family: str, context: int, tmp_path: Path) -> None:
    """A step at position 64 was refused, and the span never served."""
    folder = make_tiny(family, tmp_path / family, context=context, layers=2)
    model = SpanModel(folder, Span(0, 2), "bf16", False, 1)
    assert decode_layer_s(model, Span(0, 2), context) > 0


def test_a_span_whose_states_no_lease_holds_is_refused_before_they_are_made(tmp_path: Path) -> None:
    """Measuring it took the states of a session, which no lease counted: gigabytes of a config with wide heads."""
    folder = make_tiny("granitemoehybrid_mamba", tmp_path / "wide", layers=2, mamba_d_state=2048)

    async def scene() -> None:
        async with memory_swarm(folder, "0-1") as swarm:
            (node,) = swarm.hops
            (host,) = node.hosts
            needed = host.leases.bytes_of(1)
            assert needed > 8 << 20
            node.worker.caches.limit(needed - 1)
            with pytest.raises(BadRequest, match=r"layers 0-1 take .* of cache .*--memory leaves .* give more"):
                measured_positions(node.worker, host)
            node.worker.caches.limit(needed)
            assert measured_positions(node.worker, host) == 64

    run_virtual(scene())
