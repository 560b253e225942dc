"""HearthNet's names of what a gateway can do (HN-R01): capabilities of its bus, topics of its event log. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

CHAT: Final = "experimental.distributed_llm.chat"
ADVERTISE: Final = "experimental.distributed_llm.shard.advertise"
SERVE: Final = "experimental.distributed_llm.shard.serve"
# What nodes do among themselves and not over HTTP, where they prove who they are, and how.
ELSEWHERE: Final[Mapping[str, str]] = {
    ADVERTISE: "nodes advertise spans by signed records, which GET /api/swarm shows; `manyhands join` makes one",
    SERVE: "hops are opened over the peer protocol (docs/protocol.md), by members of the swarm",
}


def capabilities(models: Sequence[str], *, is_on: bool) -> list[dict[str, Any]]:
    """The list of GET /bus/v1/capabilities. `is_on`: the node takes requests (its policy.research.enable)."""
    chat = {"path": "/bus/v1/call", "params": {"model": next(iter(models), None), "models": list(models)}}
    return [
        _entry(CHAT, stream=True, trust="member", is_on=is_on) | chat,
        _entry(ADVERTISE, stream=False, trust="trusted", is_on=is_on) | {"instead": ELSEWHERE[ADVERTISE]},
        _entry(SERVE, stream=True, trust="trusted", is_on=is_on) | {"instead": ELSEWHERE[SERVE]},
    ]


def _entry(name: str, *, stream: bool, trust: str, is_on: bool) -> dict[str, Any]:
    return {
        "name": name,
        "version": "1.0",
        "stability": "experimental",
        "stream": stream,
        "trust_required": trust,
        "local": True,
        "enabled": is_on,
    }
