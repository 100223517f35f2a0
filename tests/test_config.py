import dataclasses

import pytest

from andrea_jax.config import EXPERT_FIELDS, TRAINING_ONLY, ModelConfig
from andrea_jax.presets import (
    PRESETS,
    andrea_12m,
    andrea_12m_card,
    andrea_120m,
    andrea_120m_card,
    andrea_480m,
    andrea_modern_12m,
    andrea_modern_120m,
    andrea_modern_480m,
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


@pytest.mark.parametrize(
    ("modern", "first", "mlp_dim"),
    [
        (andrea_modern_12m, andrea_12m, 1024),
        (andrea_modern_120m, andrea_120m, 2048),
        (andrea_modern_480m, andrea_480m, 4096),
    ],
)
def test_modern_presets_have_andreas_sizes_and_another_block(modern, first, mlp_dim):
    config, old = modern(), first()
    for name in ("vocab_size", "context_length", "d_model", "n_layer", "n_head", "tie_embeddings"):
        assert getattr(config, name) == getattr(old, name)
    assert (config.position, config.norm, config.activation, config.gated) == ("rotary", "rms", "silu", True)
    assert (config.mlp_dim, config.mlp_bias, config.attention_bias, config.norm_shift) == (mlp_dim, False, False, False)


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


SIZES = "context_length d_model n_layer n_head mlp_multiple mlp_size n_kv_head head_size vocab_multiple window"


@pytest.mark.parametrize("field", SIZES.split())
@pytest.mark.parametrize("size", [0, -1])
def test_sizes_below_one_are_refused(field, size):
    with pytest.raises(UserError, match=rf"^ModelConfig\.{field} = {size}: must be at least 1$"):
        ModelConfig(**{field: size})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 1),
        ("mlp_ratio", 0),
        ("norm_eps", -1e-5),
        ("dropout", -0.1),
        ("dropout", 1),
        ("rotary_base", 1),
        ("rotary_factor", 0.5),
        ("attention_scale", 0),
        ("attention_soft_cap", 0),
        ("logit_soft_cap", -1.0),
        ("branch_multiplier", 0),
    ],
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
    "mlp_ratio": 2.0,
    "mlp_multiple": 1000,
    "mlp_size": 2000,
    "n_kv_head": 4,
    "head_size": 32,
    "activation": "relu",
    "gated": True,
    "mlp_bias": False,
    "attention_bias": True,
    "norm": "rms",
    "norm_position": "post",
    "norm_gain": False,
    "norm_shift": False,
    "norm_eps": 1e-6,
    "final_norm": False,
    "qk_norm": True,
    "position": "alibi",
    "rotary_base": 500.0,
    "rotary_local_base": 100.0,
    "rotary_scaling": "linear",
    "rotary_factor": 4.0,
    "rotary_original": 512,
    "rotary_slow": 0.5,
    "rotary_fast": 32.0,
    "rotary_length": 1.5,
    "window": 64,
    "global_every": 6,
    "attention_scale": 0.5,
    "attention_soft_cap": 50.0,
    "logit_soft_cap": 30.0,
    "logit_scale": 0.25,
    "embedding_scale": 2.0,
    "parallel_block": True,
    "branch_multiplier": 0.5,
    "branch_gain": 0.1,
    "tie_embeddings": False,
    "vocab_multiple": 128,
    "n_expert": 4,
    "expert_top_k": 1,
    "expert_size": 64,
    "n_shared_expert": 1,
    "router": "sigmoid",
    "router_renormalize": False,
    "balance_bias": 0.001,
    "capacity_factor": 1.5,
    "mup_width": 64,
    "mup_head": 32,
}
ROTARY = dict(position="rotary", rotary_scaling="yarn", window=32)
READ_BY = {"global_every": dict(window=32), "rotary_scaling": dict(position="rotary")}  # else they would be refused
READ_BY["mup_head"] = dict(mup_width=64)
READ_BY |= {name: dict(n_expert=4) for name in EXPERT_FIELDS}


def test_differences_name_each_field_that_changes_what_is_computed():
    assert {*OTHER, *TRAINING_ONLY} == {field.name for field in dataclasses.fields(ModelConfig)}
    for name, value in OTHER.items():
        mine = andrea_120m(**READ_BY.get(name, ROTARY if name.startswith("rotary") else {}))
        found = mine.differences(dataclasses.replace(mine, **{name: value}))
        assert found == [f"{name}: {getattr(mine, name)} != {value}"]


