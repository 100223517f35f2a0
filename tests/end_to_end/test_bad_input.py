"""Wrong input: one or two lines, an exit code, nothing lost. Each as a user would meet it."""

import json
import os
import shutil

import pytest
from end_to_end.scripts import refused, run, settings, succeed, write_text

from andrea_jax.checkpoint import complete_steps


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    write_text(folder / "text.txt")
    succeed("train.py", *settings(folder, train__save_every=10, train__steps=20))
    return folder


@pytest.fixture
def copied(trained, tmp_path):
    """A copy of the trained run, free to be damaged."""
    shutil.copytree(trained / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--gin.train.steps=0", "train.steps = 0: must be at least 1"),
        ("--gin.train.steps=-5", "train.steps = -5: must be at least 1"),
        ("--gin.train.steps=1000000000000", "train.steps = 1000000000000: must be at most"),
        ("--gin.train.steps=many", "train.steps"),
        ("--gin.train.stepz=5", "did you mean train.steps?"),
        ("--gin.train.batch_size=0", "train.batch_size = 0: must be at least 1"),
        ("--gin.train.batch_size=1000000000", "train.batch_size = 1000000000: must be at most"),
        ("--gin.schedule.peak=0", "schedule.peak = 0.0: must be above 0"),
        ("--gin.schedule.peak=-0.1", "schedule.peak = -0.1: must be above 0"),
        ("--gin.schedule.peak=1e999", "schedule.peak = inf: must be finite"),
        ("--gin.ModelConfig.n_head=3", "does not divide into n_head = 3 heads; d_model = 15 would"),
        ("--gin.data.path=nowhere.txt", "nowhere.txt"),
        ("--gin.engine.attention=cudnn", "the device is cpu, not a GPU"),
        ("--gin.ModelConfig.vocab_size=100", "set ModelConfig.vocab_size = 257 or more"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_compiles(trained, tmp_path, flag, message):
    name = flag.partition("=")[0].removeprefix("--gin.").replace(".", "__")
    flags = settings(trained, **{"train__run_dir": tmp_path / "run", name: ...})
    assert message in refused("train.py", *flags, flag)
    assert not (tmp_path / "run").exists()


def test_the_same_flag_twice_is_refused(trained):
    flags = settings(trained)
    assert "2 times" in refused("train.py", *flags, "--gin.train.steps=30")


def test_steps_already_reached(trained):
    message = refused("train.py", *settings(trained))
    assert "already at step 20" in message
    assert "raise train.steps above 20" in message


def test_a_run_folder_of_another_model_is_left_alone(trained):
    message = refused("train.py", *settings(trained, train__steps=30, ModelConfig__n_layer=2))
    assert "n_layer: 1 != 2" in message
    assert complete_steps(trained / "run" / "checkpoints") == [10, 20]


def test_a_run_folder_of_other_data_is_left_alone(trained, tmp_path):
    write_text(tmp_path / "text.txt", lines=300)
    changes = dict(train__steps=30, data__path=tmp_path / "text.txt", data__prepared=tmp_path / "prepared")
    assert "other data" in refused("train.py", *settings(trained, **changes))


def test_a_run_of_another_optimizer_is_left_alone(trained):
    message = refused("train.py", *settings(trained, train__steps=30, optimizer__kind="adamw"))
    assert "optimizer.kind = 'muon'" in message


def test_an_incomplete_checkpoint_is_skipped_with_a_word(trained, copied):
    half = copied / "checkpoints" / "30.orbax-checkpoint-tmp"
    shutil.copytree(copied / "checkpoints" / "20", half)
    shutil.rmtree(half / "params")
    out = succeed("train.py", *settings(trained, train__run_dir=copied, train__steps=22))
    assert "incomplete checkpoint 30" in out
    assert "resuming from step 20" in out


def damage(checkpoint):
    """Cuts the largest file of the parameters in half."""
    files = [p for p in (checkpoint / "params").rglob("*") if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def test_a_damaged_checkpoint_is_refused_by_name_and_moving_it_away_helps(trained, copied):
    damage(copied / "checkpoints" / "20")
    flags = settings(trained, train__run_dir=copied, train__steps=22)
    message = refused("train.py", *flags)
    assert f"{copied / 'checkpoints' / '20'} cannot be restored" in message
    assert "the run goes on from step 10" in message
    shutil.move(copied / "checkpoints" / "20", copied / "20")
    assert "resuming from step 10" in succeed("train.py", *flags)


def test_altered_parameters_are_noticed(copied):
    """One flipped bit that the storage format itself may not notice."""
    meta = next(
        p
        for p in (copied / "checkpoints" / "20" / "meta").rglob("*")
        if p.is_file() and b"fingerprints" in p.read_bytes()
    )
    content = json.loads(meta.read_text())
    content["fingerprints"]["position_embedding"] ^= 1
    meta.write_text(json.dumps(content))
    assert "the bits of position_embedding" in refused("eval.py", "--checkpoint", copied)


@pytest.mark.parametrize("script", ["eval.py", "generate.py"])
def test_a_missing_or_empty_checkpoint_folder_is_named(script, tmp_path):
    assert "no such folder" in refused(script, "--checkpoint", tmp_path / "none", *prompt(script))
    assert "no complete checkpoint" in refused(script, "--checkpoint", tmp_path, *prompt(script))
    assert "--checkpoint" in refused(script, *prompt(script))


def prompt(script):
    return ["--prompt", "the"] if script == "generate.py" else []


def test_evaluating_under_another_model_names_the_fields(trained):
    message = refused("eval.py", "--checkpoint", trained / "run", "--gin.ModelConfig.n_layer=2")
    assert "n_layer: 1 != 2" in message


def test_an_average_that_no_run_kept_is_refused(trained):
    message = refused("eval.py", "--checkpoint", trained / "run", "--weights=average")
    assert "has no averaged weights; a run keeps them with train.ema" in message
    assert "auto, average, last" in refused("eval.py", "--checkpoint", trained / "run", "--weights=ema").replace(
        "|", ", "
    )


def test_a_prompt_longer_than_the_context(trained):
    message = refused("generate.py", "--checkpoint", trained / "run", "--prompt", "x" * 40)
    assert "16" in message
    assert "40" in message or "41" in message


def test_a_temperature_below_zero(trained):
    assert "temperature" in refused("generate.py", "--checkpoint", trained / "run", "--prompt", "a", "--temperature=-1")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "empty"),
        ("short.txt", b"ab\n", ""),
        ("binary.txt", bytes(range(256)) * 40, "binary"),
    ],
)
def test_a_corpus_that_cannot_be_trained_on(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    found = refused("train.py", *settings(tmp_path, data__path=tmp_path / name))
    assert message in found
    assert name in found or "tokens" in found or "document" in found
    assert not (tmp_path / "run").exists()


def test_invalid_utf8_is_trained_on_as_bytes(tmp_path):
    text = write_text(tmp_path / "text.txt").read_bytes()
    (tmp_path / "text.txt").write_bytes(text.replace(b"quick", b"qu\xff\xfeck"))
    out = succeed("train.py", *settings(tmp_path, train__steps=3))
    assert "validation" in out


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_disk_while_saving_ends_the_run_and_keeps_the_last_checkpoint(trained, tmp_path):
    import subprocess

    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this sandbox forbids mounts: " + mounted.stderr.decode().strip())
    try:
        flags = settings(
            trained, train__run_dir=small / "run", train__steps=400, train__save_every=20, train__keep_last=100
        )
        done = run("train.py", *flags)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert "No space left on device" in done.stderr
        steps = complete_steps(small / "run" / "checkpoints")
        assert steps
        assert str(steps[-1]) in done.stderr
        assert "loss" in succeed("eval.py", "--checkpoint", small / "run", "--step", steps[-1])
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_loss_that_is_not_finite_stops_the_run_and_nothing_bad_is_saved(trained, tmp_path):
    flags = settings(
        trained,
        train__run_dir=tmp_path / "run",
        train__steps=200,
        train__save_every=1,
        schedule__peak=1e30,
        schedule__kind="constant",
        optimizer__clip_norm=None,
        optimizer__weight_decay=0.0,
    )
    message = refused("train.py", *flags, code=1)
    assert "not finite" in message
    assert "schedule.peak" in message
    steps = complete_steps(tmp_path / "run" / "checkpoints")
    assert f"the last good checkpoint is of step {steps[-1]}" in message
    assert run("eval.py", "--checkpoint", tmp_path / "run").returncode == 0


def test_a_second_process_in_the_same_run_folder_is_refused(trained, copied):
    import fcntl

    with open(copied / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process is training" in refused(
            "train.py", *settings(trained, train__run_dir=copied, train__steps=30)
        )
