"""`manyhands chat`: a conversation with a swarm or a gateway. Ctrl-C stops the answer, not the program."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli import options
from manyhands.cli.chat_screen import AnswerScreen, without_echo
from manyhands.cli.chat_text import HELP, Command, Mistake, Said, as_markdown, parse
from manyhands.cli.client import ApiKey
from manyhands.cli.progress import doing
from manyhands.config import home_from_env
from manyhands.core import PathKind, SamplingParams
from manyhands.errors import BadRequest, ManyhandsError
from manyhands.plain import one_line

if TYPE_CHECKING:
    from manyhands.cli.chat_source import Source

WAITING_S = 1.0  # without text: then what it waits for is shown
HISTORY = "chat_history"

Model = Annotated[str, typer.Argument(help="As the swarm or the gateway has it; may be left out if that has one.")]
Ticket = Annotated[
    str, typer.Option("--ticket", envvar="MANYHANDS_TICKET", help="Be an origin of this swarm, without a gateway.")
]
Api = Annotated[
    list[str] | None,
    typer.Option(
        "--api",
        envvar="MANYHANDS_API",
        help="Ask this gateway; default: a member that runs here. Again: another one of the swarm, should it be gone.",
    ),
]
_ROUTING = [each.name for each in fields(options.RouteOptions)]
Ask = Callable[[], Awaitable[str]]  # the next line; raises EOFError at the end, KeyboardInterrupt


@options.grouped
def chat(
    context: typer.Context,
    model: Model = "",
    ticket: Ticket = "",
    api: Api = None,
    api_key: ApiKey = "",
    system: Annotated[str, typer.Option("--system", help="What the model shall be.")] = "",
    history: Annotated[bool, typer.Option("--history/--no-history", help="Remember what was typed.")] = True,
    sampling: options.Sampling = options.Sampling(max_tokens=256, temperature=0.7, top_p=0.95),
    computing: options.Computing = options.Computing(),
    routing: options.RouteOptions = options.RouteOptions(),
) -> None:
    """Talk with a model: with --ticket this machine is the origin, else a gateway is asked."""
    params, path = sampling.params, computing.path_kind
    given = {name for name in context.params if _is_given(context, name)}
    if ticket and "api" not in given:
        if not model:
            raise BadRequest("with a ticket, name the model: manyhands chat MODEL --ticket mh1...")
        source = _from_swarm(model, ticket, params, computing, routing)
    else:
        if idle := sorted(given & {"ticket", "dtype", "ends", "threads", "draft", *_ROUTING}):
            raise BadRequest(
                f"--{idle[0].replace('_', '-')} is for an origin of one's own: leave it out, or leave --api out and give "
                "--ticket"
            )
        source = _from_gateway(api or [], api_key, model, params, path)
    options.run(_chat(source, system, history))


@asynccontextmanager
async def _from_swarm(
    model: str, ticket: str, params: SamplingParams, computing: options.Computing, routing: options.RouteOptions
) -> "AsyncIterator[Source]":
    """This process as an origin of the swarm of `ticket`."""
    from manyhands.cli.chat_source import OriginSource
    from manyhands.cli.infer import swarm_origin

    async with swarm_origin(model, ticket, computing, routing) as origin:
        yield OriginSource(origin, model, params, computing.path_kind)


@asynccontextmanager
async def _from_gateway(
    apis: list[str], api_key: str, model: str, params: SamplingParams, path: PathKind
) -> "AsyncIterator[Source]":
    """The first gateway of `apis` that is there, or of a member that runs here."""
    from manyhands.cli.chat_source import GatewaySource
    from manyhands.cli.status import running_api

    gateway = GatewaySource(apis or [running_api()], api_key, model, params, path)
    with doing("asking the gateway for its models") as screen:
        others = await gateway.choose()
        if others:
            screen.clear()
            named = one_line(", ".join(others), 300)
            typer.secho(f"also here: {named}; /model NAME goes on with another", dim=True, err=True)
    yield gateway


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether a parameter stands on the command line itself."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


async def _chat(source: "AbstractAsyncContextManager[Source]", system: str, has_history: bool) -> None:
    async with source as other:
        typer.secho(f"talking with {one_line(other.model)}; /help lists the commands", dim=True, err=True)
        conversation = ChatHistory(other, _prompt(has_history), system)
        await conversation.run()
    if conversation.num_failed:
        raise typer.Exit(1)


class ChatHistory:
    """The messages so far, and the loop that reads the next one."""

    def __init__(self, source: "Source", ask: Ask, system: str = "") -> None:
        from manyhands.cli.chat_source import Stats

        self._source, self._ask, self._system = source, ask, system
        self._turns: list[dict[str, str]] = []
        self.num_failed = 0  # questions without a whole answer
        self._stats, self._Stats = Stats(), Stats

    @property
    def messages(self) -> list[dict[str, str]]:
        first = [{"role": "system", "content": self._system}] if self._system else []
        return first + self._turns

    async def run(self) -> None:
        while True:
            try:
                line = parse(await self._ask())
            except EOFError:
                return
            except KeyboardInterrupt:
                continue
            match line:
                case Command("exit"):
                    return
                case Command(name, argument):
                    await self._do(name, argument)
                case Mistake(why):
                    typer.echo(why)
                case Said(text):
                    await self._turn(text)

    async def _do(self, name: str, argument: str) -> None:
        match name:
            case "help":
                typer.echo(HELP)
            case "reset":
                self._turns.clear()
                typer.echo("forgotten")
            case "system":
                self._system = argument
                typer.echo("from now on" if argument else "nothing said")
            case "stats":
                typer.echo(str(self._stats))
            case "save":
                self._save(argument)
            case "model":
                await self._choose(argument)

    def _save(self, name: str) -> None:
        path = Path(name).expanduser()
        try:
            with path.open("x") as file:  # never over something that is there
                file.write(as_markdown(self.messages))
            typer.echo(f"{len(self.messages)} messages are in {path}")
        except OSError as error:
            typer.echo(f"{path} cannot be written: {error.strerror}")

    async def _choose(self, name: str) -> None:
        try:
            known = await self._source.models()
        except ManyhandsError as error:
            typer.echo(f"manyhands: {one_line(error, 2000)}")
            return
        if name in known:
            self._source.model = name
        elif name:
            typer.echo(f"there is no {name!r:.80} here")
        typer.echo("\n".join(one_line(f"{'*' if one == self._source.model else ' '} {one}") for one in known))

    async def _turn(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})
        self._stats = self._Stats()
        said: list[str] = []
        try:
            if not await _until_interrupted(self._answer(said)):
                typer.secho("[stopped]", dim=True)
        except ManyhandsError as error:
            typer.secho(f"manyhands: {one_line(error, 2000)}", err=True)
            if said:
                typer.secho("what came of the answer is not kept in the conversation: ask again", dim=True, err=True)
            self.num_failed += 1
            self._turns.pop()
            return
        if said:
            self._turns.append({"role": "assistant", "content": "".join(said)})
        else:
            self._turns.pop()  # nothing was answered: as if it had not been asked

    async def _answer(self, said: list[str]) -> None:
        with without_echo(), contextlib.closing(AnswerScreen()) as screen:
            telling = asyncio.ensure_future(self._tell_waiting(screen))
            try:
                async with contextlib.aclosing(self._source.answer(self.messages, self._stats)) as pieces:
                    async for piece in pieces:
                        while self._stats.notices:
                            screen.note(self._stats.notices.pop(0))
                        said.append(piece)
                        screen.show(piece)
            finally:
                telling.cancel()

    async def _tell_waiting(self, screen: AnswerScreen) -> None:
        """Say what the answer waits for, as long as no text comes."""
        while screen.is_shown:
            await asyncio.sleep(WAITING_S / 2)
            if (silent_s := time.monotonic() - screen.shown_at) >= WAITING_S:
                screen.wait(f"{await self._source.waits_for()}, {silent_s:.0f} s", screen.shown_at)


def _prompt(has_history: bool) -> Ask:
    """How to ask for the next line: with editing and history at a terminal, else line by line from stdin."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):

        async def read() -> str:
            line: str = await asyncio.to_thread(sys.stdin.readline)
            if not line:
                raise EOFError
            return line

        return read
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = home_from_env() / HISTORY
    if has_history:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND, 0o600))  # what was typed is private
    session: PromptSession[str] = PromptSession(history=FileHistory(str(path)) if has_history else InMemoryHistory())

    async def ask() -> str:
        line: str = await session.prompt_async("> ")
        return line

    return ask


async def _until_interrupted(work: Any) -> bool:
    """Run `work`; Ctrl-C cancels it alone. Returns whether it came to its end."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        if not task.cancelled():
            raise
        return False
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return True
