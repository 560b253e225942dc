"""What a consumer sees of an answer: its tokens as they come, and all that is known of it."""

from dataclasses import dataclass, field

from manyhands.core import Exactness, FinishReason, Precision, SamplingParams
from manyhands.origin.audit import Audit
from manyhands.origin.draft import Drafting
from manyhands.origin.repair_plan import Event, Repair
from manyhands.origin.request_routes import Routing
from manyhands.origin.session import Session
from manyhands.route.search import Offer


@dataclass(frozen=True, slots=True)
class Token:
    """One committed token: the text it released (often of several tokens at once, sometimes none) and its odds."""

    id: int
    text: str
    logprob: float | None
    top: tuple[tuple[int, float], ...] | None


@dataclass(slots=True)
class Timings:
    """Seconds; None until known. `open_s`: finding a route and opening it. `ttft_s`: request to first token."""

    open_s: float | None = None
    ttft_s: float | None = None
    total_s: float | None = None
    first_at: float | None = None
    last_at: float | None = None

    def decode_tokens_per_s(self, num_tokens: int) -> float | None:
        """Tokens after the first, over the time since the first."""
        if self.first_at is None or self.last_at is None or num_tokens < 2 or self.last_at <= self.first_at:
            return None
        return (num_tokens - 1) / (self.last_at - self.first_at)


@dataclass(slots=True)
class Answer:
    """One request's answer, filled in as it grows.

    `route` is the first one; `session` (once open) has the present one, also after the answer has ended.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    precision: Precision
    route: tuple[Offer, ...] = ()
    session: Session | None = field(default=None, repr=False)
    exactness: Exactness = "E0"
    cached_tokens: int = 0  # of the prompt, that did not have to be computed; known with the first token
    redrawn: int = 0  # tokens that an earlier attempt had drawn, of which the hops had kept the rows
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    repairs: list[Repair] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stopped_by: str | None = None  # the stop string that ended the text, if one did
    timings: Timings = field(default_factory=Timings)
    drafting: Drafting = field(default_factory=Drafting)
    routing: Routing = field(default_factory=Routing)
    audit: Audit | None = None  # None: none was made
