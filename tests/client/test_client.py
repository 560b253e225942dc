"""manyhands.connect against a gateway. By a ticket, and a local swarm: examples/python.py."""

import asyncio
import gc
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import manyhands
from manyhands.api.formats import ModelFormats
from manyhands.api.http.app import create_app
from manyhands.api.http.server import serving
from manyhands.api.native.process import process_router
from manyhands.api.routers import compatible_routers
from manyhands.cli.owner import owner_file
from manyhands.client import backend
from manyhands.client.layers import LayersRequest, own_layers
from manyhands.core import SamplingParams
from manyhands.errors import BadRequest, LinkClosed, ManyhandsError
from tests.api.served import MODEL, Served, make_model, served

HI = [{"role": "user", "content": "hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway in a thread of its own."""
    folder = make_model(tmp_path_factory.mktemp("client") / "m")
    ready: Future[tuple[Served, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        end = asyncio.Event()
        async with served(folder) as it:
            ready.set_result((it, asyncio.get_running_loop(), end))
            await end.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    it, loop, end = ready.result(TIMEOUT_S)
    yield it
    loop.call_soon_threadsafe(end.set)
    thread.join(TIMEOUT_S)


@pytest.fixture
def client(gateway: Served) -> Iterator[manyhands.Client]:
    with manyhands.connect(f"http://{gateway.addr}", MODEL) as made:
        yield made


def test_a_text_and_a_conversation(client: manyhands.Client) -> None:
    assert client.models() == [MODEL]
    for prompt in ("hi", HI):
        whole = client.generate(prompt, max_tokens=9, temperature=0.0)
        assert whole.finish_reason == "length" and whole.completion_tokens == 9 and whole.exactness == "E0"
        assert [hop.layers for hop in whole.route] == ["0", "1"] and whole.prompt_tokens > 1
        stream = client.stream(prompt, max_tokens=9, temperature=0.0)
        assert "".join(piece.text for piece in stream) == whole.text == stream.completion.text == str(whole)
    first, again = (client.generate("hi", max_tokens=9, temperature=1.0, seed=4) for _ in range(2))
    assert first.text == again.text and first.seed == 4


def test_log_probabilities(client: manyhands.Client) -> None:
    for prompt in ("hi", HI):
        made = client.generate(prompt, max_tokens=5, temperature=0.0, logprobs=3)
        assert len(made.pieces) == 5
        for piece in made.pieces:
            assert piece.token is not None and piece.logprob is not None and len(piece.top) == 3
            assert piece.logprob == max(logprob for _, logprob in piece.top)


def test_async_and_three_at_once(gateway: Served) -> None:
    async def main() -> None:
        async with manyhands.connect(f"http://{gateway.addr}") as client:
            assert await client.amodels() == [MODEL]
            alone = await client.agenerate("hi", max_tokens=12, temperature=1.0, seed=2)
            made = await asyncio.gather(
                *(client.agenerate("hi", max_tokens=12, temperature=1.0, seed=seed) for seed in (1, 2, 3))
            )
            assert made[1].text == alone.text and len({one.text for one in made}) == 3
            text = ""
            async for piece in client.stream("hi", max_tokens=12, temperature=1.0, seed=2):
                text += piece.text
            assert text == alone.text

    asyncio.run(main())


def test_sync_threads_share_a_client(client: manyhands.Client) -> None:
    made: dict[int, str] = {}

    def ask(seed: int) -> None:
        made[seed] = client.generate(HI, max_tokens=12, temperature=1.0, seed=seed).text

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert len(set(made.values())) == 3


@pytest.fixture
def unhurried(gateway: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token takes 20 ms: an answer of 900 does not end while the one that reads it has no CPU for some seconds."""
    ends: Any = gateway.swarm.origin._ends
    turn = ends.turn

    async def slow(*arguments: Any) -> Any:
        await asyncio.sleep(0.02)
        return await turn(*arguments)

    monkeypatch.setattr(ends, "turn", slow)


@pytest.mark.usefixtures("unhurried")
def test_a_cancelled_stream_frees_its_session(gateway: Served, client: manyhands.Client) -> None:
    def freed() -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while gateway.num_sessions or gateway.gateway.jobs:
            assert time.monotonic() < deadline, "a session is left"
            time.sleep(0.02)

    stream = client.stream("hi", max_tokens=900, temperature=0.0)
    next(stream)
    stream.cancel()
    assert list(stream) == [] and stream.completion.finish_reason == "cancelled"
    freed()
    with client.stream("hi", max_tokens=900) as left:
        next(left)
    freed()
    waiting = client.stream("hi", max_tokens=900)
    next(waiting)
    some = gateway.watcher.num_tokens + 3

    def cancel() -> None:
        while gateway.watcher.num_tokens < some:
            time.sleep(0.001)
        waiting.cancel()

    threading.Thread(target=cancel).start()  # from another thread, while it is read
    assert waiting.finish().finish_reason == "cancelled"
    freed()

    async def main() -> None:
        async with manyhands.connect(f"http://{gateway.addr}") as other:
            task = asyncio.create_task(other.agenerate("hi", max_tokens=900))
            while not gateway.gateway.jobs:  # noqa: ASYNC110 - another thread's state
                await asyncio.sleep(0.002)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await other.agenerate("hi", max_tokens=2)).completion_tokens == 2

    asyncio.run(main())
    freed()


@pytest.mark.usefixtures("unhurried")
def test_a_closed_client_ends_what_runs(gateway: Served) -> None:
    client = manyhands.connect(f"http://{gateway.addr}").open()
    stream = client.stream("hi", max_tokens=900)
    next(stream)
    client.close()
    client.close()
    assert stream.completion.finish_reason == "cancelled"
    with pytest.raises(BadRequest, match="closed"):
        client.generate("hi")


def test_a_dropped_client_closes_by_itself(gateway: Served) -> None:
    """Its thread ends, and nothing is raised where no caller can catch it."""
    before = set(threading.enumerate())
    client = manyhands.connect(f"http://{gateway.addr}")
    client.generate("hi", max_tokens=2)
    (thread,) = (one for one in threading.enumerate() if one not in before and one.name == "manyhands")
    del client
    gc.collect()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_a_client_that_cannot_open_says_so_each_time() -> None:
    client = manyhands.connect("http://127.0.0.1:1")
    for _ in range(2):
        with pytest.raises(LinkClosed, match="no gateway"):
            client.generate("hi")
        with pytest.raises(LinkClosed, match="no gateway"):
            client.models()
    client.close()


class Unanswered:
    """A source whose questions are never answered."""

    def __init__(self) -> None:
        self.asked, self.ended = threading.Event(), threading.Event()

    async def models(self) -> list[str]:
        self.asked.set()
        try:
            never: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
            return await never
        finally:
            self.ended.set()

    async def pieces(self, *_: object) -> AsyncIterator[object]:
        yield await self.models()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Any]:
        yield self


def test_a_question_ends_with_the_client_that_another_thread_closes() -> None:
    for ask in (lambda client: client.models(), lambda client: asyncio.run(client.amodels())):
        source = Unanswered()
        client, said = manyhands.Client(source.opened), list[str]()

        def use(ask: Any = ask, client: Any = client, said: list[str] = said) -> None:
            with pytest.raises(BadRequest) as refusal:
                ask(client)
            said.append(str(refusal.value))

        user = threading.Thread(target=use)
        user.start()
        assert source.asked.wait(TIMEOUT_S)
        client.close()
        user.join(TIMEOUT_S)
        assert said == ["this client is closed: connect again"] and source.ended.is_set()


def test_ctrl_c_ends_what_it_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    source, plain = Unanswered(), Future.result
    client = manyhands.Client(source.opened)

    def interrupted(future: Future[object], timeout: float | None = None) -> object:
        if threading.current_thread() is not threading.main_thread():  # a loop of another thread asks too
            return plain(future, timeout)
        assert source.asked.wait(TIMEOUT_S)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.generate("hi")
    assert source.ended.wait(TIMEOUT_S)
    client.close()


class Paused(Unanswered):
    """A source that opens, and whose answers end, when they may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_open, self.may_end, self.is_ending = threading.Event(), threading.Event(), threading.Event()
        self.is_left = False

    async def pieces(self, *_: object) -> AsyncIterator[object]:
        self.asked.set()
        try:
            while True:
                yield backend.TextDelta("x")
        finally:
            self.is_ending.set()
            await asyncio.to_thread(self.may_end.wait, TIMEOUT_S)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Any]:
        await asyncio.to_thread(self.may_open.wait, TIMEOUT_S)
        yield self
        self.is_left = True


def test_a_stream_that_is_cancelled_while_its_client_opens_asks_for_nothing() -> None:
    """Its first piece was read all the same, and nothing ended what it had asked for."""
    source = Paused()
    client, read = manyhands.Client(source.opened), list[str]()
    stream = client.stream("hi")
    reader = threading.Thread(target=lambda: read.extend(piece.text for piece in stream))
    reader.start()
    while client._loop is None:
        time.sleep(0.001)
    stream.cancel()
    source.may_open.set()
    reader.join(TIMEOUT_S)
    assert read == [] and stream.completion.finish_reason == "cancelled" and not source.asked.is_set()
    client.close()


def test_a_stream_may_be_ended_by_several_at_once() -> None:
    """The second was told that a generator was running, and a client that closed then left open what it had."""
    source = Paused()
    source.may_open.set()
    client, failed = manyhands.Client(source.opened), list[BaseException]()
    stream = client.stream("hi")
    next(stream)

    def end(how: Callable[[], None]) -> None:
        try:
            how()
        except BaseException as error:
            failed.append(error)

    enders = [threading.Thread(target=end, args=(how,)) for how in (stream.cancel, stream.cancel, client.close)]
    for ender in enders:
        ender.start()
        assert source.is_ending.wait(TIMEOUT_S)
    time.sleep(0.1)  # all of them have asked
    source.may_end.set()
    for ender in enders:
        ender.join(TIMEOUT_S)
    assert failed == [] and source.is_left and stream.completion.finish_reason == "cancelled"


def test_a_gateway_that_says_nothing_more_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine may be gone without a word: the answer was waited for without end."""
    monkeypatch.setattr("manyhands.cli.chat_events.TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        asked = backend.PythonRequest("hi", SamplingParams())
        source = backend.GatewayAnswers(f"http://127.0.0.1:{silent.getsockname()[1]}", "", MODEL)

        async def main() -> None:
            with pytest.raises(LinkClosed, match="broke off"):
                async for _ in source.pieces(asked, backend.Completion()):
                    raise AssertionError

        asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


def test_a_stream_that_was_never_read_opens_nothing() -> None:
    client = manyhands.Client(Unanswered().opened)
    with client.stream("hi") as stream:
        pass
    assert stream.completion.finish_reason == "cancelled" and list(stream) == []
    assert not [one for one in threading.enumerate() if one.name == "manyhands"]
    client.close()


def test_a_client_closes_while_the_hub_is_asked_and_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question stood in the way of the client's own loop: `close`, and so Ctrl-C, waited for the hub's deadlines, 90 s."""
    asked, ends, answered = threading.Event(), threading.Event(), list[str]()

    def ask(model: str, home: Path) -> str:
        asked.set()
        ends.wait(TIMEOUT_S / 4)
        answered.append(model)
        return "bf16"

    def use() -> None:
        with pytest.raises(BadRequest, match="closed while it was being opened"):
            swarm.models()
        told.set()

    monkeypatch.setattr("manyhands.place.shape.stored_precision", ask)
    swarm, told = manyhands.local_swarm("org/name"), threading.Event()
    user = threading.Thread(target=use)
    user.start()
    assert asked.wait(TIMEOUT_S)
    swarm.close()
    assert not answered
    ends.set()
    user.join(TIMEOUT_S)
    assert told.is_set()


def test_errors_are_ours(gateway: Served, client: manyhands.Client) -> None:
    with pytest.raises(ManyhandsError, match="1024"):
        client.generate("hi " * 1024, max_tokens=1)
    with pytest.raises(BadRequest, match="temperature"):
        client.stream("hi", temperature=-1.0)
    with pytest.raises(BadRequest, match=r"there is no parameter temprature: did you mean temperature\?"):
        client.generate("hi", temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(LinkClosed, match="no gateway"), manyhands.connect("http://127.0.0.1:1"):
        pass
    with pytest.raises(ManyhandsError, match="not served"):
        manyhands.connect(f"http://{gateway.addr}", "gpt-9").generate("hi")
    with pytest.raises(BadRequest, match="neither"):
        manyhands.connect("somewhere")
    with pytest.raises(BadRequest, match="None is neither"):
        manyhands.connect(None)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="model is missing"):
        manyhands.connect("mh1abc")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_tokens": 3.5}, "max_tokens is 3.5; it must be a whole number"),
        ({"max_tokens": "3"}, "max_tokens is '3'; it must be a whole number"),
        ({"seed": 3.0}, "seed is 3.0; it must be a whole number"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"stop": "END"}, r"stop is 'END'; it must be a tuple of texts, as in \('END',\)"),
        ({"stop": 5}, "stop is 5; it must be a tuple of texts"),
        ({"path": "line"}, "path is 'line'; it must be ring or star"),
        ({"prompt": None}, "the prompt is None; it must be a text, or a conversation"),
        ({"prompt": b"hi"}, "the prompt is b'hi'; it must be"),
        ({"prompt": HI[0]}, "the prompt is {'role'.*; it must be"),
        ({"prompt": ["hi"]}, r"the prompt is \['hi'\]; it must be"),
        ({"prompt": [{"role": "user"}]}, "the prompt is .*; it must be"),
        ({"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]}, "the prompt is .*; it must be"),
        ({"prompt": [65, "hi"]}, "the prompt is .*; it must be"),
    ],
)
def test_what_is_of_a_wrong_kind_is_refused_before_anything_is_sent(wrong: dict[str, Any], said: str) -> None:
    """A fraction for max_tokens went to the nodes, which closed their links over it: they were blamed, after 30 s."""
    client = manyhands.connect("http://127.0.0.1:1")
    with pytest.raises(BadRequest, match=said):
        client.stream(**{"prompt": "hi", **wrong})
    if set(wrong) == {"prompt"}:
        with pytest.raises(BadRequest, match=said):
            client.hidden_states(wrong["prompt"], [0])


def test_what_is_no_event_is_an_error() -> None:
    with pytest.raises(ManyhandsError, match="full"):
        backend._read({"error": {"message": "full", "code": "busy"}}, backend.Completion())


def test_hidden_states_and_logits(client: manyhands.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a gateway that allows it, and by an origin of one's own: the same numbers."""
    with pytest.raises(BadRequest, match="debug = true"):
        client.hidden_states("hi", [0])
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    folder = make_model(tmp_path / "m")

    async def main() -> None:
        async with AsyncExitStack() as stack:
            it = await stack.enter_async_context(served(folder))
            origin, gateway = it.swarm.origin, it.gateway
            app = create_app(
                gateway, routers=[*compatible_routers(gateway, ModelFormats(gateway)), process_router(gateway)]
            )
            addr = await stack.enter_async_context(serving(app, "127.0.0.1", 0))
            with owner_file(tmp_path, addr.port, app.state.access.owner_secret):
                async with manyhands.connect(f"http://{addr}") as owner:
                    for prompt in ("hi", HI, PARTS, [65, 66, 67]):
                        told = await owner.ahidden_states(prompt, [0, 1, 2], logits=2)  # type: ignore[arg-type]
                        own = await own_layers(origin, LayersRequest(prompt, (0, 1, 2), 2))  # type: ignore[arg-type]
                        assert told.token_ids == own.token_ids and sorted(told.states) == [0, 1, 2]
                        assert all(np.array_equal(told.states[at], own.states[at]) for at in told.states)
                        assert told.logits is not None and own.logits is not None and told.logits.shape[0] == 2
                        assert np.array_equal(told.logits, own.logits)
                        assert [hop.layers for hop in told.route] == ["0", "1"]
                    first = await owner.ahidden_states("hi", [0])
                    assert sorted(first.states) == [0] and first.logits is None
                    with pytest.raises(ManyhandsError, match="at is"):
                        await owner.ahidden_states("hi", [-1])

    asyncio.run(main())


def test_parts_of_a_text_are_read_alike_by_a_gateway_and_by_an_origin_of_ones_own(tmp_path: Path) -> None:
    """An origin's model was told them as Python writes a list."""

    async def main() -> None:
        async with served(make_model(tmp_path / "m")) as it:
            own = backend.SwarmAnswers(it.swarm.origin, MODEL)
            told = backend.GatewayAnswers(f"http://{it.addr}", "", MODEL)
            texts = []
            for source in (own, told):
                made = backend.Completion()
                asked = backend.PythonRequest(PARTS, SamplingParams(max_tokens=5))  # type: ignore[arg-type]
                pieces: Any = source.pieces(asked, made)
                texts.append(("".join([piece.text async for piece in pieces]), made.prompt_tokens))
            assert texts[0] == texts[1]

    asyncio.run(main())


def test_the_import_is_fast() -> None:
    """`import manyhands` shows the API and loads nothing of it."""
    code = (
        "import sys, json, manyhands\n"
        "assert dir(manyhands) == sorted(manyhands.__all__), dir(manyhands)\n"
        "loaded = [name for name in sys.modules if name.startswith('manyhands') or name in ('asyncio', 'numpy', 'torch')]\n"
        "assert callable(manyhands.connect)\n"
        "assert dir(manyhands) == sorted(manyhands.__all__), dir(manyhands)\n"
        "heavy = [name for name in ('numpy', 'torch', 'fastapi', 'uvicorn', 'typer', 'tokenizers') if name in sys.modules]\n"
        "print(json.dumps([loaded, heavy]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, heavy = json.loads(done.stdout)
    assert loaded == ["manyhands"] and heavy == []
    assert Path(manyhands.__file__ or "").name == "__init__.py"
