"""Distil the drafter of *tales* from tales itself. No corpus is needed: it learns from texts that tales writes.

    python -m tools.distil_tales --out build/tales --threads 2

The drafter begins as some of tales' own layers (`--layers`) between its embedding and its head. tales writes texts at T = 0.7
and 1.0, as the engine computes them, behind its token of beginning and behind paragraphs of earlier texts; they are written
while the drafter learns, CHUNK at a time, so that each is seen about REUSE times. The loss is the divergence from tales'
odds at the text's temperature, at first KL(tales || drafter), then more and more the total variation, which bounds how
often a draft drawn with the target's noise is right (bench/acceptance.py: at least (1 - TV) / (1 + TV)).

It takes `--minutes` of computing on each of `--threads` threads: the learning rate follows the CPU time, so a pause or other
work beside it changes no drafter. State and texts are saved at every evaluation (`--every` seconds) and picked up by the next
run of the same command. An evaluation asks how often a draft is right on texts behind openings that are not learnt from; the
best drafter so far lies in OUT/drafter.
"""

import argparse
import copy
import json
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaForCausalLM

from bench.acceptance import Texts, Whole, chances, openings
from manyhands import tales
from manyhands.text.tokenizer import load_tokenizer
from tools import five_bits
from tools.train_tales import Run

HEATS = (0.7, 1.0)
CHUNK, LENGTH = 64, 320  # texts that are written at once, and tokens of each
REUSE, NEWEST = 4.0, 8  # times that a text is seen; chunks that batches are taken from
BATCH, PART = 4, 256  # texts of a step; rows whose odds are compared at once
PROMPT_IDS = (8, 24)  # of a paragraph that a text goes on from
RATES = 3e-3, 1e-3  # of hidden matrices, of norms
KL_ALONE, LEAST_KL = 0.3, 0.2  # of the time; of the loss at the end
HELD_OUT, HELD_OUT_LENGTH = 4, 128  # texts behind each opening


@dataclass(slots=True)
class Shelf:
    """What tales has written, in chunks kept as files of `folder`. A chunk depends on the seed and those before it alone."""

    folder: Path
    target: Whole
    banned: list[int]
    breaks: set[int]  # after these ids a line begins
    first: int  # the id that begins a text
    seed: int
    texts: list[Texts] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.texts) * CHUNK * LENGTH

    def grow(self) -> None:
        """Write one chunk more, or read it if it lies there."""
        number = len(self.texts)
        path = self.folder / f"texts-{number:03}.npz"
        if not path.exists():
            rng = np.random.default_rng([self.seed, 1, number])
            prompts = [self._prompt(rng) for _ in range(CHUNK)]
            made = self.target.write(prompts, heats(CHUNK), LENGTH, self.banned, rng)
            partial = path.with_suffix(".part.npz")
            np.savez(partial, ids=made.ids, rows=made.rows)
            partial.replace(path)
        with np.load(path) as found:
            self.texts.append(Texts(found["ids"], found["rows"]))

    def _prompt(self, rng: np.random.Generator) -> list[int]:
        """The token that begins a text, or the beginning of a paragraph in an earlier one."""
        if not self.texts or rng.random() < 0.25:
            return [self.first]
        ids = self.texts[rng.integers(len(self.texts))].ids[rng.integers(CHUNK)].tolist()
        rooms = range(1, LENGTH - PROMPT_IDS[1])
        begins = [n for n in rooms if ids[n - 1] in self.breaks and ids[n] not in self.breaks]
        if not begins:
            return [self.first]
        start = begins[rng.integers(len(begins))]
        return list(ids[start : start + int(rng.integers(*PROMPT_IDS))])

    def newest(self) -> Tensor:
        """Ids [CHUNK, LENGTH] of the last texts, written if there are none."""
        if not self.texts:
            self.grow()
        return torch.from_numpy(self.texts[-1].ids)

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids [B, L], tales' rows [B, L, hidden] and temperatures [B, 1, 1] of a step."""
        rng = np.random.default_rng([self.seed, 2, step])
        end = len(self.texts)
        picked = [(int(rng.integers(max(0, end - NEWEST), end)), int(rng.integers(CHUNK))) for _ in range(BATCH)]
        ids = torch.from_numpy(np.stack([self.texts[chunk].ids[n] for chunk, n in picked]))
        rows = widened(np.stack([self.texts[chunk].rows[n] for chunk, n in picked]))
        return ids, rows, torch.tensor([heats(CHUNK)[n] for _, n in picked])[:, None, None]


