"""A node whose Hello states of its spans what cannot be, which is no record that others check: requests go on without it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pytest

from manyhands.core import PathKind, Span, SpanInfo
from manyhands.testing.tiny import make_tiny
from manyhands.worker.worker import Worker
from tests.kill import Bench, kept_models

MOST: Final = (1 << 32) - 1
STATED: Final[tuple[dict[str, Any], ...]] = (
    {"hidden_size": 0},
    {"hidden_size": MOST},
    {"num_layers": 0},
    {"num_layers": MOST},
    {"context_length": 0},
    {"free_tokens": 0, "max_sessions": 0},
    {"free_tokens": MOST, "max_sessions": MOST},
    {"span": Span(0, MOST)},
    {"span": Span(MOST - 1, MOST)},
    {"arithmetic": "", "model_name": ""},
    {"is_loaded": False, "has_ends": True},
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(make_tiny("qwen3", tmp_path_factory.mktemp("hello") / "qwen3", seed=21), models)


@pytest.mark.parametrize("path", ["ring", "star"])
@pytest.mark.parametrize("stated", STATED, ids=lambda stated: " ".join(stated))
def test_what_a_hello_states_ends_no_request(
    bench: Bench, stated: dict[str, Any], path: PathKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without columns, of hop 0, were divided by: ZeroDivisionError, for each request that went that way."""
    right = vars(Worker)["spans"].fget

    async def main() -> None:
        async with bench.scene(spares=["0-5"]) as scene:
            false = scene.hops[0].worker

            def spans(worker: Worker) -> tuple[SpanInfo, ...]:
                told: tuple[SpanInfo, ...] = right(worker)
                return tuple(replace(info, **stated) for info in told) if worker is false else told

            with monkeypatch.context() as patch:
                patch.setattr(Worker, "spans", property(spans))
                assert await scene.ask("hot", 1, path=path) == bench.wanted["hot", 1]

    bench.play(main)
