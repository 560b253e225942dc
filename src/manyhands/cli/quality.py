"""`manyhands model quality A B`: how far the predictions of B are from those of A, over a text."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli.options import DTYPE_HELP, MODEL_HELP, precision_of
from manyhands.cli.progress import doing
from manyhands.config import home_from_env
from manyhands.errors import BadRequest

if TYPE_CHECKING:  # help is instant
    from manyhands.worker.quality import Divergence

_CACHE = "Keys and values: w8; auto: as rows are."


def quality(
    a: Annotated[str, typer.Argument(metavar="A", help="What counts as right. " + MODEL_HELP)],
    b: Annotated[
        str, typer.Argument(metavar="B", help="What is compared with it: the same model, or one of its kind.")
    ],
    dtype_a: Annotated[str, typer.Option(help=f"Of A. {DTYPE_HELP}")] = "auto",
    dtype_b: Annotated[str, typer.Option(help=f"Of B. {DTYPE_HELP}")] = "auto",
    cache_dtype_a: Annotated[str, typer.Option(help=f"Of A. {_CACHE}")] = "auto",
    cache_dtype_b: Annotated[str, typer.Option(help=f"Of B. {_CACHE}")] = "auto",
    text: Annotated[Path | None, typer.Option(help="A text file; without it, what A draws at temperature 1.")] = None,
    windows: Annotated[int, typer.Option(min=1, max=4096, help="Of 256 tokens, or the models' context, at most.")] = 16,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: all cores.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Compare two models or precisions.

    KL divergence of their predictions, how often the likeliest token is the same, perplexity.
    """
    given = _read(text)
    with doing(f"comparing {b} with {a}") as progress:
        import numpy as np

        from manyhands.resources import num_cores
        from manyhands.text.tokenizer import load_tokenizer
        from manyhands.weights.fetch import resolve_model
        from manyhands.worker.quality import Predictor, compare, window_within, windows_of
        from manyhands.worker.runner import describe

        precisions = [precision_of(dtype_a, a, cache_dtype_a), precision_of(dtype_b, b, cache_dtype_b)]
        count = threads or num_cores()
        folders = [resolve_model(model, None, True, home_from_env(), progress) for model in (a, b)]
        encoders = [] if given is None else [load_tokenizer(folder).encode for folder in folders]
        kinds = list(zip(folders, precisions, strict=True))
        length = window_within(describe(folder, at).context_length for folder, at in kinds)
        chosen = None if given is None else windows_of(encoders, given, windows, length)
        right, other = (Predictor(folder, at, count) for folder, at in kinds)
        if right.vocab_size != other.vocab_size:
            raise BadRequest(
                f"{a} has {right.vocab_size} tokens and {b} {other.vocab_size}: compare models of one tokenizer"
            )
        chosen = list(right.draw(windows, np.random.default_rng(0), length)) if chosen is None else chosen
        found = compare(right, other, chosen, lambda done: progress.say(f"compared {done} of {len(chosen)} windows"))
    if as_json:
        about = {"a": a, "b": b, "dtype_a": precisions[0], "dtype_b": precisions[1]}
        typer.echo(json.dumps({**about, **asdict(found), "perplexity_ratio": found.perplexity_ratio}))
    else:
        _show(f"{b} in {precisions[1]} beside {a} in {precisions[0]}", found)


def _read(text: Path | None) -> str | None:
    try:
        return None if text is None else text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"--text {text} cannot be read as UTF-8: {error}") from None


def _show(title: str, found: "Divergence") -> None:
    rows: dict[str, Any] = {
        "positions": f"{found.positions:,}",
        "mean KL divergence": f"{found.mean_kl:.6f}",
        "median": f"{found.median_kl:.6f}",
        "99.9 %": f"{found.kl_99_9:.6f}",
        "largest": f"{found.max_kl:.6f}",
        "same likeliest token": f"{found.same_top:.2%}",
        "perplexity of A, of B": f"{found.perplexity_a:.4f}, {found.perplexity_b:.4f}",
        "perplexity of B / A": f"{found.perplexity_ratio:.5f}",
    }
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "", title=Text(title), show_header=False)
    for row in rows.items():
        table.add_row(*row)
    Console().print(table)
