import json
import os
import subprocess
import sys
from pathlib import Path

import flags
import pytest
from absl import flags as absl_flags
from settings_table import SETTINGS

from andrea_jax.settings import RunError, UserError

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
OWN = absl_flags.FlagValues()
CHECKPOINT = absl_flags.DEFINE_string("checkpoint", None, "the run folder", flag_values=OWN)
COUNT = absl_flags.DEFINE_integer("count", 3, "how many samples", flag_values=OWN)
JSON = absl_flags.DEFINE_bool("json", False, "print JSON", flag_values=OWN)
STOP = absl_flags.DEFINE_multi_string("stop", [], "texts that end a sample", flag_values=OWN)


@pytest.fixture
def call(capsys):
    """Runs a script's main and returns (exit code, stdout, stderr)."""

    def call(*arguments, run=lambda config, bound: None, **keywords):
        with pytest.raises(SystemExit) as caught:
            flags.main(run, "Tests flags.", OWN, argv=["folder/script.py", *arguments], **keywords)
        return caught.value.code, *capsys.readouterr()

    return call


def test_settings_and_own_flags_reach_the_script(call, tmp_path):
    (tmp_path / "my.gin").write_text("train.run_dir = 'here'\n")

    def run(config, bound):
        print(config.train.steps, config.train.seed, config.data.path, CHECKPOINT.value, JSON.value, STOP.value)
        print(*sorted(bound))

    code, out, err = call(
        "--gin.train.steps", "100", "--gin.data.path=my.txt", "--gin_bindings=train.seed = 7",
        f"--gin_file={tmp_path}/my.gin",
        "--checkpoint=A", "--json", "--stop=a", "--stop=b", run=run,
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert out == "100 7 my.txt A True ['a', 'b']\ndata.path train.run_dir train.seed train.steps\n"
    assert call(run=run)[1] == "1000 0 python_docs None False []\n\n"  # nothing is left of the first call


@pytest.mark.parametrize("returned", [None, 0, 1, 75])
def test_the_exit_code_is_what_the_run_returned(call, returned):
    assert call(run=lambda config, bound: returned)[0] == (returned or 0)


@pytest.mark.parametrize(("error", "exit_code"), [(UserError, 2), (RunError, 1)])
def test_what_the_run_raises_for_the_user_is_an_error_line(call, error, exit_code):
    def run(config, bound):
        raise error("loss is nan at step 7")

    assert call(run=run) == (exit_code, "", "error: loss is nan at step 7\n")


def test_ctrl_c_exits_with_130(call):
    def run(config, bound):
        raise KeyboardInterrupt

    assert call(run=run) == (130, "", "interrupted\n")


def test_a_bug_is_not_swallowed():
    def run(config, bound):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        flags.main(run, "", argv=["script.py"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chekpoint=A"], "no flag --chekpoint; did you mean --checkpoint?"),
        (["--gin.train.stepz=1"], "--gin.train.stepz: no setting train.stepz; did you mean train.steps?"),
        (["--steps=1"], "no flag --steps; did you mean --gin.train.steps?"),
        (["--train.steps=1"], "no flag --train.steps; did you mean --gin.train.steps?"),
        (["--qqqq"], "no flag --qqqq; --help lists them"),
        (["x.txt"], "unexpected argument 'x.txt'"),
        (["train.steps=1"], "unexpected argument 'train.steps=1'; settings are given as --gin.train.steps=1"),
        (["--count=x"], "--count=x: invalid literal for int() with base 10: 'x'"),
        (["--json=maybe"], "--json=maybe: expected true or false"),
        (["--gin.train.steps"], "Missing value for flag --gin.train.steps"),
        (["--checkpoint", "A", "--checkpoint=B"], "--checkpoint is given 2 times: A and B"),
        (["--json", "--nojson"], "--json is given 2 times: --json and --nojson"),
        (["--gin.train.steps=1", "--gin.train.steps", "2"], "--gin.train.steps is given 2 times: 1 and 2"),
        (["--gin_bindings=train.steps = 0"], "train.steps = 0: must be at least 1"),
        (["--gin_file=andrea_12"], "--gin_file=andrea_12: no such file; did you mean andrea_12m?"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_2(call, arguments, message):
    def run(config, bound):
        raise AssertionError("ran")

    assert call(*arguments, run=run) == (2, "", f"error: {message}\n")


def test_a_required_flag():
    own = absl_flags.FlagValues()
    absl_flags.DEFINE_string("out", None, "a folder", flag_values=own, required=True)
    with pytest.raises(SystemExit) as caught:
        flags.main(lambda config, bound: None, "", own, argv=["script.py"])
    assert caught.value.code == 2


def test_what_a_script_does_not_read_is_refused_as_a_flag_and_noted_in_a_file(call):
    uses = ["data", "ModelConfig.preset", "ModelConfig.vocab_size"]
    assert call("--gin.ModelConfig.vocab_size=300", "--gin.data.path=x", uses=uses)[0] == 0
    for place in ("--gin.ModelConfig.d_model=64", "--gin_bindings=ModelConfig.d_model=64"):
        code, _, err = call(place, uses=uses)
        assert code == 2
        assert err.endswith(": ModelConfig.d_model would never be used: script.py does not read it\n")
    code, _, err = call("--gin_file=andrea_nano", uses=uses)
    assert (code, err) == (0, "note: script.py does not use what the gin files say on optimizer, schedule, train\n")


def test_help_lists_every_setting_with_default_and_help_in_100_columns(call):
    code, out, err = call("--nonsense", "--help")
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines()) <= 100
    assert out.startswith("usage: python folder/script.py ")
    assert "Tests flags." in out
    words = " ".join(out.split())
    for name, setting in SETTINGS.items():
        assert f" {name} {' '.join(repr(setting.default).split())} {' '.join(setting.help.split())}" in words
    assert "--checkpoint the run folder --count 3 how many samples" in words
    assert "(none | attention | block)" in words
    assert "flagfile" not in words


def test_help_lists_only_what_the_script_reads(call):
    out = call("--help", uses=["engine"])[1]
    assert "engine.dtype" in out
    assert "train.steps" not in out


def test_print_config_prints_the_operative_config_and_runs_nothing(call, tmp_path):
    def run(config, bound):
        raise AssertionError("ran")

    code, out, err = call("--gin_file=andrea_12m", "--gin.train.steps=5", "--print_config", run=run)
    assert (code, err) == (0, "")
    (tmp_path / "config.gin").write_text(out)
    again = flags.run_config([str(tmp_path / "config.gin")])[0]
    assert again == flags.run_config(["andrea_12m"], ["train.steps = 5"])[0]
    assert call("--print_config", uses=["engine"])[1].startswith("# engine\nengine.")


SCRIPT = f"""
'''A script.'''
import sys
sys.path.insert(0, {str(EXPERIMENTS)!r})
import json, logging, warnings
import flags
from absl import logging as absl_logging

def run(config, bound):
    absl_logging.info('noise')
    absl_logging.warning('noise')
    if config.train.seed == 13:
        raise RuntimeError('unlucky')
    print(json.dumps({{'steps': config.train.steps}}))

flags.main(run, __doc__)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "script.py").write_text(SCRIPT)

    def script(*arguments):
        command = [sys.executable, "script.py", *arguments]
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)

    return script


def test_a_real_script_prints_clean_json(script):
    done = script("--gin_file=andrea_12m.gin")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"steps": 43587}


def test_a_real_script_refuses_in_one_line(script):
    done = script("--gin.train.steps=1e5")
    message = "error: train.steps = 100000.0: expected a whole number; write 100000\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_a_real_script_that_fails_shows_its_traceback(script):
    done = script("--gin.train.seed=13")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("RuntimeError: unlucky\n")
