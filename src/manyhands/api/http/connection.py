"""One connection of the HTTP server (server.py): what it may send, hold up and leave unread."""

import asyncio

from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from manyhands.net.admission import Pending, source_of

MAX_HEADER_BYTES = 64 << 10
# What one read may cost in calls of the parser: a read of 256 KiB holds 13,000 header lines, 43,000 parts of a body of one byte
# each, or 9,000 requests. Browsers send some 20 lines.
MAX_HEADER_LINES = 128
MAX_TARGET_BYTES = 8 << 10
MAX_PARTS, PART_BYTES = 4096, 64
MAX_PIPELINED = 16
# Of a body that is refused: so much of it may still come before the connection is closed, and for so long.
DRAIN_BYTES = 256 << 10
DRAIN_S = 2.0
UNREAD_BYTES = 64 << 10  # as much as a transport of asyncio holds before it asks to write no more


def until_closed(cycle: RequestResponseCycle) -> Send:
    """How an answer is sent to a client of HTTP/1.0, which knows no chunks: one without a length ends with its connection.

    uvicorn sends chunks wherever no length is stated; where one is, it counts what is left of it.
    """
    cycle.chunked_encoding = False

    async def send(message: Message) -> None:
        cycle.expected_content_length = len(message.get("body", b""))
        await cycle.send(message)  # type: ignore[arg-type]

    return send


class Http(HttpToolsProtocol):
    """Cuts a connection whose next request header does not come within read_timeout_s of its first byte (slowloris).

    Of a body whose answer is complete (a refusal) DRAIN_BYTES more are read, for DRAIN_S, and thrown away; where that is not
    all, the connection ends. One that ends while its reader does not take what was written is cut after read_timeout_s.

    Connections whose request is not read whole, idle ones among them, are `pending`: bounded in all and of one address, the
    oldest of the address with the most gives way to a new one (net/admission.py).

    A header has at most MAX_HEADER_BYTES; so has anything else that the parser keeps to itself (a trailer), of which it may
    take one read more. It has MAX_HEADER_LINES lines at most, trailers among them, and a target of MAX_TARGET_BYTES; a body
    comes in MAX_PARTS parts at most, and one more for each PART_BYTES; MAX_PIPELINED requests wait for those before them. What
    exceeds any of these is answered by 400, and the connection ends. Cookies are dropped: nothing here reads them.

    A reader takes what was written, but for what the transport holds anyway, at UNREAD_BYTES in write_timeout_s, or the
    connection ends: whatever the answer is, and whether it is complete.
    """

    read_timeout_s = write_timeout_s = 30.0
    pending: Pending["Http"]
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None  # ends the connection of a reader that takes nothing
    _header_bytes = _num_lines = 0
    _body_bytes = _num_parts = 0
    _kept_bytes = 0  # since the parser last told of anything
    _is_whole = True  # the last request has come to its end
    _drained = 0  # bytes of its body after its answer
    _is_ending = False
    _refusal = ""  # why the parser was made to give up

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._source = source_of(self.client[0] if self.client else "")
        self._cycles: list[RequestResponseCycle] = []  # the last of them, `cycle`, may wait for the others (pipelining)
        self._arm(self.read_timeout_s)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        if not self._is_busy and self._deadline is None:
            self._arm(self.read_timeout_s)
        self._kept_bytes += len(data)
        super().data_received(data)
        if self._kept_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(f"at most {MAX_HEADER_BYTES} bytes in a header are taken: send less")
        if self._is_busy:
            self._disarm()
        self._end_in_time()

    def pause_writing(self) -> None:
        """More waits for the reader than the transport is to hold: uvicorn writes no more until it has been taken."""
        super().pause_writing()
        wait_s = self.write_timeout_s * max(1.0, self.transport.get_write_buffer_size() / UNREAD_BYTES)
        self._unread = self.loop.call_later(wait_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.resume_writing()
        self.pending.leave(self)
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._header_bytes = self._num_lines = self._body_bytes = self._num_parts = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._check(len(self.url), MAX_TARGET_BYTES, "bytes in the target of a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        self._num_lines += 1
        self._check(self._header_bytes, MAX_HEADER_BYTES, "bytes in a header")
        self._check(self._num_lines, MAX_HEADER_LINES, "lines in a header")
        if name.lower() != b"cookie":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check(len(self.pipeline) + 1, MAX_PIPELINED, "requests that wait for the answer to one before")
        self._kept_bytes = self._drained = 0
        self._is_whole = False
        self.scope["state"]["target"] = self.url
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        super().on_headers_complete()
        self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._kept_bytes = 0
        self._body_bytes += len(body)
        self._num_parts += 1
        self._check(self._num_parts, MAX_PARTS + self._body_bytes // PART_BYTES, "parts of a body, by its length")
        super().on_body(body)
        if not self._is_busy:
            self._drained += len(body)
            if self._drained > DRAIN_BYTES:
                self.transport.close()

    def on_message_complete(self) -> None:
        self._kept_bytes = 0
        self._is_whole = True
        super().on_message_complete()
        if self._is_busy:
            self.pending.leave(self)
        elif not self.transport.is_closing():  # its answer came first
            self._disarm()
            self._await_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_busy:
            return
        if self._is_whole and not self.transport.is_closing():
            self._await_request()
        elif not self._is_whole:
            self._arm(DRAIN_S)
        self._end_in_time()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_in_time()

    def _end_in_time(self) -> None:
        """Closing waits for what is to be written, and that for its reader."""
        if self.transport.is_closing() and not self._is_ending:
            self._is_ending = True
            self._arm(self.read_timeout_s)

    def _await_request(self) -> None:
        """This connection has to send a request now, or it is idle: one of those that may have to go for others."""
        self.pending.leave(self)
        evicted = self.pending.enter(self, self._source, self.loop.time())
        if evicted is not None:
            evicted.transport.abort()

    def _should_upgrade(self) -> bool:
        """Never; uvicorn takes the header apart to find out."""
        return False

    def _unsupported_upgrade_warning(self) -> None:
        """The request has its answer; the parser reads nothing after it, so the connection ends with it."""
        if self._is_busy:
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    def cut(self) -> None:
        """Take no more requests, and drop the connection if part of an answer is sent: it must not look like the whole."""
        self.pipeline.clear()
        begun = any(cycle.response_started and not cycle.response_complete for cycle in self._cycles)
        for cycle in self._cycles:
            cycle.keep_alive, cycle.disconnected = False, cycle.disconnected or begun
        if begun:
            self.transport.abort()

    def _check(self, count: int, most: int, of_what: str) -> None:
        """Have the parser give up beyond `most`, and say so."""
        if count > most:
            self._refusal = f"at most {most} {of_what} are taken: send less"
            raise ValueError(self._refusal)

    def send_400_response(self, msg: str) -> None:
        """`msg`: what the parser says of bytes that mean nothing."""
        super().send_400_response(self._refusal or msg)

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
