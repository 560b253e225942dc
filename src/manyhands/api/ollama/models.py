"""What Ollama's clients ask about models: /api/tags, /api/show, /api/ps and /api/version."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from manyhands import __version__
from manyhands.api.formats import ModelFormats
from manyhands.api.gateway import Gateway, OfferedModel
from manyhands.api.http.error import NotOffered
from manyhands.api.http.hosts import OLLAMA_REFUSED
from manyhands.api.http.route import caller_of
from manyhands.api.names import LATEST
from manyhands.checkpoint.config_fields import parse_config
from manyhands.checkpoint.folder import read_config
from manyhands.errors import ModelError
from manyhands.origin import Origin
from manyhands.text.reasoning import template_of

Object = dict[str, Any]
# The version of Ollama whose API this is: programs ask for it before they use what is newer.
OLLAMA_VERSION: Final = "0.12.0"
FOREVER: Final = "2318-01-01T00:00:00Z"  # as Ollama has it for a model that is not unloaded


class ShowRequest(BaseModel):
    """Which model; `verbose` and `options` change nothing. Ollama's own program sends all of them, set or not."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = Field(None, max_length=512)
    name: str | None = Field(None, max_length=512, description="The older word for model.")
    verbose: bool | None = None
    options: Object | None = None
    system: Literal[""] | None = None
    template: Literal[""] | None = None


def models_router(gateway: Gateway, formats: ModelFormats) -> APIRouter:
    """The four paths."""
    router = APIRouter(prefix="/api", tags=["Ollama"])

    async def listed(request: Request) -> list[Object]:
        caller = caller_of(request)
        models = gateway.models
        may_use = {name: model for name, model in models.items() if caller.models is None or name in caller.models}
        wanted = [_Listed.of(name, model, gateway) for name, model in may_use.items()]
        return await asyncio.to_thread(lambda: [_entry(one, gateway.started_at) for one in wanted])

    @router.get("/version", summary="The version of Ollama's API")
    async def version() -> dict[str, str]:
        """And that of manyhands."""
        return {"version": OLLAMA_VERSION, "manyhands": __version__}

    @router.get("/tags", summary="The models, as Ollama lists them")
    async def tags(request: Request) -> Object:
        """Those that this key may use."""
        return {"models": await listed(request)}

    @router.get("/ps", summary="The models that are loaded: all of them")
    async def running(request: Request) -> Object:
        """`size_vram` is 0: where layers lie, each node's owner says."""
        models = gateway.models
        return {"models": [_running(entry, models) for entry in await listed(request)]}

    @router.post("/show", summary="One model, as Ollama shows it")
    async def show(body: ShowRequest, request: Request) -> Object:
        """Template, capabilities and sizes."""
        wanted = body.model or body.name or gateway.unnamed(caller_of(request))
        meant = gateway.names.find(wanted, gateway.models)
        caller_of(request).check_model(meant)
        origin = await gateway.ensure(wanted, caller_of(request))
        await formats.open()
        one = _Listed(meant, gateway.models[meant], origin.model.folder, origin.model.num_parameters)
        entry = await asyncio.to_thread(_entry, one, gateway.started_at)
        return _shown(entry, origin, formats, meant, await asyncio.to_thread(_config_of, origin.model.folder))

    for name in OLLAMA_REFUSED:
        router.add_api_route(f"/{name}", _refused(name), methods=["POST", "DELETE"], include_in_schema=False)
    return router


def _refused(name: str) -> Callable[[], Awaitable[None]]:
    """What answers a path of Ollama's that is not offered, with what to do instead."""
    is_embedding = name.startswith("embed")
    why = "a swarm serves causal language models, ask an embedding server"
    remedy = "the owner of a node fetches and removes models there: manyhands pull, manyhands rm"

    async def refused() -> None:
        raise NotOffered(f"/api/{name} is not offered: {why if is_embedding else remedy}")

    return refused


class _Listed(NamedTuple):
    """A model as the event loop knows it; `folder` and parameters: of its files, where it is loaded here."""

    name: str
    model: OfferedModel
    folder: Path | None = None
    num_parameters: int = 0

    @classmethod
    def of(cls, name: str, model: OfferedModel, gateway: Gateway) -> "_Listed":
        if (origin := gateway.origins.get(name)) is None:
            return cls(name, model)
        return cls(name, model, origin.model.folder, origin.model.num_parameters)


def _entry(one: _Listed, started_at: float) -> Object:
    """One model of a list. Blocking: looks at its files."""
    name, model, folder, num_parameters = one
    files = [] if folder is None else [path for path in folder.iterdir() if path.is_file()]
    config = {} if folder is None else _config_of(folder)
    family = str(config.get("model_type", ""))
    families = [family] if family else []
    stored = "gguf" if any(path.suffix == ".gguf" for path in files) else "safetensors"
    details = {"parent_model": "", "format": stored, "family": family, "families": families}
    size = f"{num_parameters / 1e9:.1f}B" if num_parameters >= 1e9 else f"{num_parameters / 1e6:.1f}M"
    return {
        "name": name + LATEST,
        "model": name + LATEST,
        "modified_at": datetime.fromtimestamp(started_at, UTC).isoformat(),
        "size": sum(path.stat().st_size for path in files),
        "digest": model.id,
        "details": {
            **details,
            "parameter_size": size if num_parameters else "",
            "quantization_level": model.precision,
        },
    }


def _config_of(folder: Path) -> Object:
    try:
        return parse_config(read_config(folder))
    except ModelError:
        return {}


def _running(entry: Object, models: Mapping[str, OfferedModel]) -> Object:
    known = models.get(entry["name"].removesuffix(LATEST))  # it may have come while files were looked at
    context = 0 if known is None else known.context_length
    kept = {key: value for key, value in entry.items() if key != "modified_at"}
    return {**kept, "expires_at": FOREVER, "size_vram": 0, "context_length": context}


# GGUF's names for what config.json says of a model.
_OF_CONFIG: Final = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}


def _shown(entry: Object, origin: Origin, formats: ModelFormats, name: str, config: Object) -> Object:
    speaker, family = formats.known(name).speaker, entry["details"]["family"]
    can = {"completion": True, "tools": speaker.dialect is not None, "thinking": speaker.thinking is not None}
    info: Object = {
        "general.architecture": family,
        "general.basename": name,
        "general.parameter_count": origin.model.num_parameters,
        f"{family}.context_length": speaker.context,
        f"{family}.block_count": origin.model.num_layers,
        f"{family}.vocab_size": speaker.vocab_size,
    }
    info |= {f"{family}.{key}": config[ours] for key, ours in _OF_CONFIG.items() if isinstance(config.get(ours), int)}
    return {
        "modelfile": f"FROM {name}",
        "parameters": f"num_ctx {speaker.context}",  # from which Continue has the context
        "template": template_of(speaker.tokenizer),
        "details": entry["details"],
        "model_info": info,
        "capabilities": [word for word, is_so in can.items() if is_so],
        "modified_at": entry["modified_at"],
    }
