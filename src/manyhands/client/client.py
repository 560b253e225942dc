"""A client for programs and notebooks: one event loop in a thread of its own, behind a sync and an async face.

    with manyhands.connect(url_or_ticket, model) as client:            async with manyhands.connect(...) as client:
        print(client.generate("Once upon a time"))                         print(await client.agenerate("Once upon ..."))
        for piece in client.stream(messages, seed=7): ...                  async for piece in client.stream(messages): ...

A stream is pulled: a program that stops reading pauses its own generation and no other. Threads and tasks may share a client.
"""

import asyncio
import secrets
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from difflib import get_close_matches
from types import TracebackType
from typing import Any, Final, Literal, Self, TypedDict, TypeVar, Unpack, get_args

from manyhands.client.backend import (
    AnswerSource,
    Completion,
    PythonRequest,
    TextDelta,
    gateway_backend,
    local_backend,
    ticket_backend,
)
from manyhands.client.held import HeldSource, SourceOpening
from manyhands.client.layers import LayersRequest, LayerStates, Prompt, check_prompt
from manyhands.core import PathKind, SamplingParams
from manyhands.errors import BadRequest

T = TypeVar("T")
CLOSED: Final = "this client is closed: connect again"


class SamplingWishes(TypedDict, total=False):
    """How tokens are drawn (SamplingParams). `logprobs`: how many alternatives to tell of each token; None: no odds."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: tuple[str, ...]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    ignore_eos: bool
    logprobs: int | None


def _check_names(drawn: Mapping[str, object]) -> None:
    """Raise BadRequest for a parameter that there is not."""
    known = SamplingWishes.__annotations__
    for name in sorted(drawn.keys() - known.keys()):
        near = get_close_matches(name, known, 1)
        raise BadRequest(f"there is no parameter {name}: " + (f"did you mean {near[0]}?" if near else ", ".join(known)))


def connect(where: str, model: str | None = None, *, api_key: str = "", threads: int | None = None) -> "Client":
    """A client of a gateway (`http://...`) or of the swarm of a ticket (`mh1...`), whose origin this process then is.

    `model`: a name of the gateway's (None: its only one), or what the swarm of a ticket serves: a folder, a hub id, "tales".
    `api_key` is for gateways, `threads` (compute threads of embedding and head, default all cores) for tickets. Nothing is
    opened before the first use. Raises BadRequest for what is neither a ticket nor an address.
    """
    if not isinstance(where, str) or not where.startswith(("http://", "https://", "mh1")):
        raise BadRequest(f"{where!r:.60} is neither an address (http://...) nor a ticket (mh1...)")
    if not where.startswith("mh1"):
        return Client(lambda: gateway_backend(where, api_key, model))
    if model is None:
        raise BadRequest("model is missing: name what the swarm serves, connect(ticket, model)")
    return Client(lambda: ticket_backend(where, model, threads))


def local_swarm(model: str = "tales", *, nodes: int = 2, cut: str = "", threads: int | None = None) -> "Client":
    """A client of a swarm of node processes on this machine, which live as long as the client: for trying and for tests.

    `cut`: layers of each node, "0-7,8-15"; left out, `nodes` equal parts.
    """
    return Client(lambda: local_backend(model, nodes, cut, threads))


class Client:
    """Made by `connect` or `local_swarm`. Use it as a context manager, sync or async, or `close` it.

    One that is dropped closes by itself, in the background.
    """

    def __init__(self, opening: SourceOpening) -> None:
        self._opening = opening
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._source: HeldSource | None = None
        self._is_closed = False
        self._streams: weakref.WeakSet[TextStream] = weakref.WeakSet()

    # -- asking -------------------------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt, *, path: PathKind = "ring", **drawn: Unpack[SamplingWishes]) -> Completion:
        """The whole answer to a text, or to a conversation of {"role", "content"}. Raises ManyhandsError."""
        return self.stream(prompt, path=path, **drawn).finish()

    async def agenerate(
        self, prompt: Prompt, *, path: PathKind = "ring", **drawn: Unpack[SamplingWishes]
    ) -> Completion:
        """As `generate`; cancelling it ends the request."""
        return await self.stream(prompt, path=path, **drawn).afinish()

    def stream(self, prompt: Prompt, *, path: PathKind = "ring", **drawn: Unpack[SamplingWishes]) -> "TextStream":
        """The answer piece by piece, by `for` or `async for`. Raises BadRequest for parameters that cannot be."""
        _check_names(drawn)
        params = SamplingParams(**{"seed": secrets.randbits(53), **drawn})  # type: ignore[arg-type]
        check_prompt(prompt)
        if path not in get_args(PathKind):
            raise BadRequest(f"path is {path!r:.60}; it must be {' or '.join(get_args(PathKind))}")
        return TextStream(self, PythonRequest(prompt, params, path))

    def hidden_states(
        self, prompt: Prompt | Sequence[int], layers: Sequence[int] = (), *, logits: int = 0
    ) -> LayerStates:
        """The hidden states that enter `layers` (the number of layers: those that leave the last one), and the logits of the
        last `logits` tokens of a text, a conversation, or token ids.

        A gateway gives them to admins, where its operator allows it ([api] debug). Raises ManyhandsError.
        """
        return self._wait(self._layers(LayersRequest(prompt, tuple(layers), logits)))

    async def ahidden_states(
        self, prompt: Prompt | Sequence[int], layers: Sequence[int] = (), *, logits: int = 0
    ) -> LayerStates:
        """As `hidden_states`."""
        return await self._await(self._layers(LayersRequest(prompt, tuple(layers), logits)))

    async def _layers(self, asked: LayersRequest) -> LayerStates:
        return await (await self._backend()).layers(asked)

    def models(self) -> list[str]:
        """The names of the models that can be asked."""
        return self._wait(self._models())

    async def amodels(self) -> list[str]:
        """As `models`."""
        return await self._await(self._models())

    async def _models(self) -> list[str]:
        return await (await self._backend()).models()

    # -- life ---------------------------------------------------------------------------------------------------------

    def open(self) -> Self:
        """Open it now and not at the first use. Raises what opening does."""
        self._wait(self._backend())
        return self

    def close(self) -> None:
        """End all requests and what the client has started. Harmless when repeated."""
        with self._lock:
            loop, source, self._is_closed = self._loop, self._source, True
            self._loop = None
        if loop is None or source is None:
            return
        try:
            asyncio.run_coroutine_threadsafe(self._stop(), loop).result()
        finally:
            source.close()
            source.over.result()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await self._await(self._backend())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run `work` on the client's loop, which begins with it. Raises BadRequest once it is closed."""
        with self._lock:
            if self._is_closed:
                work.close()
                raise BadRequest(CLOSED)
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._source = HeldSource(self._opening, self._loop)
                threading.Thread(target=self._source.run, name="manyhands", daemon=True).start()
                weakref.finalize(self, self._source.close).atexit = False
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes of `work` on the client's loop; Ctrl-C meanwhile ends it too. Raises BadRequest once it is closed."""
        future = self._submit(work)
        try:
            return future.result()
        except CancelledError:
            raise BadRequest(CLOSED) from None
        finally:
            future.cancel()

    async def _await(self, work: Coroutine[Any, Any, T]) -> T:
        """As `_wait`, for another loop's task, whose cancellation ends it."""
        future = self._submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise BadRequest(CLOSED) from None

    async def _backend(self) -> AnswerSource:
        assert self._source is not None  # _submit made it
        return await asyncio.shield(self._source.ready)

    async def _stop(self) -> None:
        for stream in list(self._streams):
            await stream.stop()


