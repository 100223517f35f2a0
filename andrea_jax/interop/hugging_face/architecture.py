"""What an architecture of Hugging Face is to us: options, tensors, and what every model of it shares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from andrea_jax.config import ModelConfig
from andrea_jax.interop.hugging_face.canonical import canonical
from andrea_jax.interop.hugging_face.layouts import Layout
from andrea_jax.interop.hugging_face.options import Field, Options, make_model
from andrea_jax.parameters import Spec, named_specs
from andrea_jax.settings import UserError


class Row(NamedTuple):
    """One of our tensors and theirs; `{}` in a name stands for the number of the block, then of the expert."""

    ours: str
    theirs: tuple[str, ...]
    layout: Layout


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One `model_type`."""

    model_type: str
    class_name: str
    prefix: str  # of the names of all tensors but the head's
    fields: tuple[Field, ...]
    shared: dict[str, Any]  # our fields that all its models have in common
    rows: tuple[Row, ...]
    read_more: Callable[[Options], dict[str, Any]]  # our fields that are more than one option's
    write_more: Callable[[ModelConfig], dict[str, Any]]  # and the options of these
    only: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)  # values of options that we have
    filled: tuple[str, ...] = ("norm_gain",)  # our flags that ones and zeros can stand for where a model lacks them
    whole_heads: bool = False  # d_model must divide by the heads, whatever their width

    def read_config(self, options: Options) -> ModelConfig:
        """The model that a config.json describes.

        Raises:
            UserError: an option that is missing or that our models lack, by name.
        """
        for name, allowed in self.only.items():
            options.only(name, *allowed)
        fields = {field.ours: field.read(options) for field in self.fields}
        return make_model(options, self.shared | fields | self.read_more(options))

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """The options of a canonical config, as far as this architecture has them."""
        return {field.theirs: field.write(config) for field in self.fields} | self.write_more(config)

    def fill(self, config: ModelConfig) -> ModelConfig:
        """The canonical config with tensors for what the layout cannot leave out."""
        switched_on: dict[str, Any] = dict.fromkeys(self.filled, True)
        return dataclasses.replace(canonical(config), **switched_on)

    def lacks(self, config: ModelConfig) -> list[str]:
        """Why it cannot express a model; empty if it does, that is if its options read back as the same function."""
        if self.whole_heads and config.d_model % config.n_head:
            return [f"d_model = {config.d_model} does not divide by n_head = {config.n_head}"]
        try:
            asked = self.fill(config)
            got = canonical(self.read_config(Options(self.write_config(asked))))
        except UserError as error:
            return [str(error)]
        return asked.differences(got)

    def table(self, config: ModelConfig) -> list[tuple[Row, Spec]]:
        """The rows of the tensors that this model has."""
        specs = named_specs(config)
        rows = [(row, specs.pop(row.ours)) for row in self.rows if row.ours in specs]
        assert not specs, f"{self.model_type} has no row for {', '.join(specs)}"
        return rows
