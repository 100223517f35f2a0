import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_model import VARIANTS

from andrea_jax import parameters
from andrea_jax.config import ModelConfig
from andrea_jax.parameters import (
    abstract_params,
    by_name,
    count_parameters,
    decay_mask,
    init_params,
    logical_axes,
    map_specs,
    specs,
)
from andrea_jax.presets import (
    andrea_12m_card,
    andrea_120m,
    andrea_120m_card,
    andrea_modern_12m,
    andrea_modern_120m,
    andrea_modern_480m,
)

KEY = jax.random.key(0)
SWITCHES = ("mlp_bias", "attention_bias", "norm_gain", "norm_shift", "tie_embeddings")


def small(**changes):
    return ModelConfig(**{"vocab_size": 61, "context_length": 32, "d_model": 24, "n_layer": 3, "n_head": 4} | changes)


MATRICES = ["blocks.attention.qkv", "blocks.attention.out", "blocks.mlp.w_1", "blocks.mlp.w_2", "blocks.mlp.w_gate"]
MATRICES += ["head"]
EVERY_KIND = small(attention_bias=True, tie_embeddings=False, gated=True, qk_norm=True)  # of parameter
ALL = by_name(init_params(KEY, EVERY_KIND))


def count_by_hand(V, T, D, L, R, mlp_bias, attention_bias, norm_gain, norm_shift, tie_embeddings):
    """The sum as one writes it on paper, for an mlp R times as wide as the stream."""
    block = 4 * D * D + 2 * R * D * D + mlp_bias * (R * D + D) + attention_bias * 4 * D
    norms = (2 * L + 1) * D * (norm_gain + norm_shift)
    return (2 - tie_embeddings) * V * D + T * D + L * block + norms


def test_the_lessons_numbers():
    config = andrea_120m()
    shapes = {name: leaf.shape for name, leaf in by_name(abstract_params(config)).items()}
    per_layer = {name: math.prod(shape[1:]) for name, shape in shapes.items() if name.startswith("blocks.mlp.w_")}
    assert per_layer == {"blocks.mlp.w_1": 2_359_296, "blocks.mlp.w_2": 2_359_296}
    assert sum(per_layer.values()) == 4_718_592
    assert 12 * sum(per_layer.values()) == 56_623_104 == sum(math.prod(shapes[name]) for name in per_layer)
    assert math.prod(shapes["token_embedding"]) == 6_488_832
    norms = [math.prod(shape[:-1]) for name, shape in shapes.items() if "norm.gain" in name]
    assert sum(norms) == 25


def test_the_cards_counts():
    assert count_parameters(andrea_120m_card()) == 98_698_752
    assert count_parameters(andrea_12m_card()) == 12_780_288
    assert count_parameters(andrea_120m(mlp_bias=False, norm_gain=False, norm_shift=False)) == 98_698_752 - 6_488_832


@pytest.mark.parametrize("switches", list(itertools.product([False, True], repeat=5)))
def test_the_count_and_the_abstract_parameters_are_those_of_the_arrays_that_init_makes(switches):
    config = small(**dict(zip(SWITCHES, switches, strict=True)))
    made = jax.eval_shape(lambda key: init_params(key, config), KEY)
    assert made == abstract_params(config)
    assert count_parameters(config) == sum(leaf.size for leaf in jax.tree.leaves(made))
    assert count_parameters(config) == count_by_hand(61, 32, 24, 3, 4, *switches)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(2, 99), st.integers(1, 40), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(1, 5),
    st.tuples(*[st.booleans()] * 5), st.sampled_from([1, 8, 128]),
)  # fmt: skip
def test_the_count_is_the_sum_on_paper(V, T, heads, head_dim, L, R, switches, multiple):
    D, padded = heads * head_dim, math.ceil(V / multiple) * multiple
    config = ModelConfig(
        vocab_size=V, context_length=T, d_model=D, n_layer=L, n_head=heads, mlp_ratio=R, vocab_multiple=multiple,
        **dict(zip(SWITCHES, switches, strict=True)),
    )  # fmt: skip
    assert count_parameters(config) == count_by_hand(padded, T, D, L, R, *switches)


def test_the_modern_presets_by_hand():
    """A block: 4 D^2 of attention, 3 D F of the MLP, two norms of D, two gains of H; then a norm and the table, whose
    rows are padded to a multiple of 64."""
    twelve = 6 * (4 * 384**2 + 3 * 384 * 1024 + 2 * 384 + 2 * 32) + 384 + 4416 * 384
    assert count_parameters(andrea_modern_12m()) == twelve == 12_317_952
    hundred = 12 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768 + 2 * 64) + 768 + 8512 * 768
    assert count_parameters(andrea_modern_120m()) == hundred == 91_492_608
    four_hundred = 16 * (4 * 1536**2 + 3 * 1536 * 4096 + 2 * 1536 + 2 * 64) + 1536 + 8512 * 1536
    assert count_parameters(andrea_modern_480m()) == four_hundred == 466_112_000


