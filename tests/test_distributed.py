"""Real processes on this machine, on a model small enough to compile in seconds."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from end_to_end.scripts import EXPERIMENTS, settings, start, succeed, write_text

from andrea_jax import load_checkpoint
from andrea_jax.distributed import DistributedConfig, Place, find_place
from andrea_jax.settings import UserError

LAUNCH = EXPERIMENTS / "launch"
SLURM = {"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly():
    """Code that is compiled fast rather than runs fast, and each process's own, as bits of several are compared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
        patch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("corpus") / "text.txt")


def flags(corpus, run_dir, **changes):
    shared = {"data__path": corpus, "data__prepared": corpus.parent / "prepared", "train__log_every": 1}
    return settings(run_dir.parent, train__run_dir=run_dir, **shared | changes)


def together(count, *arguments, per_process=()):
    """`count` processes of train.py; `per_process` are more flags, one list each."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    joint = [f"coordinator=127.0.0.1:{port}", f"processes={count}", "timeout=10", "start_timeout=120"]
    joint = [f"--gin.distributed.{flag}" for flag in joint]
    return [
        start("train.py", *arguments, *joint, f"--gin.distributed.process={i}", *more)
        for i, more in itertools.zip_longest(range(count), per_process, fillvalue=())
    ]


def ends(processes, seconds=240):
    """(exit code, standard error) of each."""
    try:
        outputs = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, err) for process, (_, err) in zip(processes, outputs, strict=True)]


def error_line(err):
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err
    return lines[0]


def records(run_dir, kind="train"):
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [record for record in lines if record["kind"] == kind]


def wait_for_step(run_dir, step, processes, seconds=120):
    end = time.monotonic() + seconds
    while time.monotonic() < end and all(process.poll() is None for process in processes):
        if (run_dir / "metrics.jsonl").exists() and any(r["step"] >= step for r in records(run_dir)):
            return
        time.sleep(0.05)
    raise AssertionError(f"no step {step}: " + "".join(process.communicate()[1] for process in processes))


def same_bits(a, b):
    import jax

    left, right = (jax.tree.leaves(load_checkpoint(run_dir)[0]) for run_dir in (a, b))
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(left, right, strict=True))


def test_two_processes_train_as_one_and_stop_and_go_on_together(corpus, tmp_path):
    """Losses equal to one process's; SIGTERM to one saves the same step of both; what follows is as if it had not."""
    one, two, straight = tmp_path / "one", tmp_path / "two", tmp_path / "straight"
    many = {"train__steps": 40, "mesh__fsdp": 2, "train__sample_every": 1000}
    succeed("train.py", *flags(corpus, one, train__steps=40, train__sample_every=1000))
    assert [code for code, _ in ends(together(2, *flags(corpus, straight, **many)))] == [0, 0]
    loss = [[r["loss"] for r in records(run_dir)] for run_dir in (one, straight)]
    # two orders of summation; over 40 steps the difference may grow by the steps taken on it
    np.testing.assert_allclose(*loss, rtol=40 * 2**-20)
    np.testing.assert_allclose(*[[r["loss"] for r in records(d, "validation")] for d in (one, straight)], rtol=2**-15)

    slow = together(2, *flags(corpus, two, **many))
    wait_for_step(two, 3, slow)
    slow[1].send_signal(signal.SIGTERM)
    assert [code for code, _ in ends(slow)] in ([75, 75], [0, 0])  # [0, 0]: it was through before the signal came
    assert [code for code, _ in ends(together(2, *flags(corpus, two, **many)))] in ([0, 0], [2, 2])
    assert same_bits(two, straight)
    assert [r["step"] for r in records(two)] == list(range(1, 41))

    alone = succeed("train.py", *flags(corpus, straight, train__steps=44))  # what two wrote, one goes on with
    assert "resuming from step 40" in alone
    assert [r["step"] for r in records(straight)] == list(range(1, 45))


def test_a_killed_process_ends_the_others_with_one_line_and_the_same_command_goes_on_exactly(corpus, tmp_path):
    run_dir = tmp_path / "run"
    arguments = flags(corpus, run_dir, train__steps=100_000, train__save_every=5, mesh__data=4)
    processes = together(4, *arguments)
    wait_for_step(run_dir, 8, processes)
    processes[2].kill()
    began = time.monotonic()
    found = ends(processes)
    assert time.monotonic() - began < 40  # distributed.timeout = 10, and what a busy machine adds
    assert [code for code, _ in found] == [1, 1, -signal.SIGKILL, 1]
    line = error_line(found[0][1])
    assert "lost process 2. The last complete checkpoint is of step" in line
    assert all("process" in error_line(found[i][1]) for i in (1, 3))

    before = {r["step"]: r["loss"] for r in records(run_dir)}
    again = together(4, *arguments)
    wait_for_step(run_dir, max(before) + 1, again)
    again[3].send_signal(signal.SIGTERM)
    assert [code for code, _ in ends(again)] == [75] * 4
    after = {r["step"]: r["loss"] for r in records(run_dir)}
    assert {step: after[step] for step in before} == before


