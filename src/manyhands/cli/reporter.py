"""What `up` and `join` say on the way: lines for people, or JSON objects."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from manyhands.api.http.hosts import is_loopback
from manyhands.api.limits import Bucket
from manyhands.cli.code import say_code
from manyhands.cli.lines import fitted, say
from manyhands.cli.progress import no_line
from manyhands.core import NodeAddr, NodeId, Span
from manyhands.errors import BadRequest, ManyhandsError
from manyhands.plain import one_line

if TYPE_CHECKING:
    from manyhands.member.hosting import Hosting
    from manyhands.member.invite import Invitations
    from manyhands.member.member import Member

MAX_LOST = 1024  # nodes that are told as back when they come again
QUIET_S = 0.5  # changes come in pairs: a claim becomes a span
# Lines about nodes that are said at once, and in so many seconds: a member can make up nodes that come and go.
MOST_LINES = 64


class Reporter:
    """Says what happens: lines for people, or JSON objects; on stdout."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.serves: Callable[[], None] = lambda: (
            None
        )  # called once, when everything that is there from the start is said

    def __call__(self, event: str, text: str, **facts: Any) -> None:
        plain = "\n".join(one_line(line, 4000) for line in text.split("\n"))  # our own breaks: foreign texts have none
        line = json.dumps({"event": event, "text": text, **facts}) if self.as_json else fitted(plain, sys.stdout)
        with no_line():
            say(line)

    def line(self, text: str) -> None:
        self("note", text)

    @property
    def shows(self) -> bool:
        """Whether a person looks on: lines for people, on a terminal."""
        return not self.as_json and sys.stdout.isatty()

    def show(self, text: str) -> None:
        """Lines for the person who looks on now; in the background they stand in no log (background.py, Tee)."""
        if (terminal := getattr(sys.stdout, "terminal", sys.stdout)) is not None:
            with no_line():
                print(fitted(text, terminal), file=terminal, flush=True)


def tell_serving(member: "Member", hosting: "Hosting", tell: Reporter, why: str, seconds: float) -> None:
    """Say which layers are served, why, and how fast, and what is not as it should be (a relay that is not there)."""
    from manyhands.worker.runner import precision_note

    for host in hosting.hosts:
        info, layer_s = host.info, member.layer_s[host.info.span]
        spare = " as a spare, where no other node does" if info.is_spare else ""
        text = (
            f"serving layers {info.span} of {info.model_name} in {info.precision}{spare}: {why}\n"
            f"  one token takes {layer_s * len(info.span) * 1e3:.1f} ms here ({layer_s * 1e3:.2f} ms a layer), "
            f"peers come to {member.addresses[0]}"
        )
        if note := precision_note(hosting.weights.config, info.precision):
            text += f"\n  {note}"
        tell(
            "serving",
            text,
            model=info.model_name,
            model_id=info.model,
            layers=str(info.span),
            dtype=info.precision,
            arithmetic=info.arithmetic,
            back_end=host.back_end,
            why=why,
            is_spare=info.is_spare,
            layer_ms=layer_s * 1e3,
            address=str(member.addresses[0]),
            node=member.id,
            seconds=round(seconds, 3),
        )
    for note in member.notes:
        tell.line(note)


async def tell_invitation(invitations: "Invitations", tell: Reporter, *, shows_code: bool) -> None:
    """Say how other machines come in: by a new code where a person looks on (`shows_code`, a terminal), and by the ticket.

    A code is for the screen: a pipe, a log file and JSON lines get none, and `manyhands code` shows one.
    """
    invitation = invitations.ticket()
    ticket = invitation.encode()
    if invitations.member.config.scope == "off":
        tell(
            "invitation", "for this machine alone (scope off): start with --scope lan to let others join", ticket=ticket
        )
        return
    if invitation.addresses and all(is_loopback(addr.host) for addr in invitation.addresses):
        line = (
            f"from this machine alone, as peers come to {invitation.addresses[0]}:  manyhands join {ticket}\n"
            f"  for other machines: {_beyond_loopback(invitations.member.config.listen)}"
        )
        tell("invitation", line, ticket=ticket)
        return
    line = f"from elsewhere:  manyhands join {ticket}\n  the same as a QR code: manyhands ticket qr"
    if shows_code and tell.shows:
        try:
            await invitations.show()
        except BadRequest:
            line = f"on another machine:  manyhands join {ticket}"
        else:
            tell.show(say_code(invitations.told()))
    tell("invitation", line, ticket=ticket)


