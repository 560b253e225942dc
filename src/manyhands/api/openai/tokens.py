"""/tokenize, /detokenize and /props, as llama.cpp's and vLLM's servers have them."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field as Limits

from manyhands import __version__
from manyhands.api.formats import ModelFormats
from manyhands.api.gateway import Gateway
from manyhands.api.http.encode import JsonBytes
from manyhands.api.http.route import body_of, caller_of, client_of, describe
from manyhands.api.http.sse import Single, Watched
from manyhands.api.preparation.desk import Prepared
from manyhands.text.reasoning import template_of

Object = dict[str, Any]


def tokens_router(gateway: Gateway, formats: ModelFormats) -> APIRouter:
    """The three paths."""
    router = APIRouter(tags=["tokens"])

    def handler(path: str, shape: Callable[[Prepared, int], Object]) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            body = await body_of(request)

            async def work() -> Single:
                gateway.enter(caller_of(request), "tokens")
                model_format, made = await formats.prepare(path, body, caller_of(request), client_of(request))

                async def told() -> Object:
                    request.state.check_room()  # an answer may be long, and another is soon made
                    return shape(made, model_format.speaker.context)

                return Single(told)

            return Watched(work(), request.state.release_body)

        return handle

    describe(router, "/tokenize", handler("/tokenize", _tokenized), "The token ids of a text or a conversation.")
    describe(router, "/detokenize", handler("/detokenize", _text), "The text of token ids.")

    @router.get("/props", summary="What is served, as llama.cpp's server says it")
    async def props(request: Request, model: Annotated[str | None, Limits(max_length=512)] = None) -> Object:
        """Of the model that `model` names; it may be left out where there is one."""
        meant = gateway.names.find(model or gateway.unnamed(caller_of(request)), gateway.models)
        caller_of(request).check_model(meant)
        await gateway.ensure(meant, caller_of(request))
        name = gateway.name(meant)
        await formats.open()
        speaker = formats.known(name).speaker
        return {
            "default_generation_settings": {"n_ctx": speaker.context},
            "total_slots": gateway.max_running,
            "model_alias": name,
            "chat_template": template_of(speaker.tokenizer),
            "modalities": {"vision": False, "audio": False},
            "build_info": f"manyhands {__version__}",
        }

    return router


def _tokenized(made: Prepared, context: int) -> Object:
    return {"tokens": JsonBytes(made.shown), "count": made.num_tokens, "max_model_len": context}


def _text(made: Prepared, _: int) -> Object:
    text = JsonBytes(made.shown)
    return {"content": text, "prompt": text}
