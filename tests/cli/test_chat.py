"""manyhands chat: what a line means, where a paragraph ends, and a conversation with a gateway and with an own origin."""

import asyncio
import contextlib
import io
import ssl
import sys
import urllib.error
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from manyhands.cli import app, chat_loop
from manyhands.cli.chat_loop import ChatHistory
from manyhands.cli.chat_source import GatewaySource, Messages, OriginSource, Stats
from manyhands.cli.chat_text import (
    HELP,
    Command,
    Mistake,
    Paragraphs,
    Said,
    as_markdown,
    introduced,
    parse,
    tail,
    waiting_for,
)
from manyhands.cli.chat_wishes import ChatWishes
from manyhands.cli.client import GatewayError, no_gateway
from manyhands.core import NodeAddr, SamplingParams
from manyhands.errors import BadRequest, LinkClosed
from tests.api.served import Served, make_model, served


@pytest.mark.parametrize(
    "line, meant",
    [
        ("", None),
        ("  \n", None),
        (" hello\n", Said("hello")),
        ("//etc is a path", Said("/etc is a path")),
        ("/help", Command("help")),
        ("/system be brief ", Command("system", "be brief")),
        ("/system", Command("system")),
        ("/model", Command("model")),
        ("/save a b.md", Command("save", "a b.md")),
    ],
)
def test_what_a_line_is(line: str, meant: object) -> None:
    assert parse(line) == meant


@pytest.mark.parametrize(
    "line, why",
    [("/nonsense", "no command"), ("/reset all", "nothing behind"), ("/save ", "file"), ("/", "no command")],
)
def test_mistakes_are_told(line: str, why: str) -> None:
    meant = parse(line)
    assert isinstance(meant, Mistake) and why in meant.why


def test_a_model_that_answers_no_questions_is_introduced_so() -> None:
    assert introduced("tales") == "tales, which continues stories and answers no questions"
    assert introduced("smollm2") == "smollm2" and introduced("x\x1b") == "x?"


def test_help_names_every_command() -> None:
    for name in ("reset", "system", "model", "save", "stats", "exit"):
        assert f"/{name}" in HELP


def test_a_paragraph_ends_at_an_empty_line_but_not_in_a_fence() -> None:
    cut = Paragraphs()
    assert cut.feed("one\ntwo\n") == []
    assert cut.feed("\nthree") == ["one\ntwo"]
    assert cut.rest == "three"
    assert cut.feed("\n\n```py\na = 1\n\nb = 2\n") == ["three"]
    assert cut.feed("```\n\nend") == ["```py\na = 1\n\nb = 2\n```"]
    assert cut.rest == "end"


@given(st.text(alphabet="ab`~ \n", max_size=60), st.data())
def test_however_it_comes_nothing_is_lost_and_the_cuts_are_the_same(text: str, data: st.DataObject) -> None:
    whole, pieces = Paragraphs(), Paragraphs()
    at_once = [*whole.feed(text), whole.rest]
    bit_by_bit: list[str] = []
    rest = text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        bit_by_bit += pieces.feed(rest[:size])
        rest = rest[size:]
    bit_by_bit.append(pieces.rest)
    assert "".join(bit_by_bit).replace("\n", "").replace(" ", "") == text.replace("\n", "").replace(" ", "")
    assert "".join(at_once).replace("\n", "").replace(" ", "") == text.replace("\n", "").replace(" ", "")


@given(st.text(alphabet="ab \n", max_size=200), st.integers(1, 20), st.integers(1, 10))
def test_what_grows_fits_the_screen(text: str, width: int, height: int) -> None:
    lines = tail(text, width, height).split("\n")
    assert len(lines) <= height and all(len(line) <= width for line in lines)
    assert text.replace("\n", "").endswith("".join(lines))


class Echo:
    """A source without a model: says what it was told, or fails."""

    def __init__(self) -> None:
        self.model, self.asked = "echo", list[list[str]]()

    async def models(self) -> list[str]:
        return ["echo", "other"]

    async def answer(self, messages: Messages, stats: Stats) -> AsyncGenerator[str, None]:
        self.asked.append([f"{m['role']}: {m['content']}" for m in messages])
        if messages[-1]["content"] == "fail":
            raise BadRequest("too long")
        for word in messages[-1]["content"].split():
            stats.count(1)
            yield word


