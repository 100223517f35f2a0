"""The nnx module computes what the functions compute, bit for bit, and behaves as Flax's users expect of a module."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from reference_model import SEGMENTS, TOKENS, VARIANTS, drawn, tiny

from andrea_jax.engine import EngineConfig
from andrea_jax.interop.flax_nnx import Andrea, on_states, params_of
from andrea_jax.layers.routing import move_router_bias
from andrea_jax.loss import loss_fn
from andrea_jax.model import model_forward
from andrea_jax.optimizer import OptimizerConfig, make_optimizer
from andrea_jax.parameters import abstract_params, count_parameters, init_params, map_specs, named_specs, path_name
from andrea_jax.settings import UserError
from andrea_jax.sharding import RULES, MeshConfig, plan_mesh, spec_sharding

BATCH = {"tokens_BT": TOKENS, "targets_BT": np.roll(TOKENS, -1, 1), "weights_BT": np.ones(TOKENS.shape, np.float32)}
DENSE, EXPERTS, BARE = tiny(), VARIANTS["deepseek"], VARIANTS["odd_mlp"]  # BARE: norms without parameters
ENGINE = EngineConfig(blocks="scan", attention="explicit")  # what compiles fastest


def assert_equal(found, expected):
    """The same structure and the same bits."""
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_logits_are_the_bits_of_model_forward():
    params = drawn(DENSE)
    found = nnx.jit(lambda model: model(TOKENS, SEGMENTS))(Andrea.from_params(params, DENSE, engine=ENGINE))
    assert_equal(found, jax.jit(lambda p: model_forward(p, TOKENS, DENSE, ENGINE, SEGMENTS))(params))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_the_same_program(name):
    config = VARIANTS[name]
    programs = [
        str(jax.make_jaxpr(f)(abstract_params(config)))
        for f in (lambda p: model_forward(p, TOKENS, config), lambda p: Andrea.from_params(p, config)(TOKENS))
    ]
    assert programs[0] == programs[1]


@pytest.mark.parametrize("config", [DENSE, BARE], ids=["dense", "bare"])
def test_parameters_go_in_and_out_without_a_copy(config):
    params = drawn(config)
    model = Andrea.from_params(params, config)
    out, pure = model.params(), nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert jax.tree.structure(out) == jax.tree.structure(params)
    for tree in (out, pure):  # a State has no empty dicts
        leaves = dict(jax.tree.leaves_with_path(tree))
        assert leaves.keys() == dict(jax.tree.leaves_with_path(params)).keys()
        assert all(leaves[path] is x for path, x in jax.tree.leaves_with_path(params))
    other = drawn(config, seed=2)
    nnx.update(model, other)
    assert model.params()["token_embedding"] is other["token_embedding"]
    assert_equal(model.params(), other)


def test_a_new_model_starts_as_init_params_of_its_streams_key():
    def new():
        return Andrea(DENSE, rngs=nnx.Rngs(params=3))

    found, expected = (
        str(jax.make_jaxpr(f)())
        for f in (lambda: new().params(), lambda: init_params(nnx.Rngs(params=3).params(), DENSE))
    )
    assert found == expected
    assert nnx.eval_shape(new).params() == abstract_params(DENSE)
    with pytest.raises(UserError, match=r"rngs=nnx.Rngs\(0\)"):
        Andrea(DENSE)


def test_gradients_and_training_steps_are_the_bits_of_ours():
    config = tiny(n_layer=1)
    tx = optax.chain(make_optimizer(OptimizerConfig("adamw"), config), optax.scale(-0.01))  # with a mask of our trees
    params = drawn(config)
    model = Andrea.from_params(params, config, engine=ENGINE)
    optimizer = nnx.Optimizer(model, on_states(tx, config), wrt=nnx.Param)

    @nnx.jit
    def their_step(model, optimizer):
        def loss_of(model):
            return loss_fn(model.params(), BATCH, model.config, model.engine)

        (loss, _), gradients = nnx.value_and_grad(loss_of, has_aux=True)(model)
        optimizer.update(model, gradients)
        return loss, params_of(gradients, config)

    @jax.jit
    def our_step(params, state):
        (loss, _), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params, BATCH, config, ENGINE)
        updates, state = tx.update(gradients, state, params)
        return loss, gradients, optax.apply_updates(params, updates), state

    state, losses = tx.init(params), []
    for _ in range(4):
        loss, gradients, params, state = our_step(params, state)
        assert_equal(their_step(model, optimizer), (loss, gradients))
        assert_equal(model.params(), params)
        losses.append(loss)
    assert losses[-1] < 0.8 * losses[0]


def test_a_routers_bias_is_moved_as_ours():
    params, load = drawn(EXPERTS), np.arange(12.0).reshape(2, 6)
    model = Andrea.from_params(params, EXPERTS)
    nnx.update(model, move_router_bias(model.params(), {"load": load}, EXPERTS))
    assert_equal(model.params(), move_router_bias(params, {"load": load}, EXPERTS))
    assert np.all(model.blocks.moe.router_bias[...] != params["blocks"]["moe"]["router_bias"])


def test_muons_groups_are_those_of_our_trees():
    tx = make_optimizer(OptimizerConfig("muon"), DENSE)
    state = nnx.state(nnx.eval_shape(lambda: Andrea(DENSE, rngs=nnx.Rngs(0))), nnx.Param)
    update, _ = jax.eval_shape(
        lambda p: (lambda t: t.update(p, t.init(p), p))(on_states(tx, DENSE)), nnx.as_pure(state)
    )
    assert params_of(update, DENSE) == abstract_params(DENSE)


def test_split_and_merged_it_is_the_same_model():
    model = Andrea.from_params(drawn(BARE), BARE)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    assert not jax.tree.leaves(rest)
    merged = nnx.merge(graph, params, rest)
    assert (merged.config, merged.engine) == (BARE, model.engine)
    assert_equal(merged.params(), model.params())


def test_tabulate_has_one_row_and_counts_every_parameter():
    model = Andrea.from_params(drawn(DENSE), DENSE, engine=ENGINE)
    text = nnx.tabulate(model, TOKENS, console_kwargs={"width": 200, "force_terminal": False})
    count = count_parameters(DENSE)
    assert text.count(f"{count:,} ({4 * count / 1000:.1f} KB)") == 3, text  # of the model, and two totals
    assert f"Total Parameters: {count:,} " in text


def test_dropout_is_of_training_only_and_its_stream_moves_on():
    config = tiny(dropout=0.5)
    model = Andrea.from_params(drawn(config), config, engine=ENGINE, rngs=nnx.Rngs(dropout=0))
    logits = nnx.jit(lambda model: model(TOKENS))
    first, second = logits(model), logits(model)
    assert np.any(first != second)
    model.eval()
    plain = logits(model)
    assert_equal(plain, logits(model))
    assert np.any(plain != first)
    assert model.dropout_key() is None
    model.train()
    assert model.dropout_key() != model.dropout_key()
    assert model.dropout_key(rngs=nnx.Rngs(dropout=7)) == nnx.Rngs(dropout=7).dropout()
    assert model.dropout_key(deterministic=True) is nnx.view(model, deterministic=True).dropout_key() is None


def test_dropout_without_a_stream_is_refused():
    config = tiny(dropout=0.5)
    with pytest.raises(UserError, match=r"rngs=nnx.Rngs\(dropout=SEED\)"):
        Andrea.from_params(drawn(config), config)(TOKENS)


def test_parameters_of_another_model_are_refused_by_name():
    params = drawn(DENSE)
    short = params | {"blocks": params["blocks"] | {"mlp": params["blocks"]["mlp"] | {"w_1": np.zeros((2, 16, 60))}}}
    with pytest.raises(
        UserError, match=r"^params blocks.mlp.w_1 is \[2, 16, 60\], but this ModelConfig has \[2, 16, 64\]$"
    ):
        Andrea.from_params(short, DENSE)
    missing = {name: tree for name, tree in params.items() if name != "final_norm"}
    message = r"^params final_norm.gain is not in it, but this ModelConfig has \[16\] \(and 1 more\)$"
    with pytest.raises(UserError, match=message):
        Andrea.from_params(missing, DENSE)
    with pytest.raises(UserError, match=r"^params head is \[16, 31\], but this ModelConfig has no such tensor$"):
        Andrea.from_params(params | {"head": np.zeros((16, 31))}, DENSE)


@pytest.mark.parametrize("config", [DENSE, VARIANTS["gemma3"], EXPERTS], ids=["dense", "gemma3", "experts"])
def test_partition_specs_are_those_of_sharding(config):
    model = nnx.eval_shape(lambda: Andrea(config, rngs=nnx.Rngs(0)))
    with nnx.logical_axis_rules(tuple(RULES.items())):
        found = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model, nnx.Param)))
    mesh = plan_mesh(MeshConfig(1, 2, 2), 4)
    is_spec = lambda x: isinstance(x, jax.sharding.PartitionSpec)  # noqa: E731
    by_name = {path_name(path): spec for path, spec in jax.tree.leaves_with_path(found, is_leaf=is_spec)}
    assert by_name == {name: spec_sharding(mesh, spec.axes).spec for name, spec in named_specs(config).items()}


def test_over_a_mesh_parameters_and_activations_lie_as_sharding_says():
    config, mesh = tiny(vocab_multiple=2), plan_mesh(MeshConfig(1, 2, 2), 4)

    def ours(params):
        held = map_specs(lambda name, spec: (spec_sharding(mesh, spec.axes),), config)
        params = jax.tree.map(lambda x, held: jax.lax.with_sharding_constraint(x, *held), params, held)
        return model_forward(params, TOKENS, config, mesh=mesh)

    def theirs(params):
        return Andrea.from_params(params, config, mesh=mesh)(TOKENS)

    assert str(jax.make_jaxpr(theirs)(abstract_params(config))) == str(jax.make_jaxpr(ours)(abstract_params(config)))
