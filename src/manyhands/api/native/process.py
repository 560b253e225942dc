"""POST /api/process: hidden states into and out of some layers, as JSON or Base64. For admins, where [api] debug is on.

lattice9's path of a worker with InferD's tensors (IN-12, IN-20, L9-R04), over the sessions that requests use: admitted, charged
and listed as a request of as many tokens as there are rows.
"""

import asyncio
import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, Tag, TypeAdapter
from pydantic_core import from_json

from manyhands.api.access import check_admin
from manyhands.api.gateway import Gateway
from manyhands.api.http.body import check
from manyhands.api.http.encode import JsonBytes, encode
from manyhands.api.http.route import PROCESS_PATH, Direct, body_of, caller_of
from manyhands.api.http.sse import Single, Watched
from manyhands.api.jobs import hop_object
from manyhands.api.native.workers import find_worker
from manyhands.api.openai.schema import FIRST, by
from manyhands.api.run import Ask
from manyhands.core import SamplingParams, Span
from manyhands.errors import BadRequest, ProtocolError
from manyhands.origin import Origin
from manyhands.origin.layers import LayerRows, run_layers
from manyhands.wire.message import DType, Payload
from manyhands.wire.rows import numbers, read_rows, store
from manyhands.worker.execute import WIRE_DTYPES

MAX_ROWS: Final = 256
MAX_LISTS: Final = 2 * MAX_ROWS  # in a body, or braces in its texts
# Of tensors in an answer: bytes as Base64, or numbers in lists, each of which is encoded and read for itself.
MAX_BYTES: Final = 4 << 20
MAX_NUMBERS: Final = 1 << 17
# Of tensors that are encoded in one turn of the event loop: some milliseconds. 3 bytes are 4 characters of Base64.
B64_A_TURN: Final = 3 << 18
NUMBERS_A_TURN: Final = 4096
_DTYPES: Final[dict[str, DType]] = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
}
_ROWS: Final = Field(max_length=MAX_ROWS)
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class JsonTensor(BaseModel):
    """Numbers in row order, little endian. A leading dimension of 1 (the batch) may stand."""

    model_config = _STRICT
    b64: str
    dtype: str
    shape: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2, max_length=3)]


class ProcessRequest(BaseModel):
    """What to run. Either `input_ids`, which enter layer 0, or `hidden_states`."""

    model_config = _STRICT
    model: str | None = Field(None, description="One of /v1/models; may be left out where there is one.")
    layers: str | Annotated[list[int], FIRST] | None = Field(None, description='"4-7", or [4, 5, 6, 7]; left out: all.')
    input_ids: Annotated[list[int], FIRST, _ROWS] | None = None
    hidden_states: (
        Annotated[
            Annotated[JsonTensor, Tag("<tensor>")]
            | Annotated[list[Annotated[list[float], FIRST]], FIRST, _ROWS, Tag("<lists>")],
            by({"tensor": dict, "lists": list}),
        ]
        | None
    ) = None
    at: Annotated[list[int], FIRST] = Field([], max_length=256, description="Also the states that enter these layers.")
    logits: int = Field(0, ge=0, description="Of so many last rows; the last layer must be among `layers`.")
    is_first: bool | None = Field(None, description="lattice9's: must say whether there are input_ids.")
    is_last: bool | None = Field(None, description="lattice9's: true asks for the logits of the last row.")
    worker: str | None = Field(None, description="The node to run it on, by id, its first digits, or name.")
    encoding: Literal["b64", "list"] = "b64"
    request_id: str | None = Field(None, max_length=200, description="Comes back in the answer.")


_ASKED: Final = TypeAdapter(ProcessRequest)


def process_router(gateway: Gateway) -> APIRouter:
    """The path. Mount it only where the operator wants it ([api] debug)."""
    router = APIRouter(prefix="/api", tags=["debug"])

    async def process(request: Request) -> Response:
        """The states that leave the last of `layers`, those at `at`, and logits, with the nodes that ran them."""
        check_admin(caller_of(request))  # before the body is parsed
        asked = read_asked(await body_of(request))

        async def work() -> Single:
            return Single(lambda: _answer(gateway, asked, request))

        return Watched(work(), request.state.release_body)

    _mount(router, PROCESS_PATH, process, "Hidden states through some layers")
    return router


def _mount(router: APIRouter, path: str, handler: Callable[[Request], Awaitable[Response]], says: str) -> None:
    """Mount a POST handler that reads a ProcessRequest itself."""
    schema = ProcessRequest.model_json_schema()
    schema = _whole(schema, schema.pop("$defs"))
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    options: dict[str, Any] = {"response_model": None, "route_class_override": Direct}
    name = path.removeprefix(router.prefix)
    router.add_api_route(name, handler, methods=["POST"], summary=says, openapi_extra={"requestBody": body}, **options)


def _whole(schema: Any, models: Mapping[str, Any]) -> Any:
    """A schema with what it refers to in the places of the references."""
    if isinstance(schema, dict):
        name = schema.get("$ref", "").rpartition("/")[2]
        return models[name] if name else {key: _whole(value, models) for key, value in schema.items()}
    return [_whole(value, models) for value in schema] if isinstance(schema, list) else schema


def read_asked(body: bytes) -> ProcessRequest:
    """Parsed once, by Rust: the worst of PROCESS_BYTES in some milliseconds. Raises BadRequest."""
    if (lists := body.count(b"[") + body.count(b"{")) > MAX_LISTS:  # each is an object, which the collector looks at
        raise BadRequest(f"the body has {lists} lists and objects; at most {MAX_LISTS} are read, of {MAX_ROWS} rows")
    try:
        sent = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON in UTF-8: {error}") from None
    if isinstance(sent, dict) and len(sent) > len(ProcessRequest.model_fields):  # pydantic notes each that is too many
        raise BadRequest(f"the body has {len(sent)} keys; there are {', '.join(ProcessRequest.model_fields)}")
    return check(_ASKED, sent, {}, PROCESS_PATH)


