"""An Open that is being carried out."""

import asyncio
from dataclasses import dataclass

from manyhands.net.transport import Link
from manyhands.wire.message import Open


@dataclass(eq=False, slots=True)
class Opening:
    """An Open that is being carried out, by `task`, which ends with it: overtaken, closed, or its origin gone."""

    message: Open
    origin: Link
    task: "asyncio.Task[None] | None" = None

    def cancel(self) -> None:
        task, self.task = self.task, None  # which leads back here
        if task is not None:
            task.cancel()
