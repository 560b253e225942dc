"""Train the bundled *tales* model on a plain-text corpus. Its drafter is distilled from it by tools/distil_tales.py.

    python -m tools.train_tales --corpus tales.txt.gz --out build/tales --tokens 11.8e6

Books are separated by two blank lines; a line in capitals inside a book starts a new story. The last 2 % of every book
are held out. The corpus is never copied into the output: only the tokenizer, the weights and the figures of the card are.

Interrupt it at will: the state is saved every `--save-every` seconds and picked up by the next run of the same command.
Hidden matrices are trained with Muon (tools/muon.py), embeddings and norms with AdamW; the rate is warmed up, held, and
brought to zero over the last 40 % (WSD).
"""

import argparse
import gzip
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.muon import Muon

BEGIN, END = "<|begin|>", "<|end|>"
VOCAB_SIZE = 4096
# 5.5 M parameters, 11 MB in bf16: twelve layers so that cutting means something.
SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
# An answer goes on in the line of what it answers, as it was drawn: so the next question begins with the very same ids.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if not loop.last and loop.nextitem['role'] != 'assistant' %}{{ '\\n\\n' }}{% endif %}{% endfor %}"
)
_HEADING = re.compile(r"\n\n(?=[A-Z][A-Z0-9 ,.'!?;:()\"-]{4,70}\n\n)")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids of the training part and of the held-out part, each one long stream."""

    train: Tensor
    held_out: Tensor


def read_books(path: Path) -> list[str]:
    """The books of a corpus file (gzip or plain UTF-8 text), stories inside a book separated by END."""
    raw = gzip.open(path, "rt", encoding="utf8").read() if path.suffix == ".gz" else path.read_text("utf8")
    books = [book.strip() for book in re.split(r"\n\n\n+", raw)]
    return [_HEADING.sub(f"{END}{BEGIN}", book) for book in books if len(book) > 1000]


def train_tokenizer(books: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of VOCAB_SIZE tokens; every text can be encoded and comes back unchanged."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator((part for book in books for part in book.split("\n")), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BEGIN,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def encode_corpus(books: list[str], tokenizer: PreTrainedTokenizerFast) -> Corpus:
    """Encode every book as BEGIN text END and hold out its last 2 %."""
    train: list[int] = []
    held_out: list[int] = []
    for book in books:
        ids = tokenizer.encode(BEGIN + book + END, add_special_tokens=False)
        edge = int(len(ids) * 0.98)
        train += ids[:edge]
        held_out += ids[edge:]
    return Corpus(torch.tensor(train), torch.tensor(held_out))


def batches(stream: Tensor, batch: int, length: int, seed: int, skip: int) -> Iterator[Tensor]:
    """Endless [batch, length + 1] windows; each epoch has its own offset and order; `skip` batches are passed over."""
    epoch = 0
    while True:
        rng = torch.Generator().manual_seed(seed * 1000 + epoch)
        offset = int(torch.randint(0, length, (1,), generator=rng))
        num_windows = (len(stream) - offset - 1) // length
        order = torch.randperm(num_windows, generator=rng)
        for rows in order[: num_windows // batch * batch].view(-1, batch):
            if skip:
                skip -= 1
                continue
            yield torch.stack([stream[offset + r * length : offset + r * length + length + 1] for r in rows.tolist()])
        epoch += 1


def rate(progress: float) -> float:
    """Learning-rate factor at `progress` in [0, 1]: 2 % warm-up, hold, linear to zero over the last 40 %."""
    return min(1.0, progress / 0.02, (1.0 - progress) / 0.4)


def logits_of(model: LlamaForCausalLM, ids_BT: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out: Tensor = model(ids_BT, use_cache=False).logits
    return out.float()


def loss_of(model: LlamaForCausalLM, window_BT: Tensor) -> Tensor:
    """Cross entropy against the text, in nats per token."""
    logits_BTV = logits_of(model, window_BT[:, :-1])
    return F.cross_entropy(logits_BTV.flatten(0, 1), window_BT[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, stream: Tensor, length: int, limit: int = 64) -> float:
    """Mean nats per token over at most `limit` windows of the held-out part."""
    total, count = 0.0, 0
    for start in range(0, min(len(stream) - length - 1, limit * length), length):
        window = stream[start : start + length + 1][None]
        total += float(loss_of(model, window))
        count += 1
    return total / max(count, 1)


@dataclass
class Run:
    """One training run: model, optimisers, and how far it has come. Saved whole, resumed whole."""

    model: LlamaForCausalLM
    step: int = 0
    seconds: float = 0.0
    rates: tuple[float, float] = (3e-3, 3e-3)  # of hidden matrices, of all else

    def __post_init__(self) -> None:
        learnt = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        hidden = [p for n, p in learnt if p.dim() == 2 and "embed" not in n]
        other = [p for n, p in learnt if not (p.dim() == 2 and "embed" not in n)]
        self.optimizers = [
            Muon(hidden, lr=self.rates[0], weight_decay=0.1),
            torch.optim.AdamW(other, lr=self.rates[1], betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def advance(self, progress: float) -> None:
        """One step down the gradients."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, highest in zip(self.optimizers, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = highest * rate(progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
        }
        partial = path.with_suffix(".part")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **SHAPE,
    )
    return LlamaForCausalLM(config)


