"""What can be said between two nodes. Values only: bytes are made in frame.py, numbers in rows.py.

What goes with every token is a NamedTuple: made in a third of a frozen dataclass's time.

One link carries one lane: `control` (everything else), `data` (Step, Credit) or `bulk` (weights).
Lanes so that a cancel overtakes steps, and both overtake weights; credits go against the stream of steps that they pay for.

    origin ── Open ──► every hop      hop ── Opened | Fault ──► origin
    origin ── Step ──► hop 0 ── Step ──► hop 1 ── Step ──► origin      (ring; in a star every hop answers the origin)
    origin ── Retract ──► hops: steps under older guesses are dead
    origin ── Probe ──► hop ── Progress ──► origin     origin ── Feed ──► hop ── Step ──► standby of the next hop
    origin ── Extend ──► hops ── Extended ──► origin     origin ── Attest ──► hop or standby ── Attested ──► origin
    receiver ── Credit ──► sender     origin ── Close ──► hops
    node ── DirectoryUpdate ──► node            operator's node ── Reassign ──► node ── Reassigned ──► operator's node
    joining node ── WeightRequest ──► holder ── WeightsChunk | WeightsNotFound ──► joining node
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, NewType, get_args

from manyhands.core import (
    EndsAt,
    ModelId,
    NodeAddr,
    NodeId,
    PathKind,
    Precision,
    SamplingParams,
    SessionId,
    Span,
    SpanInfo,
)
from manyhands.wire.attest_message import Attest, Attested, Signature
from manyhands.wire.rounding import Rounding
from manyhands.wire.weights_message import WeightRequest, WeightsChunk, WeightsNotFound

Token = NewType("Token", str)  # 32 hex digits: 16 random bytes

PROTOCOL_VERSION = 12
# `emit_from` of a standby: a standby for a hop, which computes when its device is idle and sends nothing on. It says how far it
# is by Progress whenever it has computed what it had. Beyond every position.
STANDBY = (1 << 32) - 1
Ids = tuple[int, ...]  # of tokens
Lane = Literal["control", "data", "bulk"]
DType = Literal["bf16", "fp16", "fp32", "int32"]
ITEMSIZE: dict[DType, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "int32": 4}  # bytes of a number
# The tensor of a Step: hidden states going on, token ids drawn by the last hop (ends = edges), or logits.
Content = Literal["hidden", "ids", "logits"]
Codec = Literal["plain", "planes", "int8"]  # how a payload's rows are laid out in its data (codec.py, int8.py)

MAX_DIRECTORY_BYTES = 48 << 10  # of one message of the directory


class Payload(NamedTuple):
    """A [count, width] tensor as bytes, row by row, little endian: count * width * itemsize of them, fewer if coded."""

    dtype: DType
    width: int
    data: bytes | bytearray | memoryview
    codec: Codec = "plain"


class Step(NamedTuple):
    """Run `hop`'s layers on positions [position, position + count) of `session`, after dropping its cache beyond `position`.

    `hop` is the index of the receiver in the route (ORIGIN_HOP: the origin). Rows at positions >= `reply_from` are wanted by
    the origin; the last hop sends only those (perhaps none: count 0 then says "computed up to `position`").
    `ids` are the token ids of the rows; they travel only when ends = edges, else None.
    `guess` is the number of the origin's guess: a hop drops queued steps of a session under a guess older than the newest seen.
    `timings` are those of the hops it has passed, in their order, as they travel (timings.py): people see them, and how many
    drafts pay is judged by them (origin/step_costs.py).
    `committed`: tokens at positions below it are final. Rows of others may be guesses, which no other origin may adopt.
    """

    session: SessionId
    epoch: int
    hop: int
    position: int
    count: int  # type: ignore[assignment]  # hides tuple's own
    reply_from: int
    guess: int
    content: Content
    ids: Ids | None
    payload: Payload | None  # None iff ids alone go to the first hop (ends = edges), or count == 0
    timings: bytes = b""
    committed: int = 0


class Credit(NamedTuple):
    """`steps` more Steps of `session` may be sent to `hop` in `epoch` (the sender has so many credits more)."""

    session: SessionId
    epoch: int
    hop: int
    steps: int


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on every link, both ways. `token` is drawn for this link; Opens sent to its maker repeat it."""

    version: int
    lane: Lane
    name: str
    listen: NodeAddr | None
    spans: tuple[SpanInfo, ...]
    token: Token


