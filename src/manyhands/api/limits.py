"""Who may run now. Pure: time is an argument, jobs are ids; gateway.py does the waiting.

A request runs at once, waits in the one bounded queue, or is refused with the seconds after which to try again. The
queue is fair by key: the key with the fewest running goes next, among those the longest waiting; where it is full, a
request takes the place of the newest of the key that has the most waiting, if its own has fewer. What a request may use
at most (prompt + max_tokens) is taken from its key's buckets when it is asked for; what it did not use comes back.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from manyhands.config import LimitsConfig
from manyhands.errors import BadRequest, RateLimited

# max_tokens of a request that names none, where what it may use is charged to a limit of tokens.
CHARGED_TOKENS = 1024
# Requests at once where it is not known how many the nodes serve.
MAX_RUNNING = 64


@dataclass(frozen=True, slots=True)
class Quota:
    """What one key may use; None: no limit of its own."""

    concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not 1 <= value <= 1 << 50:
                raise BadRequest(f"{name} is {value}; it must be at least 1, or left out for no limit")

    def within(self, limits: LimitsConfig) -> "Quota":
        """This quota, and the gateway's where it says nothing."""
        own = {name: getattr(self, name) for name in self.__slots__}
        return Quota(**{name: getattr(limits, name) if value is None else value for name, value in own.items()})


NO_QUOTA = Quota()


