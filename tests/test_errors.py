"""What a group of errors comes down to, and what of one comes to another process."""

import copy
import pickle

from manyhands.api.http.body import BadField
from manyhands.cli.client import GatewayError
from manyhands.errors import Damaged, ManyhandsError, RateLimited, Unanswered, WrongCode, first_of
from manyhands.text.render_budget import TooCostly


def test_the_first_of_a_kind_is_found_however_deep() -> None:
    first, second = OSError("first"), OSError("second")
    group = BaseExceptionGroup("", [KeyError("x"), BaseExceptionGroup("", [ValueError("y"), first]), second])
    assert first_of(group, OSError) is first
    assert first_of(group, TypeError) is None


def test_an_error_comes_whole_to_another_process() -> None:
    """A pool of processes could not read what its worker raised: multiprocessing.Pool waits then for ever."""
    errors: list[ManyhandsError] = [
        GatewayError("full", "busy", 503),
        BadField("x is 1", "x", "invalid_type"),
        Unanswered("no answer", [1]),
        WrongCode("nas", 2),
        Damaged("two tensors", "/m", ("a", "b")),
        RateLimited("later", 7.0),
        TooCostly("it takes more than 2 s"),
    ]
    for error in errors:
        error.node = "n1"
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            for again in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
                assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)