@dataclass(frozen=True, slots=True)
class Open:
    """Reserve cache for `capacity` positions of a session on `span` and say which nodes send and get its steps.

    A higher `epoch` of a session that the receiver already serves gives it a new place in the route: it keeps its cache,
    forgets what waits, and first re-sends its output log of positions [replay_from, replay_until). A hop computes what it
    gets but sends on only positions from `emit_from`: those its successor lacks; none with `emit_from` = STANDBY.

    Steps are accepted only from node `predecessor`. `successor` is None where the next receiver is the origin itself.
    `sampling` is given to the last hop iff it draws the tokens (ends = edges), else it is None; the last hop then returns
    hidden states (ends = origin) or logits (ends = edges). `prompt_length` is what penalties count from.

    `resume` names a session that the origin parked here (Close): the place begins with a copy of its positions
    [0, `resume_until`), or with as many of them as can be gone on from. Opened says how many. Of a place that is here
    `resume_until` names, without `resume`, the positions of its own cache that it is to go on from. Another origin's session is
    named by what `adoption` of its Open was made from (handle.py): with it the place is parked, also if its origin is lost.
    `rounding`: which rows it sends with loss; None: none. `attests`: it keeps a hash of every row, for Attest.

    `origin` owns the session and signs everything else here (signed.py). `to` is the node addressed, `token` that of its
    Hello to the origin, `serial` is used once: the signature is worth nothing to another node, on another link or again.
    """

    session: SessionId
    epoch: int
    hop: int
    num_hops: int
    model: ModelId
    precision: Precision
    span: Span
    capacity: int
    prompt_length: int
    path: PathKind
    ends: EndsAt
    predecessor: NodeId
    successor: NodeAddr | None
    sampling: SamplingParams | None
    credits: int  # steps that may be on the way to one receiver without having been computed
    replay_from: int
    replay_until: int
    emit_from: int
    origin: NodeId
    to: NodeId
    token: Token
    serial: int
    signature: Signature
    resume: SessionId | None = None
    resume_until: int = 0
    adoption: SessionId | None = None
    rounding: Rounding | None = None
    attests: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """`hop` of `session` holds its lease; `arithmetic` is its arithmetic class.

    `has_log`: the replay that Open asked for is on its way; false if the log has been dropped (it was bounded out).
    `cached`: so many of the first `resume_until` positions can be gone on from. `rounds`: it rounds rows, as Open allowed.
    """

    session: SessionId
    epoch: int
    hop: int
    arithmetic: str
    has_log: bool
    cached: int = 0
    rounds: bool = False


@dataclass(frozen=True, slots=True)
class Close:
    """The session, open or parked, is over: free everything at once. Sent to every hop by the origin.

    With `parked_as` the receiver may keep cache and log of positions [0, `positions`) under that name, a secret of the
    origin, for as long as nothing else needs the room (worker/parking.py).
    """

    session: SessionId
    parked_as: SessionId | None = None
    positions: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """Something is wrong with `session`, says `hop`. `code` is an error code of errors.py.

    With `blame` None the hop itself cannot go on and has freed the session; else it is well and blames that hop.
    """

    session: SessionId
    epoch: int
    hop: int
    code: str
    detail: str
    blame: int | None = None


@dataclass(frozen=True, slots=True)
class Retract:
    """Steps of `session` under guesses before `guess` were guessed wrong from `position` on, and all before that has been
    computed: drop them uncomputed. It overtakes the step that begins `guess` there. Places of older epochs are freed; after a
    repair `guess` 0 asks for that alone."""

    session: SessionId
    epoch: int
    guess: int
    position: int


@dataclass(frozen=True, slots=True)
class Probe:
    """How far is the session on your hop(s)? Answered by Progress, from each place the receiver has in it."""

    session: SessionId
    epoch: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Hop `hop` has received steps up to position `received` in this epoch and has computed up to `computed`. `guess` is the
    newest under which steps came to it, or by word of the origin."""

    session: SessionId
    epoch: int
    hop: int
    received: int
    computed: int
    guess: int


@dataclass(frozen=True, slots=True)
class Extend:
    """Let the lease of the session's places in this epoch have `capacity` positions. Each answers by Extended."""

    session: SessionId
    epoch: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Extended:
    """The lease of hop `hop` has `capacity` positions now: what Extend asked for, or fewer where there is no room."""

    session: SessionId
    epoch: int
    hop: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Feed:
    """Hop `hop`: send positions [start, until) of your output log to the standby of the next hop, at `to`.

    If the log does not reach as far, nothing is sent.
    """

    session: SessionId
    epoch: int
    hop: int
    to: NodeAddr
    start: int
    until: int


@dataclass(frozen=True, slots=True)
class Ping:
    nonce: int


@dataclass(frozen=True, slots=True)
class Pong:
    nonce: int


@dataclass(frozen=True, slots=True)
class DirectoryUpdate:
    """One message of the directory's back-end (gossip, dht), which alone reads its body. At most 48 KiB."""

    body: bytes


@dataclass(frozen=True, slots=True)
class Reassign:
    """Please serve `span` of this model instead of what you serve. The receiver decides (place/orders.py).

    `request` is the asker's number for it. `is_forced`: even if no other node serves the layers that are left.
    """

    request: int
    model: ModelId
    precision: Precision
    span: Span
    is_forced: bool


@dataclass(frozen=True, slots=True)
class Reassigned:
    """The answer to Reassign `request`: `code` None if the receiver obeys, else of errors.py. `detail`: a line for people."""

    request: int
    code: str | None
    detail: str


_OfSession = Open | Opened | Close | Fault | Retract | Probe | Progress | Extend | Extended | Feed | Attest | Attested
Message = (
    Step
    | Credit
    | Hello
    | _OfSession
    | Ping
    | Pong
    | DirectoryUpdate
    | WeightRequest
    | WeightsChunk
    | WeightsNotFound
    | Reassign
    | Reassigned
)

# What may be sent on a lane after the first Hello.
LANES: dict[Lane, tuple[type, ...]] = {
    "control": (*get_args(_OfSession), Ping, Pong, DirectoryUpdate, Reassign, Reassigned),
    "data": (Step, Credit, Ping, Pong),
    "bulk": (WeightRequest, WeightsChunk, WeightsNotFound, Ping, Pong),
}
