"""What a model is: sizes and choices that fix its computation."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from andrea_jax.settings import UserError, check_fields, setting


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A pre-norm decoder. Saved with every checkpoint; a checkpoint runs only under its own config.

    Raises:
        UserError: sizes that cannot form a model, naming the field and the nearest value that can.
    """

    vocab_size: int = setting(8449, "token ids; ANDREA: 8192 segments + 256 bytes + BOS", at_least=2)
    context_length: int = setting(1024, "positions the model can see", at_least=1)
    d_model: int = setting(768, "width of the residual stream", at_least=1)
    n_layer: int = setting(12, "blocks", at_least=1)
    n_head: int = setting(12, "attention heads; must divide d_model", at_least=1)
    mlp_ratio: int = setting(4, "mlp width / d_model", at_least=1)
    activation: Literal["gelu", "relu"] = setting("gelu", "MLP activation; gelu in its tanh form")
    mlp_bias: bool = setting(True, "biases b_1 and b_2 of the MLP")
    attention_bias: bool = setting(False, "biases of the query, key, value and output products")
    norm_gain: bool = setting(True, "learned gain of every norm")
    norm_shift: bool = setting(True, "learned shift of every norm")
    norm_eps: float = setting(1e-5, "added to the variance in every norm", at_least=0)
    tie_embeddings: bool = setting(True, "the output product uses the token table")
    vocab_multiple: int = setting(1, "rows of the token table are padded to a multiple of this", at_least=1)
    dropout: float = setting(0.0, "on the embeddings and on each branch, in training only", at_least=0, at_most=0.99)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.d_model % self.n_head:
            nearest = max(1, round(self.d_model / self.n_head)) * self.n_head
            raise UserError(
                f"ModelConfig.d_model = {self.d_model} does not divide into n_head = {self.n_head} heads; "
                f"d_model = {nearest} would"
            )

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_head

    @property
    def mlp_dim(self) -> int:
        return self.mlp_ratio * self.d_model

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def differences(self, other: ModelConfig) -> list[str]:
        """Fields in which the two models compute something else, as `field: mine != other's`. Dropout is not one."""
        mine, others = dataclasses.asdict(self), dataclasses.asdict(other)
        return [f"{k}: {mine[k]} != {others[k]}" for k in mine if k != "dropout" and mine[k] != others[k]]


def andrea_12m(**changes: Any) -> ModelConfig:
    """ANDREA-12M: 6 blocks of width 384, as the course describes it."""
    base = ModelConfig(vocab_size=4353, d_model=384, n_layer=6, n_head=12)
    return dataclasses.replace(base, **changes)


def andrea_120m(**changes: Any) -> ModelConfig:
    """ANDREA-120M: 12 blocks of width 768, as its block lesson describes it."""
    return dataclasses.replace(ModelConfig(), **changes)


def andrea_480m(**changes: Any) -> ModelConfig:
    """ANDREA-480M: 16 blocks of width 1536."""
    base = ModelConfig(d_model=1536, n_layer=16, n_head=24)
    return dataclasses.replace(base, **changes)


def andrea_nano(**changes: Any) -> ModelConfig:
    """A model that learns something in two minutes on two CPU cores."""
    base = ModelConfig(vocab_size=2305, context_length=128, d_model=128, n_layer=4, n_head=4)
    return dataclasses.replace(base, **changes)


_CARD = dict(tie_embeddings=False, mlp_bias=False, norm_gain=False, norm_shift=False)


def andrea_12m_card(**changes: Any) -> ModelConfig:
    """The layout that gives the 12,780,288 parameters of ANDREA-12M's model card."""
    return dataclasses.replace(andrea_12m(vocab_size=2305, **_CARD), **changes)


def andrea_120m_card(**changes: Any) -> ModelConfig:
    """The layout that gives the 98,698,752 parameters of ANDREA-120M's model card."""
    return dataclasses.replace(andrea_120m(**_CARD), **changes)


PRESETS = {
    f.__name__: f for f in (andrea_nano, andrea_12m, andrea_120m, andrea_480m, andrea_12m_card, andrea_120m_card)
}
