"""What is said of a model that a gateway offers and has not loaded."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from manyhands.api.gateway import Gateway, OfferedModel
from manyhands.api.names import ModelNames
from manyhands.errors import BadRequest, ModelNotFound
from manyhands.origin import Origin
from manyhands.testing.swarm import memory_swarm
from tests.api.observed import observed, served
from tests.api.test_unnamed import ask, opened


class OthersOf:
    """The models of `origins`, each loaded when it is asked for but those of which `trouble` says why not."""

    own = ""

    def __init__(self, origins: Mapping[str, Origin], **trouble: str) -> None:
        self.origins, self.trouble = origins, trouble

    def offered(self) -> dict[str, OfferedModel]:
        each = [(name, origin.model) for name, origin in self.origins.items()]
        return {name: OfferedModel(m.id, m.precision, m.num_layers, m.context_length) for name, m in each}

    async def load(self, name: str) -> Origin:
        if name in self.trouble:
            raise BadRequest(self.trouble[name])
        return self.origins[name]


def test_the_name_of_a_model_that_is_offered_goes_before_aliases(folder: Path) -> None:
    """`*`, which stands for unknown names, took requests for models that `/v1/models` shows, until one was loaded."""

    async def main() -> None:
        async with memory_swarm(folder, "0-2,3-5") as swarm:
            others = OthersOf(dict.fromkeys(("large", "poems"), swarm.origin), large="it is too large")
            names = ModelNames.of(["*=tales", "poems=tales", "gpt=tales"])
            gateway = Gateway({"tales": swarm.origin}, others=others, names=names)

            async def asked(model: str) -> tuple[int, str]:
                status, told = await ask(addr, "/v1/completions", {"model": model, "prompt": "hi", "max_tokens": 2})
                said = json.loads(told.partition(b"\r\n\r\n")[2])
                return status, said["model"] if status == 200 else said["error"]["message"]

            async with opened(gateway) as addr:
                for other in ("gpt", "whatever"):
                    assert await asked(other) == (200, "tales")
                assert await asked("poems:latest") == (200, "poems") and await asked("poems") == (200, "poems")
                why = (404, "model 'large' cannot be served here: it is too large")
                assert await asked("large") == why and await asked("large") == why
                with pytest.raises(ModelNotFound, match="it is too large"):
                    gateway.origin("large")

    asyncio.run(main())


def test_a_model_that_is_offered_is_never_said_not_to_be_served(folder: Path) -> None:
    """Seen: "model 'm' is not served here; there is m": of one that is not loaded yet, and of one that cannot be."""

    async def main() -> None:
        async with observed(folder) as scene, served(scene) as client:
            gateway = scene.gateway
            ((name, origin),) = gateway.origins.items()
            gateway.others = OthersOf({name: origin, "large": origin}, large="its ends take 2 GB, --memory leaves 1 GB")

            async def said_of(model: str) -> tuple[int, str]:
                answer = await client.post("/api/infer", json={"model": model, "prompt": "x"})
                return answer.status_code, answer.json()["error"]["message"]

            why = "model 'large' cannot be served here: its ends take 2 GB, --memory leaves 1 GB"
            assert await said_of("large") == (404, why)
            assert await said_of("gpt") == (404, f"model 'gpt' is not served here; there is {name}, large")
            gateway.origins.clear()
            assert (
                str(gateway.absent(name))
                == f"model {name!r} is served in this swarm and not loaded here yet: ask again"
            )
            register = {"address": "mem:1", "model_name": name, "total_layers": 99}
            told = await client.post("/api/workers/register", json=register)
            assert told.status_code == 409 and name in gateway.origins, "it is loaded for that"

    asyncio.run(main())
