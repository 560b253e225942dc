"""What a serving process imports before its event loop runs.

An import on a running loop holds it: one second for the API alone, and ten and more on a busy machine, where other nodes then
take this one for frozen. So commands that serve import here what they use later; tests/cli/test_ahead.py finds what lacks.
"""

import importlib

_NODE = (
    "manyhands.cli.connect",
    "manyhands.cli.own_layers",
    "manyhands.member.home",
    "manyhands.member.loadable",
    "manyhands.member.neighbours",
    "manyhands.weights.refetch",
    "manyhands.weights.shelf",
)
_MEMBER = (
    "manyhands.member.hosting",
    "manyhands.member.invite",
    "manyhands.member.models",
    "manyhands.member.providers",
    "manyhands.member.weights",
    "manyhands.api.native.invite",
    "manyhands.swarm.lan",
    "manyhands.swarm.qr",
    "manyhands.weights.fetch",
)
_GATEWAY = (
    "manyhands.api.http.app",
    "manyhands.api.http.server",
    "manyhands.api.log",
    "manyhands.api.native.plan",
    "manyhands.api.native.routes",
    "manyhands.api.native.switch",
    "manyhands.api.routers",
    "manyhands.api.status",
    "manyhands.api.trace",
    "encodings.idna",  # of the first address that is bound
    "pydantic._internal._dataclasses",
    "pydantic.v1",  # fastapi asks it about every model of a route
    "uvicorn.lifespan.off",
)


def import_ahead(*, is_member: bool, has_api: bool) -> None:
    """Import what a node uses, what a member uses beyond that, and what a gateway uses."""
    for name in _NODE + _MEMBER * is_member + _GATEWAY * has_api:
        importlib.import_module(name)
