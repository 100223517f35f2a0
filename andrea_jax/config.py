"""What a model is: sizes and choices that fix its computation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from andrea_jax.settings import UserError, check_fields, setting

EXPERT_FIELDS = (
    *("expert_top_k", "expert_size", "n_shared_expert", "router", "router_renormalize", "balance_bias"),
    *("capacity_factor", "balance_weight", "router_z_weight"),
)
DERIVED = {  # fields that only make a size, which may be said in several ways
    **dict.fromkeys(("mlp_ratio", "mlp_multiple", "mlp_size"), "mlp_dim"),
    **dict(n_kv_head="kv_heads", head_size="head_dim", expert_size="expert_dim"),
}
TRAINING_ONLY = ("dropout", "balance_weight", "router_z_weight")  # they change no logits


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of blocks. Saved with every checkpoint; a checkpoint runs only under its own config.

    Raises:
        UserError: sizes that cannot form a model, naming the field and the nearest value that can.
    """

    vocab_size: int = setting(8449, "token ids; ANDREA: 8192 segments + 256 bytes + BOS", at_least=2)
    context_length: int = setting(1024, "positions the model can see", at_least=1)
    d_model: int = setting(768, "width of the residual stream", at_least=1)
    n_layer: int = setting(12, "blocks", at_least=1)
    n_head: int = setting(12, "attention heads", at_least=1)
    mlp_ratio: float = setting(4.0, "mlp width / d_model", above=0)
    mlp_multiple: int = setting(1, "the mlp width is rounded up to a multiple of this", at_least=1)
    mlp_size: int | None = setting(None, "mlp width; None: from mlp_ratio and mlp_multiple", at_least=1)
    n_kv_head: int | None = setting(None, "heads of keys and values; None: n_head; must divide it", at_least=1)
    head_size: int | None = setting(None, "width of a head; None: d_model / n_head", at_least=1)
    activation: Literal["gelu", "gelu_exact", "relu", "relu2", "silu"] = setting(
        "gelu", "of the MLP; gelu in its tanh form, relu2: relu squared"
    )
    gated: bool = setting(False, "the activated half of the MLP multiplies a second product (SwiGLU, GEGLU)")
    mlp_bias: bool = setting(True, "biases of the MLP's products")
    n_expert: int | None = setting(None, "experts that stand for the MLP; None: a single MLP", at_least=1)
    expert_top_k: int = setting(2, "experts of each token", at_least=1)
    expert_size: int | None = setting(None, "width of an expert; None: that of the MLP", at_least=1)
    n_shared_expert: int = setting(0, "experts of all tokens, beside those that are chosen", at_least=0)
    router: Literal["softmax", "sigmoid"] = setting("softmax", "what makes scores of the router's logits")
    router_renormalize: bool = setting(True, "a token's weights are divided by their sum; of one expert it is then 1")
    balance_bias: float | None = setting(
        None, "a bias that chooses experts, moved by this a step towards even loads; None: no bias", at_least=0
    )
    capacity_factor: float | None = setting(
        None, "an expert takes this times its even share of a text, in order, and no more; None: all", above=0
    )
    balance_weight: float = setting(0.0, "times the load-balance loss", at_least=0)
    router_z_weight: float = setting(0.0, "times the mean square of the router's logsumexp", at_least=0)
    attention_bias: bool = setting(False, "biases of the query, key, value and output products")
    norm: Literal["layer", "rms", "none"] = setting("layer", "kind of every norm of the stream")
    norm_position: Literal["pre", "post", "sandwich"] = setting(
        "pre", "pre: x + f(norm(x)); post: norm(x + f(x)); sandwich: x + norm(f(norm(x)))"
    )
    norm_gain: bool = setting(True, "learned gain of every norm")
    norm_shift: bool = setting(True, "learned shift of every norm")
    norm_eps: float = setting(1e-5, "added to the variance in every norm", at_least=0)
    final_norm: bool = setting(True, "a norm before the output product")
    qk_norm: bool = setting(False, "RMS norm, with a gain, of each head's queries and keys")
    position: Literal["learned", "rotary", "alibi", "none"] = setting("learned", "how the model knows positions")
    rotary_base: float = setting(10000.0, "rotary: base of the wavelengths", above=1)
    rotary_local_base: float | None = setting(None, "rotary: base in blocks with a window; None: rotary_base", above=1)
    rotary_scaling: Literal["none", "linear", "llama3", "yarn"] = setting(
        "none", "rotary: how wavelengths are stretched"
    )
    rotary_factor: float = setting(1.0, "rotary scaling: by how much the context is longer", at_least=1)
    rotary_original: int | None = setting(None, "rotary scaling: context before; None: context_length", at_least=1)
    rotary_slow: float = setting(
        1.0, "llama3, yarn: turns in it up to which a wavelength is stretched in full", above=0
    )
    rotary_fast: float = setting(
        4.0, "llama3, yarn: turns in it from which a wavelength is kept; YaRN says 32", above=0
    )
    rotary_length: float | None = setting(
        None, "yarn: times the rotated queries and keys; None: 0.1 ln(rotary_factor) + 1", above=0
    )
    window: int | None = setting(None, "positions a query sees, itself included; None: all before it", at_least=1)
    global_every: int | None = setting(None, "every n-th block sees all in spite of window; None: none", at_least=1)
    attention_scale: float | None = setting(None, "times q k; None: 1 / sqrt(head width)", above=0)
    attention_soft_cap: float | None = setting(None, "attention scores s become cap tanh(s / cap)", above=0)
    logit_soft_cap: float | None = setting(None, "logits l become cap tanh(l / cap)", above=0)
    logit_scale: float = setting(1.0, "times the logits, before logit_soft_cap", above=0)
    embedding_scale: float = setting(1.0, "times the embeddings", above=0)
    parallel_block: bool = setting(False, "attention and MLP read the same norm: x + attention(n) + mlp(n)")
    branch_multiplier: float = setting(1.0, "times each branch before it is added", above=0)
    branch_gain: float | None = setting(None, "start of a learned gain on each branch (LayerScale); 0: ReZero")
    tie_embeddings: bool = setting(True, "the output product uses the token table")
    vocab_multiple: int = setting(1, "rows of the token table are padded to a multiple of this", at_least=1)
    mup_width: int | None = setting(
        None,
        "muP: d_model at which the learning rate was chosen, which then serves this width; None: no muP",
        at_least=1,
    )
    mup_head: int | None = setting(None, "muP: width of a head there; None: that of this model", at_least=1)
    dropout: float = setting(0.0, "on the embeddings and on each branch, in training only", at_least=0, at_most=0.99)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.head_size is None and self.d_model % self.n_head:
            nearest = max(1, round(self.d_model / self.n_head)) * self.n_head
            raise UserError(
                f"ModelConfig.d_model = {self.d_model} does not divide into n_head = {self.n_head} heads; "
                f"d_model = {nearest} would"
            )
        if self.n_head % self.kv_heads:
            possible = [n for n in range(1, self.n_head + 1) if self.n_head % n == 0]
            nearest = min(possible, key=lambda n: abs(n - self.kv_heads))
            raise UserError(
                f"ModelConfig.n_kv_head = {self.n_kv_head} does not divide n_head = {self.n_head}; {nearest} would"
            )
        if self.position == "rotary" and self.head_dim % 2:
            raise UserError(f"ModelConfig.position = 'rotary' needs an even head width, not {self.head_dim}")
        if self.n_expert is not None and self.expert_top_k > self.n_expert:
            raise UserError(
                f"ModelConfig.expert_top_k = {self.expert_top_k}: must be at most n_expert = {self.n_expert}"
            )
        self._check_effects()
        if self.parallel_block and self.norm_position == "post":
            raise UserError("ModelConfig.parallel_block = True needs norm_position = 'pre' or 'sandwich', not 'post'")

    def _check_effects(self) -> None:
        """Refuses settings that nothing reads."""
        rotary, mixed = self.position == "rotary", self.rotary_scaling in ("llama3", "yarn")
        needs = {
            "global_every": (self.window is not None, "window"),
            "norm_position": (self.norm != "none", "a norm"),
            "rotary_base": (rotary, "position = 'rotary'"),
            "rotary_local_base": (rotary and self.window is not None, "position = 'rotary' and window"),
            "rotary_scaling": (rotary, "position = 'rotary'"),
            "rotary_factor": (self.rotary_scaling != "none", "rotary_scaling"),
            "rotary_original": (mixed, "rotary_scaling = 'llama3' or 'yarn'"),
            "rotary_slow": (mixed, "rotary_scaling = 'llama3' or 'yarn'"),
            "rotary_fast": (mixed, "rotary_scaling = 'llama3' or 'yarn'"),
            "rotary_length": (self.rotary_scaling == "yarn", "rotary_scaling = 'yarn'"),
            "mup_head": (
                self.mup_width is not None and self.attention_scale is None,
                "mup_width, or with attention_scale",
            ),
        }
        needs |= dict.fromkeys(EXPERT_FIELDS, (self.n_expert is not None, "n_expert"))
        for field in dataclasses.fields(self):
            read, what = needs.get(field.name, (True, ""))
            if not read and (value := getattr(self, field.name)) != field.default:
                raise UserError(f"ModelConfig.{field.name} = {value!r} has no effect without {what}")
        if mixed and self.rotary_fast <= self.rotary_slow:
            raise UserError(
                f"ModelConfig.rotary_fast = {self.rotary_fast}: must be above rotary_slow = {self.rotary_slow}"
            )

    @property
    def head_dim(self) -> int:
        return self.head_size or self.d_model // self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def mlp_dim(self) -> int:
        return self.mlp_size or -(-round(self.mlp_ratio * self.d_model) // self.mlp_multiple) * self.mlp_multiple

    @property
    def expert_dim(self) -> int:
        return self.expert_size or self.mlp_dim

    @property
    def shared_dim(self) -> int:
        """Width of the MLP that every token goes through."""
        return self.mlp_dim if self.n_expert is None else self.n_shared_expert * self.expert_dim

    @property
    def width_ratio(self) -> float:
        """By how much wider the model is than that whose learning rate it takes; 1 without muP."""
        return 1.0 if self.mup_width is None else self.d_model / self.mup_width

    @property
    def score_scale(self) -> float:
        """What q k is multiplied by: under muP 1/H, and 1/sqrt(H) at the head width `mup_head`."""
        if self.attention_scale is not None:
            return self.attention_scale
        return self.head_dim**-0.5 if self.mup_head is None else math.sqrt(self.mup_head) / self.head_dim

    @property
    def output_scale(self) -> float:
        """What the logits are multiplied by, before their soft cap: under muP less in a wider model."""
        return self.logit_scale / self.width_ratio

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def sees_all(self, layer: Any) -> Any:
        """Whether a block attends to all positions before; for a layer number that is an array too."""
        return self.window is None or (self.global_every is not None and (layer + 1) % self.global_every == 0)

    def differences(self, other: ModelConfig) -> list[str]:
        """Fields in which the two models compute something else, as `field: mine != other's`; not TRAINING_ONLY."""
        mine, others = dataclasses.asdict(self), dataclasses.asdict(other)
        same = {name for name, size in DERIVED.items() if getattr(self, size) == getattr(other, size)}
        names = [name for name in mine if name not in TRAINING_ONLY and name not in same]
        return [f"{name}: {mine[name]} != {others[name]}" for name in names if mine[name] != others[name]]