def test_dropout_makes_no_different_model_and_two_differences_are_both_named():
    assert andrea_120m().differences(andrea_120m(dropout=0.5)) == []
    assert andrea_120m().differences(andrea_120m(n_head=24, mlp_bias=False)) == [
        "n_head: 12 != 24",
        "mlp_bias: True != False",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(global_every=2), "ModelConfig.global_every = 2 has no effect without window"),
        (dict(norm="none", norm_position="post"), "ModelConfig.norm_position = 'post' has no effect without a norm"),
        (dict(rotary_base=5e5), "ModelConfig.rotary_base = 500000.0 has no effect without position = 'rotary'"),
        (
            dict(position="rotary", rotary_local_base=1e3),
            "ModelConfig.rotary_local_base = 1000.0 has no effect without position = 'rotary' and window",
        ),
        (
            dict(position="alibi", rotary_scaling="linear"),
            "ModelConfig.rotary_scaling = 'linear' has no effect without position = 'rotary'",
        ),
        (
            dict(position="rotary", rotary_factor=2),
            "ModelConfig.rotary_factor = 2.0 has no effect without rotary_scaling",
        ),
        (
            dict(position="rotary", rotary_scaling="linear", rotary_original=64),
            "ModelConfig.rotary_original = 64 has no effect without rotary_scaling = 'llama3' or 'yarn'",
        ),
        (
            dict(position="rotary", rotary_scaling="llama3", rotary_length=2.0),
            "ModelConfig.rotary_length = 2.0 has no effect without rotary_scaling = 'yarn'",
        ),
        (
            dict(position="rotary", rotary_scaling="yarn", rotary_fast=1.0),
            "ModelConfig.rotary_fast = 1.0: must be above rotary_slow = 1.0",
        ),
        (dict(position="rotary", d_model=36), "ModelConfig.position = 'rotary' needs an even head width, not 3"),
        (dict(n_kv_head=5), "ModelConfig.n_kv_head = 5 does not divide n_head = 12; 4 would"),
        (dict(expert_top_k=3), "ModelConfig.expert_top_k = 3 has no effect without n_expert"),
        (dict(balance_weight=0.01), "ModelConfig.balance_weight = 0.01 has no effect without n_expert"),
        (dict(n_expert=4, expert_top_k=5), "ModelConfig.expert_top_k = 5: must be at most n_expert = 4"),
        (
            dict(parallel_block=True, norm_position="post"),
            "ModelConfig.parallel_block = True needs norm_position = 'pre' or 'sandwich', not 'post'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes, message):
    with pytest.raises(UserError) as error:
        ModelConfig(**changes)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        (dict(), 3072),
        (dict(mlp_ratio=8 / 3), 2048),
        (dict(mlp_ratio=8 / 3, mlp_multiple=64, d_model=384), 1024),
        (dict(mlp_ratio=8 / 3, mlp_multiple=256, d_model=384), 1024),
        (dict(mlp_ratio=8 / 3, mlp_multiple=64, d_model=1020), 2752),  # 2720 rounded up to 43 x 64
        (dict(mlp_size=100, mlp_multiple=64), 100),
    ],
)
def test_the_width_of_the_mlp(changes, width):
    assert ModelConfig(**changes).mlp_dim == width


def test_a_head_may_be_wider_than_its_share_of_the_stream():
    config = ModelConfig(d_model=10, n_head=3, head_size=8)
    assert (config.head_dim, config.kv_heads) == (8, 3)


@pytest.mark.parametrize(
    ("changes", "seeing"),
    [
        (dict(), [0, 1, 2, 3, 4, 5]),
        (dict(window=4), []),
        (dict(window=4, global_every=1), [0, 1, 2, 3, 4, 5]),
        (dict(window=4, global_every=3), [2, 5]),
        (dict(window=4, global_every=7), []),
    ],
)
def test_which_blocks_see_everything(changes, seeing):
    config = ModelConfig(n_layer=6, **changes)
    assert [layer for layer in range(6) if config.sees_all(layer)] == seeing


def test_one_size_said_in_two_ways_is_no_difference():
    said = andrea_120m(mlp_size=3072, n_kv_head=12, head_size=64)
    assert andrea_120m().differences(said) == []
    assert andrea_120m(mlp_ratio=2.0).differences(said) == ["mlp_ratio: 2.0 != 4.0", "mlp_size: None != 3072"]


def test_a_misspelt_field_of_a_preset_is_named_with_the_right_one():
    with pytest.raises(UserError, match=r"^ModelConfig\.n_layr: no such field; did you mean n_layer\?$"):
        andrea_120m(n_layr=1)
