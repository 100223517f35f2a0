"""Models from and to Hugging Face's form."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import flags
from absl import flags as absl_flags

from andrea_jax.checkpoint import find_checkpoint, load_checkpoint, takes_average
from andrea_jax.config import ModelConfig
from andrea_jax.data.config import DataConfig
from andrea_jax.interop.hugging_face import read_model, write_model
from andrea_jax.interop.hugging_face.architectures import ARCHITECTURES
from andrea_jax.interop.run_folder import write_run
from andrea_jax.optimizer import OptimizerConfig
from andrea_jax.parameters import count_parameters
from andrea_jax.schedule import ScheduleConfig
from andrea_jax.settings import RunError, UserError
from andrea_jax.train.config import RunConfig, TrainConfig

DESCRIPTION = f"""Turns a folder that transformers wrote into a run folder, or a checkpoint into such a folder:
  python experiments/convert.py --from_hf=DIR --run_dir=runs/x
  python experiments/convert.py --to_hf=DIR --checkpoint=runs/x
The function stays the same; tensors are read as safetensors only. Architectures: {", ".join(ARCHITECTURES)}."""

FLAGS = absl_flags.FlagValues()
absl_flags.DEFINE_string("from_hf", None, "folder with config.json, safetensors and tokenizer.json", flag_values=FLAGS)
absl_flags.DEFINE_string("run_dir", None, "from_hf: run folder to write; it must not exist", flag_values=FLAGS)
absl_flags.DEFINE_integer(
    "context_length", None, "from_hf: a shorter context, for models with rotary positions", 1, flag_values=FLAGS
)
absl_flags.DEFINE_string("tokenizer", None, "from_hf: another tokenizer.json than the folder's", flag_values=FLAGS)
absl_flags.DEFINE_string("to_hf", None, "folder to write; it must not exist", flag_values=FLAGS)
absl_flags.DEFINE_string("checkpoint", None, "to_hf: run folder, or one checkpoint in it", flag_values=FLAGS)
absl_flags.DEFINE_integer("step", None, "to_hf: checkpoint of this step; default: the newest", flag_values=FLAGS)
flags.define_weights(FLAGS, "to_hf: ")
absl_flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16", "float16"], "to_hf: of the tensors; float32 is exact", flag_values=FLAGS
)
absl_flags.DEFINE_integer("shard_mb", 5000, "to_hf: megabytes of a file, at most", 1, flag_values=FLAGS)
absl_flags.DEFINE_string(
    "architecture", None, "to_hf: default: the first that expresses the model exactly", flag_values=FLAGS
)
absl_flags.DEFINE_bool("json", False, "print one JSON object", flag_values=FLAGS)

DIRECTIONS = {
    "from_hf": ("run_dir", ("run_dir", "context_length", "tokenizer")),
    "to_hf": ("checkpoint", ("checkpoint", "step", "weights", "dtype", "shard_mb", "architecture")),
}


def run(config: RunConfig, bound: dict[str, str]) -> None:
    try:
        done = from_hf() if direction() == "from_hf" else to_hf()
    except OSError as error:
        raise RunError(f"{error.filename or 'a file'}: cannot be written: {error.strerror or error}") from error
    if FLAGS["json"].value:
        print(json.dumps({key: value for key, value in done.items() if key != "text"}))
    else:
        print("\n".join(done["text"]))


def direction() -> str:
    """`from_hf` or `to_hf`. Raises UserError for flags that do not go together."""
    given = [name for name in DIRECTIONS if FLAGS[name].value is not None]
    if len(given) != 1:
        raise UserError(
            "give --from_hf=DIR --run_dir=RUN to read a model, or --to_hf=DIR --checkpoint=RUN to write one"
        )
    needed, own = DIRECTIONS[given[0]]
    if FLAGS[needed].value is None:
        raise UserError(f"--{given[0]} needs --{needed}")
    for name in {name for _, names in DIRECTIONS.values() for name in names} - set(own):
        if FLAGS[name].present:
            raise UserError(f"--{name} has no effect with --{given[0]}")
    return given[0]


def from_hf() -> dict[str, Any]:
    """Reads a model and writes a run folder."""
    folder, run_dir = FLAGS["from_hf"].value, FLAGS["run_dir"].value
    read = read_model(folder, FLAGS["context_length"].value, FLAGS["tokenizer"].value)
    settings = RunConfig(
        model=read.config,
        train=TrainConfig(run_dir=run_dir),
        data=DataConfig(tokenizer=str(Path(run_dir) / "tokenizer.json")),
        optimizer=OptimizerConfig(kind="adamw"),
        schedule=ScheduleConfig(peak=1e-4),  # our choice, as adamw is: what was trained far is moved gently
    )
    write_run(settings, read.params, read.tokenizer, flags.format_config(settings))
    scripts = sys.argv[0].rpartition("convert.py")[0]
    text = [
        f"{read.model_type}: {sizes(read.config)}, tokenizer with {read.tokenizer.size:,} ids",
        *(f"note: {note}" for note in read.notes),
        f"everything is in {run_dir}: checkpoints/, tokenizer.json, config.gin. Next:",
        f"  python {scripts}generate.py --checkpoint {run_dir} --prompt 'The '",
        f"  python {scripts}eval.py --checkpoint {run_dir} --text YOUR.txt",
        f"  python {scripts}train.py --gin_file={run_dir}/config.gin --gin.data.path=YOUR.txt   # go on training",
    ]
    done = {"model_type": read.model_type, "parameters": count_parameters(read.config), "notes": read.notes}
    return {"run_dir": run_dir, "text": text, **done}


def to_hf() -> dict[str, Any]:
    """Reads a checkpoint and writes a folder."""
    folder, step = find_checkpoint(FLAGS["checkpoint"].value, FLAGS["step"].value)
    params, config, tokenizer = load_checkpoint(folder, step, FLAGS["weights"].value)
    out, dtype = FLAGS["to_hf"].value, FLAGS["dtype"].value
    average = takes_average(folder, step, FLAGS["weights"].value)
    shard_bytes = FLAGS["shard_mb"].value * 10**6
    written = write_model(out, params, config, tokenizer, dtype, shard_bytes, FLAGS["architecture"].value)
    text = [
        f"{written.model_type}: {sizes(config)}, {dtype}, step {step}" + (", averaged weights" if average else ""),
        *(f"note: {name} is written as {value}, which the model lacks" for name, value in written.filled.items()),
        f"{out}: {', '.join(sorted(path.name for path in Path(out).iterdir()))}",
    ]
    done = {"model_type": written.model_type, "parameters": count_parameters(config), "step": step, "dtype": dtype}
    return {"folder": out, "text": text, "files": written.files, "filled": written.filled, **done}


def sizes(config: ModelConfig) -> str:
    return (
        f"{count_parameters(config):,} parameters, {config.n_layer} x block of width {config.d_model}, "
        f"{config.n_head} heads, context {config.context_length:,}, vocabulary {config.vocab_size:,}"
    )


if __name__ == "__main__":
    flags.main(run, DESCRIPTION, FLAGS, uses=())
