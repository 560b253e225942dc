"""Options that several commands share, and how they become the dataclasses of core.py."""

import os
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, TypeVar

import typer

from manyhands.cli.progress import doing
from manyhands.config import MAX_HOPS, RequestConfig, check_draft, home_from_env
from manyhands.config_file import Settings, read_settings
from manyhands.core import (
    MAX_TOKENS,
    PRECISIONS,
    EndsAt,
    NodeAddr,
    PathKind,
    Precision,
    SamplingParams,
    caches_codes,
    with_codes,
)
from manyhands.errors import BadRequest
from manyhands.files import this_folder

T = TypeVar("T")
MODEL_HELP = (
    "A short name (smollm2, tales), a checkpoint folder, a GGUF file, or a hub id: org/name[@revision], "
    "hf:org/name:file.gguf or hf:org/name:Q4_K_M."
)


def _named(model: str) -> str:
    from manyhands.weights.names import check_name

    return check_name(model)


def is_text(words: str) -> str:
    """An option's words, which Python gives bytes that are no text as halves of surrogate pairs. Raises BadRequest for them."""
    if (wrong := next((at for at, letter in enumerate(words) if "\ud800" <= letter <= "\udfff"), None)) is not None:
        encoding = sys.getfilesystemencoding()
        raise BadRequest(
            f"character {wrong + 1} of the text is not valid {encoding}: set the terminal to UTF-8 (LANG=C.UTF-8)"
        )
    return words


Model = Annotated[str, typer.Argument(callback=_named, help=MODEL_HELP)]
Prompt = Annotated[str, typer.Option("-p", "--prompt", callback=is_text, help="The text to go on from.")]
MaxTokens = Annotated[int | None, typer.Option("-n", "-m", "--max-tokens", help="Tokens to generate at most.")]
Deterministic = Annotated[
    bool, typer.Option("-d", "--deterministic", help="Plain argmax: every other sampling option is off.")
]
Temperature = Annotated[
    float, typer.Option("-t", "--temperature", help="0 is greedy, 1 as the model has it; at most 100.")
]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens that hold this much probability.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep this many of the likeliest tokens; 0 is all.")]
MinP = Annotated[float, typer.Option("--min-p", help="Keep tokens this likely relative to the likeliest.")]
Seed = Annotated[int, typer.Option("--seed", help="Same seed, same text, however the model is cut.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End the text before this string; may be repeated.")]
RepetitionPenalty = Annotated[float, typer.Option("--repetition-penalty", help="1 is none.")]
DTYPE_HELP = "Precision: bf16, fp32, w8 or w4; auto: w8 or w4 where the model is stored in blocks, else bf16."
DType = Annotated[str, typer.Option("--dtype", help=DTYPE_HELP)]
CacheDType = Annotated[
    str,
    typer.Option(
        "--cache-dtype",
        help="Keys and values of sessions: w8, in half the memory; auto: as rows are, or as the swarm has it.",
    ),
]
Path_ = Annotated[str, typer.Option("--path", help="ring: hop to hop; star: each hop answers the origin.")]
Standby = Annotated[
    bool, typer.Option("--standby", help="Spare nodes follow the request, so that a repair takes one short step.")
]
Spare = Annotated[bool, typer.Option("--spare", help="Serve only where no other node does: after a death.")]
CanLoad = Annotated[
    int, typer.Option("--can-load", min=0, help="Load so many further layers when no other node holds them.")
]
Fallback = Annotated[
    bool, typer.Option("--fallback", help="Keep the whole model here, loaded when no other node can go on.")
]
Policy = Annotated[
    str, typer.Option("--policy", help="How a route is chosen: latency, or greedy (hop by hop, the lowest queue).")
]
AllowSelf = Annotated[
    bool,
    typer.Option("--allow-self/--avoid-self", help="Whether layers of this node may serve its own requests."),
]
Sticky = Annotated[
    bool, typer.Option("--sticky/--no-sticky", help="Take the route of the last request unless another is 20 % better.")
]
MaxShards = Annotated[
    int, typer.Option("--max-shards-per-request", min=1, max=MAX_HOPS, help="Hops of a request's route at most.")
]
OwnFirst = Annotated[
    int, typer.Option("--own-first", min=0, help="Compute the first N layers on this machine and nowhere else.")
]
OwnLast = Annotated[
    int, typer.Option("--own-last", min=0, help="Compute the last N layers on this machine and nowhere else.")
]
MixClasses = Annotated[
    bool,
    typer.Option(
        "--mix-classes/--no-mix-classes", help="Let devices of torch (class E2) and exact nodes share a route."
    ),
]
AuditShare = Annotated[
    float,
    typer.Option("--audit", min=0, max=1, help="The share of answers that other nodes compute again, to compare."),
]
Draft = Annotated[
    str, typer.Option("--draft", help="What guesses tokens, several at once: auto, off, suffix, model[:MODEL].")
]
Ends = Annotated[str, typer.Option("--ends", help="Where embedding and head are: origin, or edges (first, last hop).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        help="What computes: cpu; cuda[:N], an NVIDIA GPU, with the same bits; or torch (class E2) on mps, xpu[:N], torch-cpu.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="Compute threads; default: all cores, or one where that is faster."),
]


