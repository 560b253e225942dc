"""Tests of this folder have a home and tiny checkpoints (tests/checkpoints.py)."""

from tests.checkpoints import home, llama, sharded, tied

__all__ = ["home", "llama", "sharded", "tied"]
