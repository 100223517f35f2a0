"""Train a model: prepares the corpus, trains, evaluates, saves, samples; continues a run it finds in train.run_dir."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from functools import partial
from pathlib import Path

import flags
import jax
from absl import flags as absl_flags
from rich.console import Console
from settings_table import SETTINGS

from andrea_jax.checkpoint import describe_last, newest_step
from andrea_jax.distributed import agree, is_main, joined, main_first
from andrea_jax.inspect.parameter_table import parameter_table, sharding_table
from andrea_jax.layers.attention import check_attention, choose_back_end
from andrea_jax.optimizer import group_of
from andrea_jax.parameters import count_parameters, named_specs
from andrea_jax.sharding import plan_mesh, split_text
from andrea_jax.train.config import RunConfig
from andrea_jax.train.corpus import TokenCorpus, open_corpus
from andrea_jax.train.loop import Result, train
from andrea_jax.train.parallel import planned_mesh, sharded_abstract_state
from andrea_jax.train.report import ConsoleReport, Quiet, Report
from andrea_jax.train.resume import data_identity, flat, run_settings

FLAGS = absl_flags.FlagValues()
absl_flags.DEFINE_bool("print_parameters", False, "print every tensor of the model, and stop", flag_values=FLAGS)
STOPPED = 75  # EX_TEMPFAIL: run the same command again


def run(config: RunConfig, bound: dict[str, str]) -> int:
    if FLAGS["print_parameters"].value:
        console, mesh = Console(width=140), planned_mesh(config)
        console.print(parameter_table(config.model, config.optimizer))
        if mesh.size > 1:
            console.print(sharding_table(config.model, sharded_abstract_state(config, mesh)))
        return 0
    with joined(config.distributed, partial(last_checkpoint, config)):
        return run_joined(config, bound)


def run_joined(config: RunConfig, bound: dict[str, str]) -> int:
    report = ConsoleReport() if is_main() else Quiet()
    with main_first("the corpus is prepared"):
        config, corpus = open_corpus(config, bound, report.preparing if is_main() else None)
    agree(flat(run_settings(config)) | data_identity(corpus) | versions())
    check_attention(config.engine, config.model, config.engine.activation_dtype)
    introduce(config, corpus, report)
    shared = [name for name in SETTINGS if not name.startswith("distributed.")]
    result = train(config, corpus, report, flags.format_config(config, shared))
    conclude(result, config, report)
    return STOPPED if result.stopped else 0


def last_checkpoint(config: RunConfig) -> str:
    text = describe_last(newest_step(Path(config.train.run_dir) / "checkpoints"))
    return f"{text[0].upper()}{text[1:]}. "


def versions() -> dict[str, str]:
    """What numbers depend on beside the settings."""
    packages = ("jax", "jaxlib", "optax", "andrea_jax")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def introduce(config: RunConfig, corpus: TokenCorpus, report: Report) -> None:
    model = config.model
    dtype = config.engine.activation_dtype
    back_end = choose_back_end(config.engine, model, dtype, model.context_length)
    windows = config.train.batch_size * model.context_length
    report.say(
        f"model    {count_parameters(model):,} parameters: {model.n_layer} x block of width {model.d_model}, "
        f"{model.n_head} heads, context {model.context_length}, vocabulary {model.vocab_size:,}"
    )
    report.say(
        f"data     {config.data.path}: {len(corpus.train):,} tokens to train on, {len(corpus.validation):,} to "
        f"validate, tokenizer {corpus.tokenizer.kind} with {corpus.tokenizer.size:,} ids ({corpus.folder})"
    )
    if skipped := corpus.manifest["skipped_files"]:
        report.say(f"         {len(skipped)} files were left out as binary: {', '.join(skipped[:3])} ...")
    device = jax.devices()[0]
    report.say(f"device   {device_text(config, device.device_kind)}, {dtype.name}, attention {back_end}")
    if model.mup_width is not None:
        heads, logits = model.mup_head or model.head_dim, f"logits x {1 / model.width_ratio:g}"
        report.say(
            f"muP      learning rate of width {model.mup_width}, with heads of {heads}: {logits}; the parts that"
        )
        report.say("         matrices take of it: --print_parameters")
    muon = [name for name, spec in named_specs(model).items() if group_of(config.optimizer, spec) == "muon"]
    report.say(
        "optim    "
        + (f"muon on {', '.join(muon)}; adamw on the rest" if muon else f"{config.optimizer.kind} on all tensors")
    )
    if config.train.ema is not None:
        report.say(f"average  evaluations and samples use parameters averaged with decay {config.train.ema}")
    if config.train.steps <= config.schedule.warmup:
        some = max(1, config.train.steps // 10)
        report.say(
            f"note: the run ends within its warm-up of {config.schedule.warmup} steps; try schedule.warmup={some}"
        )
    epochs = config.train.steps * windows / len(corpus.train)
    report.say(
        f"run      {config.train.run_dir}: {config.train.steps:,} steps of {windows:,} tokens, {epochs:.1f} epochs"
    )


def device_text(config: RunConfig, kind: str) -> str:
    """`8 x cpu (data 2 x fsdp 4)`."""
    split = split_text(plan_mesh(config.mesh, jax.device_count()).shape)
    split += ", pmap" if split and config.train.parallel == "pmap" else ""
    return f"{jax.device_count()} x {kind}" + (f" ({split})" if split else "")


def conclude(result: Result, config: RunConfig, report: Report) -> None:
    script, run_dir = sys.argv[0], result.run_dir
    folder = script.rpartition("train.py")[0]
    if result.stopped:
        report.say(f"stopped by {result.stopped} and saved at step {int(result.state.step)}; to go on:")
        report.say(f"  python {script} --gin_file={run_dir}/config.gin")
        return
    report.say(f"\nsample     {result.sample.strip()}\n")
    report.say(f"everything is in {run_dir}: loss.png, metrics.jsonl, samples.txt, tensorboard/, checkpoints/. Next:")
    report.say(f"  python {folder}eval.py --checkpoint {run_dir}")
    report.say(f"  python {folder}generate.py --checkpoint {run_dir} --prompt 'The '")
    more = 2 * int(result.state.step)
    report.say(
        f"  python {script} --gin_file={run_dir}/config.gin --gin.train.steps={more}   # go on, on a longer schedule"
    )
    if config.data.path == "python_docs":
        report.say(f"  python {script} --gin.data.path=YOUR.txt --gin.train.run_dir=runs/mine   # your own text")


if __name__ == "__main__":
    flags.main(run, __doc__, FLAGS)
