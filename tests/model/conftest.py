"""A home and tiny checkpoints for the tests of this folder, and which exactness tests wait for the night."""

import pytest

from tests.checkpoints import home, llama, sharded, tied

__all__ = ["home", "llama", "sharded", "tied"]

# Every family runs in bf16 on the native engine in `make test`; in fp32 and by `model/` only these do, the others nightly.
DAILY = ("[llama-", "-llama-", "gemma2", "gpt_oss", "deepseek_v3")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name == "test_exactness.py" and not any(name in item.name for name in DAILY):
            if "tiles" in item.name or "fp32" in item.name:
                item.add_marker(pytest.mark.nightly)
