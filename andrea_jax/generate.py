"""Text from a model: a batch of continuations, or one as it comes."""

from __future__ import annotations

import codecs
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from andrea_jax.config import ModelConfig
from andrea_jax.data.tokenizer import Tokenizer
from andrea_jax.engine import EngineConfig
from andrea_jax.model import ENGINE
from andrea_jax.parameters import Params
from andrea_jax.sample_tokens import sample_tokens
from andrea_jax.sampling import SAMPLING, SamplingConfig
from andrea_jax.settings import UserError

Text = str | bytes


def generate(
    params: Params,
    config: ModelConfig,
    tokenizer: Tokenizer,
    prompts: Sequence[Text],
    sampling: SamplingConfig = SAMPLING,
    max_tokens: int = 200,
    seed: int = 0,
    engine: EngineConfig = ENGINE,
) -> list[str]:
    """The continuation of each prompt, without it; prompts may differ in length.

    A text ends before a stop text, at the end of its document (a sampled BOS or another end) or after `max_tokens`. It
    depends on the seed and on its place in `prompts`, not on the other prompts. A full window goes on with its newest
    half.

    Raises:
        UserError: a prompt longer than the context or that the tokenizer cannot encode; a tokenizer of another model.
        RunError: logits that are not finite.
    """
    steps = _pieces(params, config, tokenizer, prompts, sampling, max_tokens, seed, engine)
    return ["".join(row) for row in zip(*steps, strict=True)]


def stream(
    params: Params,
    config: ModelConfig,
    tokenizer: Tokenizer,
    prompt: Text,
    sampling: SamplingConfig = SAMPLING,
    max_tokens: int = 200,
    seed: int = 0,
    engine: EngineConfig = ENGINE,
) -> Iterator[str]:
    """The text of `generate` for one prompt, in pieces as its tokens come; a character is never split.

    A piece that may be the beginning of a stop text waits until that is known. Raises as `generate` does.
    """
    steps = _pieces(params, config, tokenizer, [prompt], sampling, max_tokens, seed, engine)
    return (piece for (piece,) in steps if piece)


def encode_prompt(tokenizer: Tokenizer, prompt: Text, context_length: int) -> np.ndarray:
    """int32 ids that a model continues: BOS, which begins a document, and the prompt.

    Without BOS an empty prompt becomes a newline, or id 0 where the tokenizer has none.

    Raises:
        UserError: more ids than `context_length`, or a prompt that the tokenizer cannot encode.
    """
    ids = tokenizer.encode(prompt)
    if tokenizer.bos is not None:
        ids = np.insert(ids, 0, tokenizer.bos)
    elif not len(ids):
        ids = _newline(tokenizer)
    if len(ids) > context_length:
        start = " with BOS" if tokenizer.bos is not None else ""
        raise UserError(f"a prompt has {len(ids)} tokens{start}, but context_length is {context_length}; shorten it")
    return ids


def _newline(tokenizer: Tokenizer) -> np.ndarray:
    ids = np.zeros(0, np.int32)
    with contextlib.suppress(UserError):
        ids = tokenizer.encode("\n")
    return ids if len(ids) else np.zeros(1, np.int32)


def _pieces(
    params: Params,
    config: ModelConfig,
    tokenizer: Tokenizer,
    prompts: Sequence[Text],
    sampling: SamplingConfig,
    max_tokens: int,
    seed: int,
    engine: EngineConfig,
) -> Iterator[list[str]]:
    """One more piece of each text a step, until all have ended."""
    if isinstance(prompts, (str, bytes)):
        raise UserError("prompts: expected a list of texts; for one, write [prompt]")
    if max_tokens < 1:
        raise UserError(f"max_tokens = {max_tokens}: must be at least 1")
    if tokenizer.size > config.vocab_size:
        raise UserError(f"the tokenizer has {tokenizer.size} ids, but ModelConfig.vocab_size is {config.vocab_size}")
    windows = [encode_prompt(tokenizer, prompt, config.context_length) for prompt in prompts]
    allowed_V = np.arange(config.vocab_size) < tokenizer.size
    if sampling.ignore_end:
        allowed_V[[i for i in (tokenizer.bos, *tokenizer.ends) if i is not None]] = False
    tokens = sample_tokens(params, windows, allowed_V, config, sampling, seed, engine)
    return _decode(tokenizer, itertools.islice(tokens, max_tokens), len(prompts), sampling.stop)


def _decode(
    tokenizer: Tokenizer, tokens: Iterable[np.ndarray], batch: int, stop: tuple[str, ...]
) -> Iterator[list[str]]:
    texts = [_Text(stop) for _ in range(batch)]
    for tokens_B in tokens if batch else ():
        yield [text.add(tokenizer, int(i)) for text, i in zip(texts, tokens_B, strict=True)]
        if all(text.ended for text in texts):
            return
    yield [text.end() for text in texts]


class _Text:
    """The bytes of one text, handed on as whole characters; bytes that may begin a stop text are held."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.stop = [text.encode() for text in stop]
        self.characters = codecs.getincrementaldecoder("utf-8")("replace")
        self.held = b""
        self.ended = False

    def add(self, tokenizer: Tokenizer, token: int) -> str:
        if self.ended or token == tokenizer.bos or token in tokenizer.ends:
            return self.end()
        self.held += tokenizer.decode([token])
        found = [at for stop in self.stop if (at := self.held.find(stop)) >= 0]
        if found:
            self.held = self.held[: min(found)]
            return self.end()
        ready = len(self.held) - self._begun()
        piece, self.held = self.characters.decode(self.held[:ready]), self.held[ready:]
        return piece

    def _begun(self) -> int:
        """The length of the longest end of `held` with which a stop text begins."""
        return max((n for stop in self.stop for n in range(1, len(stop)) if self.held.endswith(stop[:n])), default=0)

    def end(self) -> str:
        """What is left. Bytes that are no character become U+FFFD."""
        self.ended = True
        piece, self.held = self.characters.decode(self.held, final=True), b""
        return piece
