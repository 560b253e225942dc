"""The conversation of `manyhands chat`: the messages so far, and the loop that reads the next one and has it answered."""

import asyncio
import contextlib
import signal
import sys
import time
from typing import Any

import typer

from manyhands.aside import aside
from manyhands.cli.chat_screen import AnswerScreen
from manyhands.cli.chat_source import Source, Stats
from manyhands.cli.chat_text import HELP, Command, Mistake, Said, as_markdown, cut_off, introduced, parse
from manyhands.cli.line_editor import Ask, line_editor
from manyhands.cli.lines import error_line, fitted
from manyhands.cli.terminal import without_echo
from manyhands.config import home_from_env
from manyhands.errors import ManyhandsError
from manyhands.files import expanded
from manyhands.plain import one_line

WAITING_S = 1.0  # without text: then what it waits for is shown
HISTORY = "chat_lines"


class ChatHistory:
    """The messages so far, and the loop that reads the next one."""

    def __init__(self, source: Source, ask: Ask, system: str = "") -> None:
        self._source, self._ask, self._system = source, ask, system
        self._turns: list[dict[str, str]] = []
        self.num_failed = 0  # questions without a whole answer
        self._stats = Stats()

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
            match line:
                case Command("exit"):
                    return
                case Command(name, argument):
                    await self._do(name, argument)
                case Mistake(why):
                    typer.echo(fitted(why, sys.stdout))
                case Said(text):
                    await self._turn(text)

    async def _do(self, name: str, argument: str) -> None:
        match name:
            case "help":
                typer.echo(fitted(HELP, sys.stdout))
            case "reset":
                self._turns.clear()
                typer.echo("forgotten")
            case "system":
                self._system = argument
                typer.echo("from now on" if argument else "nothing said")
            case "stats":
                typer.echo(fitted(str(self._stats), sys.stdout))
            case "save":
                self._save(argument)
            case "model":
                await self._choose(argument)

    def _save(self, name: str) -> None:
        path = expanded(name)
        try:
            with path.open("x", encoding="utf-8") as file:  # never over something that is there
                file.write(as_markdown(self.messages))
            said = f"{len(self.messages)} messages are in {path}"
        except OSError as error:
            said = f"{path} cannot be written: {error.strerror}"
        typer.echo(fitted(said, sys.stdout))

    async def _choose(self, name: str) -> None:
        try:
            known = await self._source.models()
        except ManyhandsError as error:
            typer.echo(error_line(error, sys.stdout))
            return
        if name in known:
            self._source.model = name
            typer.echo(fitted(f"from now on {introduced(name)}", sys.stdout))
        elif name:
            typer.echo(fitted(f"there is no {name!r:.80} here", sys.stdout))
        typer.echo("\n".join(one_line(f"{'*' if one == self._source.model else ' '} {one}") for one in known))

    async def _turn(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})
        self._stats = Stats()
        said: list[str] = []
        try:
            if not await _until_interrupted(self._answer(said)):
                typer.secho("[stopped]", dim=True)
            elif self._stats.finish_reason == "length" and _at_terminal():
                typer.secho(fitted(cut_off(self._stats.tokens), sys.stdout), dim=True)
            if self._stats.is_doubtful:
                typer.secho(fitted(self._stats.audit, sys.stderr), fg="red", err=True)
        except ManyhandsError as error:
            typer.secho(error_line(error, sys.stderr), err=True)
            if said:
                kept = "what came of the answer is not kept in the conversation: ask again"
                typer.secho(fitted(kept, sys.stderr), dim=True, err=True)
            self.num_failed += 1
            self._turns.pop()
            return
        if said:
            self._turns.append({"role": "assistant", "content": "".join(said)})
        else:
            self._turns.pop()  # nothing was answered: as if it had not been asked

    async def _answer(self, said: list[str]) -> None:
        # What is typed meanwhile would tear the answer: it waits for the next prompt.
        silent = without_echo() if _at_terminal() else contextlib.nullcontext()
        with silent, contextlib.closing(AnswerScreen()) as screen:
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


def prompt_of(has_history: bool) -> Ask:
    """How to ask for the next line: with editing and history at a terminal, else line by line from stdin."""
    if not _at_terminal():

        async def read() -> str:
            line: str = await aside(sys.stdin.readline)
            if not line:
                raise EOFError
            return line

        return read
    return line_editor(home_from_env() / HISTORY if has_history else None)


def _at_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


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
