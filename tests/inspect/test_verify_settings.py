import dataclasses

import pytest
from end_to_end.scripts import write_text

from andrea_jax import ModelConfig, UserError
from andrea_jax.data.config import DataConfig
from andrea_jax.data.windows import make_batches
from andrea_jax.inspect.compare_runs import Comparison
from andrea_jax.inspect.kills import KINDS, plan
from andrea_jax.inspect.verify_resume import cost, flag_notes
from andrea_jax.inspect.verify_settings import check_space, choose
from andrea_jax.train.config import RunConfig, TrainConfig
from andrea_jax.train.corpus import open_corpus

MODEL = ModelConfig(vocab_size=257, context_length=16, d_model=8, n_layer=1, n_head=2)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """(settings, corpus) of a small text."""
    folder = tmp_path_factory.mktemp("text")
    data = DataConfig(path=str(write_text(folder / "text.txt")), tokenizer="bytes", prepared=str(folder / "prepared"))
    return open_corpus(RunConfig(model=MODEL, train=TrainConfig(batch_size=4), data=data))


@pytest.mark.parametrize("steps", [8, 9, 24, 25, 100])
def test_every_kind_of_kill_is_planned_within_the_run(steps):
    every = steps // 4
    for seed in range(20):
        moments = plan(KINDS, steps, every, 3 * every + 1, seed)
        assert len(moments) == len(KINDS) + 1
        assert [m.step for m in moments] == sorted(m.step for m in moments)
        assert all(1 < m.step < steps and 0 <= m.fraction < 1 for m in moments)
        first, second = (m for m in moments if "of two" in m.why)
        assert first.step // every == (second.step - 1) // every == 2, "a checkpoint may lie in between"
        assert [m.step for m in moments if m.during == "save"] == [2 * every]
    assert plan(("save",), steps, every, 5, 0)[0].during == "save"
    assert (
        plan(("random",), 10**6, 10, 5, 1) == plan(("random",), 10**6, 10, 5, 1) != plan(("random",), 10**6, 10, 5, 2)
    )


def test_an_epoch_ends_in_the_middle_of_the_batch_that_is_named(opened, tmp_path):
    config, corpus = opened
    chosen = choose(config, (), corpus, steps=24, every=6, rows=1, work=tmp_path)
    assert chosen.epoch_end == 19
    _, short = open_corpus(chosen.config)
    assert short.tokenizer.to_dict() == corpus.tokenizer.to_dict()
    assert len(short.train) < len(corpus.train)
    batches = make_batches(short.train, 4, MODEL.context_length, 0)
    windows = [row.tobytes() for step in range(19) for row in batches[step]["tokens_BT"]]
    epoch, rest = windows[: 18 * 4 + 2], windows[18 * 4 + 2 :]
    original = {corpus.train.read(i * 16, (i + 1) * 16).tobytes() for i in range(18 * 4 + 2)}
    assert set(epoch) == original, "the first epoch has each window once"
    assert len(rest) == 2


def test_a_corpus_that_is_shorter_is_left_whole(opened, tmp_path):
    config, corpus = opened
    chosen = choose(config, (), corpus, steps=10**5, every=25_000, rows=1, work=tmp_path)
    assert chosen.config.data.path == str(corpus.folder)
    assert chosen.epoch_end == (len(corpus.train) - 1 + 15) // 16 // 4 + 1


def test_what_the_user_bound_stays_and_the_rest_becomes_harder(opened, tmp_path):
    config, corpus = opened
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=7, wandb="project"))
    chosen = choose(config, (), corpus, steps=8, every=2, rows=2, work=tmp_path)
    assert (chosen.config.train.accumulate, chosen.config.model.dropout) == (2, 0.1)
    assert "train.accumulate = 2 and ModelConfig.dropout = 0.1" in "".join(chosen.notes)
    assert (chosen.config.train.seed, chosen.config.train.wandb, chosen.config.train.log_every) == (7, None, 1)
    bound = ("train.accumulate", "ModelConfig.dropout")
    kept = choose(config, bound, corpus, steps=8, every=2, rows=2, work=tmp_path / "kept")
    assert (kept.config.train.accumulate, kept.config.model.dropout) == (1, 0.0)
    assert not any("settings" in note for note in kept.notes)
    parts_of_one_row = choose(config, (), corpus, steps=8, every=2, rows=4, work=tmp_path / "rows")
    assert parts_of_one_row.config.train.accumulate == 1


def test_a_disk_that_is_too_small_is_noticed_before_training(opened, tmp_path):
    check_space(opened[0], 8, tmp_path)
    with pytest.raises(UserError, match=r"take \d+\.\d GB, .* set TMPDIR"):
        check_space(opened[0], 10**12, tmp_path)


def test_flags_for_gpus_are_named_as_set_or_missing():
    lacking = {"--xla_gpu_deterministic_ops": "true"}
    assert flag_notes(0, {}, True) == []
    assert flag_notes(1, {}, True) == ["flags     all that equal bits need on GPUs are set"]
    assert "set for these runs: --xla_gpu_deterministic_ops=true" in flag_notes(1, lacking, True)[0]
    assert "missing: --xla_gpu_deterministic_ops=true" in flag_notes(1, lacking, False)[0]


def test_the_cost_of_determinism_is_the_share_of_tokens_a_second_that_is_lost():
    from andrea_jax.inspect.compare_metrics import Metrics

    equal = Comparison(("a", "b"), [], Metrics([1, 2], [], []), [])
    text = cost({"straight": 900.0, "fast": 1000.0}, equal)
    assert "900 tokens/s with the flags, 1,000 without (10.0% lost)" in text
    assert text.endswith("bit-equal in 2 logged steps")
