import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from end_to_end.scripts import refused, run

from andrea_jax import ModelConfig, UserError
from andrea_jax.checkpoint import open_for_saving, save
from andrea_jax.data.tokenizer import bytes_tokenizer
from andrea_jax.inspect.compare_metrics import compare_metrics
from andrea_jax.inspect.compare_report import as_json, conclusion, lines
from andrea_jax.inspect.compare_runs import compare_runs
from andrea_jax.train.config import RunConfig, TrainConfig
from andrea_jax.train.state import init_state

MODEL = ModelConfig(vocab_size=257, context_length=8, d_model=8, n_layer=2, n_head=2)
STEPS = (2, 4, 6)


def record(step, loss, kind="train", **more):
    return {"kind": kind, "step": step, "loss": loss, "grad_norm": 1.0, "seconds_step": step * 0.1} | more


def write_run(folder, model=MODEL, tamper=lambda step, state: state, losses=None, **train):
    """A run folder whose values are chosen here."""
    config = RunConfig(model=model, train=TrainConfig(run_dir=str(folder), **train))
    settings = {f.name: dataclasses.asdict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    meta = {"model": dataclasses.asdict(model), "tokenizer": bytes_tokenizer().to_dict(), "settings": settings}
    with open_for_saving(folder / "checkpoints", 10) as manager:
        for step in STEPS:
            state = init_state(config)
            params = jax.tree.map(lambda x, step=step: x + step, state.params)
            save(manager, tamper(step, state.replace(step=jnp.int32(step), params=params)), meta, None)
    records = losses or [record(step, 5.0 - step / 8) for step in range(1, 7)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("straight"))


def nudged(item, name, index, at):
    """Moves one element of one tensor to its next neighbour in the states from step `at` on."""

    def tamper(step, state):
        tree = getattr(state, item)
        if step < at:
            return state

        def nudge(path, x):
            if not jax.tree_util.keystr(path, simple=True, separator=".").endswith(name):
                return x
            return x.at[index].set(jnp.nextafter(x[index], jnp.float32(np.inf)))

        return state.replace(**{item: jax.tree.map_with_path(nudge, tree)})

    return tamper


def test_a_run_equals_its_copy_apart_from_times(straight, tmp_path):
    copy = write_run(tmp_path, losses=[record(s, 5.0 - s / 8, seconds_step=9.0) for s in range(1, 7)])
    found = compare_runs(straight, copy)
    assert found.equal
    assert not found.settings
    assert [c.step for c in found.checkpoints] == list(STEPS)
    assert conclusion(found).startswith("bit-equal in 6 logged steps and 3 checkpoints of ")
    assert found.checkpoints[-1].params_hash in conclusion(found)


@pytest.mark.parametrize(
    ("item", "name", "index"),
    [("params", "blocks.mlp.w_2", (1, 3, 4)), ("optimizer", "mu.token_embedding", (200, 7))],
)
def test_one_bit_of_one_tensor_is_found_with_its_place(straight, tmp_path, item, name, index):
    other = write_run(tmp_path, tamper=nudged(item, name, index, at=4), log_every=3)
    found = compare_runs(straight, other)
    assert found.settings == ["train.log_every: 10 != 3"]
    assert [c.step for c in found.checkpoints if not c.equal] == [4, 6]
    (difference,) = found.parted.different
    assert difference.name.startswith(item)
    assert difference.name.endswith(name)
    assert (difference.where, difference.ulp, difference.different) == (index, 1, 1)
    text = "\n".join(lines(found))
    assert f"at [{', '.join(map(str, index))}]" in text
    assert "not in 6 logged steps; in the checkpoint of step 4 (equal at 2)" in text.splitlines()[-1]


def test_the_first_step_whose_loss_differs_is_named_with_its_distance(straight, tmp_path):
    three_up = np.float32(5.0 - 5 / 8)
    for _ in range(3):
        three_up = np.nextafter(three_up, np.float32(np.inf))
    losses = [record(s, 5.0 - s / 8) for s in range(1, 5)] + [record(5, float(three_up)), record(6, 1.0)]
    found = compare_runs(straight, write_run(tmp_path, losses=losses))
    assert (found.metrics.first.step, found.metrics.first.field, found.metrics.first.ulp) == (5, "loss", 3)
    assert found.metrics.largest_loss.step == 6
    assert conclusion(found).startswith("the runs part: after 4 equal logged steps, at step 5, loss by 3 ulp")
    assert as_json(found)["first"]["values"] == (5.0 - 5 / 8, float(three_up))


def test_a_mean_loss_over_other_steps_is_left_out_only_where_the_runs_were_equal_until_later():
    every_ten = [record(10, 5.0), record(20, 4.0)]
    resumed_at_15 = [record(10, 5.0), record(20, 3.9)]
    assert compare_metrics(every_ten, resumed_at_15, equal_until=10).first.step == 20
    found = compare_metrics(every_ten, resumed_at_15, equal_until=20)
    assert not found.different
    assert "step 20" in found.notes[0]
    every_step = [record(s, 6.0 - s / 10) for s in range(1, 21)]
    assert [d.field for d in compare_metrics(every_ten, every_step).different] == []
    ours, theirs = [record(1, 2.0), record(2, 2.0)], [record(1, 2.0), record(2, 2.1)]
    assert compare_metrics(ours, theirs, equal_until=2).first.step == 2, "a line for each step is no mean"


def test_a_run_that_was_resumed_between_two_lines_is_equal_with_a_note(tmp_path):
    log = [record(3, 5.0), record(6, 4.0)]
    ours, theirs = write_run(tmp_path / "a", losses=log), write_run(tmp_path / "b", losses=[log[0], record(6, 3.5)])
    found = compare_runs(ours, theirs)
    assert found.equal
    assert "loss of step 6: the mean of other steps" in "\n".join(lines(found))


def test_nothing_logged_against_a_number_is_a_difference():
    found = compare_metrics([record(1, None)], [record(1, 2.0)])
    assert found.first.values == (None, 2.0)
    json.dumps(found.first)


def test_runs_that_cannot_be_compared_are_refused(straight, tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        compare_runs(straight, tmp_path / "none")
    with pytest.raises(UserError, match="no run there"):
        compare_runs(tmp_path, straight)
    wide = write_run(tmp_path / "wide", model=dataclasses.replace(MODEL, d_model=16))
    with pytest.raises(UserError, match="different models: d_model: 8 != 16"):
        compare_runs(straight, wide)
    late = tmp_path / "late"
    late.mkdir()
    (late / "metrics.jsonl").write_text(json.dumps(record(40, 1.0)))
    with pytest.raises(UserError, match=r"no step in common: .* and saved 2, 4, 6; .*late logged 1 from 40 to 40"):
        compare_runs(straight, late)


def test_another_optimizer_leaves_the_parameters_to_compare(straight, tmp_path):
    def other_state(step, state):
        return state.replace(optimizer={"momentum": state.params})

    found = compare_runs(straight, write_run(tmp_path, tamper=other_state))
    assert not found.equal
    assert not found.checkpoints[0].different
    assert any("momentum.position_embedding: absent != float32[8, 8]" in text for text in found.checkpoints[0].unlike)


def test_the_script_prints_ends_with_one_line_and_an_exit_code(straight, tmp_path):
    other = write_run(tmp_path, tamper=nudged("params", "final_norm.gain", (2,), at=6))
    done = run("compare_runs.py", straight, other)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("the runs part: ")
    done = run("compare_runs.py", "--json", straight, straight)
    assert done.returncode == 0
    assert json.loads(done.stdout)["equal"] is True
    assert "two run folders" in refused("compare_runs.py", straight)
