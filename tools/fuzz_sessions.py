"""Sessions of a random life on every back end of the machine: their rows have the bits of plain C in one step.

fuzz_configs.py runs them. Steps are cut at random, in company and on 1, 2 or 4 threads; guesses are taken back, some of which
go beyond the context and are refused; sessions go back to earlier positions, to go on with the same text or with another one,
and others begin with a part of what they have.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from manyhands.checkpoint.folder import read_config
from manyhands.core import PRECISIONS, Precision
from manyhands.engine import library
from manyhands.engine.layout import STATE_BLOCK
from manyhands.engine.span import Cache
from manyhands.errors import ContextOverflow, ModelError
from manyhands.program.families import read_program
from manyhands.worker.choice import program_of
from tests.worker.pipeline import Feed, Ids, Loader, Logits, Pipeline

PIECES: Final = (1, 1, 2, 3, 5, 9, 17, 40, 64, 100)  # rows of a step
EVENTS: Final = 50  # of a life, before its first session is led to the end
MOST_SESSIONS: Final = 3
NEAR: Final = 100  # positions that a session with states can go back by, wherever it is


def precisions(folder: Path) -> list[Precision]:
    """Those in which a checkpoint of fp32 is computed here."""
    found: list[Precision] = []
    for precision in PRECISIONS:
        try:
            program_of(read_config(folder), precision)
        except ModelError:  # fp16, and caches of 8 bit of what has latents or an indexer
            continue
        found.append(precision)
    return found


def reachable(caches: Sequence[Cache], position: int) -> int:
    """The greatest position, at most this one, from which all spans of a session can go on."""
    while (nearest := min(cache.reachable(position) for cache in caches)) < position:
        position = nearest
    return position


@dataclass(eq=False)
class Text:
    """Ids, and their logits."""

    ids: Ids
    want: Logits


@dataclass(eq=False)
class Session:
    """The first `at` ids of the text are computed in its caches, one of each span."""

    number: int
    caches: list[Cache]
    text: Text
    at: int = 0


@dataclass
class Life:
    """What happens to sessions of one pipeline, whose model has `context` positions.

    Texts are alike in their first `common` ids, and equally long. `told`: what has happened, for a report.
    """

    pipeline: Pipeline
    context: int
    texts: Sequence[Text]
    common: int
    draw: Random
    sessions: list[Session] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    made: int = 0  # sessions so far

    def run(self) -> str:
        """What happened, up to rows that differ; "" if none does."""
        self.begin()
        for _ in range(EVENTS):
            events = [*[self.step] * 4, *[self.back] * 2, *[self.fork] * 2, self.begin]
            if not self.draw.choice(events)():
                return "; ".join(self.told)
        first = self.sessions[0]
        while first.at < len(first.text.ids):
            if not self.step([first]):
                return "; ".join(self.told)
        return ""

    def step(self, chosen: Sequence[Session] = ()) -> bool:
        """Some sessions at once, each with rows of its text or with guesses; whether the former have their bits."""
        chosen = chosen or self.draw.sample(self.sessions, self.draw.randint(1, len(self.sessions)))
        feeds, ends = list[Feed](), list[int]()
        for session in chosen:
            session.text = self.draw.choice(self.texts) if session.at <= self.common else session.text
            count = self._place(session.at + 1, session.at + self.draw.choice(PIECES)) - session.at
            right = session.text.ids[session.at : session.at + count]
            is_guess = not right or self.draw.random() < 0.3
            if is_guess and self.draw.random() < 0.2:  # a step that is begun, and fails
                count = self.context - session.at + 1
            ids = [self.draw.randrange(256) for _ in range(count)] if is_guess else right
            ends.append(session.at if is_guess else session.at + len(ids))
            feeds.append(Feed(session.caches, session.at, ids))
        threads = self.draw.choice([1, 2, 4])
        rows = [
            f"{one.number}: {feed.position} + {len(feed.ids)} to {end} of {self.texts.index(one.text)}"
            for one, feed, end in zip(chosen, feeds, ends, strict=True)
        ]
        self.told.append(f"step of {', '.join(rows)} on {threads} threads")
        try:
            found = self.pipeline.on(threads).step(feeds)
        except ContextOverflow:
            ends, found = [session.at for session in chosen], [session.text.want[:0] for session in chosen]
        is_same = True
        for session, end, logits in zip(chosen, ends, found, strict=True):
            if end > session.at:
                is_same &= logits.tobytes() == session.text.want[session.at : end].tobytes()
            session.at = reachable(session.caches, end)
        return is_same

    def back(self) -> bool:
        """A session goes back, as one whose last hop is replaced, or whose prompt is edited."""
        session = self.draw.choice(self.sessions)
        least = self.draw.choice([0, max(0, session.at - NEAR)])
        session.at = reachable(session.caches, self._place(least, session.at))
        self.told.append(f"{session.number} back to {session.at}")
        return True

    def fork(self) -> bool:
        """One begins with positions of another, whose place it may take."""
        source = self.draw.choice(self.sessions)
        at = reachable(source.caches, self.draw.choice([source.at, self._place(0, source.at)]))
        if at == 0:
            return True
        mark = self.draw.choice([0, self.draw.randint(0, len(source.text.ids))])
        given = zip(self.pipeline.spans, source.caches, strict=True)
        self._add([span.fork(cache, at, self.context, mark) for span, cache in given], source.text, at)
        self.told.append(f"a fork of {source.number}, marked at {mark}")
        return True

    def begin(self) -> bool:
        """A new one, in company of the others."""
        self._add(self.pipeline.session(self.draw.choice([0, self.context])), self.texts[0], 0)
        return True

    def _add(self, caches: list[Cache], text: Text, at: int) -> None:
        """It may take the place of the second one, whose end ends no fork of it."""
        if len(self.sessions) == MOST_SESSIONS:
            self.told.append(f"{self.sessions.pop(1).number} ends")
        self.made += 1
        self.sessions.append(Session(self.made, caches, text, at))
        self.told.append(f"{self.made} begins at {at}")

    def _place(self, low: int, high: int) -> int:
        """A position from `low` to `high`: often where a block of states begins, or near where texts part."""
        edge = high // STATE_BLOCK * STATE_BLOCK
        found = self.draw.choice([edge, self.common + self.draw.randint(-8, 8), self.draw.randint(low, high)])
        return found if low <= found <= high else self.draw.randint(low, high)


def on_all(folder: Path, precision: Precision, ids: Ids, draw: Random) -> tuple[Logits, str]:
    """Logits of plain C in one step on one thread, and the first life of sessions that gave others ("": none)."""
    program, plain = read_program(folder), Loader(folder, precision, "scalar")
    layers, common = len(program.layers), draw.randint(0, len(ids))
    others = [*ids[:common], *(draw.randrange(256) for _ in ids[common:])]
    texts = [Text(each, plain.cut(0, layers).run(each, [len(each)])) for each in (ids, others)]
    for back_end in library.supported():
        edges = sorted({0, draw.randint(0, layers), layers})
        life = Life(Loader(folder, precision, back_end).cut(*edges), program.context, texts, common, draw)
        if told := life.run():
            return texts[0].want, f"{back_end}, cut at {edges}: {told}"
    return texts[0].want, ""
