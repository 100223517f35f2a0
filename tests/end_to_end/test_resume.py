"""A run that was killed and resumed is, bit by bit, the run that was never killed."""

import random
import signal
import time

import jax
import numpy as np
import pytest
from end_to_end.scripts import run, settings, start, succeed, write_text

from andrea_jax.checkpoint import complete_steps, read_meta, restore_state
from andrea_jax.train.config import RunConfig, TrainConfig
from andrea_jax.train.run_folder import read_metrics
from andrea_jax.train.state import abstract_state

STEPS, EVERY = 600, 40
OPTIONS = dict(
    train__steps=STEPS,
    train__save_every=EVERY,
    train__eval_every=2 * EVERY,
    train__sample_every=10_000,
    train__accumulate=2,
    train__keep_last=1,
    train__ema=0.95,
    ModelConfig__dropout=0.1,
    data__mask_documents=True,
)


def final_state(run_dir, step=STEPS):
    import andrea_jax.checkpoint as checkpoint

    folder = run_dir / "checkpoints"
    model = checkpoint.model_config(read_meta(folder, step))
    config = RunConfig(model=model, train=TrainConfig(ema=0.95))
    return jax.device_get(restore_state(folder, step, abstract_state(config)))


def assert_bit_equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture(scope="module", autouse=True)
def compiled_anew():
    """Each process compiles for itself, as a user's does: what differs from one compilation to the next would show."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
        yield


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("straight")
    write_text(folder / "text.txt")
    succeed("train.py", *settings(folder, **OPTIONS))
    return folder


def kill_when(process, condition, seconds=120):
    """SIGKILL as soon as the condition holds; fails if the process ends before."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "ended before it could be killed: " + process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.001)
    process.kill()
    process.communicate()


def resumed(straight, folder, *conditions):
    """The same run in `folder`, killed at each condition in turn, then left to finish."""
    flags = settings(straight, train__run_dir=folder / "run", **OPTIONS)
    for condition in conditions:
        kill_when(start("train.py", *flags), condition)
    return succeed("train.py", *flags)


def test_killed_twice_between_and_during_saves_and_resumed_ends_with_equal_bits(straight, tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"

    def writing():
        return any("tmp" in p.name for p in checkpoints.glob("*")) and complete_steps(checkpoints)

    delay = random.Random(time.time_ns()).random()

    def later():
        steps = complete_steps(checkpoints)
        if steps and steps[-1] >= STEPS // 2:
            time.sleep(delay * 0.2)
            return True
        return False

    output = resumed(straight, tmp_path, writing, later)
    assert "resuming from step" in output
    assert_bit_equal(final_state(straight / "run"), final_state(tmp_path / "run"))

    ours, theirs = ({(r["kind"], r["step"]): r["loss"] for r in read_metrics(f / "run")} for f in (tmp_path, straight))
    assert ours.keys() == theirs.keys(), "a step is missing or there twice in metrics.jsonl"
    validation = [key for key in theirs if key[0] == "validation"]
    assert [ours[k] for k in validation] == [theirs[k] for k in validation]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_with_75_and_the_printed_command_continues(straight, tmp_path, number):
    flags = settings(straight, train__run_dir=tmp_path / "run", **OPTIONS | {"train__save_every": 100_000})
    process = start("train.py", *flags)
    while not (tmp_path / "run" / "metrics.jsonl").exists() or not read_metrics(tmp_path / "run"):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, out + err
    saved = complete_steps(tmp_path / "run" / "checkpoints")
    assert len(saved) == 1
    assert saved[0] < STEPS
    command = out.strip().splitlines()[-1].split()
    assert command[0] == "python"
    assert f"saved at step {saved[0]}" in out
    done = run("train.py", *command[2:])
    assert done.returncode == 0, done.stderr
    assert f"resuming from step {saved[0]}" in done.stdout
    assert_bit_equal(final_state(straight / "run"), final_state(tmp_path / "run"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_step_compiles_is_kept_until_a_step_is_saved(straight, tmp_path, number):
    process = start("train.py", *settings(straight, train__run_dir=tmp_path / "run", train__steps=10**6))
    while not (tmp_path / "run" / ".lock").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.001)
    time.sleep(0.2)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, out + err
    assert complete_steps(tmp_path / "run" / "checkpoints")


def test_a_signal_before_there_is_anything_to_save_ends_at_once_with_one_line(straight, tmp_path):
    write_text(tmp_path / "text.txt", lines=200_000)
    flags = settings(tmp_path, data__path=tmp_path / "text.txt", data__tokenizer="bpe")
    process = start("train.py", *flags)
    while not (tmp_path / "prepared").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "interrupted by SIGINT; nothing more was saved\n"
