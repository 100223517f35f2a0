"""How a model is computed. None of these choices changes what it computes, beyond rounding."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from andrea_jax.settings import check_fields, setting

BackEnd = Literal["auto", "explicit", "blockwise", "cudnn", "xla"]


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Engine options. `auto` is resolved when a function is traced; `describe` says to what."""

    SECTION: ClassVar[str] = "engine"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "of activations; auto: bfloat16 on GPU, float32 on CPU"
    )
    attention: BackEnd = setting(  # noqa: RUF009  (an alias hides that it is immutable)
        "auto", "attention back end; auto: cudnn on GPU where it runs, blockwise on CPU"
    )
    attention_block: int = setting(128, "query rows at a time in blockwise attention", at_least=1)
    blocks: Literal["auto", "scan", "unroll"] = setting(
        "auto", "one compiled block in a loop, or all unrolled, which moves fewer bytes; auto: a loop if remat='block'"
    )
    remat: Literal["none", "attention", "block"] = setting(
        "none", "what is recomputed in the backward pass to save memory"
    )
    kernels: Literal["auto", "xla", "pallas", "jax_triton"] = setting(
        "auto",
        "norms, GELU and loss; auto: a Pallas kernel on a GPU where it moves fewer bytes than XLA's best form; "
        "jax_triton: Triton kernels for the backward passes of norms and GELU, XLA for the rest",
    )
    loss_chunk: int = setting(0, "rows of logits held at a time by the loss; 0: from width and vocabulary", at_least=0)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def activation_dtype(self) -> jnp.dtype:
        return self.dtype_on(jax.default_backend())

    def dtype_on(self, platform: str) -> jnp.dtype:
        """Of activations on "cpu" or "gpu"."""
        return jnp.dtype(("float32" if platform == "cpu" else "bfloat16") if self.dtype == "auto" else self.dtype)

    @property
    def unrolled(self) -> bool:
        """Whether blocks are; over several devices XLA moves unrolled recomputation forward, where it saves nothing."""
        return self.blocks == "unroll" or (self.blocks == "auto" and self.remat != "block")
