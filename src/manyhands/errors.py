"""The exception tree. Every error a user can meet is one line: what, where, limit, remedy.

ManyhandsError                code            meaning
├─ BadRequest                 bad_request     the caller asked for something impossible
│  ├─ CutError                bad_request     layers do not cover the model
│  ├─ NoAddress               bad_request     an address cannot be listened at now; later it may be
│  └─ ContextOverflow         bad_request     a prompt fills the context, or a step exceeds the lease
├─ Unauthorized               invalid_api_key no key, or one that is not known
├─ Forbidden                  forbidden       this key may not do that
│  └─ WrongCode               wrong_code      not the code that the other machine shows for joining
├─ NotFound                   not_found       no job, node or path of that name
│  └─ ModelNotFound           model_not_found no model of that name is served
├─ Conflict                   conflict        it would break what runs now
├─ TooLarge                   too_large       a body beyond the limit
├─ RateLimited                rate_limit_exceeded  a quota is used up or the queue is full; `retry_after_s` says until when
├─ ModelError                 bad_model       a checkpoint is missing, corrupt or of an unknown family
│  ├─ Damaged                 bad_model       bytes on disk are not those of the model's manifest
│  └─ DeviceLost              bad_model       a GPU failed, and fails from now on in this process
├─ WeightsMismatch            weights_mismatch  two nodes hold different weights or precision
├─ ShardUnavailable           shard_unavailable no node can serve a needed span (retryable elsewhere)
│  ├─ Busy                    busy            a hop is full; said before it accepts, never after
│  ├─ Draining               draining        a hop would like to leave; it serves on until it is replaced
│  ├─ Apart                  apart           a hop cannot reach the next one; their origin may reach both
│  └─ Detour                 detour          a hop sends through a relay and need not any more; it serves on
├─ ExperimentalDisabled       experimental_disabled  this node is switched off
├─ PipelineStalled            pipeline_stalled  no progress within the deadline
│  └─ Unanswered              pipeline_stalled  hops did not answer Open
├─ PipelineAborted            pipeline_aborted  a running session cannot go on
│  └─ Corruption              pipeline_aborted  a hop sent NaN, Inf or nonsense
├─ StateGone                  state_gone      a hop cannot go back to a position; its origin has it computed anew
├─ ProtocolError              protocol_error  a peer sent bytes that mean nothing; its link is closed
├─ LinkClosed                 link_closed     a link is gone
├─ TicketError                bad_ticket      a ticket cannot be read or does not fit
└─ DiskFull                   disk_full       no room for a download
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

_E = TypeVar("_E", bound=BaseException)


class ManyhandsError(Exception):
    """Base of all errors of this package. `code` goes over the wire and into JSON; `http_status` into HTTP answers;
    `api_code`, where there is one, stands there in place of `code`: OpenAI's word for what others call by a wider one.

    `node` is the id of the node that said no, where one did: others may be asked. `told_by`: of the one that said so of it.
    `may_pass`: what its record says it can do it could not now, so its record or it will change.
    """

    code = "internal"
    api_code: str | None = None
    http_status = 500
    node: str | None = None
    told_by: str | None = None
    may_pass = False

    def __reduce__(self) -> tuple[Any, ...]:
        """What it says, for another process: `__init__` of some takes other arguments than it says."""
        return _made_again, (type(self), self.args), self.__dict__


def _made_again(kind: type[_E], args: tuple[Any, ...]) -> _E:
    return kind.__new__(kind, *args)


class BadRequest(ManyhandsError):
    code = "bad_request"
    http_status = 400


class CutError(BadRequest):
    pass


class NoAddress(BadRequest):
    """An address that is in use, or that this machine does not have, as before its network is up."""

    http_status = 503


class ContextOverflow(BadRequest):
    api_code = "context_length_exceeded"

    @classmethod
    def of(cls, what: str, context: int, remedy: str = "shorten it") -> "ContextOverflow":
        """`what` is too much for `context` tokens. Client libraries tell this error by OpenAI's words for it."""
        return cls(f"{what}; this model's maximum context length is {context} tokens: {remedy}")


