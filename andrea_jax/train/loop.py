"""The training loop: the only part with side effects."""

from __future__ import annotations

import dataclasses
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import jax
from jax.sharding import Mesh

from andrea_jax.checkpoint import describe_last, last_saved, newest_step, open_for_saving, save
from andrea_jax.data.windows import eval_batches, iterate, make_batches
from andrea_jax.distributed import agreed_stop, gather, is_main
from andrea_jax.evaluate import evaluate
from andrea_jax.files import write_file
from andrea_jax.generate import SamplingConfig, encode_prompt, generate
from andrea_jax.inspect.plots import plot_loss
from andrea_jax.settings import RunError
from andrea_jax.sharding import local_rows, place_batch
from andrea_jax.train.config import RunConfig, TrainConfig
from andrea_jax.train.corpus import TokenCorpus
from andrea_jax.train.meter import Meter
from andrea_jax.train.parallel import compile_step, run_mesh
from andrea_jax.train.report import Quiet, Report
from andrea_jax.train.resume import data_identity, make_meta, start_state
from andrea_jax.train.run_folder import MetricsLog, NoLog, locked
from andrea_jax.train.signals import StopRequest, stop_on_signal
from andrea_jax.train.state import State


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended. `validation` is that of the last evaluation; `stopped` names the signal that ended it early."""

    state: State
    validation: dict[str, float]
    sample: str
    run_dir: Path
    stopped: str | None


def train(config: RunConfig, corpus: TokenCorpus, report: Report | None = None, config_text: str = "") -> Result:
    """Trains from the newest checkpoint of `train.run_dir`, or from the start, to `train.steps`.

    `config_text` is written to the run folder as config.gin.

    Raises:
        UserError: the run folder cannot be continued with these settings.
        RunError: a loss or gradient that is not finite; a checkpoint that cannot be written.
    """
    run_dir = Path(config.train.run_dir)
    mesh = run_mesh(config)  # refused before there is a folder
    with locked(run_dir) if is_main() else nullcontext(), stop_on_signal(together=jax.process_count() > 1) as stop:
        try:
            return _train(config, corpus, report or Quiet(), config_text, run_dir, mesh, stop)
        except OSError as error:
            last = describe_last(newest_step(run_dir / "checkpoints"))
            raise RunError(f"cannot write to {run_dir}: {error.strerror or error}; {last}") from error


def _train(
    config: RunConfig,
    corpus: TokenCorpus,
    report: Report,
    config_text: str,
    run_dir: Path,
    mesh: Mesh,
    stop: StopRequest,
) -> Result:
    options, tokenizer = config.train, corpus.tokenizer
    sizes = (options.batch_size, config.model.context_length)
    documents = (config.data.mask_documents, tokenizer.bos)
    encode_prompt(tokenizer, options.sample_prompt, config.model.context_length)  # refused now, not at the first sample
    batches = make_batches(corpus.train, *sizes, options.seed, *documents, local_rows(mesh, options.batch_size))
    state, tokens = start_state(config, corpus, report, mesh)
    first = int(state.step)
    if config_text and is_main():
        write_file(run_dir / "config.gin", config_text.encode())

    meta = make_meta(config, tokenizer, data_identity(corpus))
    train_step = compile_step(config, mesh)
    log = MetricsLog(run_dir, options, meta["settings"], first) if is_main() else NoLog()
    saved_at = time.monotonic()
    validation: dict[str, float] = {}
    sample = ""
    try:
        with open_for_saving(run_dir / "checkpoints", options.keep_last) as manager:
            meter = Meter(config, log, report, first, tokens, partial(last_saved, manager))
            steps = range(first + 1, options.steps + 1)
            for step, batch in zip(steps, meter.waiting(iterate(batches, first, config.data.workers)), strict=False):
                with meter.timed("step"):
                    state, metrics = train_step(state, place_batch(batch, mesh, options.batch_size))
                    meter.read(step, metrics)  # of the step before: the device is already at work on this one
                if agreed_stop(step):
                    stop.name = "SIGTERM"
                last = step == options.steps
                ending = last or stop.name is not None
                evaluating = last or step % options.eval_every == 0
                saving = ending or step % options.save_every == 0 or _due(options, step, saved_at)
                if evaluating or saving:
                    meter.catch_up()  # nothing is evaluated or saved before its own metrics were seen
                if evaluating:
                    with meter.timed("evaluation"):
                        windows = eval_batches(corpus.validation, *sizes, options.eval_windows, *documents)
                        validation = evaluate(
                            state.evaluated, windows, config.model, tokenizer.byte_lengths, config.engine, mesh
                        )
                    log.write(validation_record(step, meter.tokens, validation))
                    report.say(f"step {step}: validation {describe(validation)}")
                if saving:
                    with meter.timed("save"):
                        loss = validation["loss"] if evaluating else None
                        save(manager, state, meta | {"tokens": meter.tokens}, loss)
                        saved_at = time.monotonic()
                if last or step % options.sample_every == 0:
                    sample = draw_sample(state, config, corpus)
                    if is_main():
                        with open(run_dir / "samples.txt", "a", encoding="utf-8") as samples:
                            samples.write(f"--- step {step}\n{sample}\n")
                if ending:
                    break
    finally:
        report.close()
        log.close()
    if is_main():
        plot_loss(run_dir)
    return Result(state, validation, sample, run_dir, None if last else stop.name)


def _due(options: TrainConfig, step: int, saved_at: float) -> bool:
    """Whether `train.save_minutes` have passed, by the clock of process 0."""
    if options.save_minutes is None or step % options.log_every:
        return False
    return gather(time.monotonic() - saved_at >= 60 * options.save_minutes)[0]


def draw_sample(state: State, config: RunConfig, corpus: TokenCorpus) -> str:
    """Text that the model writes after `train.sample_prompt`, the prompt included; the same for the same step."""
    options = config.train
    texts = generate(
        state.evaluated,
        config.model,
        corpus.tokenizer,
        [options.sample_prompt],
        SamplingConfig(),
        max_tokens=options.sample_tokens,
        seed=options.seed,
        engine=config.engine,
    )
    return options.sample_prompt + texts[0]


def validation_record(step: int, tokens: int, validation: dict[str, float]) -> dict[str, object]:
    """A line of metrics.jsonl; `tokens` are those trained on, so that both losses can be drawn over them."""
    measures = {name: validation[name] for name in ("loss", "perplexity", "bits_per_byte")}
    counted = {f"validation_{name}": validation[name] for name in ("tokens", "bytes")}
    return {"kind": "validation", "step": step, "tokens": tokens, **measures, **counted}


def describe(validation: dict[str, float]) -> str:
    """`loss 3.214  perplexity 24.9  bits per byte 1.52`."""
    return (
        f"loss {validation['loss']:.4f}  perplexity {validation['perplexity']:.2f}  "
        f"bits per byte {validation['bits_per_byte']:.4f}"
    )
