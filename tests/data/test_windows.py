import itertools

import numpy as np
import pytest

from andrea_jax.data.shards import tokens_in_memory
from andrea_jax.data.windows import count_windows, eval_batches, iterate, make_batches, window
from andrea_jax.settings import UserError

BOS = 256


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


def epoch(tokens, batch_size, T, seed, number):
    """Window numbers of one epoch in the order they come, for tokens that are 0, 1, 2, ..."""
    batches, count = make_batches(tokens, batch_size, T, seed), count_windows(tokens, T)
    steps = range(number * count // batch_size, -(-(number + 1) * count // batch_size))
    first = np.concatenate([batches[step]["tokens_BT"][:, 0] for step in steps]) // T
    skip = number * count - steps.start * batch_size
    return first[skip : skip + count].tolist()


def test_windows_hold_each_token_once_as_a_target():
    for n, T in ((2, 5), (11, 5), (12, 5), (16, 5), (17, 1)):
        tokens = tokens_in_memory(np.arange(100, 100 + n))
        windows = [window(tokens, i, T) for i in range(count_windows(tokens, T))]
        targets = np.concatenate([w["targets_T"][w["weights_T"] == 1] for w in windows])
        inputs = np.concatenate([w["tokens_T"][w["weights_T"] == 1] for w in windows])
        np.testing.assert_array_equal(targets, np.arange(101, 100 + n))
        np.testing.assert_array_equal(inputs, np.arange(100, 99 + n))


def test_the_last_window_is_padded_with_weight_zero():
    w = window(tokens_in_memory([7, 8, 9, 10, 11, 12]), 1, 4, bos=None)
    assert w["tokens_T"].tolist() == [11, 0, 0, 0]
    assert w["targets_T"].tolist() == [12, 0, 0, 0]
    assert w["weights_T"].tolist() == [1, 0, 0, 0]
    assert (w["tokens_T"].dtype, w["targets_T"].dtype, w["weights_T"].dtype) == (np.int32, np.int32, np.float32)
    assert "segments_T" not in w


def test_segments_count_bos_and_padding_is_apart():
    w = window(tokens_in_memory([1, 2, BOS, 3, BOS, BOS, 4]), 0, 8, bos=BOS)
    assert w["segments_T"].tolist() == [0, 0, 1, 1, 2, 3, -1, -1]
    assert w["segments_T"].dtype == np.int32
    assert w["targets_T"][1] == BOS  # the end of a document is predicted
    assert w["weights_T"][1] == 1


def test_a_batch_has_the_shapes_and_dtypes_of_its_names():
    batch = make_batches(tokens_in_memory(np.arange(50) % 9), 4, 6, 0, mask_documents=True, bos=8)[3]
    assert {name: (value.shape, value.dtype) for name, value in batch.items()} == {
        "tokens_BT": ((4, 6), np.int32),
        "targets_BT": ((4, 6), np.int32),
        "weights_BT": ((4, 6), np.float32),
        "segments_BT": ((4, 6), np.int32),
    }


@pytest.mark.parametrize("batch_size", [1, 4, 30])
def test_an_epoch_has_every_window_once_and_the_next_one_another_order(batch_size):
    tokens, T = tokens_in_memory(np.arange(102)), 5  # 21 windows, the last with one target
    orders = [epoch(tokens, batch_size, T, seed=3, number=number) for number in range(4)]
    assert all(sorted(order) == list(range(21)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert list(range(21)) not in orders


def test_every_token_of_an_epoch_is_a_target_once():
    tokens = tokens_in_memory(np.arange(101))
    batches = make_batches(tokens, 4, 7, seed=0)  # 15 windows: 15 batches are 4 epochs
    targets = np.concatenate([batches[s]["targets_BT"][batches[s]["weights_BT"] == 1] for s in range(15)])
    assert np.bincount(targets, minlength=101).tolist() == [0] + [4] * 100


def test_neighbouring_seeds_share_no_epoch_and_any_seed_is_taken():
    tokens = tokens_in_memory(np.arange(1000))
    orders = [tuple(epoch(tokens, 8, 10, seed, number)) for seed in (-1, 0, 1, 2, 2**40) for number in range(3)]
    assert len(set(orders)) == len(orders)


def test_the_batch_of_a_seed_and_step_never_changes():
    """Numbers written down once: another grain, machine or version must give the same."""
    tokens = tokens_in_memory(np.arange(1000))
    batches = make_batches(tokens, 4, 10, seed=17)
    assert (batches[0]["tokens_BT"][:, 0] // 10).tolist() == [74, 40, 13, 19]
    assert (batches[10**6]["tokens_BT"][:, 0] // 10).tolist() == [7, 49, 62, 89]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("start", [0, 7, 1000])
def test_iterating_gives_the_batch_of_each_step_from_any_start_with_any_workers(start, workers):
    tokens = tokens_in_memory(np.arange(500))
    batches = make_batches(tokens, 4, 10, seed=5)
    for step, batch in enumerate(itertools.islice(iterate(batches, start, workers), 30), start):
        same(batch, batches[step])
        same(batch, make_batches(tokens, 4, 10, seed=5)[step])


def test_evaluation_sees_every_target_once_in_order_with_one_shape():
    tokens = tokens_in_memory(np.arange(1, 104))
    batches = [*eval_batches(tokens, 4, 10, mask_documents=True, bos=50)]  # 11 windows
    assert {batch["tokens_BT"].shape for batch in batches} == {(4, 10)}
    targets = np.concatenate([batch["targets_BT"][batch["weights_BT"] == 1] for batch in batches])
    np.testing.assert_array_equal(targets, np.arange(2, 104))
    assert batches[-1]["segments_BT"][-1].tolist() == [-1] * 10


def test_evaluation_can_stop_after_some_windows():
    tokens = tokens_in_memory(np.arange(1000))
    batches = [*eval_batches(tokens, 4, 10, max_windows=6)]
    assert sum(batch["weights_BT"].sum() for batch in batches) == 60
    assert len(batches) == 2
    assert sum(batch["weights_BT"].sum() for batch in eval_batches(tokens, 4, 10, max_windows=10**6)) == 999


def test_a_split_shorter_than_a_window_is_refused_for_training_and_padded_for_evaluation():
    tokens = tokens_in_memory([5, 6, 7])
    with pytest.raises(UserError, match=r"has 3 tokens, but a window needs context_length \+ 1 = 9"):
        make_batches(tokens, 2, 8, 0)
    (batch,) = eval_batches(tokens, 2, 8)
    assert batch["weights_BT"].sum() == 2
    with pytest.raises(UserError, match="has 1 tokens: evaluation needs at least 2"):
        next(eval_batches(tokens_in_memory([5]), 2, 8))
    assert make_batches(tokens, 2, 2, 0)[0]["tokens_BT"].tolist() == [[5, 6], [5, 6]]


def test_masking_documents_needs_a_bos():
    tokens = tokens_in_memory(np.arange(100))
    for make in (
        lambda: make_batches(tokens, 2, 8, 0, mask_documents=True),
        lambda: next(eval_batches(tokens, 2, 8, mask_documents=True)),
    ):
        with pytest.raises(UserError, match="needs a tokenizer with a BOS"):
            make()
    assert "segments_BT" not in make_batches(tokens, 2, 8, 0, bos=3)[0]
