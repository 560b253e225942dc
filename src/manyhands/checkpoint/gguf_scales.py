"""Scales beside matrices of GGUF in NVFP4: "blk.0.attn_q.scale", what all numbers of "blk.0.attn_q.weight" are multiplied with.

One number of F32, or one for each matrix of a stack; a matrix without one has 1. ".input_scale" says how activations could
be rounded, which is not followed. llama.cpp multiplies products with a scale of a matrix of any type, but tables have none.
"""

import math
from collections.abc import Mapping
from typing import Final

from manyhands.checkpoint.gguf import Gguf, GgufTensor
from manyhands.errors import ModelError

SCALE: Final = "_scale"  # ends the name of the tensor that holds the scale of a matrix
FLOAT4: Final = "NVFP4"
_ENDINGS: Final = (".scale", ".input_scale")
_TABLES: Final = ("token_embd.weight", "per_layer_token_embd.weight")


class Scales:
    """What the tensors of a file are scales of."""

    def __init__(self, gguf: Gguf) -> None:
        self._matrices: Mapping[str, GgufTensor] = {tensor.name: tensor for tensor in gguf.tensors}

    def matrix(self, tensor: GgufTensor) -> GgufTensor | None:
        """The matrix beside which `tensor` is a scale, None if it is none. Raises ModelError for a scale that is not read."""
        ending = next((each for each in _ENDINGS if tensor.name.endswith(each)), "")
        found = self._matrices.get(f"{tensor.name.removesuffix(ending)}.weight") if ending else None
        if found is None or found.name in _TABLES:
            return None
        if found.dtype != FLOAT4:
            what = f"{tensor.name[:80]!a} is a scale of a matrix that is stored as {found.dtype}"
            raise ModelError(f"{tensor.file} refused: {what}; read are those of {FLOAT4}")
        count = math.prod(found.shape[:-2])
        if tensor.dtype != "F32" or tensor.shape != (count,):
            what = f"{tensor.name[:80]!a} is {tensor.dtype} {list(tensor.shape)}"
            raise ModelError(f"{tensor.file} refused: {what}; F32 [{count}] is needed beside {list(found.shape)}")
        return found


def is_followed(tensor: GgufTensor) -> bool:
    """Whether a scale enters what is computed."""
    return tensor.name.endswith(_ENDINGS[0])