class Unauthorized(ManyhandsError):
    code = "invalid_api_key"
    http_status = 401


class Forbidden(ManyhandsError):
    code = "forbidden"
    http_status = 403


class WrongCode(Forbidden):
    """The code was not that of the machine at `host`, which bears `tries_left` further wrong ones."""

    code = "wrong_code"

    def __init__(self, host: str, tries_left: int) -> None:
        left = {0: "it is used up now: show a new one there (manyhands code)", 1: "1 try is left"}
        super().__init__(
            f"that is not the code shown at {host}; {left.get(tries_left, f'{tries_left} tries are left')}"
        )
        self.tries_left = tries_left


class NotFound(ManyhandsError):
    code = "not_found"
    http_status = 404


class ModelNotFound(NotFound):
    """`model`: the name that was asked for, where loading it may help."""

    code = "model_not_found"
    param = "model"

    def __init__(self, message: str, model: str = "") -> None:
        super().__init__(message)
        self.model = model


class Conflict(ManyhandsError):
    code = "conflict"
    http_status = 409


class TooLarge(ManyhandsError):
    code = "too_large"
    http_status = 413


class RateLimited(ManyhandsError):
    """Try again in `retry_after_s` seconds."""

    code = "rate_limit_exceeded"
    http_status = 429

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelError(ManyhandsError):
    code = "bad_model"
    http_status = 400


class Damaged(ModelError):
    """`names`: the tensors and small files of `folder` (a path) that are not as the model's manifest has them."""

    def __init__(self, message: str, folder: str, names: tuple[str, ...]) -> None:
        super().__init__(message)
        self.folder, self.names = folder, names


class DeviceLost(ModelError):
    pass


class WeightsMismatch(ManyhandsError):
    code = "weights_mismatch"
    http_status = 409


class ShardUnavailable(ManyhandsError):
    code = "shard_unavailable"
    http_status = 503


class Busy(ShardUnavailable):
    code = "busy"


class Draining(ShardUnavailable):
    code = "draining"


class Apart(ShardUnavailable):
    code = "apart"


class Detour(ShardUnavailable):
    code = "detour"


class ExperimentalDisabled(ManyhandsError):
    """This node is switched off (HN-39)."""

    code = "experimental_disabled"
    http_status = 503


class PipelineStalled(ManyhandsError):
    code = "pipeline_stalled"
    http_status = 504


class Unanswered(PipelineStalled):
    """`hops`: the indices of those that did not answer Open."""

    def __init__(self, message: str, hops: Sequence[int]) -> None:
        super().__init__(message)
        self.hops = tuple(hops)


class PipelineAborted(ManyhandsError):
    code = "pipeline_aborted"
    http_status = 503


class Corruption(PipelineAborted):
    pass


class StateGone(ManyhandsError):
    """What a session keeps of a model with states does not reach back so far (engine/states.py)."""

    code = "state_gone"
    http_status = 503


class AnsweredEarly(ManyhandsError):
    """Rows of positions came back to the origin that a hop on their way has not computed: one behind it made them up."""

    code = "answered_early"
    http_status = 502


class ProtocolError(ManyhandsError):
    code = "protocol_error"
    http_status = 502


class LinkClosed(ManyhandsError):
    """`answered`: by host and port, the nodes that have proven their keys where another node was meant."""

    code = "link_closed"
    http_status = 502

    def __init__(self, said: str, answered: Mapping[tuple[str, int], str] | None = None) -> None:
        super().__init__(said)
        self.answered = answered or {}


class TicketError(ManyhandsError):
    code = "bad_ticket"
    http_status = 400


class DiskFull(ManyhandsError):
    code = "disk_full"
    http_status = 507


def first_of(group: BaseExceptionGroup[BaseException], kind: type[_E]) -> _E | None:
    """The first exception of `kind` in a group, however deep: what a TaskGroup ends with, as one error to raise.

    For `except BaseExceptionGroup`: what is raised within `except*` may come out in a group of its own.
    """
    for error in group.exceptions:
        if isinstance(error, kind):
            return error
        if isinstance(error, BaseExceptionGroup) and (found := first_of(error, kind)) is not None:
            return found
    return None
