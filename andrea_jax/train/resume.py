"""Where a run begins: fresh, or from the newest complete checkpoint of its folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from andrea_jax.checkpoint import (
    discard_incomplete,
    model_config,
    newest_step,
    read_meta,
    restore_params,
    restore_state,
)
from andrea_jax.data.tokenizer import Tokenizer
from andrea_jax.distributed import agree, barrier, is_main
from andrea_jax.settings import UserError
from andrea_jax.train.config import RunConfig
from andrea_jax.train.corpus import TokenCorpus
from andrea_jax.train.parallel import sharded_abstract_state, sharded_init_state
from andrea_jax.train.report import Report
from andrea_jax.train.state import State, copied


def make_meta(config: RunConfig, tokenizer: Tokenizer, data: dict[str, Any] | None) -> dict[str, Any]:
    """What a checkpoint says beside its arrays; `data` is the identity of what was trained on, None: nothing yet."""
    return {
        "model": dataclasses.asdict(config.model),
        "settings": run_settings(config),
        "tokenizer": tokenizer.to_dict(),
        "data": data,
    }


def run_settings(config: RunConfig) -> dict[str, dict[str, Any]]:
    """All settings but those that say which of several processes this is."""
    sections = [f.name for f in dataclasses.fields(config) if f.name != "distributed"]
    return {name: dataclasses.asdict(getattr(config, name)) for name in sections}


def flat(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """{"train.steps": 10} of {"train": {"steps": 10}}."""
    return {f"{section}.{field}": value for section, fields in settings.items() for field, value in fields.items()}


def data_identity(corpus: TokenCorpus) -> dict[str, Any]:
    """The hashes of the training shards, in order: what a batch depends on beside seed and step."""
    return {"train": [shard["blake2b"] for shard in corpus.manifest["shards"] if shard["split"] == "train"]}


def start_state(config: RunConfig, corpus: TokenCorpus, report: Report, mesh: Mesh) -> tuple[State, int]:
    """The first state, or that of the newest complete checkpoint in `train.run_dir`, and the tokens trained on so far.

    Raises:
        UserError: the checkpoint is damaged, or of another model, other data or another tokenizer, or already at
            `train.steps`.
    """
    folder = Path(config.train.run_dir) / "checkpoints"
    for name in discard_incomplete(folder) if is_main() else ():
        report.say(f"skipped and removed the incomplete checkpoint {name}")
    barrier("checkpoints")
    step = newest_step(folder)
    agree({"the newest checkpoint": step})
    if step is None:
        return sharded_init_state(config, mesh), 0
    meta = read_meta(folder, step)
    _check_same_run(config, corpus, meta, step, report)
    if meta["data"] is None:
        report.say(f"starting with the parameters of {folder / str(step)}")
        first = sharded_init_state(config, mesh)
        params = restore_params(folder, step, sharded_abstract_state(config, mesh).params, meta)
        return State(first.step, params, first.optimizer, None if first.average is None else copied(params)), 0
    state = restore_state(folder, step, sharded_abstract_state(config, mesh))
    report.say(f"resuming from step {step} ({folder / str(step)})")
    return state, meta["tokens"]


def _check_same_run(config: RunConfig, corpus: TokenCorpus, meta: dict[str, Any], step: int, report: Report) -> None:
    run_dir = config.train.run_dir
    different = model_config(meta).differences(config.model)
    if different:
        raise UserError(
            f"{run_dir} holds another model (checkpoint != settings): {'; '.join(different)}. "
            "Choose another train.run_dir, or the settings of that run"
        )
    if meta["data"] is None:  # parameters from elsewhere, not trained here yet
        if meta["tokenizer"] != corpus.tokenizer.to_dict():
            raise UserError(
                f"{run_dir} holds a model of another tokenizer; set data.tokenizer = '{run_dir}/tokenizer.json'"
            )
        return
    kind = meta["settings"]["optimizer"]["kind"]
    if kind != config.optimizer.kind:
        raise UserError(
            f"{run_dir} was trained with optimizer.kind = '{kind}', whose state does not serve "
            f"'{config.optimizer.kind}'; choose another train.run_dir, or the settings of that run"
        )
    if meta["data"] != data_identity(corpus):
        raise UserError(f"{run_dir} was trained on other data than {corpus.folder}; choose another train.run_dir")
    if step >= config.train.steps:
        raise UserError(
            f"{run_dir} is already at step {step}, train.steps = {config.train.steps}; "
            f"raise train.steps above {step} to go on, or choose another train.run_dir"
        )
    for change in setting_changes(meta["settings"], config):
        report.say(f"note: changed since the checkpoint: {change}")


def setting_changes(saved: dict[str, dict[str, Any]], config: RunConfig) -> list[str]:
    """`section.field: then -> now` for each setting that differs from a checkpoint's."""
    then, now = flat(saved), flat(run_settings(config))
    return [f"{name}: {then[name]} -> {now[name]}" for name in then if name in now and now[name] != then[name]]