@dataclass(frozen=True, slots=True)
class Sampling:
    """The options that say how tokens are drawn."""

    max_tokens: MaxTokens = 64
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    seed: Seed = 0
    repetition_penalty: RepetitionPenalty = 1.0
    stop: Stop = None
    deterministic: Deterministic = False

    @property
    def params(self) -> SamplingParams:
        """Raises BadRequest for values that mean nothing."""
        return sampling_of(**{each.name: getattr(self, each.name) for each in fields(self)})


@dataclass(frozen=True, slots=True)
class Computing:
    """The options of a command that is the origin: what it computes itself, and how its requests travel.

    They raise BadRequest for a value that an option does not have.
    """

    dtype: DType = "auto"
    cache_dtype: CacheDType = "auto"
    path: Path_ = "ring"
    ends: Ends = "origin"
    threads: Threads = None
    device: Device = "cpu"

    def use_device(self) -> None:
        """As use_device of this module."""
        use_device(self.device)

    def precision(self, model: str) -> Precision:
        return precision_of(self.dtype, model, self.cache_dtype)

    @property
    def path_kind(self) -> PathKind:
        return path_of(self.path)

    @property
    def ends_at(self) -> EndsAt:
        return ends_of(self.ends)


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """The options of a command that is the origin: who computes what of its requests, and what guesses their tokens."""

    policy: Policy = "latency"
    allow_self: AllowSelf = True
    sticky: Sticky = False
    own_first: OwnFirst = 0
    own_last: OwnLast = 0
    fallback: Fallback = False
    mix_classes: MixClasses = False
    max_shards_per_request: MaxShards = MAX_HOPS
    draft: Draft = "auto"
    audit: AuditShare = 0.0

    def applied(self, config: RequestConfig) -> RequestConfig:
        """`config` with what the options say. Raises BadRequest."""
        return replace(
            config,
            policy=self.policy,
            allow_self_as_shard=self.allow_self,
            sticky=self.sticky,
            own_first=self.own_first,
            own_last=self.own_last,
            fallback=self.fallback,
            mix_classes=self.mix_classes,
            max_shards_per_request=self.max_shards_per_request,
            draft=self.draft,
            audit=self.audit,
        )

    def for_api(self, config: RequestConfig, *, has_api: bool) -> RequestConfig:
        """As `applied`. Raises BadRequest if an option says something and no API is opened whose requests it could bear on."""
        told = self.applied(config)
        if told == config or has_api:
            return told
        name = next(n for n in RequestConfig.__slots__ if getattr(told, n) != getattr(config, n))
        option = "avoid-self" if name == "allow_self_as_shard" else name.replace("_", "-")
        raise BadRequest(f"--{option} is for requests to this machine's API: open it with --api HOST:PORT")