def export(run: Run, tokenizer: PreTrainedTokenizerFast, corpus: Corpus, args: argparse.Namespace) -> None:
    """Write the bf16 checkpoint, the tokenizer and card.json into OUT/main."""
    folder = args.out / "main"
    loss = held_out_loss(run.model, corpus.held_out, args.length, limit=10_000)
    run.model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    card = {
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "training_tokens": run.step * args.batch * args.length,
        "epochs": round(run.step * args.batch * args.length / len(corpus.train), 2),
        "held_out_tokens": len(corpus.held_out),
        "held_out_loss_nats_per_token": round(loss, 4),
        "minutes": round(run.seconds / 60, 1),
        "seed": args.seed,
    }
    (folder / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    print(json.dumps(card))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools.train_tales", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=float, default=14e6)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds")
    return parser.parse_args()


def load_tokenizer(folder: Path, books: list[str]) -> PreTrainedTokenizerFast:
    if (folder / "tokenizer.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = train_tokenizer(books)
    tokenizer.save_pretrained(folder)
    return tokenizer


def main() -> None:
    args = parse_args()
    books = read_books(args.corpus)
    tokenizer = load_tokenizer(args.out / "tokenizer", books)
    corpus = encode_corpus(books, tokenizer)
    run = Run(new_model(tokenizer, args.seed))
    state = args.out / "main.state"
    if state.exists():
        run.load(state)
    num_steps = int(args.tokens / (args.batch * args.length))
    print(f"{len(corpus.train)} training tokens, {num_steps} steps, from step {run.step}", flush=True)
    feed = batches(corpus.train, args.batch, args.length, args.seed, run.step)
    saved = time.monotonic()
    while run.step < num_steps:
        began = time.monotonic()
        loss = loss_of(run.model, next(feed))
        loss.backward()  # type: ignore[no-untyped-call]
        run.advance((run.step + 1) / num_steps)
        run.seconds += time.monotonic() - began
        if run.step % 10 == 0:
            speed = args.batch * args.length / (time.monotonic() - began)
            print(f"step {run.step}/{num_steps} loss {float(loss.detach()):.3f} {speed:.0f} tok/s", flush=True)
        if time.monotonic() - saved > args.save_every:
            run.save(state)
            saved = time.monotonic()
            print(f"held-out {held_out_loss(run.model, corpus.held_out, args.length, 16):.3f}", flush=True)
    run.save(state)
    export(run, tokenizer, corpus, args)


if __name__ == "__main__":
    main()
