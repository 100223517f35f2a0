"""From logits to the next token: temperature, top-k, top-p, min-p, in the order of Hugging Face transformers."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from andrea_jax.settings import UserError, check_fields, setting


class Limits(NamedTuple):
    """What `choose_tokens` needs of a SamplingConfig, as scalars that can be traced."""

    temperature: np.float32
    top_k: np.int32
    top_p: np.float32
    min_p: np.float32


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen, and where a text ends.

    Raises:
        UserError: a value out of its range, or an empty stop text.
    """

    SECTION: ClassVar[str] = "sample"
    temperature: float = setting(
        0.8, "logits are divided by it; 0: always the most probable token", at_least=0, at_most=1e6
    )
    top_k: int = setting(
        0, "only the k most probable tokens; 0, or more than there are: all", at_least=0, at_most=2**31 - 1
    )
    top_p: float = setting(
        1.0, "only the fewest most probable tokens that have this share together", above=0, at_most=1
    )
    min_p: float = setting(0.0, "only tokens at least this times as probable as the first", at_least=0, at_most=1)
    stop: tuple[str, ...] = setting((), "texts that end the output, which is cut before them")
    ignore_end: bool = setting(False, "the end of a document is never sampled, so that the text goes on")

    def __post_init__(self) -> None:
        check_fields(self)
        if "" in self.stop:
            raise UserError("sample.stop: an empty text would end every output at once")

    def limits(self, vocab_size: int) -> Limits:
        """For logits over `vocab_size` tokens."""
        top_k = min(self.top_k or vocab_size, vocab_size)
        return Limits(np.float32(self.temperature), np.int32(top_k), np.float32(self.top_p), np.float32(self.min_p))


SAMPLING = SamplingConfig()


def choose_tokens(keys_B: jax.Array, logits_BV: jax.Array, allowed_V: jax.Array, limits: Limits) -> jax.Array:
    """int32 [B]: one allowed token a row, by the row's own key; -1 where a row's logits are not all finite.

    Each row draws from softmax(cut_logits(logits / temperature)) over the allowed tokens; the first of the largest
    logits at temperature 0.
    """
    finite_B = jnp.isfinite(logits_BV).all(-1)
    logits_BV = jnp.where(allowed_V, logits_BV, -jnp.inf)
    logits_BV = logits_BV - logits_BV.max(-1, keepdims=True)

    def draw() -> jax.Array:
        scaled_BV = logits_BV / jnp.maximum(limits.temperature, 1e-30)
        return jax.vmap(jax.random.categorical)(keys_B, cut_logits(scaled_BV, limits))

    tokens_B = jax.lax.cond(limits.temperature > 0, draw, lambda: logits_BV.argmax(-1))
    return jnp.where(finite_B, tokens_B, -1).astype(jnp.int32)


def cut_logits(logits_BV: jax.Array, limits: Limits) -> jax.Array:
    """-inf where top-k, then top-p, then min-p cut a token; a cut does not separate tokens of equal logits.

    top-p counts probabilities among the tokens that top-k left. The most probable token always stays.
    """

    def least_kept() -> jax.Array:
        sorted_BV = -jnp.sort(-logits_BV, axis=-1)
        kth_B1 = jnp.take_along_axis(sorted_BV, jnp.full((len(sorted_BV), 1), limits.top_k - 1), axis=-1)
        p_BV = jax.nn.softmax(jnp.where(sorted_BV >= kth_B1, sorted_BV, -jnp.inf), axis=-1)
        share_before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
        kept_B1 = (share_before_BV < limits.top_p).sum(-1, keepdims=True)
        last_B1 = jnp.take_along_axis(sorted_BV, jnp.maximum(kept_B1, 1) - 1, axis=-1)
        return jnp.where(limits.top_p < 1, jnp.maximum(kth_B1, last_B1), kth_B1)

    nothing_cut = jnp.full((len(logits_BV), 1), -jnp.inf)
    sorting = (limits.top_k < logits_BV.shape[-1]) | (limits.top_p < 1)
    least_B1 = jax.lax.cond(sorting, least_kept, lambda: nothing_cut)
    least_B1 = jnp.maximum(least_B1, logits_BV.max(-1, keepdims=True) + jnp.log(limits.min_p))
    return jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