def is_given(context: typer.Context, name: str) -> bool:
    """Whether a parameter stands on the command line itself."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def given_of(context: typer.Context) -> frozenset[str]:
    """The fields of Sampling that stand on the command line itself."""
    return frozenset(each.name for each in fields(Sampling) if is_given(context, each.name))


def check_no_origin(context: typer.Context) -> None:
    """Raise BadRequest if an option of an origin stands on the command line, and a gateway is asked."""
    names = {"ticket", *(each.name for group in (Computing, RouteOptions) for each in fields(group))}
    if idle := sorted(name for name in names - {"path", "draft"} if is_given(context, name)):
        raise BadRequest(
            f"--{idle[0].replace('_', '-')} is for an origin of one's own: leave it out, or leave --api out and give --ticket"
        )


def draft_asked(context: typer.Context, routing: RouteOptions) -> str:
    """What guesses the tokens of a gateway's request; "" where the command line does not say. Raises BadRequest."""
    if not is_given(context, "draft"):
        return ""
    kind, names_one, _ = check_draft(routing.draft).partition(":")
    if names_one:
        raise BadRequest(
            "--draft model:MODEL is for an origin of one's own: a gateway takes auto, off, suffix or model"
        )
    return kind


def address(option: str, text: str) -> NodeAddr:
    """What the option says. Raises BadRequest, which names it."""
    try:
        return NodeAddr.parse(text)
    except BadRequest as error:
        raise BadRequest(f"{option}: {error}") from None


def settings() -> Settings:
    """What file and environment say, for a command run here. Raises BadRequest."""
    return read_settings(os.environ, this_folder())


def use_device(device: str) -> None:
    """Compute on what --device says from now on, in this process and those that it starts. Raises BadRequest for what is no
    device's name, ModelError where what it needs, or the device, is missing: before anything is fetched."""
    from manyhands.engine import devices

    devices.use(device)
    if (named := devices.named_device()) is None:
        return
    with doing(f"opening {named}"):
        from manyhands.worker.runner import device_name

        device_name()


def precision_of(text: str, model: str, cache: str = "auto") -> Precision:
    """What --dtype and --cache-dtype say of `model`. Raises BadRequest, and ModelError of a file that is none."""
    found = _weights_of(text, model)
    return with_codes(found) if check_cache_dtype(cache) else found


def check_cache_dtype(text: str) -> bool:
    """Whether --cache-dtype asks for codes of 8 bit. Raises BadRequest."""
    if text not in ("auto", "w8"):
        raise BadRequest(f"--cache-dtype is {text!r}; it is auto or w8")
    return text == "w8"


def _weights_of(text: str, model: str) -> Precision:
    """auto: as it is stored."""
    if text == "auto":
        with doing(f"reading {model}") as screen:  # its config may be the hub's
            from manyhands.place.shape import stored_precision
            from manyhands.weights.names import is_here

            if not is_here(model):
                from manyhands.weights.fetch import bring_short

                bring_short(model, home_from_env(), screen)  # where no hub answers, it may come from elsewhere
            return stored_precision(model, home_from_env())
    if text not in PRECISIONS or text == "fp16" or caches_codes(text):
        raise BadRequest(f"--dtype is {text!r}; on a CPU it is one of auto, bf16, fp32, w8, w4")
    return text


def path_of(text: str) -> PathKind:
    if text not in ("ring", "star"):
        raise BadRequest(f"--path is {text!r}; it is ring or star")
    return text  # type: ignore[return-value]


def ends_of(text: str) -> EndsAt:
    if text not in ("origin", "edges"):
        raise BadRequest(f"--ends is {text!r}; it is origin or edges")
    return text  # type: ignore[return-value]


def sampling_of(**values: Any) -> SamplingParams:
    """SamplingParams of the options given; `max_tokens` None is no limit, MAX_TOKENS. Raises BadRequest."""
    most = MAX_TOKENS if values["max_tokens"] is None else values["max_tokens"]
    return SamplingParams(**{**values, "max_tokens": most, "stop": tuple(values.get("stop") or ())})


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine on uvloop where it is installed."""
    import asyncio
    from time import monotonic

    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)

    class Loop(uvloop.Loop):  # type: ignore[misc]
        """uvloop, whose own clock counts whole milliseconds: a round on one machine takes two of them."""

        time = staticmethod(monotonic)

    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(main)
