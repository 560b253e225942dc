"""A request that names no model: which one is meant, where models are loaded and where they are once they are asked for."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from manyhands.api.auth import KeyRing
from manyhands.api.formats import ModelFormat, ModelFormats
from manyhands.api.gateway import Gateway, OfferedModel
from manyhands.api.http.app import create_app
from manyhands.api.http.server import serving
from manyhands.api.jobs import History
from manyhands.api.names import SHOWN, ModelNames
from manyhands.api.native.routes import native_router
from manyhands.api.preparation.process import PreparationJob, _do, read_answer
from manyhands.api.routers import compatible_routers
from manyhands.api.run import Caller
from manyhands.core import ModelId, NodeAddr
from manyhands.errors import BadRequest, ModelNotFound
from manyhands.origin import Origin
from manyhands.testing.swarm import memory_swarm
from tests.api.preparation.answers import parts_of
from tests.api.served import make_model, post, raw

HI: Any = [{"role": "user", "content": "hi"}]
BODIES: dict[str, Any] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HI},
    "/api/chat": {"messages": HI, "stream": False, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "hi", "stream": False, "options": {"num_predict": 2}},
    "/api/show": {},
    "/api/infer": {"prompt": "hi", "max_tokens": 2},
    "/tokenize": {"content": "hi"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("unnamed") / "tiny")


class Others:
    """Models of other members: each is the same origin, once it is asked for."""

    def __init__(self, origin: Origin, *names: str, own: str = "") -> None:
        self.names, self.own, self._origin = names, own, origin
        self.loaded: list[str] = []

    def offered(self) -> dict[str, OfferedModel]:
        return {name: OfferedModel(ModelId(f"{i:064x}"), "bf16", 2, 128) for i, name in enumerate(self.names)}

    async def load(self, name: str) -> Origin:
        self.loaded.append(name)
        return self._origin


@asynccontextmanager
async def opened(gateway: Gateway, keys: KeyRing | None = None) -> AsyncIterator[NodeAddr]:
    formats = ModelFormats(gateway)
    routers = [*compatible_routers(gateway, formats), native_router(gateway, History(), formats)]
    async with serving(create_app(gateway, keys=keys, routers=routers), "127.0.0.1", 0) as addr:
        yield addr


async def ask(addr: NodeAddr, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    status, said = await raw(addr, post(path, json.dumps(body).encode(), **headers))
    return status, said


def test_a_member_that_has_loaded_nothing_answers_for_the_only_model(folder: Path) -> None:
    """A `join` gateway said "name one of none, as none is served", and listed one."""

    async def main() -> None:
        async with memory_swarm(folder, "0,1") as swarm:
            for path, body in BODIES.items():
                others = Others(swarm.origin, "tales")
                async with opened(Gateway({}, others=others)) as addr:
                    status, said = await ask(addr, path, body)
                    assert status == 200, (path, said[-400:])
                    assert others.loaded == ["tales"]

    asyncio.run(main())


def test_where_several_could_be_meant_the_error_names_them(folder: Path) -> None:
    """Whichever of them happens to be loaded; the one that this machine hosts is meant before the others."""

    async def main() -> None:
        async with memory_swarm(folder, "0,1") as swarm:
            gateway = Gateway({}, others=Others(swarm.origin, "tales", "poems"))
            async with opened(gateway) as addr:
                for loaded in ([], ["poems"]):
                    for name in loaded:
                        await gateway.bring(name)
                    for path, body in BODIES.items():
                        status, said = await ask(addr, path, body)
                        assert status == 400 and b"name one of " in said, (path, said[-400:])
                        assert b"tales" in said and b"poems" in said, said[-400:]
            async with opened(Gateway({}, others=Others(swarm.origin, "tales", "poems", own="poems"))) as addr:
                status, said = await ask(addr, "/v1/completions", BODIES["/v1/completions"])
                assert status == 200 and b'"model":"poems"' in said.replace(b" ", b"")
            async with opened(Gateway({})) as addr:
                status, said = await ask(addr, "/v1/completions", BODIES["/v1/completions"])
                assert status == 404 and b"manyhands up MODEL" in said

    asyncio.run(main())


def test_a_key_for_one_model_means_that_one(folder: Path, tmp_path: Path) -> None:
    keys = KeyRing(tmp_path / "keys.json")
    secrets = {name: keys.add(name, 1.0, models=(name,)) for name in ("tales", "poems", "gone")}

    async def main() -> None:
        async with memory_swarm(folder, "0,1") as swarm:
            gateway = Gateway({"tales": swarm.origin}, others=Others(swarm.origin, "poems"))
            async with opened(gateway, keys) as addr:
                for name, status in (("tales", 200), ("poems", 200), ("gone", 403)):
                    body = BODIES["/v1/chat/completions"]
                    found, said = await ask(addr, "/v1/chat/completions", body, authorization=f"Bearer {secrets[name]}")
                    assert found == status, (name, said[-300:])

    asyncio.run(main())


def test_what_is_meant_and_how_long_the_error_is(folder: Path) -> None:
    async def main() -> None:
        async with memory_swarm(folder, "0,1") as swarm:
            many = [f"model-{i}" for i in range(500)]
            gateway = Gateway({}, others=Others(swarm.origin, *many))
            with pytest.raises(BadRequest, match="name one of model-0, model-1") as refused:
                gateway.unnamed(Caller())
            assert len(str(refused.value)) < SHOWN + 100
            with pytest.raises(ModelNotFound) as absent:
                gateway.origin("x")
            assert len(str(absent.value)) < SHOWN + 200
            names = ModelNames.of(["*=model-7"])
            assert Gateway({}, others=Others(swarm.origin, *many), names=names).unnamed(Caller()) == "model-7"
            gateway = Gateway({"a": swarm.origin, "b": swarm.origin})
            with pytest.raises(BadRequest, match="name one of a, b"):
                gateway.unnamed(Caller())

    asyncio.run(main())


def test_a_process_is_told_which_one_is_meant(folder: Path) -> None:
    async def main() -> None:
        async with memory_swarm(folder, "0,1") as swarm:
            speaker = (await asyncio.to_thread(ModelFormat.of, "tales", swarm.origin)).speaker
            body = json.dumps(BODIES["/v1/completions"]).encode()
            for unnamed in ("", "tales"):
                job = PreparationJob("/v1/completions", body, None, None, 16, 1024, unnamed=unnamed)
                parts = parts_of(_do(job, {"tales": speaker}))
                assert not parts.shown
                if unnamed:
                    assert (await read_answer(parts)).model == "tales"
                    continue
                with pytest.raises(ModelNotFound) as absent:
                    await read_answer(parts)
                assert absent.value.model == ""

    asyncio.run(main())
