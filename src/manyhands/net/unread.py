"""Whether a peer reads what is sent to it. Pure."""

from typing import Final

from manyhands.wire.message import Lane

# Bytes that may wait to be read by the peer; more close the link. Control: a directory. Data: credits of 32 sessions, 16
# steps of 1 MiB each. Bulk: a chunk of weights at a time.
MAX_UNSENT: Final[dict[Lane, int]] = {"control": 4 << 20, "data": 512 << 20, "bulk": 16 << 20}
# While more than MUCH_UNSENT waits, the peer has to read MIN_READ_BPS in each READ_S, or it loses the link: 64 MiB would then
# take it a minute. So a slow reader costs MUCH_UNSENT and what is sent to it in READ_S.
MUCH_UNSENT: Final = 64 << 20
MIN_READ_BPS: Final = 1 << 20
READ_S: Final = 10.0


class Unread:
    """What waits for one peer, looked at with each write."""

    def __init__(self) -> None:
        # Since when more than MUCH_UNSENT waits, and bytes read by then.
        self._much_since: tuple[float, int] | None = None

    def judge(self, lane: Lane, num_unsent: int, num_read: int, now: float) -> str | None:
        """Why the link has to be closed, if more waits than a peer that reads would leave.

        `num_unsent` bytes wait, `num_read` have left in all; `now` in seconds.
        """
        if num_unsent > MAX_UNSENT[lane]:
            return f"{num_unsent} bytes wait, {MAX_UNSENT[lane]} is the limit"
        if num_unsent <= MUCH_UNSENT:
            self._much_since = None
            return None
        began, num_before = self._much_since = self._much_since or (now, num_read)
        if now - began < READ_S:
            return None
        self._much_since = now, num_read
        if num_read - num_before >= MIN_READ_BPS * (now - began):
            return None
        return f"{num_unsent} bytes wait, and it took less than {MIN_READ_BPS} a second for {READ_S:g} s"
