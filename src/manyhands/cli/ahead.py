"""What a serving process imports before its event loop runs.

An import on a running loop holds it: one second for the API alone, and ten and more on a busy machine, where other nodes then
take this one for frozen. So commands that serve import here what they use later; tests/cli/test_ahead.py finds what lacks.
"""

import contextlib
import gc
import importlib
import warnings

from manyhands.cli.process import share_heap, uncollected

_NODE = (
    "manyhands.cli.signals",
    "manyhands.cli.tls",
    "manyhands.host_node",
    "manyhands.member.home",
    "manyhands.member.loadable",
    "manyhands.net.own_address",
    "manyhands.origin.sampling",
    "manyhands.weights.refetch",
    "manyhands.weights.shelf",
    "manyhands.worker.execute",
    "manyhands.worker.runner",
    "resource",  # of the listener: how many descriptors there may be
)
# Where tokens are drawn.
_ENDS = ("manyhands.text.prompt", "manyhands.text.tokenizer")
_ORIGIN = ("manyhands.cli.connect", "manyhands.cli.own_layers")
_MEMBER = (
    "manyhands.cli.page",
    "manyhands.member.hosting",
    "manyhands.member.invite",
    "manyhands.member.lan_presence",
    "manyhands.member.models",
    "manyhands.member.providers",
    "manyhands.member.weights",
    "manyhands.api.native.invite",
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
    "encodings.ascii",  # of the first request's head
    "encodings.idna",  # of the first address that is bound
    "uvicorn.lifespan.off",
)
# What libraries import when a route is made, as they do it themselves: where it is there, without its warnings.
_OF_LIBRARIES = ("pydantic._internal._dataclasses", "pydantic.v1")


def import_ahead(
    *, owns_requests: bool, has_ends: bool = False, is_member: bool = False, has_api: bool = False
) -> None:
    """Import what a node that hosts uses, and beyond that what owners of requests, ends, members and gateways use.

    The threads that follow share one heap of the C library. What there is then is hidden from the cyclic collector, which would
    walk all of it on the running loop.
    """
    share_heap()
    with uncollected():
        for name in _NODE + _ENDS * has_ends + _ORIGIN * owns_requests + _MEMBER * is_member + _GATEWAY * has_api:
            importlib.import_module(name)
    with uncollected(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # pydantic.v1 has one on Python 3.14
        for name in _OF_LIBRARIES * has_api:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    gc.freeze()