def _beyond_loopback(listen: NodeAddr) -> str:
    """What to do where peers come to loopback."""
    from manyhands.net.own_address import LOOPBACK_6, is_wildcard, reachable

    if is_wildcard(listen) and reachable(NodeAddr("::", 0)).host != LOOPBACK_6:
        return "this one has no IPv4 address: start it with --listen [::]:0"
    return "start it on a network, without --listen 127.0.0.1:PORT"


async def tell_page(url: str, tell: Reporter) -> None:
    """Show a link that signs the owner in on the page of the gateway at `url`, on a terminal alone: it is worth a key."""
    from manyhands.cli.page import good_for, page_link

    if not tell.shows:
        return
    with contextlib.suppress(ManyhandsError):  # no file for the secret, or not on loopback: keys are for that
        link = await asyncio.to_thread(page_link, url)
        tell.show(f"as its owner:      {link.url}\n  {good_for(link)}; `manyhands page` prints another")


class NodeLines:
    """Lines about nodes: MOST_LINES at once, then one a second; says how many it leaves out. `clock` is monotonic."""

    def __init__(self, tell: Reporter, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._bucket = Bucket(MOST_LINES, float(MOST_LINES), clock())
        self._left_out = 0

    def __call__(self, event: str, text: str, **facts: Any) -> None:
        if self._bucket.wait_s(1, self._clock()) > 0:
            self._left_out += 1
            return
        self._bucket.take(1)
        if self._left_out:
            self._tell.line(
                f"{self._left_out} more lines about nodes are left out: manyhands status shows what there is"
            )
            self._left_out = 0
        self._tell(event, text, **facts)


def missing_of(hosting: "Hosting") -> list[Span]:
    """Layers of its model that no node serves: all where no record names it, as while this node alone is switched off."""
    from manyhands.member.view import missing_spans

    records = hosting.records()
    return missing_spans(hosting.kind, records) if records else [Span(0, hosting.weights.shape.num_layers)]


async def keep_telling(member: "Member", hosting: "Hosting", tell: Reporter) -> None:
    """Say which nodes come and go, and what is missing, whenever that changes."""
    from manyhands.member.view import say_missing, say_split

    known, said, noted = _present(member), "", ""
    complained, tell_of_node = set[str](), NodeLines(tell)
    lost: set[NodeId] = set()  # of those that did not say that they leave, MAX_LOST at most
    while True:
        spans = missing_of(hosting)
        line = say_missing(spans, hosting.weights.shape, hosting.budget.tokens)
        if line != said:
            said = line
            text = f"{hosting.weights.name}: {line or 'every layer is held'}"
            tell("missing", text, layers=[str(span) for span in spans])
        await asyncio.sleep(0)  # each look goes through all records
        split = "" if member.node.request.mix_classes else say_split(hosting.kind, hosting.records())
        if split and split != noted:
            tell("note", f"{hosting.weights.name}: no request has a route: {split}")
        noted = split
        await asyncio.sleep(0)
        complaints = set(member.complaints())
        for complaint in complaints - complained:
            tell_of_node("complaint", complaint)
        complained = complaints
        async with member.directory.changed:
            await member.directory.changed.wait()
        await asyncio.sleep(QUIET_S)
        present = _present(member)
        gone = known.keys() - present.keys()
        left = member.directory.backend.left() if gone else set()
        for node in gone:
            has_left = node in left
            if not has_left and len(lost) < MAX_LOST:
                lost.add(node)
            tell_of_node("gone", f"{known[node]} {'has left' if has_left else 'cannot be reached any more'}", node=node)
        for node in present.keys() - known.keys():
            tell_of_node("came", f"{present[node]} {'is back' if node in lost else 'has joined'}", node=node)
            lost.discard(node)
        known = present


def _present(member: "Member") -> dict[NodeId, str]:
    return {record.node: record.name for record in member.records() if record.node != member.id}