def heats(count: int) -> list[float]:
    """The temperatures of the texts of a chunk."""
    return [HEATS[n % len(HEATS)] for n in range(count)]


def widened(rows: NDArray[np.uint16]) -> Tensor:
    """bf16 as fp32."""
    return torch.from_numpy((rows.astype(np.uint32) << 16).view(np.float32))


def new_drafter(main: LlamaForCausalLM, layers: list[int]) -> LlamaForCausalLM:
    """Some layers of `main` between its embedding, which stays as it is, and its head, as a model of its own."""
    config = copy.deepcopy(main.config)
    config.num_hidden_layers = len(layers)
    drafter = LlamaForCausalLM(config).float()
    drafter.model.embed_tokens.load_state_dict(main.model.embed_tokens.state_dict())
    drafter.model.embed_tokens.requires_grad_(False)
    drafter.model.norm.load_state_dict(main.model.norm.state_dict())
    for own, number in zip(drafter.model.layers, layers, strict=True):
        own.load_state_dict(main.model.layers[number].state_dict())
    return drafter


def learn_from(
    drafter: LlamaForCausalLM, main: LlamaForCausalLM, batch: tuple[Tensor, Tensor, Tensor], kl: float
) -> float:
    """Add the gradients of the mean loss of a batch, and return it. The head's are taken PART rows at a time, which stay in
    the CPU's caches."""
    ids, rows, heat = batch
    hidden = drafter.model(ids, use_cache=False).last_hidden_state
    cut, total = hidden.detach().requires_grad_(), 0.0
    flat, target, heats = (
        cut.flatten(0, 1),
        main.model.norm(rows).flatten(0, 1),
        heat.expand(-1, LENGTH, -1).flatten(0, 1),
    )
    for own, goal, warmth in zip(*(torch.split(each, PART) for each in (flat, target, heats)), strict=True):
        loss = loss_of(drafter.lm_head, own, goal, warmth, kl) / len(flat)
        loss.backward(inputs=[cut])  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    hidden.backward(cut.grad)
    return total


def loss_of(head: torch.nn.Module, own: Tensor, target: Tensor, heat: Tensor, kl: float) -> Tensor:
    """Summed over rows: KL(tales || drafter) at the texts' temperatures, weighed `kl`, and the total variation, 1 - kl."""
    with torch.no_grad():
        log_p = (head(target) / heat).log_softmax(-1)
        p = log_p.exp()
    log_q: Tensor = (head(own) / heat).log_softmax(-1)
    divergence: Tensor = (p * (log_p - log_q)).sum()
    return divergence if kl == 1.0 else kl * divergence + (1 - kl) * 0.5 * (p - log_q.exp()).abs().sum()


def weight_of_kl(progress: float) -> float:
    """1 at first, then linear to LEAST_KL where the learning rate begins to fall to zero."""
    return max(LEAST_KL, 1.0 - (1.0 - LEAST_KL) * max(0.0, progress - KL_ALONE) / (0.6 - KL_ALONE))


@dataclass(slots=True)
class Exam:
    """Texts behind the openings of bench/acceptance.py at each temperature, and tales' logits there."""

    target: Whole
    prompts: list[list[int]]
    banned: list[int]
    seed: int
    texts: dict[float, Texts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.seed, 3])
        for heat in (0.0, *HEATS):
            prompts = self.prompts if heat else self.prompts[::HELD_OUT]
            written = self.target.write(prompts, [heat] * len(prompts), HELD_OUT_LENGTH, self.banned, rng)
            self.texts[heat] = written

    @torch.no_grad()
    def mark(self, drafter: LlamaForCausalLM) -> dict[str, float]:
        """How often a draft with the target's noise is right, at each temperature."""
        told = {}
        for heat, texts in self.texts.items():
            start = max(map(len, self.prompts)) - 1
            p = self.target.logits(texts.rows[:, start:].reshape(-1, self.target.hidden))
            rows = [drafter(torch.from_numpy(ids)[None], use_cache=False).logits[0, start:] for ids in texts.ids]
            q = torch.cat(rows).numpy()
            p[:, self.banned] = q[:, self.banned] = -np.inf
            told[f"T {heat:g}"] = round(chances(p, q, heat)["same_noise"], 4)
        return told


