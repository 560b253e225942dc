"""`manyhands chat`: a conversation with a swarm. Ctrl-C stops the answer, not the program."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable
from typing import TYPE_CHECKING

import typer

from manyhands.cli import options
from manyhands.cli.infer import swarm_origin
from manyhands.core import EndsAt, PathKind, Precision, SamplingParams
from manyhands.errors import BadRequest, ManyhandsError

if TYPE_CHECKING:
    from manyhands.origin import Origin

HELP = "/reset forgets the conversation · /route shows the last route · /exit or Ctrl-D leaves · Ctrl-C stops an answer"


def chat(
    model: options.Model,
    ticket: options.Ticket,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.7,
    top_p: options.TopP = 0.95,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = 0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    stop: options.Stop = None,
    dtype: options.DType = "bf16",
    path: options.Path_ = "ring",
    ends: options.Ends = "origin",
    threads: options.Threads = None,
) -> None:
    """Talk with a model on a swarm; this machine is the origin."""
    params = options.sampling_of(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        stop=stop,
    )
    precision, at, kind = options.precision_of(dtype), options.ends_of(ends), options.path_of(path)
    options.run(_chat(model, ticket, params, precision, kind, at, threads))


async def _chat(
    model: str,
    ticket: str,
    params: SamplingParams,
    precision: Precision,
    path: PathKind,
    ends: EndsAt,
    threads: int | None,
) -> None:
    async with swarm_origin(model, ticket, precision, ends, threads) as origin:
        typer.secho(HELP, dim=True, err=True)
        await _Conversation(origin, params, path).run()


class _Conversation:
    """The messages so far and the loop that reads the next one."""

    def __init__(self, origin: "Origin", params: SamplingParams, path: PathKind) -> None:
        self._origin, self._params, self._path = origin, params, path
        self._messages: list[dict[str, str]] = []
        self._last_route: list[str] = []

    async def run(self) -> None:
        while True:
            try:
                line = (await asyncio.to_thread(input, "> ")).strip()
            except (EOFError, KeyboardInterrupt):
                typer.echo()
                return
            match line:
                case "":
                    continue
                case "/exit":
                    return
                case "/reset":
                    self._messages.clear()
                case "/route":
                    typer.echo("\n".join(self._last_route) or "no route yet")
                case "/help":
                    typer.echo(HELP)
                case _ if line.startswith("/"):
                    typer.echo(f"{line} is no command. {HELP}")
                case _:
                    await self._turn(line)

    async def _turn(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        said: list[str] = []
        try:
            await _until_interrupted(self._answer(said))
        except BadRequest as error:
            self._messages.pop()
            typer.secho(f"manyhands: {error}", err=True)
            return
        except ManyhandsError as error:
            typer.secho(f"\nmanyhands: {error}", err=True)
        self._messages.append({"role": "assistant", "content": "".join(said)})

    async def _answer(self, said: list[str]) -> None:
        answer = self._origin.answer(self._origin.request(self._messages, self._params))
        stream = self._origin.stream(answer, path=self._path)
        async with contextlib.aclosing(stream):
            async for token in stream:
                said.append(token.text)
                typer.echo(token.text, nl=False)
        typer.echo()
        self._last_route = [f"layers {o.info.span!s:<7} {o.name} {o.addr}" for o in answer.route]


async def _until_interrupted(work: Awaitable[None]) -> None:
    """Run `work`; Ctrl-C cancels it alone."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        typer.secho(" [stopped]", dim=True)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
