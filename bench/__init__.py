"""One script a question. manyhands is imported first: it sets what OpenMP and MKL read when torch loads."""

import os
from pathlib import Path

import manyhands  # noqa: F401

# For node processes of modules of this package: they look for none in the folder that they are started in.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
