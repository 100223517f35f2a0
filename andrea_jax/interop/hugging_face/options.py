"""The options of a config.json, and how one of them stands for a field of ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from andrea_jax.config import ModelConfig
from andrea_jax.settings import UserError

REQUIRED = object()
ACTIVATIONS = {
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_exact",
    "gelu_python": "gelu_exact",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
# What says nothing about the function that a trained model computes.
_WITHOUT_EFFECT = """
    _attn_implementation _name_or_path _sliding_window_pattern architectures attention_dropout attn_implementation
    attn_pdrop bos_token_id cache_implementation dtype embd_pdrop eos_token_id gradient_checkpointing hidden_act
    id2label initializer_range intermediate_size label2id max_window_layers model_type n_ctx num_labels
    output_attentions output_hidden_states output_router_logits pad_token_id pretraining_tp reorder_and_upcast_attn
    resid_pdrop return_dict router_aux_loss_coef router_jitter_noise sep_token_id sliding_window summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj task_specific_params tokenizer_class
    torch_dtype transformers_version unk_token_id use_cache use_sliding_window
"""
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())


class Options:
    """The options of a config.json; those that were looked at are remembered, so that the others can be named."""

    def __init__(self, values: Mapping[str, Any], place: str = "config.json"):
        self.values, self.place = values, place
        self.seen: set[str] = set()
        self.parts: dict[str, Options] = {}

    def part(self, name: str, values: Any) -> Options:
        """The options of an object in it."""
        if not isinstance(values, dict):
            raise self.wrong(name, values, "an object, in braces")
        self.parts[name] = Options(values, f"{self.place}: {name}")
        return self.parts[name]

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        """The option, or the default where it is left out.

        Raises:
            UserError: it is left out and has no default.
        """
        self.seen.add(name)
        if name not in self.values and default is REQUIRED:
            raise UserError(f"{self.place}: {name} is missing")
        return self.values.get(name, default)

    def number(self, name: str, default: Any = REQUIRED, above: float = 0) -> float:
        """`get`, of something that must be a number above a bound."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= above:
            raise self.wrong(name, value, f"a number above {above}")
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """Refuses an option that is given and has another value than these; null counts as left out."""
        value = self.get(name, None)
        if value is not None and value not in allowed:
            choices = " or ".join(map(str, allowed))
            raise self.wrong(name, value, f"there is only {choices}" if allowed else "our models have no such thing")

    def wrong(self, name: str, value: Any, expected: str) -> UserError:
        return UserError(f"{self.place}: {name} = {value!r}: {expected}")

    def unused(self) -> list[str]:
        """Options that were not looked at and may mean something."""
        own = set(self.values) - self.seen - WITHOUT_EFFECT
        return sorted(own) + [f"{name}.{option}" for name, part in self.parts.items() for option in part.unused()]


class Field(NamedTuple):
    """Their option is our field: the same value, or that of a table, whose first match is written."""

    theirs: str
    ours: str
    default: Any = REQUIRED
    table: Mapping[Any, Any] | None = None

    def read(self, options: Options) -> Any:
        value = options.get(self.theirs, self.default)
        if self.table is None:
            return value
        found = [ours for theirs, ours in self.table.items() if theirs == value]
        if not found:
            raise options.wrong(self.theirs, value, f"there are {', '.join(map(str, self.table))}")
        return found[0]

    def write(self, config: ModelConfig) -> Any:
        value = getattr(config, self.ours)
        if self.table is None:
            return value
        return next(theirs for theirs, ours in self.table.items() if ours == value)


def make_model(options: Options, values: Mapping[str, Any]) -> ModelConfig:
    """The config of these fields. Raises UserError, with the place, where they form none."""
    try:
        return ModelConfig(**values)
    except UserError as error:
        raise UserError(f"{options.place}: {error}") from None
