"""How a choice looks in chat completions and in completions: whole, and in chunks."""

import asyncio
from collections.abc import Mapping
from typing import Any

from manyhands.api.choice import Choice
from manyhands.api.delta import Delta
from manyhands.api.http.encode import JsonText
from manyhands.api.jobs import drafting_object, timings_object
from manyhands.api.openai.logprobs import ChatOdds, Odds, Spelling, TextOdds
from manyhands.route.search import Offer
from manyhands.text.tools import CallArguments, CallStart, Content

Object = dict[str, Any]


class Form:
    """How one choice looks, whole and in chunks. `chunk_kind`: what a chunk calls itself.

    A stream of it is `begin`, once there is a first delta, `grow` for every delta, and `end`. Most deltas are nothing but text:
    such a chunk is told as that text, and `plain` is what it looks like.
    """

    chunk_kind: str

    def __init__(self, spelling: Spelling | None) -> None:
        self._spelling = spelling

    async def prepare(self) -> None:
        """Whatever must be loaded. Raises BadRequest."""
        if self._spelling is not None:
            await asyncio.to_thread(self._spelling.load)

    def odds(self) -> Odds | None:
        """Where the log probabilities of a text gather; None where none were asked for."""
        raise NotImplementedError

    def choice(self, index: int, choice: Choice, odds: Odds | None) -> Object:
        """The whole choice; `odds` are those of its tokens."""
        raise NotImplementedError

    def plain(self, index: int, text: str) -> Object:
        raise NotImplementedError

    def begin(self, index: int) -> list[Object]:
        return []

    def grow(self, index: int, choice: Choice, delta: Delta) -> list[Object | str]:
        """The chunks of one delta, which `choice` has already."""
        raise NotImplementedError

    def end(self, index: int, choice: Choice) -> Object:
        return {**self.plain(index, ""), "finish_reason": choice.finish_reason, "manyhands": extension(choice)}


class ChatForm(Form):
    chunk_kind = "chat.completion.chunk"

    def odds(self) -> Odds | None:
        return None if self._spelling is None else ChatOdds(self._spelling)

    def choice(self, index: int, choice: Choice, odds: Odds | None) -> Object:
        content = JsonText(choice.content) if choice.content or not choice.calls else None
        message: Object = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = JsonText(choice.reasoning)
        if choice.calls:
            message["tool_calls"] = [_tool_call(call) for call in choice.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": odds.shown() if odds is not None else None,
            "finish_reason": choice.finish_reason,
            "manyhands": extension(choice),
        }

    def plain(self, index: int, text: str) -> Object:
        return self._chunk(index, {"content": text})

    def begin(self, index: int) -> list[Object]:
        return [self._chunk(index, {"role": "assistant", "content": "", "refusal": None})]

    def grow(self, index: int, choice: Choice, delta: Delta) -> list[Object | str]:
        if self._spelling is None and (text := delta.text) is not None:
            return [text] if text else []
        changes = _changes(delta, choice) or ([{}] if self._spelling is not None and delta.token else [])
        out: list[Object | str] = []
        for change in changes:
            odds = self.odds()
            if odds is not None and delta.token is not None and not out:
                odds.add(delta.token, 0)
            out.append(self._chunk(index, change, odds.shown() if odds is not None else None))
        return out

    def end(self, index: int, choice: Choice) -> Object:
        return {**super().end(index, choice), "delta": {}}

    @staticmethod
    def _chunk(index: int, delta: Object, logprobs: Object | None = None) -> Object:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _changes(delta: Delta, choice: Choice) -> list[Object]:
    """The deltas of a chat chunk."""
    out: list[Object] = [{"reasoning_content": delta.reasoning}] if delta.reasoning else []
    for piece in delta.pieces:
        match piece:
            case Content(text):
                out.append({"content": text})
            case CallStart(index, name):
                made = {"index": index, "id": choice.calls[index]["id"], "type": "function"}
                out.append({"tool_calls": [{**made, "function": {"name": name, "arguments": ""}}]})
            case CallArguments(index, text):
                out.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
    return out


def _tool_call(call: Mapping[str, str]) -> Object:
    function = {"name": call["name"], "arguments": JsonText(call["arguments"])}
    return {"id": call["id"], "type": "function", "function": function}


class TextForm(Form):
    chunk_kind = "text_completion"

    def odds(self) -> Odds | None:
        return None if self._spelling is None else TextOdds(self._spelling)

    def choice(self, index: int, choice: Choice, odds: Odds | None) -> Object:
        return {
            "index": index,
            "text": JsonText(choice.content),
            "logprobs": odds.shown() if odds is not None else None,
            "finish_reason": choice.finish_reason,
            "manyhands": extension(choice),
        }

    def plain(self, index: int, text: str) -> Object:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def grow(self, index: int, choice: Choice, delta: Delta) -> list[Object | str]:
        text = delta.text or ""  # neither thoughts nor calls are told apart here
        odds = self.odds()
        if odds is None or delta.token is None:
            return [text] if text else []
        odds.add(delta.token, len(choice.content) - len(text))
        return [{**self.plain(index, text), "logprobs": odds.shown()}]


def extension(choice: Choice) -> Object:
    """What only a swarm can tell of an answer: the object `manyhands`."""
    job = choice.job
    assert job is not None
    return {
        "job": job.id,
        "exactness": job.exactness,
        "route": [_hop(offer) for offer in job.route],
        "hops": [_hop(offer) for offer in job.hops],
        "repairs": [
            {"at_token": r.at_token, "lost": list(r.lost), "ms": round(r.total_s * 1e3, 1)} for r in job.repairs
        ],
        "timings": timings_object(job),
        "drafting": drafting_object(job),
        **({"audit": job.audit.as_object()} if job.audit is not None else {}),
        **({"resumed": job.resumed._asdict()} if job.resumed is not None else {}),
        **({"codec": codec} if (codec := job.routing.loss.as_object()) is not None else {}),
    }


def _hop(offer: Offer) -> Object:
    info = offer.info
    return {"name": offer.name, "node": offer.node, "layers": str(info.span), "arithmetic": info.arithmetic}