def default_tokens(limits: LimitsConfig, quota: Quota) -> int | None:
    """max_tokens of a request that names none, of a key with `quota`. None: half of what the context leaves.

    Of a key with a limit of tokens that is CHARGED_TOKENS, or a quarter of the limit: what a request may use is taken from it
    when the request comes.
    """
    own = quota.within(limits)
    charged = [limit for limit in (own.tokens_per_minute, own.tokens_per_day) if limit is not None]
    if limits.default_max_tokens is not None or not charged:
        return limits.default_max_tokens
    return min(CHARGED_TOKENS, max(1, min(charged) // 4))


class Bucket:
    """A token bucket: holds `capacity`, refilled evenly over `period_s`; starts full."""

    def __init__(self, capacity: int, period_s: float, now: float) -> None:
        self.capacity, self._rate = capacity, capacity / period_s
        self._level, self._at = float(capacity), now

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until `amount` is there; 0 if it is, inf if it never will be."""
        self._level, self._at = min(self.capacity, self._level + (now - self._at) * self._rate), now
        if amount > self.capacity:
            return math.inf
        return max(0.0, (amount - self._level) / self._rate)

    def take(self, amount: int) -> None:
        self._level -= amount

    def used(self, now: float) -> int:
        """What is not there now, rounded."""
        return round(self.capacity - min(self.capacity, self._level + (now - self._at) * self._rate))

    def give_back(self, amount: int) -> None:
        self._level = min(self.capacity, self._level + amount)


class _Account:
    """One key's buckets, and how many of its requests run; without a key those of all callers that show none."""

    def __init__(self, key: str | None, asked: Quota, limits: LimitsConfig, now: float) -> None:
        self._of = "of callers without a key" if key is None else "of this key"
        self.asked, self.quota = asked, (quota := asked.within(limits))
        self.running = 0
        self._requests = _bucket(quota.requests_per_minute, 60.0, now)
        self._tokens = {
            name: bucket
            for name, bucket in (
                ("tokens_per_minute", _bucket(quota.tokens_per_minute, 60.0, now)),
                ("tokens_per_day", _bucket(quota.tokens_per_day, 86400.0, now)),
            )
            if bucket is not None
        }

    @property
    def has_room(self) -> bool:
        return self.quota.concurrency is None or self.running < self.quota.concurrency

    def take(self, requests: int, tokens: int, now: float) -> None:
        """Take so many requests and tokens, or nothing. Raises RateLimited naming the limit."""
        wants = [(name, bucket, tokens) for name, bucket in self._tokens.items()]
        if self._requests is not None and requests:
            wants.append(("requests_per_minute", self._requests, requests))
        for name, bucket, amount in wants:
            wait_s = bucket.wait_s(amount, now)
            if wait_s == math.inf:
                limit = f"{name} {self._of} is {bucket.capacity}, and this request may use {amount}"
                raise RateLimited(f"{limit}: lower max_tokens", 60.0)
            if wait_s > 0:
                raise RateLimited(f"{name} {self._of} ({bucket.capacity}) is used up: wait {wait_s:.0f} s", wait_s)
        for _, bucket, amount in wants:
            bucket.take(amount)

    def give_back(self, tokens: int) -> None:
        for bucket in self._tokens.values():
            bucket.give_back(tokens)

    def use(self, now: float) -> dict[str, int]:
        """What runs, and what is used of each limit that there is."""
        buckets = {**self._tokens} | ({} if self._requests is None else {"requests_per_minute": self._requests})
        return {"running": self.running} | {name: bucket.used(now) for name, bucket in buckets.items()}


def _bucket(capacity: int | None, period_s: float, now: float) -> Bucket | None:
    return None if capacity is None else Bucket(capacity, period_s, now)


@dataclass(slots=True)
class _Entry:
    key: str | None
    reserved: int
    began: float


@dataclass(slots=True)
class Admission:
    """The queue and the accounts. `start` is told the ids of jobs whose turn has come, within `ask` or `leave`; `drop` of those
    that wait no longer because another key's took their place, and why, within `ask`."""

    limits: LimitsConfig
    start: Callable[[str], None]
    drop: Callable[[str, RateLimited], None]
    running: dict[str, _Entry] = field(default_factory=dict)
    waiting: dict[str, _Entry] = field(default_factory=dict)  # in order of arrival
    _accounts: dict[str | None, _Account] = field(default_factory=dict)
    _usual_s: float = 5.0  # how long a job runs, smoothed

    @property
    def max_running(self) -> int:
        return self.limits.max_running or MAX_RUNNING

    def enter(self, key: str | None, quota: Quota, now: float) -> None:
        """Charge a request before any work on it: `ask` then says that it is paid, and a refused one stays charged.

        Raises RateLimited as `ask` does.
        """
        self._account(key, quota, now).take(1, 0, now)

    def ask(self, job: str, key: str | None, quota: Quota, tokens: int, now: float, *, is_paid: bool = False) -> None:
        """Let `job` run or wait. Raises RateLimited if the key's quota is used up or the queue is full."""
        account = self._account(key, quota, now)
        account.take(0 if is_paid else 1, tokens, now)
        if self._is_full_for(account) and (loser := self._displaced_by(key)) is not None:
            self.drop(loser, self._full())
            self.leave(loser, 0, now)
        self.waiting[job] = _Entry(key, tokens, now)
        self._fill(now)

    def _is_full_for(self, account: _Account) -> bool:
        """Whether a request of that account would have to wait, and there is no place to wait."""
        is_free = len(self.running) < self.max_running and account.has_room
        return not is_free and len(self.waiting) >= self.limits.max_queue

    def _displaced_by(self, key: str | None) -> str | None:
        """The newest job of the key that has the most waiting, if `key` has fewer even with one more; else None."""
        counts = Counter(entry.key for entry in self.waiting.values())
        newest = {entry.key: job for job, entry in self.waiting.items()}
        most = max(counts, key=lambda each: counts[each], default=key)
        return newest[most] if counts[most] > counts[key] + 1 else None

    def _full(self) -> RateLimited:
        said = (
            f"{len(self.running)} requests are running and {len(self.waiting)} wait (max_queue {self.limits.max_queue})"
        )
        return RateLimited(f"{said}: try again later", self.retry_after_s())

    def _account(self, key: str | None, quota: Quota, now: float) -> _Account:
        """The key's account. Raises RateLimited if it must wait and the queue is full, with no place to take."""
        account = self._accounts.get(key)
        if account is None or account.asked != quota:
            fresh = _Account(key, quota, self.limits, now)
            fresh.running = account.running if account else 0
            account = self._accounts[key] = fresh
        if self._is_full_for(account) and self._displaced_by(key) is None:
            raise self._full()
        return account

    def leave(self, job: str, used_tokens: int, now: float) -> None:
        """`job` has ended, or waits no longer. Harmless when repeated."""
        entry = self.running.pop(job, None)
        if entry is not None:
            self._accounts[entry.key].running -= 1
            self._usual_s += 0.1 * (now - entry.began - self._usual_s)
        else:
            entry = self.waiting.pop(job, None)
        if entry is not None:
            self._accounts[entry.key].give_back(max(0, entry.reserved - used_tokens))
        self._fill(now)

    def use_of(self, key: str, now: float) -> dict[str, int] | None:
        """What of a key's quotas is used now, and `running`; None if it has asked for nothing yet."""
        account = self._accounts.get(key)
        return None if account is None else account.use(now)

    def retry_after_s(self) -> float:
        """About when the queue will have moved by one place."""
        return max(1.0, self._usual_s * (1 + len(self.waiting)) / self.max_running)

    def _fill(self, now: float) -> None:
        while len(self.running) < self.max_running and (job := self._next()) is not None:
            entry = self.waiting.pop(job)
            entry.began = now
            self.running[job] = entry
            self._accounts[entry.key].running += 1
            self.start(job)

    def _next(self) -> str | None:
        ready = [job for job, entry in self.waiting.items() if self._accounts[entry.key].has_room]
        return min(ready, key=lambda job: self._accounts[self.waiting[job].key].running, default=None)
