"""Says where two runs part: the first logged step and, in the checkpoints that both have, the first tensor.

  python experiments/compare_runs.py runs/a runs/b
Compares losses, norms and every tensor of parameters and optimizer state, bit by bit, on one device, whatever mesh
wrote them, and names the settings that differ. Ends with one line that says it all, and with 0 if nothing differs, 1
if something does."""

from __future__ import annotations

import json

import flags
import jax
from absl import flags as absl_flags

from andrea_jax.inspect.compare_report import as_json, lines
from andrea_jax.inspect.compare_runs import compare_runs
from andrea_jax.settings import UserError
from andrea_jax.train.config import RunConfig

FLAGS = absl_flags.FlagValues()
absl_flags.DEFINE_string("run_a", None, "run folder; the first argument", flag_values=FLAGS)
absl_flags.DEFINE_string("run_b", None, "the run folder to compare it with; the second argument", flag_values=FLAGS)
absl_flags.DEFINE_bool("json", False, "print one JSON object", flag_values=FLAGS)


def run(config: RunConfig, bound: dict[str, str]) -> int:
    runs = [FLAGS[name].value for name in ("run_a", "run_b")]
    if None in runs:
        raise UserError("two run folders are needed: compare_runs.py RUN_A RUN_B, such as runs/a runs/b")
    jax.config.update("jax_platforms", "cpu")  # nothing is computed, and a GPU may be busy with a run
    found = compare_runs(*runs)
    if FLAGS["json"].value:
        print(json.dumps(as_json(found)))
    else:
        print("\n".join(lines(found)))
    return 0 if found.equal else 1


if __name__ == "__main__":
    flags.main(run, __doc__, FLAGS, uses=(), arguments=("run_a", "run_b"))