def export(drafter: LlamaForCausalLM, source: Path, folder: Path, card: dict[str, Any], ids: Tensor) -> None:
    """Write the checkpoint, its products' weights rounded for texts `ids`, and card.json. Tokenizer and embedding are those of
    tales (`new_drafter`)."""
    copy.deepcopy(drafter).to(torch.bfloat16).save_pretrained(folder)
    five_bits.write(folder, five_bits.round_model(copy.deepcopy(drafter).eval(), ids))
    shutil.copyfile(source / "generation_config.json", folder / "generation_config.json")
    (folder / "card.json").write_text(json.dumps(card, indent=2) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools.distil_tales", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", default="0,2,5,8,11", help="of tales, from which the drafter's layers begin")
    parser.add_argument("--minutes", type=float, default=13.0)
    parser.add_argument("--every", type=float, default=240.0, help="seconds between evaluations, by the clock")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def shelf_of(folder: Path, source: Path, target: Whole, banned: list[int], seed: int) -> Shelf:
    """The texts in `folder`, made if there are none."""
    tokenizer = load_tokenizer(source)
    breaks = {i for i in range(target.vocab) if tokenizer.decode([i]).endswith("\n")}
    assert tokenizer.bos_token_id is not None
    folder.mkdir(parents=True, exist_ok=True)
    return Shelf(folder, target, banned, breaks, tokenizer.bos_token_id, seed)


@dataclass(slots=True)
class Lesson:
    """One distillation: the run, what it learns from, how it is marked, and the best mark."""

    args: argparse.Namespace
    source: Path
    main: LlamaForCausalLM
    run: Run
    shelf: Shelf
    exam: Exam
    best: float = 0.0

    def step(self) -> float:
        """Learn from one batch, writing first if too little is written; the loss."""
        while self.shelf.num_tokens * REUSE <= self.run.step * BATCH * LENGTH:
            self.shelf.grow()
        progress = min(1.0, self.run.seconds / (60 * self.args.minutes))
        loss = learn_from(self.run.model, self.main, self.shelf.batch(self.run.step), weight_of_kl(progress))
        self.run.advance(progress)
        return loss

    def mark(self) -> None:
        """Evaluate, print it, save the state, and export the drafter if it is the best so far."""
        marks = self.exam.mark(self.run.model)
        mean = sum(marks[f"T {heat:g}"] for heat in HEATS) / len(HEATS)
        print(json.dumps({"step": self.run.step, "minutes": round(self.run.seconds / 60, 1), **marks}), flush=True)
        self.run.save(self.args.out / "drafter.state")
        if mean <= self.best:
            return
        self.best = mean
        card = {
            "parameters": sum(p.numel() for p in self.run.model.parameters()),
            "from_layers_of_main": self.args.layers,
            "tokens_written_by_main": self.shelf.num_tokens,
            "training_tokens": self.run.step * BATCH * LENGTH,
            "minutes": round(self.run.seconds / 60, 1),
            "seed": self.args.seed,
            "acceptance_on_held_out_openings": marks,
            "command": " ".join(["python", "-m", "tools.distil_tales", *sys.argv[1:]]),
        }
        export(self.run.model, self.source, self.args.out / "drafter", card, self.shelf.newest())


def learn(lesson: Lesson) -> None:
    """Until the time is over. It counts all but evaluations."""
    run, args = lesson.run, lesson.args
    marked = time.monotonic()
    while run.seconds < 60 * args.minutes:
        began = time.process_time()
        loss = lesson.step()
        run.seconds += (time.process_time() - began) / args.threads
        if run.step % 20 == 0:
            written = lesson.shelf.num_tokens
            print(f"step {run.step} minute {run.seconds / 60:.1f} loss {loss:.3f} written {written}", flush=True)
        if time.monotonic() - marked > args.every:
            lesson.mark()
            marked = time.monotonic()
    lesson.mark()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    source = tales.model_path()
    target = Whole(source)
    prompts, banned = openings(source, HELD_OUT)
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    run = Run(new_drafter(model, [int(n) for n in args.layers.split(",")]), rates=RATES)
    shelf = shelf_of(args.out / "texts", source, target, banned, args.seed)
    lesson = Lesson(args, source, model, run, shelf, Exam(target, prompts, banned, args.seed))
    if (args.out / "drafter.state").exists():
        run.load(args.out / "drafter.state")
    lesson.mark()
    learn(lesson)


if __name__ == "__main__":
    main()
