"""What is said of a model that a gateway offers and has not loaded."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from manyhands.api.gateway import OfferedModel
from manyhands.errors import BadRequest
from manyhands.origin import Origin
from tests.api.observed import observed, served


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
