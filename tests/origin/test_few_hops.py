"""Routes of few hops, live (HN-41)."""

from dataclasses import replace
from pathlib import Path

import pytest

from manyhands.config import RequestConfig
from manyhands.errors import ShardUnavailable
from manyhands.route.offer import Rules
from manyhands.testing.swarm import memory_swarm
from manyhands.testing.tiny import make_tiny
from tests.origin.scenes import HOT, PROMPT, play

PLAIN = RequestConfig(draft="off", patience_s=3.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("few") / "qwen3", seed=3)


def test_a_request_says_how_many_hops_its_route_may_have(folder: Path) -> None:
    """HN-41, on a live route; the error says what would do."""

    async def main() -> None:
        async with memory_swarm(folder, "0-1,2-3,4-5", spares=["0-3"], request=PLAIN) as swarm:
            origin, texts = swarm.origin, []
            for most, wanted in ((3, ["n0", "n1", "n2"]), (2, ["n3", "n2"])):
                answer = await origin.complete(origin.request_ids(PROMPT, HOT), rules=Rules(max_hops=most))
                assert [offer.name for offer in answer.route] == wanted
                texts.append(answer.token_ids)
            assert texts[0] == texts[1]
            with pytest.raises(ShardUnavailable, match=r"max_shards_per_request is 1.*raise it to 2"):
                await origin.complete(origin.request_ids(PROMPT, HOT), rules=Rules(max_hops=1))

    play(main)


def test_a_repair_goes_beyond_the_limit_rather_than_end_a_stream(folder: Path) -> None:
    async def main() -> None:
        request = replace(PLAIN, max_shards_per_request=2)
        async with memory_swarm(folder, "0-2,3-5", spares=["3-3", "4-5"], request=request) as swarm:
            origin, node = swarm.origin, swarm.hops[1].transport.node
            told = origin.answer(origin.request_ids(PROMPT, HOT))
            async for _ in origin.stream(told):
                if len(told.token_ids) == 5:
                    origin.routes.evict(node)
            assert [repair.replacement for repair in told.repairs] == [("n2", "n3")] and len(told.token_ids) > 5

    play(main)
