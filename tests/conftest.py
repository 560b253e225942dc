"""For all tests: hypothesis draws the same examples on every run, so that a run that passed passes again; what asks for no
home of its own has one that goes with this process.

manyhands is imported before any test imports torch: it sets what OpenMP and MKL read when torch loads.
"""

import gc
import os
import tempfile

from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # `make test` runs several of us: a test that wants more threads than one says so.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

_home = tempfile.TemporaryDirectory(prefix="manyhands-tests-")
os.environ["MANYHANDS_HOME"] = _home.name  # never the user's, which another run may use at the same time

import manyhands  # noqa: E402, F401

# No deadlines: how long an example takes says more of the machine than of the code.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """What tests import is not garbage: to visit torch takes each full collection a third of a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    _home.cleanup()
