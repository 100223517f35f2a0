"""The linen module computes what the functions compute, bit for bit, and behaves as Flax's users expect of a module."""

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax.core import freeze
from reference_model import SEGMENTS, TOKENS, VARIANTS, drawn, tiny

from andrea_jax.engine import EngineConfig
from andrea_jax.interop.flax_linen import Andrea
from andrea_jax.model import model_forward
from andrea_jax.parameters import abstract_params, count_parameters, init_params, named_specs, path_name
from andrea_jax.settings import UserError
from andrea_jax.sharding import RULES, MeshConfig, plan_mesh, spec_sharding

DENSE, EXPERTS = tiny(), VARIANTS["deepseek"]
ENGINE = EngineConfig(blocks="scan", attention="explicit")  # what compiles fastest


def assert_equal(found, expected):
    """The same structure and the same bits."""
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def program(f, *arguments):
    return str(jax.make_jaxpr(f)(*arguments))


def test_logits_are_the_bits_of_model_forward():
    params = drawn(DENSE)
    found = jax.jit(Andrea(DENSE, ENGINE).apply)({"params": params}, TOKENS, SEGMENTS)
    assert_equal(found, jax.jit(lambda p: model_forward(p, TOKENS, DENSE, ENGINE, SEGMENTS))(params))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_the_same_program_and_has_the_same_tree(name):
    config = VARIANTS[name]
    params, model = abstract_params(config), Andrea(config)
    ours = program(lambda p: model_forward(p, TOKENS, config), params)
    assert program(lambda p: model.apply({"params": p}, TOKENS), params) == ours
    assert program(lambda p: model.apply(freeze({"params": p}), TOKENS), params) == ours
    assert jax.eval_shape(model.init, jax.random.key(0), TOKENS) == {"params": params}


class Parent(nn.Module):
    @nn.compact
    def __call__(self, tokens_BT):
        return Andrea(DENSE, ENGINE, name="language")(tokens_BT)


def test_init_gives_init_params_of_the_same_key_and_inside_another_module_of_another():
    key = jax.random.key(5, impl="rbg")  # of which numbers compile faster
    found, inside, ours = jax.jit(
        lambda key: (
            Andrea(DENSE, ENGINE).init(key, TOKENS)["params"],
            Parent().init(key, TOKENS)["params"]["language"],
            init_params(key, DENSE),
        )
    )(key)
    assert_equal(found, ours)
    assert jax.tree.map(jax.numpy.shape, inside) == jax.tree.map(jax.numpy.shape, ours)
    assert np.any(inside["token_embedding"] != ours["token_embedding"])


def test_gradients_through_apply_are_the_same_program():
    def gradient(forward):
        return program(jax.grad(lambda p: (forward(p) ** 2).sum()), abstract_params(DENSE))

    model = Andrea(DENSE)
    assert gradient(lambda p: model.apply({"params": p}, TOKENS)) == gradient(lambda p: model_forward(p, TOKENS, DENSE))


def test_tabulate_counts_every_parameter():
    console = {"width": 200, "force_terminal": False}
    text = Andrea(DENSE, ENGINE).tabulate(jax.random.key(0), TOKENS, console_kwargs=console)
    count = count_parameters(DENSE)
    assert f"Total Parameters: {count:,} ({4 * count / 1000:.1f} KB)" in text


def test_dropout_is_of_training_only_and_its_key_decides():
    config = tiny(n_layer=1, dropout=0.5)
    model, params = Andrea(config, ENGINE), drawn(config)

    @jax.jit
    def logits(key):
        return model.apply({"params": params}, TOKENS, deterministic=False, rngs={"dropout": key})

    one, same, other = (logits(jax.random.key(seed)) for seed in (0, 0, 1))
    assert_equal(one, same)
    assert np.any(one != other)
    rngs = {"dropout": jax.random.key(0)}
    evaluated = program(lambda p: model.apply({"params": p}, TOKENS, rngs=rngs), params)
    assert evaluated == program(lambda p: model_forward(p, TOKENS, config, ENGINE), params)


def test_parameters_of_another_model_are_refused_by_name():
    params, model = drawn(DENSE), Andrea(DENSE)
    short = params | {"blocks": params["blocks"] | {"mlp": params["blocks"]["mlp"] | {"w_1": np.zeros((2, 16, 60))}}}
    message = r"^params blocks.mlp.w_1 is \[2, 16, 60\], but this ModelConfig has \[2, 16, 64\]"
    with pytest.raises(UserError, match=message):
        model.apply({"params": short}, TOKENS)
    missing = {name: tree for name, tree in params.items() if name != "position_embedding"}
    message = r"^params position_embedding is not in it, but this ModelConfig has \[12, 16\]"
    with pytest.raises(UserError, match=message):
        model.apply({"params": missing}, TOKENS)
    with pytest.raises(UserError, match=r"^params blocks.attention.out is not in it.*and 13 more"):
        model.apply({}, TOKENS)


@pytest.mark.parametrize("config", [DENSE, VARIANTS["gemma3"], EXPERTS], ids=["dense", "gemma3", "experts"])
def test_partition_specs_are_those_of_sharding(config):
    model = Andrea(config, partitioned=True)
    boxed = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    found = nn.logical_to_mesh(nn.get_partition_spec(boxed), tuple(RULES.items()))["params"]
    mesh = plan_mesh(MeshConfig(1, 2, 2), 4)
    is_spec = lambda x: isinstance(x, jax.sharding.PartitionSpec)  # noqa: E731
    by_name = {path_name(path): spec for path, spec in jax.tree.leaves_with_path(found, is_leaf=is_spec)}
    assert by_name == {name: spec_sharding(mesh, spec.axes).spec for name, spec in named_specs(config).items()}
    assert nn.unbox(boxed)["params"] == abstract_params(config)
    ours = program(lambda p: model_forward(p, TOKENS, config), abstract_params(config))
    assert program(lambda boxed: model.apply(boxed, TOKENS), boxed) == ours


def test_over_a_mesh_it_is_the_same_program():
    config, mesh = tiny(vocab_multiple=2), plan_mesh(MeshConfig(1, 2, 2), 4)
    ours = program(lambda p: model_forward(p, TOKENS, config, mesh=mesh), abstract_params(config))
    theirs = program(lambda p: Andrea(config, mesh=mesh).apply({"params": p}, TOKENS), abstract_params(config))
    assert theirs == ours
    assert "sharding_constraint" in ours
