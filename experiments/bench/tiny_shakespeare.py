"""Tiny Shakespeare at nanoGPT's CPU size, with its settings and with ours: validation loss of three seeds each.

The whole validation split in windows of 64, 2,000 steps of 12 windows, 804,096 parameters. Measured the same way
nanoGPT reaches 1.905, 1.910 and 1.917, and 1.766 with its learning rate tuned.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import flags
import jax
from absl import flags as absl_flags

from andrea_jax.files import write_file
from andrea_jax.parameters import count_parameters
from andrea_jax.train.config import RunConfig
from andrea_jax.train.corpus import open_corpus
from andrea_jax.train.loop import train

FLAGS = absl_flags.FlagValues()
SETTINGS = ("tinyshakespeare_nanogpt", "tinyshakespeare")
absl_flags.DEFINE_multi_string("settings", SETTINGS, "gin files to compare", flag_values=FLAGS)
absl_flags.DEFINE_integer("seeds", 3, "runs of each", flag_values=FLAGS, lower_bound=1)
absl_flags.DEFINE_string("out", None, "also write the JSON to this file", flag_values=FLAGS)


def run(config: RunConfig, bound: dict[str, str]) -> None:
    results = {name: measure(name, config, bound) for name in FLAGS["settings"].value}
    conditions = {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "date": time.strftime("%Y-%m-%d")}
    text = json.dumps({"conditions": conditions, "results": results}, indent=1)
    print(text)
    if FLAGS["out"].value:
        write_file(Path(FLAGS["out"].value), f"{text}\n".encode())


def measure(name: str, overrides: RunConfig, bound: dict[str, str]) -> dict[str, object]:
    config, file_bound = flags.run_config([name])
    data = dataclasses.replace(config.data, **flags.bound_fields("data", overrides, bound))
    config = dataclasses.replace(config, data=data)
    losses, seconds = [], []
    for seed in range(FLAGS["seeds"].value):
        with tempfile.TemporaryDirectory() as folder:
            options = dataclasses.replace(
                config.train, seed=seed, run_dir=folder, eval_every=10**9, save_every=10**9, sample_every=10**9
            )
            seeded, corpus = open_corpus(dataclasses.replace(config, train=options), file_bound)
            start = time.perf_counter()
            result = train(seeded, corpus)
            seconds.append(time.perf_counter() - start)
        losses.append(result.validation["loss"])
        print(f"{name} seed {seed}: {losses[-1]:.4f} in {seconds[-1]:.0f} s", file=sys.stderr, flush=True)
    return {
        "parameters": count_parameters(seeded.model),
        "losses": [round(loss, 4) for loss in losses],
        "mean": round(statistics.mean(losses), 4),
        "spread": round(max(losses) - min(losses), 4),
        "seconds": [round(s) for s in seconds],
    }


if __name__ == "__main__":
    flags.main(run, __doc__.splitlines()[0], FLAGS, ("data",))