async def _answer(gateway: Gateway, asked: ProcessRequest, request: Request) -> dict[str, Any]:
    caller = caller_of(request)
    entry = gateway.enter(caller, "debug")
    name = gateway.names.find(asked.model or gateway.unnamed(caller), gateway.models)
    origin = await gateway.ensure(name)
    span, given = _span(asked.layers, origin), _given(asked, origin)
    num_logits = asked.logits or int(bool(asked.is_last))
    _check_size(asked, origin, len(given), num_logits)
    node = None if asked.worker is None else find_worker(gateway, asked.worker).node
    prompt, params = range(len(given)), SamplingParams(max_tokens=1)
    async with gateway.run(Ask(name, "debug", prompt, params, caller, entry=entry, is_fit=True)) as run:
        made = await run_layers(origin, given, span, frozenset(asked.at), num_logits=num_logits, node=node)
        run.job.finish_reason = "stop"
        run.job.route = run.job.hops = made.hops
        told = {"request_id": asked.request_id or run.job.id, "model": name, "layers": str(span)}
        return {**told, **await _states(made, span, asked), "assignments": [hop_object(hop) for hop in made.hops]}


def _span(layers: str | list[int] | None, origin: Origin) -> Span:
    if layers is None:
        return Span(0, origin.model.num_layers)
    if isinstance(layers, str):
        return Span.parse(layers)
    if not layers or layers != list(range(layers[0], layers[0] + len(layers))):
        raise BadRequest('layers are one run of them, in order: "4-7" or [4, 5, 6, 7]')
    return Span(layers[0], layers[-1] + 1)


def _given(asked: ProcessRequest, origin: Origin) -> Sequence[int] | NDArray[np.uint8]:
    """Token ids, or rows in the model's dtype."""
    ids, states = asked.input_ids, asked.hidden_states
    if (ids is None) == (states is None):
        raise BadRequest("send either input_ids or hidden_states")
    if asked.is_first is not None and asked.is_first != (ids is not None):
        raise BadRequest("is_first says that the embedding runs here: true with input_ids, false with hidden_states")
    given = ids if ids is not None else _rows(states, WIRE_DTYPES[origin.model.precision])
    if len(given) > MAX_ROWS:
        raise BadRequest(f"the input has {len(given)} rows; at most {MAX_ROWS} are run at once")
    return given


def _rows(states: JsonTensor | list[list[float]] | None, dtype: DType) -> NDArray[np.uint8]:
    try:
        if isinstance(states, JsonTensor):
            kind, shape = _DTYPES[states.dtype], states.shape[-2:]
            if len(states.shape) == 3 and states.shape[0] != 1:
                raise BadRequest(f"hidden_states have the shape {states.shape}: one sequence is run at a time")
            data = base64.b64decode(states.b64, validate=True)
            told = numbers(read_rows(Payload(kind, shape[1], data), shape[0]), kind)
        else:
            with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused as that
                told = np.array(states, np.float32)
        return read_rows(store(told.reshape(len(told), -1), dtype), len(told))
    except KeyError:
        raise BadRequest(f"hidden_states are {states.dtype!r:.40}: send bf16, fp16 or fp32") from None  # type: ignore[union-attr]
    except (ValueError, ProtocolError) as error:
        raise BadRequest(f"hidden_states cannot be read: {error}") from None


def _check_size(asked: ProcessRequest, origin: Origin, num_rows: int, num_logits: int) -> None:
    """Raise BadRequest for an answer that would be too large, before anything runs."""
    model, tensors = origin.model, 1 + len(set(asked.at))
    states, logits = tensors * num_rows * model.hidden_size, num_logits * model.vocab_size
    size, limit, unit = 4 * (states + logits), MAX_BYTES, "bytes"
    if asked.encoding == "list":
        size, limit, unit = states + logits, MAX_NUMBERS, "numbers"
    if size > limit:
        raise BadRequest(f"the answer would have {size} {unit}, at most {limit}: ask for fewer rows, layers or logits")


async def _states(made: LayerRows, span: Span, asked: ProcessRequest) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for boundary, rows in sorted(made.states.items()):
        told[str(boundary)] = await _tensor(numbers(rows, made.dtype), made.dtype, asked.encoding)
    last = told[str(span.end)] if span.end in asked.at else told.pop(str(span.end))
    logits = None if made.logits is None else await _tensor(made.logits, "fp32", asked.encoding)
    return {"hidden_states": last, "states": told, "logits": logits}


async def _tensor(values_TD: NDArray[np.float32], dtype: DType, encoding: str) -> Any:
    """As JSON; between two turns of the event loop it does little."""
    await asyncio.sleep(0)
    if encoding == "b64":
        data = store(values_TD, dtype).data
        parts = [b'"']
        for start in range(0, len(data), B64_A_TURN):
            parts.append(base64.b64encode(data[start : start + B64_A_TURN]))
            await asyncio.sleep(0)
        return {"b64": JsonBytes(b"".join([*parts, b'"'])), "dtype": dtype, "shape": list(values_TD.shape)}
    return JsonBytes(b"[%b]" % b",".join([await _row(row) for row in values_TD]))


async def _row(values_D: NDArray[np.float32]) -> bytes:
    """As a JSON list. A row of logits has as many numbers as there are tokens."""
    parts = []
    for start in range(0, len(values_D), NUMBERS_A_TURN):
        parts.append(encode(values_D[start : start + NUMBERS_A_TURN].tolist())[1:-1])
        await asyncio.sleep(0)
    return b"[%b]" % b",".join(parts)
