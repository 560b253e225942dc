"""A home and tiny checkpoints for the tests of this folder, and which exactness tests wait for the night."""

import pytest

from tests.checkpoints import home, llama, sharded, tied

__all__ = ["home", "llama", "sharded", "tied"]

# Every family runs in bf16 on the native engine in `make test`. In fp32, and against transformers (as each does on the torch
# engine in tests/engine/test_torch.py, and that against the native one in test_cpu.py), only these; by `model/`, which
# computes on CPUs with AMX alone, only llama. The others nightly.
DAILY = ("[llama-", "-llama-", "gemma2", "gpt_oss", "deepseek_v3")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name == "test_exactness.py" and not any(name in item.name for name in _daily(item.name)):
            item.add_marker(pytest.mark.nightly)


def _daily(test: str) -> tuple[str, ...]:
    """What one of must be part of the name of an exactness test that runs in `make test`; "" is part of any."""
    if "tiles" in test:
        return DAILY[:2]
    return DAILY if "fp32" in test or "transformers" in test else ("",)
