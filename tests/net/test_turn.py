"""A turn of the event loop is shared: a link's flood neither holds it nor makes other links wait longer than their turn."""

import asyncio
from collections import deque
from collections.abc import Callable

from manyhands.net.turn import SLICE_S, TURN_S, Turn

MESSAGE_S = 0.0004
MOST_S = TURN_S + SLICE_S + MESSAGE_S  # a slice begins while there is time, and ends with a message


class Work:
    """A clock that only work moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done: list[str] = []
        self.per_turn: list[float] = []

    async def turns(self, count: int) -> None:
        for _ in range(count):
            before = self.now
            await asyncio.sleep(0)
            self.per_turn.append(self.now - before)


class Flood:
    """A link with messages that each take MESSAGE_S."""

    def __init__(self, name: str, count: int, work: Work, turn: Turn) -> None:
        self.name, self.work, self.turn = name, work, turn
        self.waiting = deque(range(count))

    def hand_on(self, is_over: Callable[[], bool]) -> bool:
        while self.waiting:
            self.waiting.popleft()
            self.work.now += MESSAGE_S
            self.work.done.append(self.name)
            if is_over():
                break
        return bool(self.waiting)

    def go_on(self) -> None:
        if self.turn.run(self.hand_on):
            self.turn.later(self.go_on)


def test_floods_take_their_part_of_each_turn_and_an_honest_message_its_own() -> None:
    async def main() -> None:
        work = Work()
        turn = Turn(lambda: work.now)
        floods = [Flood(f"flood {i}", 100, work, turn) for i in range(12)]
        for flood in floods:
            flood.go_on()
        honest = Flood("honest", 1, work, turn)
        honest.go_on()
        assert work.now <= MOST_S and "honest" not in work.done, "this turn is over"
        await work.turns(6)
        assert "honest" in work.done, "13 links at four a turn"
        await work.turns(200)
        assert max(work.per_turn) <= MOST_S
        assert not any(flood.waiting for flood in floods), "all is taken in the end"

    asyncio.run(main())


def test_what_fits_into_a_turn_is_taken_at_once() -> None:
    async def main() -> None:
        work = Work()
        few = Flood("few", 2, work, Turn(lambda: work.now))
        few.go_on()
        assert work.done == ["few"] * 2

    asyncio.run(main())
