"""Configuration: frozen dataclasses with their defaults, read once at start (CLI > environment > file > default).

Each is a section of `manyhands.toml`; config_file.py is the one reader of it and of the environment.
"""

import math
import os
import re
from dataclasses import dataclass, field, fields
from pathlib import Path

from manyhands.core import MAX_CREDITS, MAX_STEP_IDS, ORIGIN_HOP, NodeAddr, Span
from manyhands.errors import BadRequest
from manyhands.files import own_home

SCOPES = ("off", "lan", "trusted", "public")
DIRECTORIES = ("gossip", "dht", "static")
DRAFTS = ("auto", "off", "suffix", "model")
POLICIES = ("latency", "greedy")
STRATEGIES = ("cover", "measured", "uniform", "capacity")
MAX_HOPS = ORIGIN_HOP  # of a route
REQUEST_SCOPES = ("", "off", "lan", "trusted", "public")  # "": as the node's own scope


def check_draft(text: str) -> str:
    """`text`, which says what guesses tokens: one of DRAFTS, or "model:MODEL". Raises BadRequest."""
    kind, colon, named = text.partition(":")
    if kind not in DRAFTS or (colon and (kind != "model" or not named)):
        raise BadRequest(f"draft is {text!r:.80}; it is one of {', '.join(DRAFTS)}, or model:MODEL")
    return text


def home_from_env() -> Path:
    """Where state lives: see files.own_home. Raises BadRequest where that is not known."""
    return own_home(os.environ)


def physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """How a node serves its spans."""

    # Sessions a span serves at once, and cache positions it leases in all; beyond either it says Busy.
    max_sessions: int = 32
    cache_tokens: int = 65536
    # Bytes of cache of all spans together; the smaller counts. Half of the machine's memory: pages are taken as written, but a
    # lease that could not be filled would be a promise broken in the middle of an answer.
    cache_bytes: int = field(default_factory=lambda: physical_memory() // 2)
    # Rows of one device step: 256 keeps a step of a 1B model near 1 s on two CPU cores, so that no session waits longer.
    prefill_rows: int = 256
    # Prefill rows that may join a step in which another session decodes: they cost about as much again as the decode itself.
    mixed_rows: int = 32
    # Memory for output logs, from which a lost successor is rebuilt (2 x hidden bytes per position and session). 0: none;
    # replay then comes from further upstream, at worst from the origin's token ids.
    log_bytes: int = 256 << 20
    # A span that was not used for so long is dropped from memory and loaded again when asked for. 0: never.
    evict_after_s: float = 0.0
    # The same as soon as no session uses it, while the machine (or its control group) has less memory available. 0: never.
    evict_below_bytes: int = 0
    # How long a node that leaves, or moves to other layers, waits for its sessions to go or end; then it closes them.
    drain_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("max_sessions", "cache_tokens", "cache_bytes", "prefill_rows", "mixed_rows"):
            if getattr(self, name) < 1:
                raise BadRequest(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_sessions >= 1 << 32:  # more than a record and Hello can say
            raise BadRequest(f"max_sessions is {self.max_sessions}; it must be at most {(1 << 32) - 1}")
        for name in ("log_bytes", "evict_below_bytes", "evict_after_s"):
            if not getattr(self, name) >= 0:  # also refuses NaN
                raise BadRequest(f"{name} is {getattr(self, name)}; it must be 0 (none, never) or more")
        if not 0 < self.drain_s < math.inf:
            raise BadRequest(f"drain_s is {self.drain_s}; it must be more than 0 seconds")


@dataclass(frozen=True, slots=True)
class RequestConfig:
    """How an origin runs a request."""

    # For the hops' answers to Open: this and the next two are stretched by up to 7 s where event loops are late.
    open_timeout_s: float = 30.0
    # As open_timeout_s, for hops of a running session that is being repaired.
    reopen_timeout_s: float = 5.0
    # As both, where a node must load layers first that no node holds in memory (serve --can-load).
    load_timeout_s: float = 120.0
    # Repairs without a token between them before the request is given up.
    max_repairs: int = 2
    # How long a repair looks for nodes that cover the lost layers, and a new request waits for room where all are full.
    patience_s: float = 30.0
    # No step comes back for so long: the pipeline has stalled.
    stall_timeout_s: float = 60.0
    # A step counts as overdue after this many times the usual step, but not before step_floor_s (other requests' prefill
    # may be in its way); a step of more than 16 rows after prefill_overdue_s. An overdue step makes the origin ask the hops
    # which one delays it, and replace that one if another node can serve its layers.
    overdue_factor: float = 10.0
    step_floor_s: float = 1.0
    prefill_overdue_s: float = 15.0
    probe_timeout_s: float = 0.5
    # Keep a standby of every hop where a node outside the route can be one: it costs that node a cache and one step in 16
    # tokens, and makes a repair a matter of one short step.
    standby: bool = False
    # The share of answers that are audited, 0 to 1: other nodes compute again what each hop did, and it is compared.
    audit: float = 0.0
    # What guesses tokens, of which the route checks several at once, as far as that pays: "suffix" (text that repeats),
    # "model[:MODEL]" (a small model beside the origin), "auto" (both, where this one has its own), "off". The text is the same.
    draft: str = "auto"
    # Whether a request may begin with what an earlier one of the same key, or of this machine's user, has cached on the hops,
    # and leaves its own caches there for the next one. The text is the same.
    reuse: bool = True
    # How a route is chosen: "latency", the chain with the least time for a token, or "greedy", hop by hop to the lowest queue.
    policy: str = "latency"
    # Whether spans of the origin's own node may be hops of its requests; else they are used for layers that no other has.
    allow_self_as_shard: bool = True
    # Whether a request takes the route of the same key's last one, unless another is 20 % better.
    sticky: bool = False
    # Hops of a route at most. A repair goes beyond it rather than end a stream.
    max_shards_per_request: int = MAX_HOPS
    # The first and the last so many layers are computed on the origin's own node and nowhere else: what other nodes see is
    # then further from the text.
    own_first: int = 0
    own_last: int = 0
    # Whether nodes of exact classes and nodes of class E2 (devices of torch) may be hops of one route, whose answers are E2.
    mix_classes: bool = False
    # The first and the last so many layers are computed there and on nodes of the allow list, and nowhere else.
    trusted_first: int = 0
    trusted_last: int = 0
    # Whether the origin keeps the whole model on disk, and goes on alone where no other node can.
    fallback: bool = False
    # Positions per prefill frame at most: fewer where hops then work at once (route/chunks.py).
    prefill_chunk: int = 256
    # Steps that may be on the way to one hop without having been computed (credits), and bytes of one frame.
    credits: int = 16
    frame_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name in ("credits", "frame_bytes", "prefill_chunk", "max_repairs"):
            if getattr(self, name) < (name != "max_repairs"):
                raise BadRequest(f"{name} is {getattr(self, name)}; it must be at least {int(name != 'max_repairs')}")
        if self.prefill_chunk > MAX_STEP_IDS:
            raise BadRequest(
                f"prefill_chunk is {self.prefill_chunk} positions; a step has at most {MAX_STEP_IDS}: lower it"
            )
        if self.credits > MAX_CREDITS:
            raise BadRequest(f"credits is {self.credits} steps; hops grant at most {MAX_CREDITS}: lower it")
        for name in (each.name for each in fields(self) if each.name.endswith("_s")):
            if not 0 < getattr(self, name) < math.inf:
                raise BadRequest(f"{name} is {getattr(self, name)}; it must be more than 0 seconds")
        if not 0 <= self.audit <= 1:  # also refuses NaN
            raise BadRequest(f"audit is {self.audit}; it is a share of answers, from 0 (none) to 1 (all)")
        check_draft(self.draft)
        if self.policy not in POLICIES:
            raise BadRequest(f"policy is {self.policy!r:.40}; it is one of {', '.join(POLICIES)}")
        if not 1 <= (most := self.max_shards_per_request) <= MAX_HOPS:
            raise BadRequest(f"max_shards_per_request is {most}; it must be from 1 to {MAX_HOPS} hops")
        for name in ("own_first", "own_last", "trusted_first", "trusted_last"):
            if getattr(self, name) < 0:
                raise BadRequest(f"{name} is {getattr(self, name)}; it must be 0 (none) or more layers")
        if not 1 <= self.overdue_factor < math.inf:
            raise BadRequest(f"overdue_factor is {self.overdue_factor}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """What a command takes for the node it starts, where its options say nothing. "" means: as the option's default."""

    name: str = ""
    # The file of this node's key; a key is a node.
    key: str = ""
    listen: str = ""
    advertise: str = ""
    # What this machine may give, as in "6GB".
    memory: str = ""
    # Members that forward to this node (HOST:PORT), or the URL of an iroh relay.
    relay: tuple[str, ...] = ()
    threads: int | None = None
    # What computes here: "cpu"; an NVIDIA GPU, "cuda" or "cuda:1"; or torch on "torch-cpu", "mps" or "xpu".
    device: str = "cpu"
    dtype: str = "auto"
    # What sessions' keys and values are held as: "w8" codes of 8 bit; "auto" as rows are.
    cache_dtype: str = "auto"
    # Complete copies of the model that members aim at before they strengthen the weakest layers.
    max_pipes: int = 2
    # How a member chooses its first layers: "cover", what helps most; "measured", its part of the fastest plan; or its share,
    # "uniform" or by "capacity".
    strategy: str = "cover"
    # Whether a member that serves the first or the last layers holds embedding and head too, for origins that want them there.
    ends: bool = False

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise BadRequest(f"threads is {self.threads}; it must be at least 1, or left out to have it tried")
        if self.strategy not in STRATEGIES:
            raise BadRequest(f"strategy is {self.strategy!r:.40}; it is one of {', '.join(STRATEGIES)}")
        if self.max_pipes < 1:
            raise BadRequest(f"max_pipes is {self.max_pipes}; it must be at least 1 copy of the model")


@dataclass(frozen=True, slots=True)
class Listed:
    """One of swarm.nodes: where a node is, and the layers that it hosts, if it is told which."""

    addr: NodeAddr
    span: Span | None = None

    @classmethod
    def parse(cls, text: str) -> "Listed":
        """Read "HOST:PORT" or "HOST:PORT LAYERS". Raises BadRequest."""
        where, _, layers = text.strip().partition(" ")
        try:
            addr = NodeAddr.parse(where)
            if not 0 < addr.port < 1 << 16:
                raise BadRequest(f"{addr.port} is no port that can be dialled")
            return cls(addr, Span.parse(layers) if layers else None)
        except BadRequest as error:
            raise BadRequest(
                f'nodes has {text!r:.80}; it must be "HOST:PORT" or "HOST:PORT LAYERS" ({error})'
            ) from error


@dataclass(frozen=True, slots=True)
class SwarmConfig:
    """Which swarm, and which of its members to share with (swarm/members.py)."""

    # A password: a file that holds it belongs to its owner alone (chmod 600).
    ticket: str = field(default="", repr=False)
    scope: str = "lan"
    # Ids of nodes, 64 hex digits. `deny` beats everything.
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    # The back-end of a swarm that is founded here. The ticket states it for the others: "" takes that.
    directory: str = ""
    # Nodes to keep links to, "HOST:PORT" or "HOST:PORT LAYERS": the list that directory "static" uses.
    nodes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise BadRequest(f"scope is {self.scope!r}; it must be one of {', '.join(SCOPES)}")
        if self.directory not in ("", *DIRECTORIES):
            raise BadRequest(f"directory is {self.directory!r:.40}; it must be one of {', '.join(DIRECTORIES)}")
        for text in self.nodes:
            Listed.parse(text)
        for name in ("allow", "deny"):
            for node in getattr(self, name):
                if len(node) != 64 or not set(node) <= set("0123456789abcdef"):
                    raise BadRequest(f"{name} has {node!r:.80}, which is not a node id (64 hex digits)")


@dataclass(frozen=True, slots=True)
class BalanceConfig:
    """When the layers of a member move (place/balance.py). All but `obey` should be equal on all nodes of a swarm."""

    # "throughput", or "load", InferD's rule (IN-R06): from a least loaded stage to the most loaded one.
    policy: str = "throughput"
    # The weakest layer that a move touches must get this many times as fast; below it, what is lost while loading is not won
    # back (field.md §4(a)). A layer that no node holds is always reason enough, and at once.
    gain: float = 1.25
    # Periods in a row that a move must look worthwhile, seconds from one move of a node to its next, and of a period.
    patience: int = 2
    cool_down_s: float = 600.0
    period_s: float = 30.0
    # Move when an operator elsewhere in the swarm asks for it (place/orders.py).
    obey: bool = True

    def __post_init__(self) -> None:
        if self.policy not in ("throughput", "load"):
            raise BadRequest(f"policy is {self.policy!r:.40}; it must be throughput or load")
        if not 1 < self.gain < math.inf:
            raise BadRequest(f"gain is {self.gain}; it must be more than 1, as in 1.25")
        if self.patience < 1:
            raise BadRequest(f"patience is {self.patience}; it must be at least 1")
        if not 0 <= self.cool_down_s < math.inf:
            raise BadRequest(f"cool_down_s is {self.cool_down_s}; it must be 0 or more seconds")
        if not 0 < self.period_s < math.inf:
            raise BadRequest(f"period_s is {self.period_s}; it must be more than 0 seconds")


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """The gateway: where this machine opens one, and where commands find one."""

    # For `up`: HOST:PORT, or "off".
    listen: str = ""
    # Let other machines use it although no key is needed.
    insecure: bool = False
    # Origins whose pages may call the gateway from a browser, "https://chat.example.org", or "*"; none unless named.
    cors: tuple[str, ...] = ()
    # Names of the gateway beside this machine's own, as behind a reverse proxy: "llm.example.org", "llm.example.org:8443".
    hosts: tuple[str, ...] = ()
    # Further names of models, ALIAS=MODEL: "gpt-4o=tales"; "*=tales" stands for every name that is not known.
    aliases: tuple[str, ...] = ()
    # Let admins run hidden states through chosen layers: POST /api/process.
    debug: bool = False
    url: str = "http://127.0.0.1:8000"
    key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for origin in self.cors:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#@*]+", origin):
                raise BadRequest(f'cors has {origin!r:.80}; it must be "*" or SCHEME://HOST[:PORT] and no more')
        for alias in self.aliases:
            if not re.fullmatch(r"[^=\s]{1,200}=[^=\s]{1,500}", alias):
                raise BadRequest(f'aliases has {alias!r:.80}; it must be ALIAS=MODEL, as "gpt-4o=tales"')
        for name in self.hosts:
            if not re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:\d{1,5})?", name):
                raise BadRequest(f"hosts has {name!r:.80}; it must be NAME or NAME:PORT, without http:// and path")


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """What a gateway takes on. Seconds and bytes."""

    # Requests that run at once, of all keys. None: as many as the nodes serve; beyond it they would say Busy.
    max_running: int | None = None
    max_queue: int = 256
    # How long a request waits for its turn.
    patience_s: float = 30.0
    # Where a request names none. None: half of what the context leaves, as api/limits.py says.
    default_max_tokens: int | None = None
    # n
    max_choices: int = 16
    # 128,000 tokens of text with every character escaped (6 bytes) have about as much; beyond it send ids, or raise it.
    max_body_bytes: int = 4 << 20
    # For a request's header, and for its body.
    read_timeout_s: float = 30.0
    # A reader that takes nothing for so long is cut.
    write_timeout_s: float = 30.0
    # An SSE comment where there was nothing else for so long.
    keep_alive_s: float = 15.0
    # What a key may use that was made without such a limit of its own (api/limits.py: Quota); where no key is needed, what
    # all callers together may. None: no limit.
    concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None

    def __post_init__(self) -> None:
        for field_ in fields(self):
            name, value = field_.name, getattr(self, field_.name)
            if name.endswith("_s"):
                if not 0 < value <= 1e6:
                    raise BadRequest(f"{name} is {value}; it must be more than 0 and at most 1000000 seconds")
            elif name == "max_queue":
                if value < 0:
                    raise BadRequest(f"max_queue is {value}; it must be 0 (no queue) or more")
            elif value is not None and not 1 <= value <= 1 << 50:
                raise BadRequest(f"{name} is {value}; it must be from 1 to 2^50")
