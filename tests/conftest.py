"""For all tests: hypothesis draws the same examples on every run, so that a run that passed passes again.

manyhands is imported before any test imports torch: it sets what OpenMP and MKL read when torch loads.
"""

import os

from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # `make test` runs one of us on each core: a test that wants more threads than its core has says so.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import manyhands  # noqa: F401

# No deadlines: how long an example takes says more of the machine than of the code.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")
