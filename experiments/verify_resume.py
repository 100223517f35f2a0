"""Shows that killing a run and starting it again changes no bit of it, for your settings on your devices.

  python experiments/verify_resume.py andrea_nano
  python experiments/verify_resume.py andrea_nano --devices=8:fsdp=8,4:data=2:fsdp=2,1
Trains a few steps straight, then again with SIGKILL at awkward moments, and compares every loss and every tensor of
every checkpoint. With --devices the run also goes on over other devices: what is restored there must be bit-equal, and
the losses equal to rounding. On GPUs it sets what equal bits need, says so, and measures what that costs. Ends with 0
(bit-equal), 1 (it differs, or training failed) or 2 (wrong input)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import flags
import jax
from absl import flags as absl_flags
from settings_table import SECTIONS

from andrea_jax.inspect.compare_report import as_json
from andrea_jax.inspect.kills import KINDS
from andrea_jax.inspect.verify_resume import Finding, Options, verify_resume
from andrea_jax.inspect.verify_settings import FEWEST_STEPS
from andrea_jax.settings import UserError, nearest
from andrea_jax.train.config import RunConfig
from andrea_jax.train.corpus import open_corpus

FLAGS = absl_flags.FlagValues()
absl_flags.DEFINE_integer("steps", 24, "steps of the run", FEWEST_STEPS, 10**6, flag_values=FLAGS)
absl_flags.DEFINE_string("kill", "all", f"moments to kill it at: all, or some of {','.join(KINDS)}", flag_values=FLAGS)
absl_flags.DEFINE_string(
    "devices",
    "",
    "start on the first of these and go on over the others, such as 8,4:fsdp=2:tensor=2,1 or 4:pmap; virtual on CPU",
    flag_values=FLAGS,
)
absl_flags.DEFINE_integer("seed", None, "of the moments; another one each time if absent", flag_values=FLAGS)
absl_flags.DEFINE_bool("set_flags", True, "on GPUs: set the flags that equal bits need", flag_values=FLAGS)
absl_flags.DEFINE_bool("keep", False, "leave the folder with all runs", flag_values=FLAGS)
absl_flags.DEFINE_bool("json", False, "print one JSON object; progress goes to standard error", flag_values=FLAGS)
OURS = ("steps", "run_dir", "log_every", "eval_every", "eval_windows", "save_every", "keep_last", "sample_every")
OURS += ("sample_tokens", "tensorboard", "wandb")  # of train


def run(config: RunConfig, bound: dict[str, str]) -> int:
    for name in OURS:
        if bound.get(f"train.{name}", "").startswith("--"):
            raise UserError(f"--gin.train.{name}: chosen by this script itself; see --steps and --keep")
    jax.config.update("jax_platforms", "cpu")  # the devices are for the processes that train
    seed = random.randrange(10**6) if FLAGS["seed"].value is None else FLAGS["seed"].value
    options = Options(FLAGS["steps"].value, kinds(), FLAGS["devices"].value, seed, FLAGS["set_flags"].value)
    config, corpus = open_corpus(config, bound)
    with working_folder(FLAGS["keep"].value) as work:
        finding = verify_resume(config, bound, corpus, options, os.environ, command, work, say)
        if FLAGS["json"].value:
            print(json.dumps(to_json(finding, options)))
        else:
            print(finding)
    return 0 if finding.good else 1


def kinds() -> tuple[str, ...]:
    """Those that --kill names."""
    names = tuple(KINDS if FLAGS["kill"].value == "all" else FLAGS["kill"].value.split(","))
    for name in names:
        if name not in KINDS:
            raise UserError(f"--kill={FLAGS['kill'].value}: no such moment as {name!r}{nearest(name, KINDS)}")
    return names


def command(config: RunConfig, path: Path) -> list[str]:
    """Trains with these settings, as a user would."""
    path.write_text(flags.format_config(config))
    return [sys.executable, str(Path(__file__).with_name("train.py")), f"--gin_file={path}"]


def say(text: str) -> None:
    print(text, file=sys.stderr if FLAGS["json"].value else sys.stdout, flush=True)


def to_json(finding: Finding, options: Options) -> dict[str, object]:
    return {
        "equal": finding.good,
        "options": dataclasses.asdict(options),
        "kills": finding.kills,
        "same_devices": as_json(finding.comparison),
        "moves": [dataclasses.asdict(m) | {"good": m.good} for m in finding.moves],
        "drift": finding.drift and dataclasses.asdict(finding.drift) | {"good": finding.drift.good},
        "flags_missing": finding.flags,
        "tokens_per_second": finding.rates,
        "conclusion": str(finding),
    }


@contextlib.contextmanager
def working_folder(keep: bool) -> Iterator[Path]:
    """A temporary folder, removed at the end, also when interrupted."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="verify_resume_"))
    try:
        yield folder
    finally:
        if keep:
            say(f"kept      {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    used = [section for section in SECTIONS if section != "distributed"]  # each training process is alone
    flags.main(run, __doc__, FLAGS, used, arguments=("gin_file",))
