"""Train, look, evaluate, sample, resume: the commands of the README on a tiny model."""

import json

import pytest
from end_to_end.scripts import settings, succeed, write_text

import andrea_jax as aj
from andrea_jax.checkpoint import complete_steps
from andrea_jax.data.shards import open_tokens
from andrea_jax.data.windows import eval_batches
from andrea_jax.evaluate import evaluate
from andrea_jax.train.run_folder import read_metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    write_text(folder / "text.txt")
    return folder


@pytest.fixture(scope="module")
def output(folder):
    changes = dict(train__steps=200, schedule__peak=0.02, train__eval_windows=..., train__tensorboard=True)
    return succeed("train.py", *settings(folder, **changes))


def test_the_log_begins_with_the_expected_and_the_measured_initial_loss(output):
    assert "uniform guessing would give ln(257) = 5.549" in output


def test_training_learns(folder, output):
    losses = [r["loss"] for r in read_metrics(folder / "run") if r["kind"] == "train"]
    assert losses[-1] < 0.75 * losses[0]


def test_the_run_folder_holds_what_it_should(folder, output):
    names = {p.name for p in (folder / "run").iterdir()}
    assert {"config.gin", "metrics.jsonl", "tensorboard", "samples.txt", "loss.png", "checkpoints"} <= names
    record = next(r for r in read_metrics(folder / "run") if r["kind"] == "train")
    expected = "loss learning_rate grad_norm param_norm tokens tokens_per_second seconds_data seconds_step"
    assert set(expected.split()) <= record.keys()


def test_the_output_ends_with_commands_that_work(folder, output):
    commands = [line.split("#")[0].split() for line in output.splitlines() if line.startswith("  python ")]
    scripts = [command[1].rpartition("/")[2] for command in commands]
    assert scripts == ["eval.py", "generate.py", "train.py"]
    evaluated = succeed("eval.py", *commands[0][2:], "--json")
    assert json.loads(evaluated)["step"] == 200


def test_evaluation_from_the_checkpoint_equals_that_of_the_run_and_of_the_functions(folder, output):
    evaluated = json.loads(succeed("eval.py", "--checkpoint", folder / "run", "--json"))
    in_run = [r for r in read_metrics(folder / "run") if r["kind"] == "validation"][-1]
    params, config, tokenizer = aj.load_checkpoint(folder / "run")
    tokens = open_tokens(next((folder / "prepared").iterdir()), "validation")
    by_hand = evaluate(params, eval_batches(tokens, 3, config.context_length), config, tokenizer.byte_lengths)
    assert evaluated["loss"] == pytest.approx(in_run["loss"], rel=1e-5)
    assert by_hand["loss"] == pytest.approx(in_run["loss"], rel=1e-5)
    assert by_hand["tokens"] == in_run["validation_tokens"] == len(tokens) - 1


def test_a_text_file_can_be_evaluated(folder, output):
    (folder / "other.txt").write_text("the quick brown fox\n" * 20)
    found = json.loads(succeed("eval.py", "--checkpoint", folder / "run", "--text", folder / "other.txt", "--json"))
    assert found["bytes"] == 20 * 20
    assert found["tokens"] == 20 * 20


def test_another_corpus_is_evaluated_in_the_checkpoints_own_tokenizer(folder, output):
    other = write_text(folder / "another.txt", lines=900)
    flags = (f"--gin.data.path={other}", f"--gin.data.prepared={folder}/others", "--json")
    found = json.loads(succeed("eval.py", "--checkpoint", folder / "run", *flags))
    assert found["tokens"] >= found["bytes"] > 1000


def test_sampling_is_reproducible(folder, output):
    flags = ("--checkpoint", folder / "run", "--prompt", "the ", "--max_tokens", 12, "--seed", 3)
    assert succeed("generate.py", *flags) == succeed("generate.py", *flags)


def test_more_steps_continue_the_run(folder, output):
    out = succeed("train.py", f"--gin_file={folder}/run/config.gin", "--gin.train.steps=210")
    assert "resuming from step 200" in out
    assert "note: changed since the checkpoint: train.steps: 200 -> 210" in out


def test_checkpoints_by_the_clock(tmp_path):
    """Looked at where a line is logged, beside `save_every` and the last step."""
    write_text(tmp_path / "text.txt")
    clock = {"train__save_minutes": 1e-9, "train__log_every": 5, "train__save_every": 7, "train__keep_last": 9}
    succeed("train.py", *settings(tmp_path, train__steps=12, **clock))
    assert complete_steps(tmp_path / "run" / "checkpoints") == [5, 7, 10, 12]
