"""Turn a corpus into token shards; training does this itself, but a large corpus is better prepared once, ahead."""

from __future__ import annotations

import json

import flags
from absl import flags as absl_flags

from andrea_jax.data.prepare import prepare
from andrea_jax.data.shards import read_manifest
from andrea_jax.train.config import RunConfig
from andrea_jax.train.corpus import chosen_vocabulary
from andrea_jax.train.report import ConsoleReport

FLAGS = absl_flags.FlagValues()
absl_flags.DEFINE_integer("processes", 1, "processes that encode", flag_values=FLAGS, lower_bound=1)
absl_flags.DEFINE_bool("json", False, "print the manifest's counts as one JSON object", flag_values=FLAGS)


def run(config: RunConfig, bound: dict[str, str]) -> None:
    report = ConsoleReport()
    progress = None if FLAGS["json"].value else report.preparing
    folder = prepare(config.data, chosen_vocabulary(config, bound), progress, FLAGS["processes"].value)
    manifest = read_manifest(folder)
    splits = manifest["splits"]
    counts = {"folder": str(folder), "tokenizer": manifest["tokenizer"], **splits}
    if FLAGS["json"].value:
        print(json.dumps(counts))
        return
    for name, split in splits.items():
        report.say(f"{name:10} " + ", ".join(f"{value:,} {what}" for what, value in split.items()))
    report.say("tokenizer  " + ", ".join(f"{what} {value}" for what, value in manifest["tokenizer"].items()))
    report.say(f"{folder}   # train on it with --gin.data.path={folder}")


if __name__ == "__main__":
    flags.main(run, __doc__, FLAGS, ("data", "ModelConfig.vocab_size"))
