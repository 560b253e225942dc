"""For all tests: hypothesis draws the same examples on every run, so that a run that passed passes again.

manyhands is imported before any test imports torch: it sets what OpenMP and MKL read when torch loads.
"""

from hypothesis import HealthCheck, settings

import manyhands  # noqa: F401

# No deadlines: how long an example takes says more of the machine than of the code.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")