def count_variant(c):
    """As above, for every option."""
    vectors = (c.norm_gain + c.norm_shift) * (c.norm != "none")  # of a norm
    norms = (1 if c.parallel_block else 2) + (2 if c.norm_position == "sandwich" else 0)
    queries, keys = c.n_head * c.head_dim, c.kv_heads * c.head_dim
    attention = c.d_model * (queries + 2 * keys) + queries * c.d_model + 2 * c.head_dim * c.qk_norm
    attention += c.attention_bias * (queries + 2 * keys + c.d_model)

    def mlp(width):
        return (2 + c.gated) * c.d_model * width + c.mlp_bias * ((1 + c.gated) * width + c.d_model)

    feed = mlp(c.mlp_dim)
    if c.n_expert:
        expert = c.expert_size or c.mlp_dim
        feed = c.n_expert * (mlp(expert) + c.d_model + (c.balance_bias is not None))
        feed += mlp(c.n_shared_expert * expert) if c.n_shared_expert else 0
    block = attention + feed + norms * vectors * c.d_model + (c.branch_gain is not None) * 2 * c.d_model
    tables = (2 - c.tie_embeddings) * c.padded_vocab_size + (c.position == "learned") * c.context_length
    return c.n_layer * block + (tables + c.final_norm * vectors) * c.d_model


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variants_count_is_the_sum_on_paper(name):
    config = VARIANTS[name]
    assert count_parameters(config) == count_variant(config)
    assert jax.eval_shape(lambda key: init_params(key, config), KEY) == abstract_params(config)


def test_a_llama_by_hand():
    """Width 18, 6 heads of 4 and 2 of keys: 18 x 40 + 24 x 18; MLP 3 x 18 x 50; two norms of 18. Twice; a norm; two
    tables of 31 x 18."""
    assert count_parameters(VARIANTS["llama"]) == 2 * (720 + 432 + 2700 + 36) + 18 + 1116 == 8910


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("token_embedding", 24**-0.5),
        ("position_embedding", 24**-0.5),
        ("head", math.sqrt(2 / (5 * 24))),
        ("blocks.attention.qkv", math.sqrt(2 / (5 * 24))),
        ("blocks.mlp.w_1", math.sqrt(2 / (5 * 24))),
        ("blocks.mlp.w_gate", math.sqrt(2 / (5 * 24))),
        ("blocks.attention.out", math.sqrt(2 / (5 * 24) * 2 / 24 / (2 * 3))),
        ("blocks.mlp.w_2", math.sqrt(2 / (5 * 24) * 2 / 24 / (2 * 3))),
    ],
)
def test_matrices_start_normal_with_their_std(name, std):
    drawn = np.asarray(ALL[name], np.float64)
    # Of n normal numbers the mean has standard error std / sqrt(n), the std has std / sqrt(2 n); five of each.
    assert abs(drawn.mean()) < 5 * std / math.sqrt(drawn.size)
    assert abs(drawn.std() / std - 1) < 5 / math.sqrt(2 * drawn.size)
    kurtosis = ((drawn - drawn.mean()) ** 4).mean() / drawn.var() ** 2
    assert abs(kurtosis - 3) < 5 * math.sqrt(24 / drawn.size)


@pytest.mark.parametrize(
    ("changes", "name", "std"),
    [
        (dict(embedding_scale=5.0), "token_embedding", 24**-0.5),
        (dict(embedding_scale=5.0), "position_embedding", 5 * 24**-0.5),  # as large as the scaled tokens
        (dict(norm_gain=False), "token_embedding", 24**-0.75),
        (dict(norm_gain=False), "blocks.attention.out", math.sqrt(2 / 120) * 24**-0.75 * math.sqrt(2 / 6)),
        (dict(norm_gain=False, tie_embeddings=False), "token_embedding", 24**-0.5),
        (dict(final_norm=False, embedding_scale=4.0), "token_embedding", (4 * 24) ** -0.5),
        (dict(position="rotary"), "blocks.mlp.w_2", math.sqrt(2 / 120 / 24 / 6)),  # one table
        (dict(embedding_scale=24**0.5, position="none"), "blocks.mlp.w_2", math.sqrt(2 / 120 / 6)),
        (dict(norm_position="post"), "blocks.mlp.w_2", math.sqrt(2 / 120 / 6)),  # of a stream of size 1
        (dict(norm="none"), "blocks.mlp.w_2", math.sqrt(2 / 120 / 6)),  # reads what it adds to
        (dict(norm_position="sandwich"), "blocks.mlp.w_2", math.sqrt(2 / 120)),  # the gain is small instead
        (dict(norm_position="sandwich", norm_gain=False), "blocks.mlp.w_2", math.sqrt(2 / 120 / 6 * 2) * 24**-0.75),
        (dict(branch_gain=0.1), "blocks.attention.out", math.sqrt(2 / 120)),
    ],
)
def test_where_variants_start(changes, name, std):
    drawn = np.asarray(by_name(init_params(KEY, small(**changes)))[name], np.float64)
    assert abs(drawn.std() / std - 1) < 5 / math.sqrt(2 * drawn.size)  # as above


