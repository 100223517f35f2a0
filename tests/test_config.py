import dataclasses

import pytest

from andrea_jax.config import (
    PRESETS,
    ModelConfig,
    andrea_12m,
    andrea_12m_card,
    andrea_120m,
    andrea_120m_card,
    andrea_480m,
)
from andrea_jax.settings import UserError


@pytest.mark.parametrize(
    ("preset", "vocab_size", "d_model", "n_layer", "n_head", "head_dim", "mlp_dim"),
    [
        (andrea_12m, 4353, 384, 6, 12, 32, 1536),
        (andrea_120m, 8449, 768, 12, 12, 64, 3072),
        (andrea_480m, 8449, 1536, 16, 24, 64, 6144),
        (andrea_12m_card, 2305, 384, 6, 12, 32, 1536),
        (andrea_120m_card, 8449, 768, 12, 12, 64, 3072),
    ],
)
def test_presets_have_the_published_dimensions(preset, vocab_size, d_model, n_layer, n_head, head_dim, mlp_dim):
    config = preset()
    assert (config.vocab_size, config.d_model, config.n_layer, config.n_head) == (vocab_size, d_model, n_layer, n_head)
    assert (config.head_dim, config.mlp_dim, config.context_length) == (head_dim, mlp_dim, 1024)
    assert config.activation == "gelu"


def test_fields_of_a_preset_can_be_replaced():
    for name, preset in PRESETS.items():
        assert preset.__name__ == name
        assert preset(n_layer=3, dropout=0.1) == dataclasses.replace(preset(), n_layer=3, dropout=0.1)


@pytest.mark.parametrize(("d_model", "n_head", "nearest"), [(770, 12, 768), (779, 12, 780), (5, 12, 12), (1, 2, 2)])
def test_heads_that_do_not_divide_the_width_are_refused_when_the_config_is_made(d_model, n_head, nearest):
    with pytest.raises(UserError) as error:
        ModelConfig(d_model=d_model, n_head=n_head)
    assert str(error.value) == (
        f"ModelConfig.d_model = {d_model} does not divide into n_head = {n_head} heads; d_model = {nearest} would"
    )
    assert ModelConfig(d_model=nearest, n_head=n_head).head_dim * n_head == nearest


@pytest.mark.parametrize("field", ["context_length", "d_model", "n_layer", "n_head", "mlp_ratio", "vocab_multiple"])
@pytest.mark.parametrize("size", [0, -1])
def test_sizes_below_one_are_refused(field, size):
    with pytest.raises(UserError, match=rf"^ModelConfig\.{field} = {size}: must be at least 1$"):
        ModelConfig(**{field: size})


@pytest.mark.parametrize(
    ("field", "value"), [("vocab_size", 1), ("norm_eps", -1e-5), ("dropout", -0.1), ("dropout", 1)]
)
def test_other_values_outside_their_range_are_refused(field, value):
    with pytest.raises(UserError, match=rf"^ModelConfig\.{field} = "):
        ModelConfig(**{field: value})


@pytest.mark.parametrize(
    ("vocab_size", "multiple", "padded"), [(8449, 1, 8449), (8449, 128, 8576), (8448, 128, 8448), (2, 64, 64)]
)
def test_the_vocabulary_is_padded_up_to_the_multiple(vocab_size, multiple, padded):
    assert ModelConfig(vocab_size=vocab_size, vocab_multiple=multiple).padded_vocab_size == padded


OTHER = {
    "vocab_size": 4353,
    "context_length": 512,
    "d_model": 384,
    "n_layer": 6,
    "n_head": 24,
    "mlp_ratio": 2,
    "activation": "relu",
    "mlp_bias": False,
    "attention_bias": True,
    "norm_gain": False,
    "norm_shift": False,
    "norm_eps": 1e-6,
    "tie_embeddings": False,
    "vocab_multiple": 128,
}


def test_differences_name_each_field_that_changes_what_is_computed():
    mine = andrea_120m()
    assert [*OTHER, "dropout"] == [field.name for field in dataclasses.fields(ModelConfig)]
    for name, value in OTHER.items():
        found = mine.differences(dataclasses.replace(mine, **{name: value}))
        assert found == [f"{name}: {getattr(mine, name)} != {value}"]


def test_dropout_makes_no_different_model_and_two_differences_are_both_named():
    assert andrea_120m().differences(andrea_120m(dropout=0.5)) == []
    assert andrea_120m().differences(andrea_120m(n_head=24, mlp_bias=False)) == [
        "n_head: 12 != 24",
        "mlp_bias: True != False",
    ]
