"""How fast is llama.cpp on the same weights? Writes a llama or qwen2 checkpoint as GGUF (bf16), and decodes with it.

Only what llama.cpp needs to compute: no vocabulary (ids in, ids out). Format: https://github.com/ggml-org/ggml/blob/
master/docs/gguf.md, version 3. Needs llama-cpp-python, an optional extra: pip install 'manyhands[bench]'.
"""

import ctypes
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from manyhands.model.load import read_config

_U32, _F32, _STRING = 4, 6, 8  # types of values
_TENSOR_F32, _TENSOR_BF16 = 0, 30
_ALIGN = 32
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf(folder: Path) -> Path:
    """The checkpoint as one GGUF file beside its safetensors; written once."""
    file = folder / "model.bf16.gguf"
    if not file.exists():
        half = file.with_suffix(".part")
        with half.open("wb") as out:
            _write(out, folder)
        half.rename(file)
    return file


def _write(out: BinaryIO, folder: Path) -> None:
    config: Any = read_config(folder)
    tensors = dict(_tensors(folder, config))
    facts = _facts(config)
    out.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts)))
    for key, (kind, value) in facts.items():
        packed = _string(value) if kind == _STRING else struct.pack("<I" if kind == _U32 else "<f", value)
        out.write(_string(key) + struct.pack("<I", kind) + packed)
    offset = 0
    for name, tensor in tensors.items():
        kind = _TENSOR_F32 if tensor.dtype == torch.float32 else _TENSOR_BF16
        sizes = tensor.shape[::-1]
        out.write(_string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset))
        offset += -(-tensor.nbytes // _ALIGN) * _ALIGN
    _pad(out)
    for tensor in tensors.values():
        out.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        _pad(out)


def _pad(out: BinaryIO) -> None:
    out.write(bytes(-out.tell() % _ALIGN))


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _facts(config: Any) -> dict[str, tuple[int, Any]]:
    arch = config.model_type
    head_dim = config.hidden_size // config.num_attention_heads
    return {
        "general.architecture": (_STRING, arch),
        "general.alignment": (_U32, _ALIGN),
        f"{arch}.context_length": (_U32, config.max_position_embeddings),
        f"{arch}.embedding_length": (_U32, config.hidden_size),
        f"{arch}.block_count": (_U32, config.num_hidden_layers),
        f"{arch}.feed_forward_length": (_U32, config.intermediate_size),
        f"{arch}.attention.head_count": (_U32, config.num_attention_heads),
        f"{arch}.attention.head_count_kv": (_U32, config.num_key_value_heads),
        f"{arch}.attention.layer_norm_rms_epsilon": (_F32, config.rms_norm_eps),
        f"{arch}.rope.dimension_count": (_U32, head_dim),
        f"{arch}.rope.freq_base": (_F32, config.rope_parameters["rope_theta"]),
        f"{arch}.vocab_size": (_U32, config.vocab_size),
        "tokenizer.ggml.model": (_STRING, "no_vocab"),
    }


def _tensors(folder: Path, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors by llama.cpp's names; vectors in float32, as it wants them."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():
                tensor = handle.get_tensor(name)
                if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
                    tensor = _interleaved(tensor, config.hidden_size // config.num_attention_heads)
                yield _renamed(name), tensor.float() if tensor.dim() == 1 else tensor


def _interleaved(weight_NK: Tensor, head_dim: int) -> Tensor:
    """llama.cpp's llama rotates neighbours, transformers' rotates halves: reorder the rows of each head."""
    heads = weight_NK.view(-1, 2, head_dim // 2, weight_NK.shape[1])
    return heads.transpose(1, 2).reshape(weight_NK.shape)


def _renamed(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, *middle, last = name.split(".")
    return f"blk.{layer}.{_NAMES['.'.join(middle)]}.{last}"


def quantised(folder: Path, kind: str) -> Path:
    """The checkpoint in one of llama.cpp's formats ("q8_0", "q4_0": its head then has 8 bits, as ours); written once."""
    import llama_cpp

    file = folder / f"model.{kind}.gguf"
    if not file.exists():
        half, given = file.with_suffix(".part"), llama_cpp.llama_model_quantize_default_params()
        given.ftype = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}[kind]
        given.output_tensor_type = given.token_embedding_type = llama_cpp.GGML_TYPE_Q8_0
        if llama_cpp.llama_model_quantize(str(gguf(folder)).encode(), str(half).encode(), ctypes.byref(given)):
            raise RuntimeError(f"llama.cpp did not write {file}")
        half.rename(file)
    return file


class LlamaCpp:
    """An arm of bench/step.py, on a GGUF file."""

    def __init__(self, file: Path, threads: int, clock: Callable[[], float] = time.perf_counter) -> None:
        from llama_cpp import Llama

        self._clock = clock
        self.model: Any = Llama(str(file), n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)

    def times(self, ids: list[int], new: int) -> list[float]:
        self.model.reset()
        began = self._clock()
        at: list[float] = []
        for _ in range(new):
            self.model.eval(ids)
            ids = [int(self.model.sample(temp=0.0))]
            at.append(self._clock() - began)
        return at
