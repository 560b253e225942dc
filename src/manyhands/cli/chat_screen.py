"""How an answer is shown as it grows, and what it waits for below it; plain text where stdout is no terminal."""

import time

import typer

from manyhands.cli.chat_text import Paragraphs, tail
from manyhands.plain import one_line, without_controls

REFRESH_PER_S = 12


class AnswerScreen:
    """Shows an answer as it grows, and each paragraph as Markdown once it is whole; plain text where stdout is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._is_plain = not self._console.is_terminal
        self._paragraphs = Paragraphs()
        self._live = Live(console=self._console, refresh_per_second=REFRESH_PER_S, transient=True)
        self.shown_at = time.monotonic()  # when text came last
        if not self._is_plain:
            self._live.start()
            self.wait("asking", self.shown_at)

    @property
    def is_shown(self) -> bool:
        """Whether there is a terminal, where what is no text of the model can be shown too."""
        return not self._is_plain

    def wait(self, text: str, shown_at: float) -> None:
        """Show `text` below the answer until more of it comes, unless more has come since `shown_at`."""
        from rich.console import Group
        from rich.text import Text

        if shown_at == self.shown_at:
            width, height = self._console.size
            told = Text(one_line(f"[{text}]", 300), "dim")
            rest = self._paragraphs.rest
            self._live.update(Group(Text(tail(rest, width, height - 3)), told) if rest else told)

    def show(self, piece: str) -> None:
        from rich.text import Text

        self.shown_at = time.monotonic()
        if self._is_plain:
            typer.echo(piece, nl=False)
            return
        for paragraph in self._paragraphs.feed(without_controls(piece)):
            self._print(paragraph)
        width, height = self._console.size
        self._live.update(Text(tail(self._paragraphs.rest, width, height - 2)))

    def note(self, text: str) -> None:
        """Show half a line that is no part of the answer."""
        if self._is_plain:
            typer.secho(text, dim=True, err=True)
        else:
            self._console.print(one_line(text), style="dim", markup=False)

    def _print(self, paragraph: str) -> None:
        from rich.markdown import Markdown

        self._live.update("")
        self._console.print(Markdown(paragraph, hyperlinks=False))  # a link shows where it leads
        self._console.print()

    def close(self) -> None:
        if self._is_plain:
            typer.echo()
            return
        rest, self._paragraphs.rest = self._paragraphs.rest, ""
        self._live.update("")
        self._live.stop()
        if rest.strip():
            self._print(rest)
