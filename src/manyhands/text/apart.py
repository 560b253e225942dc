"""Work on files of unknown people that no event loop, and no process that serves, may be held by: in a process of its own.

    chat template ─ read_templates ─► compiled code, kept (template.py)     a second or two at the limits, and a part of that
                                                                            with the interpreter's lock held
    text ─ bounded(tokenizer).encode ─► ids                                 where its tokenizer is not plain: it may make a
                                                                            letter a megabyte, or take a minute
The process ends with its answer, at a limit of memory, or after DEADLINE_S of CPU time. It imports nothing from the folder in
which it is started (-P), which may be a model's. Blocking: call it from a thread.
"""

import json
import marshal
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tokenizers import Tokenizer as Backend

from manyhands.errors import BadRequest
from manyhands.text.template import TemplateCode, compile_code, is_read, keep_template
from manyhands.text.tokenizer import TextTokenizer
from manyhands.text.tokenizer_parts import is_plain

DEADLINE_S: Final = 10.0  # of CPU time
MEMORY_BYTES: Final = 1 << 30
# Characters of a template that is compiled where it is asked for: 400 names, of which the interpreter's lock is held for 10 ms.
SMALL_TEMPLATE: Final = 2048
_TOO_COSTLY: Final = "it takes too much memory or time"


def limit_memory() -> None:
    """Hold this process to MEMORY_BYTES, beyond which the libraries abort it; it leaves no core. On Linux: macOS counts nothing
    that they take, and may refuse."""
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


# -- chat templates ---------------------------------------------------------------------------------------------------


def read_templates(sources: Iterable[str]) -> None:
    """Compile chat templates that are not kept yet, so that `compile_template` and `find_variables` have them at once.

    What is wrong with one, they say.
    """
    for source in sources:
        if len(source) > SMALL_TEMPLATE and not is_read(source):
            answer = _ask({"template": source})
            keep_template(source, _TOO_COSTLY if answer is None else _made(marshal.loads(answer)))


def _made(told: Any) -> TemplateCode | str:
    """What `_compiled` has told: it has compiled and not run what is not ours."""
    return told if isinstance(told, str) else TemplateCode(told[0], told[1], frozenset(told[2]))


def _compiled(source: str) -> bytes:
    made = compile_code(source)
    return marshal.dumps(made if isinstance(made, str) else (made.code, made.is_simple, sorted(made.variables)))


# -- tokenizers -------------------------------------------------------------------------------------------------------


def bounded(tokenizer: TextTokenizer) -> TextTokenizer:
    """The same if it is plain (tokenizer_parts.py); else one that encodes texts in processes."""
    return tokenizer if is_plain(tokenizer.backend_tokenizer) else _Bounded(tokenizer)


class _Bounded(TextTokenizer):
    def __init__(self, plain: TextTokenizer) -> None:
        super().__init__(plain.backend_tokenizer, plain.special_tokens_map, plain.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """As TextTokenizer's. Raises BadRequest also beyond the limits of a process."""
        backend = self.backend_tokenizer.to_str()
        answer = _ask({"tokenizer": backend, "text": text, "add_special_tokens": add_special_tokens})
        if answer is None:
            raise BadRequest(f"this model's tokenizer cannot read the text ({_TOO_COSTLY}): send less, or take another")
        told = json.loads(answer)
        if isinstance(told, str):
            raise BadRequest(told)
        return [int(token) for token in told]


def _encoded(job: Mapping[str, Any]) -> bytes:
    tokenizer = TextTokenizer(Backend.from_str(job["tokenizer"]), {})
    try:
        told: list[int] | str = tokenizer.encode(job["text"], add_special_tokens=job["add_special_tokens"])
    except BadRequest as error:
        told = str(error)
    return json.dumps(told).encode()


# -- the process ------------------------------------------------------------------------------------------------------


def _ask(job: Mapping[str, Any]) -> bytes | None:
    """The answer of a process; None if it has ended without one."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "manyhands.text.apart", str(DEADLINE_S)]
    done = subprocess.run(
        command,
        input=pickle.dumps(job),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        process_group=0,  # Ctrl-C is for its parent, which may go on
    )
    return done.stdout if done.returncode == 0 else None


def main(deadline_s: float) -> None:
    """Answer the job on stdin: from parent to child only, which trusts it."""
    job = pickle.load(sys.stdin.buffer)
    limit_memory()
    signal.setitimer(signal.ITIMER_PROF, deadline_s)
    sys.stdout.buffer.write(_compiled(job["template"]) if "template" in job else _encoded(job))


if __name__ == "__main__":
    main(float(sys.argv[1]))
