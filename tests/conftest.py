"""For all tests: hypothesis draws the same examples on every run, so that a run that passed passes again."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
