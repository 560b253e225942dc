"""Structured logs: one JSON object a line, with the ids of request and session. What is asked and answered is never in one.

Every line written while a request is being served carries its id, whichever module wrote it: the id travels in a context
variable, which RequestLog sets when a request starts.
"""

import json
import logging
import re
import sys
from contextvars import ContextVar
from typing import Any, TextIO

from manyhands.api.run import Job, Outcome
from manyhands.origin import Token
from manyhands.origin.repair_plan import Event
from manyhands.plain import one_line

logger = logging.getLogger(__name__)

REQUEST: ContextVar[str | None] = ContextVar("request", default=None)
# Messages begin with ids: "session=1f.. hop=2 layers=0-7 ..."
MAX_LINE_CHARS = 4000
_PAIR = re.compile(r"(\w+)=(\S+)\s*")


class JsonLines(logging.Formatter):
    """A record as one line of JSON: time, level, logger, request, the ids its message begins with, message, error."""

    def format(self, record: logging.LogRecord) -> str:
        message = one_line(record.getMessage(), MAX_LINE_CHARS)
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if (request := REQUEST.get()) is not None:
            line["request"] = request
        end = 0
        while (pair := _PAIR.match(message, end)) is not None:
            line.setdefault(pair[1], None if pair[2] == "None" else pair[2])
            end = pair.end()
        line["message"] = message[end:] or message
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)  # in ASCII: nothing in it ends a line or moves a cursor


def log_json(level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Write what manyhands logs to `stream` (stderr) as JSON lines, from now on."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    ours = logging.getLogger("manyhands")
    ours.handlers[:] = [handler]
    ours.setLevel(level)
    ours.propagate = False


class RequestLog:
    """An observer (run.py): one line when a request starts, one for each event of its route, one when it ends."""

    def started(self, job: Job) -> None:
        REQUEST.set(job.id)
        logger.info("request=%s model=%s api=%s key=%s started", job.id, job.model, job.api, job.key)

    def token(self, job: Job, token: Token) -> None:
        """Not logged."""

    def event(self, job: Job, event: Event) -> None:
        if event.kind == "audit":  # a node lies, or two contradict each other
            logger.warning("request=%s session=%s audit %s", job.id, job.session, event.detail)
        else:
            logger.info("request=%s session=%s %s at token %d", job.id, job.session, event.kind, event.at_token)

    def ended(self, job: Job, outcome: Outcome) -> None:
        logger.info(
            "request=%s session=%s outcome=%s error=%s prompt_tokens=%d tokens=%d ttft_s=%.3f total_s=%.3f ended",
            *(job.id, job.session, outcome, job.error, job.prompt_tokens, job.completion_tokens),
            *(job.timings.ttft_s or 0.0, job.timings.total_s or 0.0),
        )
        REQUEST.set(None)
