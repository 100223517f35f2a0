"""How long and how a run trains, and everything a run is made of."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from andrea_jax.config import ModelConfig
from andrea_jax.data.config import DataConfig
from andrea_jax.distributed import DistributedConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.optimizer import OptimizerConfig
from andrea_jax.presets import andrea_nano
from andrea_jax.schedule import ScheduleConfig, make_schedule
from andrea_jax.settings import UserError, check_fields, setting
from andrea_jax.sharding import MeshConfig


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One step is one optimizer step, whatever the accumulation."""

    SECTION: ClassVar[str] = "train"
    steps: int = setting(1000, "optimizer steps in all", at_least=1, at_most=2**31 - 1)
    batch_size: int = setting(8, "windows a step", at_least=1, at_most=2**24)
    parallel: Literal["jit", "pmap"] = setting(
        "jit", "jit: any mesh; pmap: the step of each device by itself on its part of the batch, mesh.data only"
    )
    accumulate: int = setting(1, "parts of a batch that are run one after the other to save memory", at_least=1)
    seed: int = setting(0, "of parameters, order of windows, dropout and samples", at_least=0, at_most=2**31 - 1)
    run_dir: str = setting("runs/nano", "folder of the run; a run found there is continued")
    z_loss: float = setting(0.0, "weight of logsumexp(logits)^2 in the training loss", at_least=0)
    nonfinite: Literal["stop", "skip"] = setting(
        "stop", "at a loss or gradient that is not finite: stop the run, or skip the step"
    )
    ema: float | None = setting(
        None,
        "decay of an average of the parameters, which evaluations, samples and scripts then use; None: no average",
        above=0,
        at_most=0.999999,
    )
    log_every: int = setting(10, "steps between lines of metrics.jsonl", at_least=1)
    eval_every: int = setting(250, "steps between evaluations", at_least=1)
    eval_windows: int | None = setting(
        None, "windows of the validation split that are evaluated; None: all", at_least=1
    )
    save_every: int = setting(250, "steps between checkpoints", at_least=1)
    save_minutes: float | None = setting(
        None, "also save after so many minutes, looked at every log_every steps; None: by steps alone", above=0
    )
    keep_last: int = setting(2, "newest checkpoints kept, beside the best", at_least=1)
    sample_every: int = setting(500, "steps between samples", at_least=1)
    sample_tokens: int = setting(120, "tokens of a sample", at_least=1)
    sample_prompt: str = setting("", "text that samples start from; empty: the beginning of a document")
    tensorboard: bool = setting(True, "write TensorBoard files into the run folder")
    wandb: str | None = setting(None, "Weights & Biases project; None: off")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.batch_size % self.accumulate:
            raise UserError(
                f"train.batch_size = {self.batch_size} does not divide into train.accumulate = {self.accumulate} parts"
            )


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """All settings of a run; the field names are the sections that flags and files use, `model` being `ModelConfig`."""

    model: ModelConfig = dataclasses.field(default_factory=andrea_nano)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)

    def __post_init__(self) -> None:
        make_schedule(self.schedule, self.train.steps)
        if self.engine.dtype == "float16":
            raise UserError("engine.dtype = 'float16' cannot train: its gradients underflow; use 'bfloat16'")
