"""Text from a trained model."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import typing
from collections.abc import Callable, Iterator

import flags
from absl import flags as absl_flags

from andrea_jax.checkpoint import find_checkpoint, load_checkpoint
from andrea_jax.generate import generate, stream
from andrea_jax.sampling import SamplingConfig
from andrea_jax.settings import UserError
from andrea_jax.train.config import RunConfig

DESCRIPTION = """Continues a prompt with a trained model:
  python experiments/generate.py --checkpoint=runs/nano --prompt="To be"
Without --prompt the text is the beginning of a document. Several --prompt are continued as one batch."""

OWN = absl_flags.FlagValues()
MOST = 2**31 - 1
CHECKPOINT = absl_flags.DEFINE_string("checkpoint", None, "folder of a run, or one of its checkpoints", flag_values=OWN)
STEP = absl_flags.DEFINE_integer("step", None, "checkpoint of this step; the newest if absent", flag_values=OWN)
WEIGHTS = flags.define_weights(OWN)
PROMPT = absl_flags.DEFINE_multi_string("prompt", [], "text to continue; can be given several times", flag_values=OWN)
MAX_TOKENS = absl_flags.DEFINE_integer("max_tokens", 200, "tokens of each text, at most", 1, MOST, flag_values=OWN)
SEED = absl_flags.DEFINE_integer(
    "seed", 0, "the same seed gives the same text; --interactive adds 1 for each prompt", 0, MOST, flag_values=OWN
)
STREAM = absl_flags.DEFINE_bool(
    "stream", None, "print one prompt's text as it comes; on a terminal it does without being told", flag_values=OWN
)
INTERACTIVE = absl_flags.DEFINE_bool(
    "interactive", False, "ask for prompts until Ctrl-D or Ctrl-C; each begins a new document", flag_values=OWN
)
JSON = absl_flags.DEFINE_bool("json", False, "print one JSON object, texts without their prompts", flag_values=OWN)


def define_sampling_flags(own: absl_flags.FlagValues) -> None:
    """A flag for each field of SamplingConfig."""
    define = {float: absl_flags.DEFINE_float, int: absl_flags.DEFINE_integer, bool: absl_flags.DEFINE_bool}
    hints = typing.get_type_hints(SamplingConfig)
    for field in dataclasses.fields(SamplingConfig):
        add: Callable[..., object] = define.get(hints[field.name], absl_flags.DEFINE_multi_string)
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        add(field.name, default, field.metadata["help"], flag_values=own)


define_sampling_flags(OWN)


def sampling_config() -> SamplingConfig:
    """As the flags say."""
    values = {field.name: OWN[field.name].value for field in dataclasses.fields(SamplingConfig)}
    return SamplingConfig(**values | {"stop": tuple(values["stop"])})


def check_flags() -> None:
    """Raises UserError for flags that do not go together."""
    if CHECKPOINT.value is None:
        raise UserError("--checkpoint is missing: give the run folder that training printed")
    if INTERACTIVE.value and (PROMPT.value or JSON.value):
        raise UserError(f"--interactive does not go with --{'prompt' if PROMPT.value else 'json'}")
    if STREAM.value and (JSON.value or len(PROMPT.value) > 1):
        raise UserError("--stream prints one text as it comes; it does not go with --json or several --prompt")
    for flag in ("prompt", "stop"):
        for text in OWN[flag].value:
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise UserError(f"--{flag}={text!a} is not UTF-8 text")


def run(config: RunConfig, bound: dict[str, str]) -> None:
    sampling = sampling_config()
    check_flags()
    folder, step = find_checkpoint(CHECKPOINT.value, STEP.value)
    model = load_checkpoint(folder, step, WEIGHTS.value)
    prompts = PROMPT.value or [""]
    options = {"sampling": sampling, "max_tokens": MAX_TOKENS.value, "engine": config.engine}
    if INTERACTIVE.value:
        interact(lambda prompt, turn: stream(*model, prompt, seed=SEED.value + turn, **options))
    elif JSON.value:
        texts = generate(*model, prompts, seed=SEED.value, **options)
        samples = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
        setup = {"step": step, "seed": SEED.value, "max_tokens": MAX_TOKENS.value, **dataclasses.asdict(sampling)}
        print(json.dumps({**setup, "samples": samples}, ensure_ascii=False, indent=2))
    elif len(prompts) == 1 and (sys.stdout.isatty() if STREAM.value is None else STREAM.value):
        show(stream(*model, prompts[0], seed=SEED.value, **options), prompts[0])
    else:
        texts = generate(*model, prompts, seed=SEED.value, **options)
        print("\n---\n".join(prompt + text for prompt, text in zip(prompts, texts, strict=True)))


def show(pieces: Iterator[str], prompt: str = "") -> None:
    """Prints pieces as they come, and a newline."""
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def interact(answer: Callable[[str, int], Iterator[str]]) -> None:
    """Asks for prompts and prints their continuations; a prompt that is wrong is answered with what is wrong."""
    turn = 0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while True:
            prompt = input("> ")
            try:
                show(answer(prompt, turn), prompt)
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
            turn += 1
    except (EOFError, KeyboardInterrupt):
        print()


if __name__ == "__main__":
    flags.main(run, DESCRIPTION, OWN, uses=["engine"])
