"""Which exactness tests wait for the night."""

import pytest

# Every family runs in bf16 in `make test`. In fp32, and against transformers (as each does on the torch engine in
# tests/engine/test_torch.py, and that against the native one in test_cpu.py), only these do; the others nightly.
DAILY = ("[llama-", "-llama-", "gemma2", "gpt_oss", "deepseek_v3")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_repeat = "fp32" in item.name or "transformers" in item.name
        if item.path.name == "test_exactness.py" and is_repeat and not any(name in item.name for name in DAILY):
            item.add_marker(pytest.mark.nightly)