def test_an_answer_that_its_limit_ends_is_said_to_be_cut_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Cut(Echo):
        async def answer(self, messages: Messages, stats: Stats) -> AsyncGenerator[str, None]:
            async for piece in super().answer(messages, stats):
                yield piece
            stats.finish_reason = "length" if messages[-1]["content"] == "on and on" else "stop"

    for is_terminal, said in ((True, 1), (False, 0)):  # a pipe gets the text alone
        monkeypatch.setattr(chat_loop, "_at_terminal", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr(chat_loop, "without_echo", contextlib.nullcontext)
        asyncio.run(talk(Cut(), "on and on", "well"))
        assert capsys.readouterr().out.count("[cut off at 3 tokens") == said


async def talk(source: object, *lines: str) -> None:
    """A conversation in which these lines are typed, then the end of input."""
    waiting = list(lines)

    async def ask() -> str:
        if not waiting:
            raise EOFError
        return waiting.pop(0)

    await ChatHistory(source, ask).run()  # type: ignore[arg-type]


def test_what_commands_say_breaks_no_word_of_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    asyncio.run(talk(Echo(), "/help", "/nonsense"))
    lines = terminal.getvalue().split("\n")
    assert max(map(len, lines)) <= 40
    assert terminal.getvalue().split() == [*HELP.split(), *parse("/nonsense").why.split()]  # type: ignore[union-attr]
    terminal.truncate(terminal.seek(0))
    asyncio.run(talk(Echo(), "/save /nowhere/talk.md", f"/model {'a name of many words ' * 2}"))
    told = terminal.getvalue()
    assert max(map(len, told.split("\n"))) <= 40
    assert "/nowhere/talk.md cannot be written: No\n  such file or directory\n" in told
    assert "there is no 'a name of many words a name\n  of many words' here\n" in told


def test_a_conversation_and_its_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, file = Echo(), tmp_path / "talk.md"
    lines = ["/stats", "/system be brief", "one two", "fail", "three", f"/save {file}", f"/save {file}"]
    asyncio.run(talk(source, *lines, "/model other", "/model none", "/stats", "/reset", "four", "/exit", "never"))
    assert source.asked[1] == ["system: be brief", "user: one two", "assistant: onetwo", "user: fail"]
    assert source.asked[2] == ["system: be brief", "user: one two", "assistant: onetwo", "user: three"]
    assert source.asked[3] == ["system: be brief", "user: four"] and len(source.asked) == 4
    assert source.model == "other"
    assert file.read_text().startswith("**system**\n\nbe brief\n\n**user**\n\none two")
    said = capsys.readouterr()
    assert "no answer yet" in said.out and "onetwo\n" in said.out and "File exists" in said.out
    assert "* other" in said.out and "there is no 'none' here" in said.out and "1 token ·" in said.out
    assert "manyhands: too long" in said.err


def test_what_an_answer_waits_for_is_said_by_name() -> None:
    hops = [{"name": "desk", "layers": "0-5"}, {"name": "laptop", "layers": "6-8"}]
    job = {"status": "running", "completion_tokens": 7, "route": hops, "hops": hops, "events": []}
    lost = {"kind": "shard_status", "nodes": ["laptop"]}
    assert waiting_for(None) == "waiting for the gateway"
    assert "its turn" in waiting_for({"status": "queued"})
    assert waiting_for({**job, "hops": []}) == "looking for nodes that serve every layer"
    assert waiting_for({**job, "completion_tokens": 0}) == "reading the prompt on desk, laptop"
    assert waiting_for({**job, "events": [lost]}).startswith("waiting for laptop (layers 6-8)")
    assert waiting_for({**job, "events": [lost, {"kind": "shard_failover", "nodes": ["nas"]}]}).startswith(
        "waiting for the"
    )


def test_stats_name_repairs_and_pauses() -> None:
    stats = Stats()
    stats.count(1)
    stats.repairs, stats.pause_s = ["repair at token 41: laptop was lost, 0.60 s"], 12.04
    assert "longest pause 12.0 s" in str(stats) and "laptop was lost" in str(stats)
    stats.route = ["layers 0-3 desk", "layers 4-7 laptop"]
    stats.hops = list(stats.route)
    assert str(stats).splitlines()[-2:] == stats.route, "one that did not change is said once"
    stats.hops[1] = "layers 4-7 nas"
    shown = ["the route at first", *stats.route, "the route after that", *stats.hops]
    assert str(stats).splitlines()[-6:] == shown
    quick = Stats()
    quick.count(1)
    assert "pause" not in str(quick)


def test_saved_as_markdown() -> None:
    assert as_markdown([{"role": "user", "content": " x\n"}]) == "**user**\n\nx\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("chat") / "tiny")


@asynccontextmanager
async def gateway(folder: Path, tokens: int = 6) -> AsyncIterator[tuple[Served, GatewaySource]]:
    async with served(folder) as scene:
        params = SamplingParams(max_tokens=tokens, temperature=0.7, seed=7, stop=("\x00",))
        source = GatewaySource([f"http://{scene.addr}/"], "", "", ChatWishes(params), "ring")
        await source.choose()
        yield scene, source


def test_a_gateway_and_an_own_origin_say_the_same(folder: Path) -> None:
    async def main() -> None:
        async with gateway(folder) as (scene, source):
            messages = [{"role": "user", "content": "Hello"}]
            stats, own = Stats(), Stats()
            over_http = [piece async for piece in source.answer(messages, stats)]
            params = SamplingParams(max_tokens=6, temperature=0.7, seed=7, stop=("\x00",))
            origin = OriginSource(scene.swarm.origin, "tiny", ChatWishes(params), "ring")
            assert "".join(over_http) == "".join([piece async for piece in origin.answer(messages, own)])
            assert (source.model, await source.models()) == ("tiny", ["tiny"])
            other = GatewaySource([f"http://{scene.addr}"], "", "gpt-9", ChatWishes(params), "ring")
            with pytest.raises(GatewayError, match="'gpt-9' is not served here; there is tiny"):
                await other.choose()  # and not with the first question
            other.model = "tiny:latest"
            assert await other.choose() == ["tiny"]
            assert stats.tokens == own.tokens == 6 and stats.finish_reason == own.finish_reason == "length"
            assert len(stats.route) == len(own.route) == 2 and "layers 0" in stats.route[0]
            assert (stats.hops, own.hops) == (stats.route, own.route)
            assert "6 tokens" in str(stats) and "finish: length" in str(stats)
            assert await source.waits_for() == "waiting for the gateway", "it has ended"
            assert (await origin.waits_for()).startswith("waiting for the next word on")

    asyncio.run(main())


def test_an_answer_that_is_stopped_frees_its_session(folder: Path) -> None:
    async def main() -> None:
        async with gateway(folder, tokens=900) as (scene, source):
            stream = source.answer([{"role": "user", "content": "Hello"}], Stats())
            await anext(stream)
            assert scene.num_sessions
            await stream.aclose()
            await scene.freed()

    asyncio.run(main())


def test_stats_of_a_stopped_answer_name_what_its_job_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    hop = {"name": "nas", "layers": "0-3"}
    job = {"route": [{**hop, "name": "desk"}], "hops": [hop]}
    repairs = [{"at_token": 41, "lost": ["desk"], "total_s": 0.6}]
    told: list[dict[str, Any]] = [{**job, "repairs": repairs}, {"error": "of no gateway of ours"}]

    async def main() -> None:
        source = GatewaySource(["http://127.0.0.1:9"], "", "tiny", ChatWishes(SamplingParams()), "ring")

        async def pieces(messages: Messages, stats: Stats) -> AsyncGenerator[str, None]:
            source._note_job("a")
            stats.count(1)
            yield "x"

        async def tell() -> dict[str, Any]:
            return told.pop(0)

        monkeypatch.setattr(source, "_pieces", pieces)
        monkeypatch.setattr(source, "_told", tell)
        for said in ("repair at token 41: desk was lost, 0.60 s", "finish: stopped"):
            stats = Stats()
            stream = source.answer([], stats)
            await anext(stream)
            await stream.aclose()
            assert said in str(stats)
        assert not told

    asyncio.run(main())


def test_refusals_and_losses_of_a_gateway_are_one_line(folder: Path) -> None:
    async def main() -> None:
        async with gateway(folder) as (_, source):
            source.model = "other"
            with pytest.raises(GatewayError, match="other"):
                await anext(source.answer([{"role": "user", "content": "x"}], Stats()))
        with pytest.raises(LinkClosed, match="no gateway answers at"):
            await anext(source.answer([{"role": "user", "content": "x"}], Stats()))

    asyncio.run(main())


def test_a_certificate_that_is_not_trusted_here_is_named_as_such() -> None:
    """`infer` and `chat` raise it, urllib wraps it: it was said that no gateway answers, and to start one."""
    error = ssl.SSLCertVerificationError(1, "CERTIFICATE_VERIFY_FAILED")
    error.verify_message = "self-signed certificate"
    said = "the certificate of https://x is not trusted here (self-signed certificate): name the file of its CA in"
    for each in (error, urllib.error.URLError(error)):
        assert no_gateway("https://x", each).startswith(said)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--api", "http://127.0.0.1:9", "--own-first", "1"], "--own-first is for an origin"),
        (["tales", "--api", "http://127.0.0.1:9", "--dtype", "fp32"], "--dtype is for an origin"),
        (["tales", "--api", "127.0.0.1:9"], "--api is '127.0.0.1:9'"),
        (["tales", "--api", "http://127.0.0.1:x"], "--api is 'http://127.0.0.1:x'"),
    ],
)
def test_wishes_that_cannot_be(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    with pytest.raises(BadRequest, match=said):
        CliRunner().invoke(app, ["chat", *arguments], catch_exceptions=False)


@asynccontextmanager
async def cutting(addr: NodeAddr, after: list[int]) -> AsyncIterator[str]:
    """A way to the gateway at `addr` that is cut after so many bytes of an answer, one number a connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = after.pop(0) if after else 1 << 30
        there, back = await asyncio.open_connection(addr.host, addr.port)
        back.write(await reader.readuntil(b"\r\n\r\n") + await reader.read(1 << 16))
        with contextlib.suppress(ConnectionError):
            while left > 0 and (data := await there.read(left)):
                writer.write(data)
                left -= len(data)
        back.close()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"


def test_an_answer_that_is_cut_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut within an event, twice, then by a gateway that is gone: the text is whole, and half a line says so each time."""
    monkeypatch.setattr("manyhands.cli.chat_source.RETRY_PAUSES_S", (0.0, 0.01, 0.01, 0.01, 0.01))

    async def main() -> None:
        async with gateway(folder, tokens=12) as (scene, source):
            messages = [{"role": "user", "content": "Hello"}]
            whole = "".join([piece async for piece in source.answer(messages, Stats())])
            cuts = [2000, 0, 1500]
            async with cutting(scene.addr, cuts) as api:
                params = SamplingParams(max_tokens=12, temperature=0.7, seed=7, stop=("\x00",))
                both = GatewaySource([api, "http://127.0.0.1:9"], "", "tiny", ChatWishes(params), "ring")
                stats = Stats()
                assert "".join([piece async for piece in both.answer(messages, stats)]) == whole
                assert not cuts and stats.resumed == len(stats.notices) == 2 and "resumed 2 times" in str(stats)
                assert api in stats.notices[0] and stats.tokens == 12
                assert "resumed once" in str(replace(stats, resumed=1))
                both._apis.remove(api)
                assert await both.waits_for() == "the gateway does not answer; waiting for it"

    asyncio.run(main())


def test_answers_are_drawn_as_the_model_recommends_where_the_command_line_does_not_say() -> None:
    defaults = SamplingParams(temperature=0.7, top_p=0.95)
    told = {"temperature": 0.6, "top_k": 20}
    assert ChatWishes(defaults).params_for(told) == replace(defaults, temperature=0.6, top_k=20)
    assert ChatWishes(defaults, frozenset({"temperature"})).params_for(told) == replace(defaults, top_k=20)
    for strange in ({"temperature": -1, "top_k": 3}, {"top_p": "x"}, {"seed": 5}, {}):  # of a gateway that is not ours
        assert ChatWishes(defaults).params_for(strange) == defaults


def test_stats_say_what_an_audit_found() -> None:
    stats = Stats(first_s=0.1)
    stats.take_audit(None)
    assert "audit" not in str(stats) and not stats.is_doubtful
    found = {"outcome": "failed", "layers": ["4-7"], "detail": "n1 did not compute what n2 and n3 do"}
    stats.take_audit(found)
    assert "audit of layers 4-7 failed: n1 did not compute what n2 and n3 do" in str(stats) and stats.is_doubtful
    stats.take_audit({**found, "outcome": "passed"})
    assert not stats.is_doubtful
