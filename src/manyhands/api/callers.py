"""Callers as metrics and jobs show them: a salted hash of the key (HN-34, F49), of a bounded number of callers.

    key's SHA-256 ─ HMAC with the swarm's secret ─► 12 hex digits        "local": this machine's user · "none": no key is needed

All gateways of a swarm have one secret, so a key has one name at all of them, and a key that is made anew has another. The name
does not lead to the key, which has 256 random bits. GET /api/keys lists for admins the name of each key.
"""

import hmac
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from manyhands.api.access import LOCAL
from manyhands.api.event_id import derive
from manyhands.api.run import Job, Outcome

# As many as keys that can be made over HTTP (keys.py), each with 6 series.
MAX_CALLERS: Final = 256
NO_KEY: Final = "none"
OTHERS: Final = "other"
DIGITS: Final = 12


class CallerNames:
    """Names of callers. `secret`: the same on all gateways of a swarm; None: names of this process alone."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._salt = derive(secret or os.urandom(32), "callers 1")

    def of(self, tenant: str | None) -> str:
        """The name of a caller by its `tenant` (auth.py:Caller): a key's hash, this machine's user, or none."""
        if tenant is None or tenant == LOCAL:
            return tenant or NO_KEY
        return hmac.new(self._salt, tenant.encode(), "sha256").hexdigest()[:DIGITS]


@dataclass(slots=True)
class _Use:
    """What a caller has had of this gateway."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    requests: dict[Outcome, int] = field(default_factory=dict)


class CallerCounts(Collector):
    """Requests and tokens by caller. The first MAX_CALLERS are counted apart, further ones as OTHERS."""

    def __init__(self, max_callers: int = MAX_CALLERS) -> None:
        self._uses: dict[str, _Use] = {}
        self._max_callers = max_callers

    def ended(self, job: Job, outcome: Outcome) -> None:
        """A request is over, or was refused. Its tokens count as its quota was charged: not what an earlier attempt paid."""
        use = self._use(job.caller)
        use.requests[outcome] = use.requests.get(outcome, 0) + 1
        if job.queue_s is not None:
            paid = min(job.paid_tokens, job.prompt_tokens)
            use.prompt_tokens += job.prompt_tokens - paid
            use.completion_tokens += max(0, job.completion_tokens - (job.paid_tokens - paid))

    def _use(self, name: str) -> _Use:
        if name not in self._uses and len(self._uses) >= self._max_callers:
            name = OTHERS
        return self._uses.setdefault(name, _Use())

    def describe(self) -> list[Metric]:
        """Nothing: so that registering does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "manyhands_caller_requests", "Requests that ended, by caller", labels=("caller", "outcome")
        )
        tokens = CounterMetricFamily(
            "manyhands_caller_tokens", "Tokens read and written by requests that ended", labels=("caller", "kind")
        )
        for name, use in self._uses.items():
            for outcome, count in use.requests.items():
                requests.add_metric((name, outcome), count)
            tokens.add_metric((name, "prompt"), use.prompt_tokens)
            tokens.add_metric((name, "completion"), use.completion_tokens)
        yield from (requests, tokens)
