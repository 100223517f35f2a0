"""The settings of a short run that is worth killing: an epoch ends in it, and it saves several times."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import jax

from andrea_jax.data.windows import count_windows
from andrea_jax.distributed import DistributedConfig
from andrea_jax.inspect.short_corpus import shorten
from andrea_jax.settings import UserError
from andrea_jax.train.config import RunConfig
from andrea_jax.train.corpus import TokenCorpus
from andrea_jax.train.state import abstract_state

CHECKPOINTS = 4  # at least so many in a run
FEWEST_STEPS = 2 * CHECKPOINTS
EVAL_WINDOWS = 8


class Chosen(NamedTuple):
    """Settings, steps between checkpoints, the step in which an epoch ends, and notes on what is not the user's."""

    config: RunConfig
    every: int
    epoch_end: int
    notes: list[str]


def choose(
    config: RunConfig, bound: Collection[str], corpus: TokenCorpus, steps: int, every: int, rows: int, work: Path
) -> Chosen:
    """What the user set, for `steps` steps. What was not bound becomes harder to resume: dropout and parts of a batch,
    where it still divides over `rows` devices. The corpus is cut in `work` so that an epoch ends in the run."""
    size, context = config.train.batch_size, config.model.context_length
    epoch_end = 3 * every + 1
    windows = (epoch_end - 1) * size + max(1, size // 2)  # the last of them in the middle of a batch
    data, notes = dataclasses.replace(config.data, path=str(corpus.folder)), []
    if count_windows(corpus.train, context) > windows:
        tokens = windows * context + 1
        folder = shorten(corpus, work / "corpus", tokens, EVAL_WINDOWS * context + 1)
        data = dataclasses.replace(data, path=str(folder))
        notes.append(f"data      the first {tokens:,} tokens, so that an epoch ends in step {epoch_end}")
    else:
        epoch_end = min(max(2, count_windows(corpus.train, context) // size + 1), steps - 1)
    model, accumulate, harder = config.model, config.train.accumulate, []
    if "train.accumulate" not in bound and size % (2 * rows) == 0:
        accumulate = 2
        harder.append("train.accumulate = 2")
    if "ModelConfig.dropout" not in bound:
        model = dataclasses.replace(model, dropout=0.1)
        harder.append("ModelConfig.dropout = 0.1")
    if harder:
        notes.append(f"settings  yours, but {' and '.join(harder)} to make it harder; bind them to keep yours")
    train = dataclasses.replace(
        config.train,
        steps=steps,
        accumulate=accumulate,
        log_every=1,
        eval_every=every,
        eval_windows=EVAL_WINDOWS,
        save_every=every,
        keep_last=steps,
        sample_every=steps,
        sample_tokens=1,
        tensorboard=False,
        wandb=None,
    )
    alone = DistributedConfig(mode="off")
    config = dataclasses.replace(config, data=data, model=model, train=train, distributed=alone)
    return Chosen(config, every, epoch_end, notes)


def check_space(config: RunConfig, checkpoints: int, work: Path) -> None:
    """Raises UserError if so many checkpoints do not fit on the disk."""
    state = jax.tree.leaves(abstract_state(config))
    needed = checkpoints * sum(math.prod(x.shape) * x.dtype.itemsize for x in state)
    free = shutil.disk_usage(work).free
    if needed > free:
        raise UserError(
            f"the checkpoints of these runs take {needed / 1e9:.1f} GB, {work.parent} has {free / 1e9:.1f} GB free; "
            "set TMPDIR to a folder on a larger disk"
        )
