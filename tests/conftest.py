"""For all tests: hypothesis draws the same examples on every run, so that a run that passed passes again.

manyhands is imported before any test imports torch: it sets what OpenMP and MKL read when torch loads.
"""

from hypothesis import settings

import manyhands  # noqa: F401

settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
