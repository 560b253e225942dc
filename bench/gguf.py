"""How fast is llama.cpp on the same weights? Writes a llama or qwen2 checkpoint as GGUF (bf16), and decodes with it.

Only what llama.cpp needs to compute: no vocabulary (ids in, ids out). Format: https://github.com/ggml-org/ggml/blob/
master/docs/gguf.md, version 3. Needs llama-cpp-python, an optional extra: pip install 'manyhands[bench]'.
"""

import ctypes
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from manyhands.checkpoint.gguf_model import config_json
from manyhands.checkpoint.gguf_parts import read_gguf, read_tensor
from manyhands.testing.gguf import ALIGN, Written, write_gguf

_KINDS = {name.lower(): name for name in "Q8_0 Q4_0 Q4_K_M Q5_K_M Q6_K IQ4_XS Q3_K_M Q2_K".split()}
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
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        write_gguf(half, _facts(config), _tensors(folder, config))
        half.rename(file)
    return file


def _facts(config: Any) -> dict[str, Any]:
    arch = config.model_type
    head_dim = config.hidden_size // config.num_attention_heads
    return {
        "general.architecture": arch,
        "general.alignment": ALIGN,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.dimension_count": head_dim,
        f"{arch}.rope.freq_base": config.rope_parameters["rope_theta"],
        f"{arch}.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "no_vocab",
    }


def _tensors(folder: Path, config: Any) -> Iterator[Written]:
    """Tensors by llama.cpp's names; vectors in float32, as it wants them."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():
                tensor = handle.get_tensor(name)
                if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
                    tensor = _interleaved(tensor, config.hidden_size // config.num_attention_heads)
                tensor = tensor.float() if tensor.dim() == 1 else tensor
                dtype = "F32" if tensor.dtype == torch.float32 else "BF16"
                raw = tensor.contiguous().flatten().view(torch.uint8).numpy()
                yield _renamed(name), dtype, tuple(tensor.shape), raw


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
    """The checkpoint in one of llama.cpp's formats (_KINDS), written once. Of "q8_0" and "q4_0" head and embedding have 8 bits,
    as ours; mixtures choose for themselves."""
    file = folder / f"model.{kind}.gguf"
    if not file.exists():
        import llama_cpp

        half, given = file.with_suffix(".part"), llama_cpp.llama_model_quantize_default_params()
        given.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{_KINDS[kind]}")
        if kind in ("q8_0", "q4_0"):
            given.output_tensor_type = given.token_embedding_type = llama_cpp.GGML_TYPE_Q8_0
        if llama_cpp.llama_model_quantize(str(gguf(folder)).encode(), str(half).encode(), ctypes.byref(given)):
            raise RuntimeError(f"llama.cpp did not write {file}")
        half.rename(file)
    return file


def served(file: Path) -> Path:
    """A folder from which the engine loads such a file, which has no vocabulary: its config, the checkpoint's tokenizer."""
    folder = file.with_suffix("")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(config_json(read_gguf(file), partial(read_tensor, file.parent)))
    shutil.copy(file.parent / "tokenizer.json", folder)
    link = folder / file.name
    if not link.is_symlink():
        link.symlink_to(file)
    return folder


class LlamaCpp:
    """An arm of bench/step.py, on a GGUF file.

    In a thread of its own: llama.cpp configures a thread's AMX tiles once, and our kernels release them when they are done.
    """

    def __init__(self, file: Path, threads: int, clock: Callable[[], float] = time.perf_counter) -> None:
        from llama_cpp import Llama

        self._clock = clock
        self._thread = ThreadPoolExecutor(1)
        self.model: Any = Llama(str(file), n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

    def times(self, ids: list[int], new: int) -> list[float]:
        return self._thread.submit(self._times, ids, new).result()

    def _times(self, ids: list[int], new: int) -> list[float]:
        self.model.reset()
        began = self._clock()
        at: list[float] = []
        for _ in range(new):
            self.model.eval(ids)
            ids = [int(self.model.sample(temp=0.0))]
            at.append(self._clock() - began)
        return at
