"""Every model that comes with a file of settings: its exact size, its arithmetic, and the command that trains it.

  python experiments/models.py > docs/models.md
Nothing is allocated: counts and FLOPs follow from the parameter specs."""

from __future__ import annotations

import json
import math
from typing import Any

import flags
from absl import flags as absl_flags
from gin_settings import CONFIGS

from andrea_jax.inspect.flops import flops_per_token
from andrea_jax.parameters import count_active_parameters, count_parameters, named_specs
from andrea_jax.train.config import RunConfig

FLAGS = absl_flags.FlagValues()
absl_flags.DEFINE_bool("json", False, "print one JSON list", flag_values=FLAGS)
TABLES = ("token_embedding", "position_embedding", "head")
HEAD = """# Models

What `python experiments/models.py` prints; a test holds this page to it. **Parameters** are exact, a tied table counted
once; *without tables*: less token and position table and head. **FLOPs a token** are those of forward and backward at
the file's context: 6 for each element of a matrix and of the output product, 6 T N H a block for causal attention, less
with a window; of experts those that a token takes. **Trained** is what the file says: steps x batch x context tokens.
"""
TITLES = {
    "andrea": "## ANDREA, as the course has it, and with the block of today's models",
    "variant": "## The default run with another block\n\nSmall enough to try in minutes; each learns in a test.",
}


def run(config: RunConfig, bound: dict[str, str]) -> None:
    found = {kind: models(kind) for kind in TITLES}
    print(json.dumps([one for rows in found.values() for one in rows]) if FLAGS["json"].value else page(found))


def models(kind: str) -> list[dict[str, Any]]:
    """The facts of all files of a kind, smaller models first."""
    return sorted((row(path.stem) for path in CONFIGS.glob(f"{kind}_*.gin")), key=lambda one: one["parameters"])


def row(name: str) -> dict[str, Any]:
    """The facts of one file of settings."""
    config, _ = flags.run_config([name])
    model, train = config.model, config.train
    count = count_parameters(model)
    tables = sum(math.prod(spec.shape) for part, spec in named_specs(model).items() if part in TABLES)
    tokens = train.steps * train.batch_size * model.context_length
    return {
        "name": name,
        "about": about(name),
        "parameters": count,
        "active_parameters": count_active_parameters(model),
        "without_tables": count - tables,
        "n_layer": model.n_layer,
        "d_model": model.d_model,
        "n_head": model.n_head,
        "context_length": model.context_length,
        "vocab_size": model.vocab_size,
        "flops_per_token": flops_per_token(model),
        "tokens": tokens,
        "flops": flops_per_token(model) * tokens,
        "command": f"python experiments/train.py --gin_file={name}",
    }


def about(name: str) -> str:
    """What the file's first lines say of it."""
    lines = (CONFIGS / f"{name}.gin").read_text().splitlines()
    comment = [line.removeprefix("#").strip() for line in lines[: next(i for i, x in enumerate(lines) if x[:1] != "#")]]
    return " ".join(line for line in comment if line != "The default run with another block.")


def page(found: dict[str, list[dict[str, Any]]]) -> str:
    columns = (
        "| file | parameters | without tables | blocks x width, heads | context, vocabulary | FLOPs a token | trained |"
    )
    parts = [HEAD]
    for kind, rows in found.items():
        lines = [columns, "|---|---|---|---|---|---|---|", *map(line, rows)]
        notes = [f"- `{one['command']}`: {one['about']}" for one in rows]
        parts.append("\n".join([TITLES[kind], "", *lines, "", *notes, ""]))
    return "\n".join(parts).rstrip()


def line(one: dict[str, Any]) -> str:
    active = "" if one["active_parameters"] == one["parameters"] else f" ({one['active_parameters']:,} a token)"
    cells = [
        f"`{one['name']}`",
        f"{one['parameters']:,}{active}",
        f"{one['without_tables']:,}",
        f"{one['n_layer']} x {one['d_model']}, {one['n_head']}",
        f"{one['context_length']:,}, {one['vocab_size']:,}",
        f"{one['flops_per_token']:,}",
        f"{one['tokens'] / 1e6:,.0f} M tokens, {one['flops']:.3g} FLOPs",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    flags.main(run, __doc__, FLAGS, uses=())
