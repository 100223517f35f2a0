"""experiments/convert.py: there and back, what is refused, and that the other scripts go on from it."""

import dataclasses
import json
import shutil

import convert as script
import flags
import numpy as np
import pytest
from end_to_end.scripts import refused, succeed, write_text
from interop.test_tensors import BYTES, LLAMA, SMALL, assert_equal_bits, random_params

from andrea_jax.checkpoint import complete_steps, load_checkpoint
from andrea_jax.interop.hugging_face import read_model, write_model
from andrea_jax.interop.run_folder import write_run
from andrea_jax.train.config import RunConfig, TrainConfig


@pytest.fixture
def call(capsys):
    """Runs the script; (exit code, stdout, stderr)."""

    def call(*arguments):
        argv = ["experiments/convert.py", *map(str, arguments)]
        with pytest.raises(SystemExit) as caught:
            flags.main(script.run, script.DESCRIPTION, script.FLAGS, (), argv)
        return caught.value.code, *capsys.readouterr()

    return call


@pytest.fixture
def theirs(tmp_path):
    write_model(tmp_path / "theirs", random_params(LLAMA), LLAMA, BYTES)
    return tmp_path / "theirs"


def test_a_model_comes_in_and_goes_out_as_the_same_bytes(call, theirs, tmp_path):
    run = tmp_path / "runs" / "x"
    code, out, err = call(f"--from_hf={theirs}", f"--run_dir={run}", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"run_dir": str(run), "model_type": "llama", "parameters": 40_488, "notes": []}
    params, config, tokenizer = load_checkpoint(run)
    assert_equal_bits(params, random_params(LLAMA))
    assert config == read_model(theirs).config
    assert tokenizer.encode("ab").tolist() == [97, 98]
    code, out, _ = call(f"--to_hf={tmp_path / 'back'}", f"--checkpoint={run}", "--json")
    assert code == 0
    assert json.loads(out)["filled"] == {}
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (theirs / name).read_bytes(), name


def test_what_is_written_beside_the_models_tensors_is_said(call, tmp_path):
    plain = dataclasses.replace(SMALL, mlp_bias=False)
    config = RunConfig(model=plain, train=TrainConfig(run_dir=str(tmp_path / "run")))
    write_run(config, random_params(plain), BYTES, "")
    code, out, _ = call(f"--to_hf={tmp_path / 'x'}", f"--checkpoint={tmp_path / 'run'}", "--dtype=bfloat16")
    assert code == 0
    assert "gpt2: " in out
    assert "bfloat16, step 0" in out
    assert "note: blocks.mlp.b_1 is written as zeros, which the model lacks" in out
    assert read_model(tmp_path / "x").config.mlp_bias


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --from_hf=DIR --run_dir=RUN to read a model, or --to_hf=DIR --checkpoint=RUN to write one"),
        (["--from_hf=x", "--to_hf=y"], "give --from_hf"),
        (["--from_hf=x"], "--from_hf needs --run_dir"),
        (["--to_hf=x"], "--to_hf needs --checkpoint"),
        (["--from_hf=x", "--run_dir=y", "--dtype=float16"], "--dtype has no effect with --from_hf"),
        (["--to_hf=x", "--checkpoint=y", "--tokenizer=z"], "--tokenizer has no effect with --to_hf"),
        (["--to_hf=x", "--checkpoint=nowhere"], "nowhere: no such folder"),
        (["--from_hf=nowhere", "--run_dir=y"], "nowhere: no config.json"),
        (["--to_hf=x", "--checkpoint=y", "--dtype=int8"], "--dtype"),
        (["--to_hf=x", "--checkpoint=y", "--shard_mb=0"], "shard_mb"),
        (["--from_hf=x", "--run_dir=y", "--gin.train.steps=5"], "train.steps would never be used"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(call, arguments, message):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_run_folder_that_is_there_is_left_alone(call, theirs, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    code, _, err = call(f"--from_hf={theirs}", f"--run_dir={tmp_path / 'run'}")
    assert code == 2
    assert "is there already" in err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_a_failed_write_leaves_nothing(call, theirs, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device", "x.safetensors")

    call(f"--from_hf={theirs}", f"--run_dir={tmp_path / 'run'}")
    monkeypatch.setattr("andrea_jax.interop.hugging_face.safetensors_files.save_file", full)
    code, _, err = call(f"--to_hf={tmp_path / 'out'}", f"--checkpoint={tmp_path / 'run'}")
    assert code == 1
    assert "model.safetensors: cannot be written" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "theirs"]


def test_help_names_the_flags_and_the_architectures(call):
    code, out, _ = call("--help")
    assert code == 0
    for word in ("--from_hf", "--to_hf", "--shard_mb", "gpt2", "gemma3_text"):
        assert word in out


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A run folder that the script made, and a text."""
    folder = tmp_path_factory.mktemp("imported")
    write_model(folder / "theirs", random_params(LLAMA), LLAMA, BYTES)
    out = succeed("convert.py", "--from_hf", folder / "theirs", "--run_dir", folder / "run")
    assert "note" not in out
    write_text(folder / "text.txt")
    return folder


def train_flags(folder, **changes):
    values = {
        "data.path": folder / "text.txt",
        "data.prepared": folder / "prepared",
        "train.steps": 2,
        "train.sample_tokens": 4,
        "train.eval_windows": 4,
        "train.tensorboard": False,
        "schedule.warmup": 1,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    settings = [f"--gin.{name}={value}" for name, value in values.items()]
    return [f"--gin_file={folder / 'run' / 'config.gin'}", *settings]


@pytest.mark.slow
def test_the_other_scripts_go_on_from_it(imported, tmp_path):
    run = shutil.copytree(imported / "run", tmp_path / "run")
    assert succeed("generate.py", "--checkpoint", run, "--prompt=the", "--max_tokens=3").startswith("the")
    found = json.loads(succeed("eval.py", "--checkpoint", run, "--text", imported / "text.txt", "--json"))
    assert (found["step"], np.isfinite(found["loss"])) == (0, True)
    out = succeed("train.py", *train_flags(imported, train__run_dir=run, optimizer__kind="adamw"))
    assert f"starting with the parameters of {run / 'checkpoints' / '0'}" in out
    assert complete_steps(run / "checkpoints") == [0, 2]
    before, after = (load_checkpoint(folder)[0] for folder in (imported / "run", run))
    change = np.abs(np.asarray(after["head"]) - np.asarray(before["head"]))
    assert 0 < change.max() <= 3e-4  # two steps of adamw at 1e-4, and weight decay


def test_training_with_another_tokenizer_is_refused(imported, tmp_path):
    run = shutil.copytree(imported / "run", tmp_path / "run")
    message = refused("train.py", *train_flags(imported, train__run_dir=run, data__tokenizer="bytes"))
    assert "holds a model of another tokenizer; set data.tokenizer = " in message
