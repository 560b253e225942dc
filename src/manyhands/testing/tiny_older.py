"""What the configs of tiny models of bitnet, of older families and of Mamba need, which have names of their own for sizes."""

from collections.abc import Callable, Mapping
from typing import Final

from manyhands.testing.tiny_latent import Overrides

_NO_HEADS: Final[Overrides] = {"num_attention_heads": None, "num_key_value_heads": None}


def _falcon(hidden: int) -> Overrides:
    return {"ffn_hidden_size": hidden * 3 // 2, "new_decoder_architecture": True, "num_kv_heads": 2}


def _gptj(hidden: int) -> Overrides:
    return {"n_inner": hidden * 3 // 2, "rotary_dim": hidden // 8}


def _mamba(hidden: int) -> Overrides:
    return {**_NO_HEADS, "intermediate_size": hidden * 3 // 2, "state_size": 12, "time_step_rank": 20}


def _mamba2(hidden: int) -> Overrides:
    return {
        **_NO_HEADS,
        "intermediate_size": hidden * 2,
        "num_heads": 8,
        "head_dim": hidden // 4,
        "n_groups": 2,
        "state_size": 20,
    }


# As MORE of tiny_configs.py.
OLDER: Final[Mapping[str, tuple[str, Callable[[int], Overrides]]]] = {
    "bitnet": ("bitnet", lambda hidden: {}),
    "codegen": ("codegen", _gptj),
    "falcon": ("falcon", _falcon),
    "falcon_mamba": ("falcon_mamba", _mamba),
    "gptj": ("gptj", _gptj),
    "mamba": ("mamba", _mamba),
    "mamba2": ("mamba2", _mamba2),
}
