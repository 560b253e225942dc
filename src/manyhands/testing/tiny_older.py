"""What the configs of tiny models of bitnet and of older families need, which have names of their own for sizes."""

from collections.abc import Callable, Mapping
from typing import Final

from manyhands.testing.tiny_latent import Overrides


def _falcon(hidden: int) -> Overrides:
    return {"ffn_hidden_size": hidden * 3 // 2, "new_decoder_architecture": True, "num_kv_heads": 2}


def _gptj(hidden: int) -> Overrides:
    return {"n_inner": hidden * 3 // 2, "rotary_dim": hidden // 8}


# As MORE of tiny_configs.py.
OLDER: Final[Mapping[str, tuple[str, Callable[[int], Overrides]]]] = {
    "bitnet": ("bitnet", lambda hidden: {}),
    "codegen": ("codegen", _gptj),
    "falcon": ("falcon", _falcon),
    "gptj": ("gptj", _gptj),
}