@pytest.mark.parametrize(
    ("changes", "name", "start"),
    [
        (dict(norm_position="sandwich"), "blocks.attention_out_norm.gain", math.sqrt(2 / 24 / 6)),
        (dict(norm_position="sandwich", branch_gain=0.5), "blocks.mlp_out_norm.gain", 1),
        (dict(norm_position="sandwich", branch_gain=0.5), "blocks.mlp_branch.gain", 0.5),
        (dict(branch_gain=0.0), "blocks.attention_branch.gain", 0),
        (dict(norm_position="post"), "blocks.mlp_norm.gain", 1),
        # the last of a tied model, whichever it is
        (dict(norm_position="post"), "final_norm.gain", 24**-0.5),
        (dict(norm_position="post", final_norm=False), "blocks.mlp_norm.gain", [[1], [1], [24**-0.5]]),
        (dict(norm_position="post", final_norm=False, tie_embeddings=False), "blocks.mlp_norm.gain", 1),
    ],
)
def test_where_gains_of_variants_start(changes, name, start):
    found = by_name(init_params(KEY, small(**changes)))[name]
    np.testing.assert_array_equal(found, np.broadcast_to(np.float32(start), found.shape))


def test_gains_start_at_one_and_shifts_and_biases_at_zero():
    for name, leaf in ALL.items():
        last = name.split(".")[-1]
        if last == "gain":
            assert np.all(leaf == 1), name
        elif last == "shift" or last.startswith("b_"):
            assert np.all(leaf == 0), name
        else:
            assert np.all(leaf != 0), name


@pytest.mark.parametrize(
    "change", [{}, {"mlp_bias": False}, {"norm_gain": False, "norm_shift": False, "tie_embeddings": False}]
)
def test_adding_or_removing_a_parameter_leaves_the_values_of_the_others(change):
    params = by_name(init_params(KEY, small(**change)))
    assert params.keys() != ALL.keys()
    for name in params.keys() & ALL.keys() - {"final_norm.gain"}:  # that one depends on the tie
        np.testing.assert_array_equal(params[name], ALL[name], err_msg=name)


def test_the_final_gain_starts_so_that_a_tied_models_first_logits_are_of_size_one():
    tied, untied = (by_name(init_params(KEY, small(tie_embeddings=tie)))["final_norm.gain"] for tie in (True, False))
    np.testing.assert_array_equal(tied, np.float32(small().d_model ** -0.5))
    np.testing.assert_array_equal(untied, 1)


def test_no_two_tensors_or_layers_start_alike_and_the_key_decides():
    params = by_name(init_params(KEY, small(vocab_size=32)))
    assert params["token_embedding"].shape == params["position_embedding"].shape
    rows = [ALL[name].reshape(3, -1)[layer] for name in MATRICES[:5] for layer in range(3)]
    rows += [params["token_embedding"].ravel(), params["position_embedding"].ravel(), ALL["head"].ravel()]
    for one, other in itertools.combinations([np.asarray(row[:500], np.float64) for row in rows], 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / 500**0.5
    other = by_name(init_params(jax.random.key(1), small(vocab_size=32)))
    assert np.all(np.asarray(other["token_embedding"]) != np.asarray(params["token_embedding"]))


def test_decay_touches_the_matrices_of_blocks_and_head_only():
    mask = by_name(decay_mask(EVERY_KIND))
    assert {name for name, decayed in mask.items() if decayed} == set(MATRICES)
    assert mask.keys() == ALL.keys()


def test_a_tied_table_is_counted_once_and_has_no_head():
    tied, untied = andrea_120m(), andrea_120m(tie_embeddings=False)
    assert "head" not in specs(tied)
    assert count_parameters(untied) - count_parameters(tied) == 8449 * 768


def test_every_axis_has_a_name_and_blocks_are_stacked_on_layers():
    config = EVERY_KIND
    shapes = map_specs(lambda _, spec: spec.shape, config)
    is_leaf = lambda x: isinstance(x, tuple)  # noqa: E731
    shapes = dict(jax.tree.leaves_with_path(shapes, is_leaf=is_leaf))
    axes = dict(jax.tree.leaves_with_path(logical_axes(config), is_leaf=is_leaf))
    sizes = {"layer": 3, "embed": 24, "heads": 4, "head_dim": 6, "qkv": 3, "mlp": 96, "vocab": 61, "position": 32}
    assert shapes == {path: tuple(sizes[axis] for axis in names) for path, names in axes.items()}
    for path, names in axes.items():
        assert ("layer" in names) == parameters.path_name(path).startswith("blocks."), path


def test_abstract_parameters_allocate_nothing_and_take_a_dtype():
    leaves = jax.tree.leaves(abstract_params(small(), "bfloat16"))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) and leaf.dtype == "bfloat16" for leaf in leaves)


def test_a_tensor_is_drawn_flat_or_with_its_axes_to_the_same_bits(monkeypatch):
    monkeypatch.setattr(parameters, "FLAT", 0)
    for name, tensor in by_name(init_params(KEY, EVERY_KIND)).items():
        np.testing.assert_array_equal(tensor, ALL[name], err_msg=name)
