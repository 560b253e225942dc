"""One example of every message, and hypothesis strategies for Steps."""

from hypothesis import strategies as st

from manyhands.core import ModelId, NodeAddr, NodeId, SamplingParams, SessionId, Span, SpanInfo
from manyhands.wire.attest_message import Attest, Attested, Root
from manyhands.wire.message import (
    ITEMSIZE,
    MAX_DIRECTORY_BYTES,
    PROTOCOL_VERSION,
    Close,
    Credit,
    DirectoryUpdate,
    DType,
    Extend,
    Extended,
    Fault,
    Feed,
    Hello,
    Lane,
    Message,
    Open,
    Opened,
    Payload,
    Ping,
    Pong,
    Probe,
    Progress,
    Reassign,
    Reassigned,
    Retract,
    Step,
    Token,
)
from manyhands.wire.rounding import Rounding
from manyhands.wire.signed import UNSIGNED
from manyhands.wire.weights_message import MAX_CHUNK_BYTES, WeightRequest, WeightsChunk, WeightsNotFound

NODE = NodeId("ab" * 32)
TOKEN = Token("0123456789abcdef" * 2)
MODEL = ModelId("cd" * 32)
SESSION = SessionId(bytes(range(16)))
SPAN_INFO = SpanInfo(MODEL, "tiny", Span(0, 8), 24, "bf16", "avx512", 64, 4096, False, 100_000, 8)


def hello(lane: Lane) -> Hello:
    return Hello(PROTOCOL_VERSION, lane, "näme", NodeAddr("::1", 4000, NODE), (SPAN_INFO, SPAN_INFO), TOKEN)


def step(count: int = 2, width: int = 3) -> Step:
    payload = Payload("bf16", width, bytes(i % 256 for i in range(2 * count * width)))
    return Step(SESSION, 7, 255, 100, count, 101, 3, "hidden", None, payload)


SAMPLING = SamplingParams(seed=(1 << 64) - 1, logit_bias=((5, -1.5),), stop=("\n", "ende"), stop_ids=(2,), logprobs=3)
CONTROL: list[Message] = [
    hello("control"),
    Hello(PROTOCOL_VERSION, "control", "", None, (), TOKEN),
    Open(
        session=SESSION,
        epoch=1,
        hop=0,
        num_hops=3,
        model=MODEL,
        precision="bf16",
        span=Span(0, 8),
        capacity=4096,
        prompt_length=12,
        path="ring",
        ends="edges",
        predecessor=NODE,
        successor=NodeAddr("example.org", 7000),
        sampling=SAMPLING,
        credits=16,
        replay_from=0,
        replay_until=0,
        emit_from=0,
        origin=NODE,
        to=NODE,
        token=TOKEN,
        serial=(1 << 64) - 1,
        signature=UNSIGNED,
        resume=SessionId(bytes(range(16))),
        resume_until=4095,
        attests=True,
        rounding=Rounding(((0, 12), (13, (1 << 32) - 1)), if_slow=True),
    ),
    Opened(SESSION, 1, 0, "avx512-bf16", True, rounds=True),
    Opened(SESSION, 1, 0, "avx512-bf16", False, cached=(1 << 32) - 1),
    Close(SESSION),
    Close(SESSION, parked_as=SessionId(bytes(range(16))), positions=17),
    Fault(SESSION, 1, 2, "shard_unavailable", "full: 8 sessions"),
    Fault(SESSION, 1, 2, "pipeline_aborted", "NaN \u00fc at 7", blame=1),
    Retract(SESSION, 3, (1 << 32) - 1, 1 << 20),
    Probe(SESSION, 3),
    Progress(SESSION, 3, 2, 1 << 20, 0, 7),
    Extend(SESSION, 3, (1 << 32) - 1),
    Extended(SESSION, 3, 2, 4096),
    Feed(SESSION, 3, 2, NodeAddr("::1", 7000, NODE), 17, (1 << 32) - 1),
    Attest(SESSION, 3, 2, 17, (1 << 32) - 1),
    Attested(SESSION, 3, 2, 0, 4096, MODEL, "w4", Span(2, 4), Root("ef" * 32), None, UNSIGNED),
    Ping((1 << 64) - 1),
    Pong(0),
    WeightRequest(7, MODEL, "tensor", "model.layers.3.näme", (1 << 64) - 1, MAX_CHUNK_BYTES),
    WeightRequest(0, MODEL, "file", "config.json", 0, 1),
    WeightsNotFound((1 << 32) - 1, "bad_model"),
    Reassign(3, MODEL, "w8", Span(0, 1), is_forced=True),
    Reassigned((1 << 32) - 1, None, "moves to layers 0-0"),
    Reassigned(0, "conflict", "n\u00f6"),
]
RAW: list[Message] = [  # bodies that are bytes and not JSON
    DirectoryUpdate(b""),
    DirectoryUpdate(bytes(range(256))),
    WeightsChunk(7, (1 << 64) - 1, b"weights"),
    WeightsChunk(0, 0, b""),
]
LARGEST: list[Message] = [DirectoryUpdate(bytes(MAX_DIRECTORY_BYTES)), WeightsChunk(1, 2, bytes(MAX_CHUNK_BYTES))]
STEPS: list[Message] = [  # what the data lane carries
    step(),
    Step(SESSION, 0, 0, 0, 0, 0, 0, "hidden", None, None),
    Step(SESSION, 0, 0, 0, 0, 0, 0, "hidden", (), None),
    Step(SESSION, (1 << 32) - 1, 1, 5, 3, 0, 1, "hidden", (1, 0, (1 << 32) - 1), None),
    Step(SESSION, 1, 1, 5, 1, 0, 1, "ids", (9,), Payload("int32", 1, b"\1\0\0\0")),
    Step(SESSION, 1, 1, 5, 1, 0, 1, "logits", None, Payload("fp32", 2, bytes(8))),
    Credit(SESSION, 7, 3, 16),
]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Any legal Step of at most 4 rows."""
    u32 = st.integers(0, (1 << 32) - 1)
    count = draw(st.integers(0, 4))
    ids = draw(st.none() | st.lists(u32, min_size=count, max_size=count).map(tuple))
    payload = None
    if count and (ids is None or draw(st.booleans())):
        dtype: DType = draw(st.sampled_from(list(ITEMSIZE)))
        width = draw(st.integers(1, 9))
        size = count * width * ITEMSIZE[dtype]
        payload = Payload(dtype, width, draw(st.binary(min_size=size, max_size=size)))
    return Step(
        session=SessionId(draw(st.binary(min_size=16, max_size=16))),
        epoch=draw(u32),
        hop=draw(st.integers(0, 255)),
        position=draw(st.integers(0, (1 << 32) - 5)),
        count=count,
        reply_from=draw(u32),
        guess=draw(u32),
        content=draw(st.sampled_from(["hidden", "ids", "logits"])),
        ids=ids,
        payload=payload,
        committed=draw(u32),
    )
