"""QR codes of tickets: their lines show every module, and the margin that a camera needs."""

import re

import pytest

from manyhands.core import NodeAddr
from manyhands.errors import BadRequest
from manyhands.swarm.qr import MAX_CHARS, QUIET, qr_lines, qr_rows
from manyhands.swarm.ticket import MAX_ADDRESSES, Ticket

BACK = {" ": "00", "▀": "10", "▄": "01", "█": "11"}
FINDER = ["1111111", "1000001", "1011101", "1011101", "1011101", "1000001", "1111111"]


@pytest.mark.parametrize("addresses", [0, 3, MAX_ADDRESSES])
def test_rows_are_a_code_with_its_margin(addresses: int) -> None:
    ticket = Ticket.new("home")
    for port in range(1, addresses + 1):
        ticket = ticket.with_address(NodeAddr("192.168.1.10", port))
    rows = qr_rows(ticket.encode())
    assert {len(row) for row in rows} == {len(rows)} and len(rows) <= 177 + 2 * QUIET
    assert all("1" not in row for row in (*rows[:QUIET], *rows[-QUIET:]))
    assert [row[QUIET : QUIET + 7] for row in rows[QUIET : QUIET + 7]] == FINDER


@pytest.mark.parametrize("is_coloured", [True, False])
def test_lines_of_a_terminal_show_every_module(is_coloured: bool) -> None:
    rows = qr_rows(Ticket.new("home").encode())
    lines = qr_lines(rows, is_coloured=is_coloured)
    assert all(("\x1b" in line) == is_coloured for line in lines)
    plain = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines]
    back = ["".join(BACK[cell][half] for cell in line) for line in plain for half in (0, 1)]
    assert back[: len(rows)] == rows and len(plain[0]) <= 80


def test_a_text_beyond_what_a_camera_reads_is_refused() -> None:
    with pytest.raises(BadRequest, match=f"{MAX_CHARS}"):
        qr_rows("x" * (MAX_CHARS + 1))