def test_processes_that_disagree_are_all_refused_before_compiling(corpus, tmp_path):
    arguments = flags(corpus, tmp_path / "run", train__batch_size=...)
    sizes = [["--gin.train.batch_size=4"], ["--gin.train.batch_size=8"]]
    for code, err in ends(together(2, *arguments, per_process=sizes)):
        assert code == 2, err
        assert "do not agree: train.batch_size is 4 in process 0 and 8 in process 1" in error_line(err)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_coordinator_that_does_not_answer_is_named(corpus, tmp_path):
    joint = ["coordinator=127.0.0.1:1", "processes=2", "process=1", "start_timeout=10"]
    process = start("train.py", *flags(corpus, tmp_path / "run"), *(f"--gin.distributed.{flag}" for flag in joint))
    [(code, err)] = ends([process])
    assert code == 2
    assert "distributed.coordinator = '127.0.0.1:1' cannot be reached within 10 s" in error_line(err)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"processes": 2}, "distributed.coordinator is missing"),
        ({"coordinator": "a:1"}, "distributed.processes is missing"),
        ({"process": 1}, "distributed.process = 1 needs distributed.coordinator"),
        ({"coordinator": "a:1", "processes": 2, "process": 2}, "the numbers are 0 to 1"),
        ({"coordinator": "a", "processes": 2, "process": 1}, "expected HOST:PORT"),
        ({"coordinator": "a:99999", "processes": 2}, "expected HOST:PORT"),
        ({"timeout": 1.0}, "distributed.timeout = 1.0: must be at least 10"),
    ],
)
def test_half_given_or_wrong_settings_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        DistributedConfig(**wrong)


def test_the_place_comes_from_the_settings_or_the_launcher():
    given = DistributedConfig(coordinator="a:1", processes=3, process=2)
    assert find_place(given, SLURM) == Place("a:1", 3, 2)
    numbered = DistributedConfig(coordinator="a:1", processes=5)
    assert find_place(numbered, {"JOB_COMPLETION_INDEX": "4"}) == Place("a:1", 5, 4)
    assert find_place(numbered, SLURM).process == 3
    with pytest.raises(UserError, match="none of JOB_COMPLETION_INDEX"):
        find_place(numbered, {})
    assert find_place(DistributedConfig(), SLURM) == find_place(DistributedConfig(), OPEN_MPI) == Place()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        SLURM | {"SLURM_STEP_NUM_TASKS": "1"},  # a shell or notebook within an allocation of four tasks
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"},  # the batch script itself, without srun
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"},  # independent runs of an indexed Job
    ],
)
def test_a_single_process_is_left_alone(environment):
    assert find_place(DistributedConfig(), environment) is None
    assert find_place(DistributedConfig(mode="off"), SLURM) is None


@pytest.mark.parametrize("script", ["local.sh", "slurm.sbatch"])
def test_launch_scripts_are_valid_bash(script):
    subprocess.run(["bash", "-n", str(LAUNCH / script)], check=True)


def accepted(command):
    """The distributed settings of a command line of train.py, which the script's own flags accept."""
    script = [sys.executable, str(EXPERIMENTS / "train.py")]
    arguments = command[command.index("experiments/train.py") + 1 :]
    done = subprocess.run([*script, *arguments, "--print_config"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    prefix = "distributed."
    lines = (line.partition(" = ") for line in done.stdout.splitlines() if line.startswith(prefix))
    values = {name.removeprefix(prefix): value for name, _, value in lines}
    return DistributedConfig(coordinator=_text(values["coordinator"]), processes=_number(values["processes"]))


def _text(value):
    return None if value == "None" else value.strip("'")


def _number(value):
    return None if value == "None" else int(value)


def test_the_slurm_script_starts_one_task_a_host_and_queues_itself_again():
    text = (LAUNCH / "slurm.sbatch").read_text()
    lines = (line.split("--", 1)[1] for line in text.splitlines() if "#SBATCH --" in line and "=" in line)
    options = dict(line.split("=", 1) for line in lines)
    assert options["ntasks-per-node"] == "1"
    assert options["signal"].startswith("TERM@")
    assert "#SBATCH --requeue\n" in text
    command = text[text.index("srun") : text.index("code=")].replace("\\\n", " ").split()
    assert "--kill-on-bad-exit=0" in command
    assert accepted(command) == DistributedConfig()
    assert '"$code" -eq 75' in text


@pytest.mark.parametrize("name", ["kubernetes_jobset.yaml", "kubernetes_indexed_job.yaml"])
def test_the_kubernetes_examples_name_the_pod_of_process_0(name):
    *services, top = yaml.safe_load_all((LAUNCH / name).read_text())
    if top["kind"] == "JobSet":
        [job] = top["spec"]["replicatedJobs"]
        first_pod, subdomain = f"{top['metadata']['name']}-{job['name']}-0-0", top["metadata"]["name"]
        job, enough = job["template"]["spec"], top["spec"]["failurePolicy"]["maxRestarts"]
    else:
        [service] = services
        job = top["spec"]
        first_pod, subdomain = f"{top['metadata']['name']}-0", job["template"]["spec"]["subdomain"]
        assert service["metadata"]["name"] == subdomain
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"] == {"job-name": top["metadata"]["name"]}
        enough = job["backoffLimit"]
        assert job["template"]["spec"]["restartPolicy"] == "OnFailure"
    assert job["completionMode"] == "Indexed"
    assert enough >= 100
    [container] = job["template"]["spec"]["containers"]
    config = accepted(container["command"])
    assert config.processes == job["parallelism"] == job["completions"]
    assert config.coordinator.startswith(f"{first_pod}.{subdomain}:")
    assert find_place(config, {"JOB_COMPLETION_INDEX": "1"}).process == 1


def test_the_local_launcher_runs_and_hands_the_exit_code_on(corpus, tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", str(LAUNCH / "local.sh"), "2"]
    good = flags(corpus, tmp_path / "run", train__steps=3)
    assert subprocess.run([*command, *good], env=environment, capture_output=True).returncode == 0
    assert records(tmp_path / "run")[-1]["step"] == 3
    wrong = subprocess.run([*command, "--gin.train.stepz=3"], env=environment, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "did you mean" in wrong.stderr
