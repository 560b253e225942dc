"""How the answers of a chat are drawn: as the command line says, else as the model's publisher recommends, else by defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from manyhands.core import MAX_TOKENS, RECOMMENDED, PathKind, SamplingParams
from manyhands.errors import BadRequest


@dataclass(frozen=True, slots=True)
class ChatWishes:
    """`params` with the command's defaults, and which of their fields (`given`) stand on the command line itself."""

    params: SamplingParams
    given: frozenset[str] = frozenset()

    def params_for(self, recommended: Mapping[str, Any]) -> SamplingParams:
        """For a model of which this is recommended. All of it is passed over if it holds what no request could ask for."""
        told = {name: recommended[name] for name in RECOMMENDED if name in recommended and name not in self.given}
        try:
            return replace(self.params, **told)
        except BadRequest:
            return self.params


def openai_fields(params: SamplingParams, path: PathKind, draft: str) -> dict[str, Any]:
    """Sampling parameters as the OpenAI API has them, and ours in their namespace. MAX_TOKENS are no limit."""
    if params.deterministic:  # OpenAI's API has no word for it; without processors, greedy is the same
        params = SamplingParams(max_tokens=params.max_tokens, seed=params.seed, stop=params.stop)
    ours: dict[str, Any] = {"path": path, "top_k": params.top_k, "min_p": params.min_p}
    ours |= {"draft": draft} if draft else {}
    return {
        **({"max_completion_tokens": params.max_tokens} if params.max_tokens < MAX_TOKENS else {}),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed,
        **({"stop": list(params.stop)} if params.stop else {}),
        "stream_options": {"include_usage": True},
        "manyhands": {**ours, "repetition_penalty": params.repetition_penalty},
    }