class TextStream:
    """One answer, piece by piece. `completion` grows with it. Made by `Client.stream`."""

    def __init__(self, client: Client, asked: PythonRequest) -> None:
        self._client, self._asked = client, asked
        self.completion = Completion()
        self._pieces: Any = None  # the backend's generator
        self._pull: asyncio.Task[TextDelta | None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._is_over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TextDelta:
        piece = None if self._is_over else self._client._wait(self._next())
        if piece is None:
            raise StopIteration
        return piece

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        piece = None if self._is_over else await self._client._await(self._next())
        if piece is None:
            raise StopAsyncIteration
        return piece

    def finish(self) -> Completion:
        """Read to the end."""
        for _ in self:
            pass
        return self.completion

    async def afinish(self) -> Completion:
        """As `finish`; cancelling it ends the request."""
        async for _ in self:
            pass
        return self.completion

    def cancel(self) -> None:
        """End it now, also from another thread: its reader sees the end. Harmless when repeated."""
        if not self._ends_unread():
            self._client._wait(self.stop())

    async def acancel(self) -> None:
        """As `cancel`."""
        if not self._ends_unread():
            await self._client._await(self.stop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self.cancel()
        return False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        await self.acancel()
        return False

    def _ends_unread(self) -> bool:
        """Whether the client has opened nothing, or is closed: then there is nothing more to end than this."""
        if self._client._loop is not None:
            return False
        if not self._is_over:
            self._is_over, self.completion.finish_reason = True, "cancelled"
        return True

    # -- on the client's loop -----------------------------------------------------------------------------------------

    async def _next(self) -> TextDelta | None:
        backend = await self._client._backend()
        if self._is_over:  # perhaps cancelled while the client opened
            return None
        if self._pieces is None:
            self._client._streams.add(self)
            self._pieces = backend.pieces(self._asked, self.completion)
        pull = self._pull = asyncio.ensure_future(anext(self._pieces, None))
        try:
            await asyncio.wait((pull,))
        except asyncio.CancelledError:  # its async reader was
            await self.stop()
            raise
        if pull.cancelled():
            return None
        try:
            piece = pull.result()
        except BaseException:
            self._is_over = True
            raise
        if piece is not None:
            self.completion.take(piece)
        self._is_over |= piece is None
        return piece

    async def stop(self) -> None:
        """End it, once for all who ask; on the client's loop."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end(is_new=not self._is_over))
            self._is_over = True
        await asyncio.shield(self._ending)

    async def _end(self, *, is_new: bool) -> None:
        if self._pull is not None and not self._pull.done():
            self._pull.cancel()
            await asyncio.wait((self._pull,))
        if self._pieces is not None:
            await self._pieces.aclose()
        if is_new:
            self.completion.finish_reason = "cancelled"
