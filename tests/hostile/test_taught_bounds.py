"""A hop teaches those behind it, by its first rows, bounds on norms that no honest row keeps (worker/bounds.py)."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from manyhands.core import PathKind
from manyhands.origin.node import FullNode
from manyhands.testing.tiny import make_tiny
from manyhands.wire.codec import plain
from manyhands.wire.rows import numbers, read_rows, store
from manyhands.worker.bounds import MAX_NORM, MIN_SEEN, RowBounds
from manyhands.worker.execute import Result, SpanModel, Work
from tests.kill import Bench, kept_models

CUT, SPARE = "0,1,2,3,4-5", "n5"  # more hops than a request has repairs without progress


@pytest.fixture(scope="module", params=["qwen3", "olmo_hybrid"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_models() as models:
        yield Bench(make_tiny(request.param, tmp_path_factory.mktemp("taught") / "model", seed=21), models)


class Teacher:
    """A SpanModel whose first results are as large as rows may be; the others are right."""

    def __init__(self, plain_model: SpanModel, num_false: int) -> None:
        self._plain, self._left = plain_model, num_false

    def run(self, works: Sequence[Work]) -> list[Result | Exception]:
        return [self._taught(result) for result in self._plain.run(works)]

    def _taught(self, result: Result | Exception) -> Result | Exception:
        if not isinstance(result, Result) or result.payload is None or not self._left:
            return result
        self._left -= 1
        rows = numbers(read_rows(plain(result.payload, result.count), result.count), result.payload.dtype)
        large = rows / np.linalg.norm(rows, axis=1, keepdims=True) * (0.98 * MAX_NORM)
        return result._replace(payload=store(large.astype(np.float32), result.payload.dtype))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def teach(node: FullNode, num_false: int) -> None:
    (host,) = node.hosts
    host.engine.model = cast(SpanModel, Teacher(cast(SpanModel, host.engine.model), num_false))


@pytest.mark.parametrize("path", ["ring", "star"])
@pytest.mark.parametrize("victim", [0, 2, 4])
def test_what_a_hop_taught_costs_it_its_place_and_no_honest_one(bench: Bench, path: PathKind, victim: int) -> None:
    """The first chunk of a prompt, or of the last hop the rows of the first tokens, were the bounds for good: rows of each node
    that took its place were refused, until the request was given up. What hops behind it have made of its rows is computed
    anew, so the text is right."""

    async def main() -> None:
        async with bench.scene(CUT, spares=["0-5"]) as scene:
            node = scene.hops[victim]
            num_false = 1 if victim < 4 else MIN_SEEN + 2  # the last hop sends one row a token
            scene.faults.at("opening", node, lambda: teach(node, num_false))
            assert await scene.ask("hot", 1, path=path) == bench.wanted["hot", 1]
            (repair,) = scene.answers[0].repairs
            assert (repair.lost, repair.replacement) == ((f"n{victim}",), (SPARE,)) and "no model's" in repair.reason
            session = scene.answers[0].session
            assert session is not None and session.untrusted_nodes == {node.transport.node}

    bench.play(main)


@pytest.mark.parametrize("path", ["ring", "star"])
def test_one_that_dies_leaves_nothing_that_refuses_its_replacement(bench: Bench, path: PathKind) -> None:
    async def main() -> None:
        async with bench.scene(CUT, spares=["0-5"]) as scene:
            node = scene.hops[1]
            scene.faults.at("opening", node, lambda: teach(node, 1))
            scene.faults.at("prefill", scene.hops[2], lambda: scene.faults.die(node), skip=1)
            await scene.ask("hot", 1, path=path)
            assert [repair.lost for repair in scene.answers[0].repairs][:1] == [("n1",)]

    bench.play(main)


def test_rows_of_another_epoch_widen_what_was_learnt() -> None:
    """What the sink taught stays."""
    bounds = RowBounds()

    def admit(*norms: float) -> None:
        rows = np.array([[norm, 0.0] for norm in norms], np.float32)
        bounds.admit(rows.tobytes(), len(norms), "fp32", "rows")

    admit(9000.0, *[1.0] * MIN_SEEN)
    bounds = bounds.renewed()
    admit(0.001)
    admit(*[1.0] * MIN_SEEN)
    admit(9000.0, 0.001)
    with pytest.raises(Exception, match="no model's"):
        admit(0.00001)
