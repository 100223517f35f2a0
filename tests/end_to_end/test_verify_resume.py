"""verify_resume.py on a small run: it holds today, and it notices a run that is tampered with between its segments."""

import json
import os

import pytest
from end_to_end.scripts import refused, run, settings, start, write_text

# Python imports sitecustomize when it starts: here it changes what a resumed training process computes.
TAMPER = """
import pathlib, sys
arguments = sys.orig_argv
if any(a.endswith("train.py") for a in arguments):
    gin_file = next(a for a in arguments if a.startswith("--gin_file=")).partition("=")[2]
    line = next(l for l in pathlib.Path(gin_file).read_text().splitlines() if l.startswith("train.run_dir = "))
    checkpoints = pathlib.Path(line.partition(" = ")[2].strip("'"), "checkpoints")
    if checkpoints.is_dir() and any(p.name.isdigit() for p in checkpoints.iterdir()):
        import jax
        import andrea_jax.train.{module} as module
        right = module.{name}
        module.{name} = {wrong}
"""
OTHER_DROPOUT = dict(
    module="step", name="row_keys", wrong="lambda key, n: right(None if key is None else jax.random.fold_in(key, 1), n)"
)
OTHER_ORDER = dict(
    module="loop", name="iterate", wrong="lambda batches, first, workers: right(batches, first + 1, workers)"
)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Those of a tiny model; what the script chooses itself is left to it."""
    folder = tmp_path_factory.mktemp("text")
    write_text(folder / "text.txt")
    ours = ("steps", "run_dir", "eval_windows", "sample_tokens", "tensorboard")
    chosen = settings(folder, **{f"train__{name}": ... for name in ours})
    return [*chosen, "--steps=40", "--kill=epoch", "--seed=0"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What one process compiled, the next one reads."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def temporary(tmp_path, monkeypatch, compiled):
    """The folder that the script works in lies here."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    return tmp_path


def test_a_killed_run_is_bit_equal_and_nothing_is_left_behind(flags, temporary):
    done = run("verify_resume.py", *flags, "--devices=2:fsdp=2,1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["equal"]
    assert found["same_devices"]["steps"] == 40
    assert [c["step"] for c in found["same_devices"]["checkpoints"]] == [10, 20, 30, 40]
    (kill,) = found["kills"]
    assert "as an epoch ends" in kill
    assert "goes on from step" in kill
    assert found["conclusion"].startswith("1 kill: bit-equal in 40 logged steps")
    (moved,) = found["moves"]
    assert (moved["step"], moved["source"], moved["target"]) == (10, "2 (fsdp 2)", "1")
    assert moved["tensors"] > 20
    assert moved["changed"] == []
    assert moved["good"]
    assert 0 < found["drift"]["allowed"] < 1e-3
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("what", [OTHER_DROPOUT, OTHER_ORDER], ids=["dropout", "order"])
def test_other_dropout_or_data_after_resuming_is_noticed_at_the_first_step(flags, temporary, monkeypatch, what):
    (temporary / "sitecustomize.py").write_text(TAMPER.format(**what))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(temporary), os.environ.get("PYTHONPATH", "")]))
    done = run("verify_resume.py", *flags, "--json")
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(done.stdout)
    resumed = int(found["kills"][-1].rpartition("goes on from step ")[2])
    assert found["same_devices"]["first"]["step"] == resumed + 1
    assert found["same_devices"]["first"]["field"] == "loss"
    parted = [c["step"] for c in found["same_devices"]["checkpoints"] if not c["equal"]]
    assert parted == [step for step in (10, 20, 30, 40) if step > resumed]
    assert found["conclusion"].startswith(f"the runs part: after {resumed} equal logged steps")


def test_an_interrupt_leaves_nothing_behind(flags, temporary):
    import signal
    import time

    process = start("verify_resume.py", *flags)
    while not list(temporary.glob("verify_resume_*/straight")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "interrupted\n"
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--steps=4", "steps"),
        ("--kill=politely", "politely"),
        ("--devices=many", "--devices=many: expected a number of devices"),
        ("--devices=8,3", "train.batch_size = 4 does not divide over mesh.data x mesh.fsdp x mesh.expert = 8"),
        ("--devices=2:fsdp=3", "mesh.fsdp = 3"),
        ("--gin.train.save_every=3", "chosen by this script"),
    ],
)
def test_wrong_flags_are_refused(flags, temporary, flag, message):
    name = flag.partition("=")[0]
    assert message in refused("verify_resume.py", *[f for f in flags if not f.startswith(f"{name}=")], flag)
