"""A run folder that begins with parameters from elsewhere."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from andrea_jax.checkpoint import open_for_saving, save
from andrea_jax.data.tokenizer import Tokenizer
from andrea_jax.files import new_folder, write_file
from andrea_jax.parameters import Params
from andrea_jax.train.config import RunConfig
from andrea_jax.train.resume import make_meta
from andrea_jax.train.state import State


def write_run(config: RunConfig, params: Params, tokenizer: Tokenizer, config_text: str) -> None:
    """Writes `train.run_dir`, whole or not at all: a checkpoint of step 0, tokenizer.json, and `config_text` as
    config.gin. Training goes on from there with any optimizer and any data of this tokenizer.

    Raises:
        UserError: the folder is there already.
        RunError: the checkpoint cannot be written.
    """
    state = State(jnp.int32(0), params, {"none": np.zeros(())})  # Orbax writes no empty tree
    with new_folder(Path(config.train.run_dir)) as folder:
        tokenizer.save(folder / "tokenizer.json")
        write_file(folder / "config.gin", config_text.encode())
        with open_for_saving(folder / "checkpoints", keep_last=1) as manager:
            save(manager, state, make_meta(config, tokenizer, data=None) | {"tokens": 0}, None)
