"""manyhands.model.prove: a machine that mixes rows is found out, once, and never called exact."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from manyhands.core import UNPROVEN, Precision
from manyhands.model import prove
from manyhands.model.arithmetic import arithmetic_class
from manyhands.model.attention import attention
from manyhands.model.linear import pack
from manyhands.model.prove import keeps_rows_apart, proven_class


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_this_machine_keeps_rows_apart(precision: Precision) -> None:
    """If this fails, this CPU computes rows together in a way we do not know yet: docs/exactness.md."""
    assert keeps_rows_apart(precision)


def _mixing(weight_NK: Tensor, bias_N: Tensor | None) -> Callable[[Tensor], Tensor]:
    """A product whose last bit depends on how many rows there are, as kernels that cut the sum have it."""
    product = pack(weight_NK, bias_N)
    return lambda x_MK: product(x_MK) * (1 + 2**-7 if x_MK.shape[0] >= 32 else 1)


def test_a_product_that_mixes_rows_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "pack", _mixing)
    before = torch.get_num_threads()
    assert not keeps_rows_apart("bf16") and torch.get_num_threads() == before


def test_attention_that_mixes_rows_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = attention

    def mixing(module: torch.nn.Module, query: Tensor, *rest: Tensor | None) -> tuple[Tensor, None]:
        out, _ = plain(module, query, *rest)  # type: ignore[arg-type]
        return (out * 1.0625 if query.shape[2] == 1 else out), None

    monkeypatch.setattr(prove, "attention", mixing)
    assert not keeps_rows_apart("fp32")


def test_the_verdict_is_kept_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def verdict(precision: Precision) -> bool:
        asked.append(precision)
        return precision == "fp32"

    monkeypatch.setattr(prove, "keeps_rows_apart", verdict)
    for _ in range(2):
        assert proven_class("fp32", tmp_path) == arithmetic_class("fp32")
        assert proven_class("bf16", tmp_path) == arithmetic_class("bf16") + UNPROVEN
    assert asked == ["fp32", "bf16"] and len(json.loads((tmp_path / "arithmetic.json").read_text())) == 2
    for damaged in ("", "[]", "{"):
        (tmp_path / "arithmetic.json").write_text(damaged)
        assert proven_class("fp32", tmp_path) == arithmetic_class("fp32")
