import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andrea_jax.config import ModelConfig, andrea_12m_card, andrea_120m, andrea_120m_card
from andrea_jax.parameters import (
    abstract_params,
    count_parameters,
    decay_mask,
    init_params,
    logical_axes,
    map_specs,
    path_name,
    specs,
)

KEY = jax.random.key(0)
SWITCHES = ("mlp_bias", "attention_bias", "norm_gain", "norm_shift", "tie_embeddings")


def small(**changes):
    return ModelConfig(**{"vocab_size": 31, "context_length": 8, "d_model": 12, "n_layer": 2, "n_head": 3} | changes)


def by_name(tree):
    return {path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


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
def test_the_count_is_that_of_the_real_arrays(switches):
    config = small(**dict(zip(SWITCHES, switches, strict=True)))
    params = init_params(KEY, config)
    assert count_parameters(config) == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert count_parameters(config) == count_by_hand(31, 8, 12, 2, 4, *switches)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract_params(config)
    )


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


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("token_embedding", 48**-0.5),
        ("position_embedding", 48**-0.5),
        ("head", 0.02),
        ("blocks.attention.qkv", 0.02),
        ("blocks.mlp.w_1", 0.02),
        ("blocks.attention.out", 0.02 / math.sqrt(2 * 3)),
        ("blocks.mlp.w_2", 0.02 / math.sqrt(2 * 3)),
    ],
)
def test_matrices_start_normal_with_their_std(name, std):
    config = small(vocab_size=401, context_length=64, d_model=48, n_layer=3, tie_embeddings=False)
    drawn = np.asarray(by_name(init_params(KEY, config))[name], np.float64)
    # Of n normal numbers the mean has standard error std / sqrt(n), the std has std / sqrt(2 n); five of each.
    assert abs(drawn.mean()) < 5 * std / math.sqrt(drawn.size)
    assert abs(drawn.std() / std - 1) < 5 / math.sqrt(2 * drawn.size)
    kurtosis = ((drawn - drawn.mean()) ** 4).mean() / drawn.var() ** 2
    assert abs(kurtosis - 3) < 5 * math.sqrt(24 / drawn.size)


def test_gains_start_at_one_and_shifts_and_biases_at_zero():
    for name, leaf in by_name(init_params(KEY, small(attention_bias=True))).items():
        last = name.split(".")[-1]
        if last == "gain":
            assert np.all(leaf == 1), name
        elif last == "shift" or last.startswith("b_"):
            assert np.all(leaf == 0), name
        else:
            assert np.all(leaf != 0), name


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"mlp_bias": False},
        {"norm_gain": False, "norm_shift": False},
        {"tie_embeddings": False},
    ],
)
def test_adding_or_removing_a_parameter_leaves_the_values_of_the_others(change):
    before, after = by_name(init_params(KEY, small())), by_name(init_params(KEY, small(**change)))
    assert before.keys() != after.keys()
    for name in before.keys() & after.keys():
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)


def test_no_two_tensors_or_layers_start_alike_and_the_key_decides():
    params = by_name(init_params(KEY, small(vocab_size=8)))
    assert params["token_embedding"].shape == params["position_embedding"].shape
    unit = [np.ravel(params[name])[:8] / np.std(params[name]) for name in params if np.std(params[name])]
    unit += [np.ravel(params["blocks.mlp.w_1"][1])[:8] / np.std(params["blocks.mlp.w_1"])]
    for one, other in itertools.combinations(unit, 2):
        assert np.abs(one - other).max() > 0.1  # equal draws would differ by rounding, about 1e-7 (or 0.01 in std)
    other = by_name(init_params(jax.random.key(1), small(vocab_size=8)))
    assert np.all(np.asarray(other["token_embedding"]) != np.asarray(params["token_embedding"]))


def test_decay_touches_the_matrices_of_blocks_and_head_only():
    mask = by_name(decay_mask(small(attention_bias=True, tie_embeddings=False)))
    assert {name for name, decayed in mask.items() if decayed} == {
        "blocks.attention.qkv",
        "blocks.attention.out",
        "blocks.mlp.w_1",
        "blocks.mlp.w_2",
        "head",
    }
    assert jax.tree.structure(decay_mask(small())) == jax.tree.structure(init_params(KEY, small()))


def test_a_tied_table_is_counted_once_and_has_no_head():
    tied, untied = andrea_120m(), andrea_120m(tie_embeddings=False)
    assert "head" not in specs(tied)
    assert count_parameters(untied) - count_parameters(tied) == 8449 * 768


def test_every_axis_has_a_name_and_blocks_are_stacked_on_layers():
    config = small(attention_bias=True, tie_embeddings=False)
    shapes = map_specs(lambda _, spec: spec.shape, config)
    is_leaf = lambda x: isinstance(x, tuple)  # noqa: E731
    shapes = dict(jax.tree.leaves_with_path(shapes, is_leaf=is_leaf))
    axes = dict(jax.tree.leaves_with_path(logical_axes(config), is_leaf=is_leaf))
    sizes = {"layer": 2, "embed": 12, "heads": 3, "head_dim": 4, "qkv": 3, "mlp": 48, "vocab": 31, "position": 8}
    assert shapes == {path: tuple(sizes[axis] for axis in names) for path, names in axes.items()}
    for path, names in axes.items():
        assert ("layer" in names) == path_name(path).startswith("blocks."), path


def test_abstract_parameters_allocate_nothing_and_take_a_dtype():
    leaves = jax.tree.leaves(abstract_params(small(), "bfloat16"))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) and leaf.dtype == "bfloat16" for leaf in leaves)
