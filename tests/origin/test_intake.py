"""Results are checked before they count: what a hop made up moves nothing."""

import asyncio
from typing import Any, cast

import pytest

from manyhands.config import RequestConfig
from manyhands.errors import ProtocolError
from manyhands.origin.first_rows import Prefill
from manyhands.origin.intake import DueRows, Intake
from manyhands.origin.pace import Pace
from manyhands.origin.repair import RepairExecutor
from manyhands.origin.returns import Returns
from manyhands.origin.session import Session
from manyhands.wire.message import Payload, Step

DUE = DueRows("ids", "int32", 1)
ROW = Payload("int32", 1, b"\0\0\0\0")


class OneResult:
    """As much of a session as an Intake uses: 40 positions are on their way, and one result has come."""

    def __init__(self, step: Step) -> None:
        self.returns, self._step = Returns(), step
        self.returns.sent(0, 40)

    async def next_result(self, deadline_s: float) -> Step:
        return self._step

    def returned(self) -> None:
        raise AssertionError("nothing that is true came back")


@pytest.mark.parametrize(
    ("position", "count", "content", "payload"),
    [
        (30, 1, "ids", ROW),  # another position's row
        (39, 2, "ids", ROW),  # more than was sent
        (41, 0, "ids", None),
        (9, 1, "ids", None),  # no row
        (9, 1, "hidden", ROW),  # not what was asked for
        (9, 1, "ids", Payload("fp32", 1, b"\0\0\0\0")),
        (9, 1, "ids", Payload("int32", 2, b"\0" * 8)),
    ],
)
def test_what_was_not_due_is_no_progress(position: int, count: int, content: Any, payload: Payload | None) -> None:
    step = Step(cast(Any, b"s" * 16), 1, 255, position, count, 0, 0, content, None, payload, b"")
    session: Any = OneResult(step)

    async def main() -> None:
        config = RequestConfig()
        prefill, healer = Prefill(session, None, config), cast(RepairExecutor, session)
        intake = Intake(cast(Session, session), healer, Pace(config), config, range(10), DUE, prefill)
        intake.reached = 3
        with pytest.raises(ProtocolError):
            await intake.rows()
        assert intake.reached == 3

    asyncio.run(main())
