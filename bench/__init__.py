"""One script a question. manyhands is imported first: it sets what OpenMP and MKL read when torch loads."""

import manyhands  # noqa: F401
