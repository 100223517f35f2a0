import dataclasses
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_model

from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.inspect.flops import flops_per_token
from andrea_jax.inspect.parameter_table import parameter_table
from andrea_jax.layers import expert_product as product
from andrea_jax.layers.expert_product import expert_product
from andrea_jax.layers.expert_rows import block_rows, place_rows
from andrea_jax.layers.mlp import mlp
from andrea_jax.layers.moe import AXES, SHARED, moe
from andrea_jax.optimizer import OptimizerConfig
from andrea_jax.parameters import count_active_parameters, count_parameters, init_params, named_specs
from andrea_jax.schedule import ScheduleConfig
from andrea_jax.train.config import RunConfig, TrainConfig
from andrea_jax.train.state import State, init_state
from andrea_jax.train.step import loss_and_gradient, make_train_step

ULP = 2.0**-23
B, T, D = 2, 9, 12
X = np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)
BASE = dict(vocab_size=17, context_length=T, d_model=D, n_layer=2, n_head=2)
CASES = {
    "mixtral": dict(n_expert=4, expert_size=10, activation="silu", gated=True, mlp_bias=False),
    "biased": dict(n_expert=5, expert_top_k=3, activation="gelu", router_renormalize=False, balance_bias=0.1),
    "sigmoid": dict(n_expert=6, expert_top_k=2, router="sigmoid", n_shared_expert=2, expert_size=5, gated=True),
    "switch": dict(n_expert=3, expert_top_k=1, router_renormalize=False, activation="relu"),
    "one": dict(n_expert=1, expert_top_k=1, activation="relu2", gated=True),
    "all": dict(n_expert=3, expert_top_k=3, activation="gelu_exact", gated=True),
    "many": dict(n_expert=40, expert_top_k=2),  # most stand idle
    "tight": dict(n_expert=4, expert_top_k=2, capacity_factor=0.6),
    "tight_gated": dict(n_expert=3, expert_top_k=2, capacity_factor=0.5, gated=True, n_shared_expert=1),
}


def config(name="mixtral", **changes):
    return ModelConfig(**BASE | CASES[name] | changes)


def params(chosen, seed=1):
    """One block's, all random."""
    rng = np.random.default_rng(seed)
    shapes = {n: s.shape[1:] for n, s in named_specs(chosen).items() if n.startswith("blocks.moe.")}
    tree = {"shared": {}}
    for name, shape in shapes.items():
        *_, group, leaf = name.split(".")
        (tree["shared"] if group == "shared" else tree)[leaf] = jnp.float32(rng.standard_normal(shape) * 0.5)
    return tree if tree["shared"] else {name: w for name, w in tree.items() if name != "shared"}


def reference(p, x, chosen):
    p = jax.tree.map(lambda w: np.asarray(w, np.float64), p)
    return np.stack([reference_model.moe(p, row, chosen) for row in np.asarray(x, np.float64)])


@pytest.mark.parametrize("name", CASES)
def test_values_equal_float64_token_by_token(name):
    p, chosen = params(config(name)), config(name)
    expected = reference(p, X, chosen)
    # Three sums of at most 48 products, as in the MLP, and a sum over experts.
    atol = 32 * ULP * np.abs(expected).max()
    np.testing.assert_allclose(jax.jit(partial(moe, config=chosen))(p, X)[0], expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_central_differences_in_float64(name):
    p, chosen = params(config(name)), config(name)
    rng = np.random.default_rng(5)
    dy = rng.standard_normal(X.shape).astype(np.float32)
    inputs = {**p, "x": jnp.asarray(X)}

    @jax.jit
    def gradient(inputs):
        return jax.grad(lambda i: (moe({n: i[n] for n in p}, i["x"], chosen)[0] * dy).sum())(inputs)

    for path, grad in jax.tree.leaves_with_path(gradient(inputs)):
        direction = rng.standard_normal(grad.shape)

        def along(h, path=path, direction=direction):
            moved = jax.tree.map_with_path(
                lambda q, w: np.asarray(w, np.float64) + (h * direction if q == path else 0), inputs
            )
            return (reference({n: moved[n] for n in p}, moved["x"], chosen) * dy).sum()

        if "router_bias" in str(path):
            assert np.all(np.asarray(grad) == 0)
            continue
        slope = (along(1e-6) - along(-1e-6)) / 2e-6  # off by about h^2; so near no token changes its experts
        atol = (64 * ULP + 1e-9) * np.linalg.norm(grad) * np.linalg.norm(direction) + 1e-7
        found = (np.asarray(grad, np.float64) * direction).sum()
        np.testing.assert_allclose(found, slope, rtol=1e-6, atol=atol, err_msg=str(path))


def test_a_capacity_drops_and_a_tokens_place_does_not_depend_on_later_tokens():
    chosen = config("tight")
    p = params(chosen)
    whole, routing = moe(p, jnp.asarray(X), chosen)
    assert np.all(np.asarray(routing["dropped"]) > 0)
    # ceil(0.6 x 2 x 9 / 4) = 3 places in each of 4 experts for 18 choices: at least a third finds none
    assert float(routing["dropped"].min()) >= (18 - 12) / 18 - ULP
    changed, _ = moe(p, jnp.asarray(X).at[:, 5:].set(7.0), chosen)
    np.testing.assert_allclose(whole[:, :5], changed[:, :5], rtol=0, atol=16 * ULP * np.abs(whole).max())
    alone, _ = moe(p, jnp.asarray(X[:1]), chosen)  # nor on other rows
    np.testing.assert_allclose(alone[0], whole[0], rtol=0, atol=16 * ULP * np.abs(whole).max())


@pytest.mark.parametrize("factor", [None, 0.25])
def test_a_token_that_no_expert_takes_gets_nothing(factor):
    """All tokens want expert 2; with room for one of a row's nine, the others pass."""
    chosen = config("switch", capacity_factor=factor, mlp_bias=False)
    p = params(chosen)
    p = {**p, "router": jnp.zeros((D, 3)).at[:, 2].set(1.0)}
    y, routing = moe(p, jnp.abs(jnp.asarray(X)), chosen)
    np.testing.assert_array_equal(routing["load"], [[0, 0, 1]] * B)
    assert [int(np.any(row != 0, axis=-1).sum()) for row in np.asarray(y)] == ([1, 1] if factor else [T, T])


@pytest.mark.parametrize("name", ["mixtral", "all", "many"])
def test_equal_experts_are_a_dense_mlp(name):
    chosen = config(name)
    p = params(chosen)
    one = {n: w[0] for n, w in p.items() if n.startswith(("w_", "b_"))}
    equal = {**p, **{n: jnp.broadcast_to(w, p[n].shape) for n, w in one.items()}}
    y, expected = moe(equal, jnp.asarray(X), chosen)[0], mlp(one, jnp.asarray(X), chosen)
    np.testing.assert_allclose(y, expected, rtol=0, atol=16 * ULP * np.abs(expected).max())


def test_of_equal_scores_the_first_experts_are_chosen():
    chosen = config("biased")
    p = {**params(chosen), "router": jnp.zeros((D, 5)), "router_bias": jnp.zeros(5)}
    _, routing = moe(p, jnp.asarray(X), chosen)
    np.testing.assert_allclose(routing["load"], [[1 / 3, 1 / 3, 1 / 3, 0, 0]] * B, rtol=2 * ULP)
    np.testing.assert_allclose(routing["balance"], [1, 1], rtol=8 * ULP)  # 5 sum of load / 5
    np.testing.assert_allclose(routing["router_entropy"], [np.log(5)] * B, rtol=8 * ULP)
    np.testing.assert_allclose(routing["router_z"], [np.log(5) ** 2] * B, rtol=8 * ULP)


def test_what_the_router_did_equals_float64():
    chosen = config("mixtral")
    p = params(chosen)
    _, routing = moe(p, jnp.asarray(X), chosen)
    router = {"router": np.asarray(p["router"], np.float64)}
    for row in range(B):
        scores = np.array([reference_model.scores_of(router, x, chosen) for x in np.float64(X[row])])
        load = np.zeros(4)
        for s in scores:
            load[np.argsort(-s)[:2]] += 1 / (2 * T)
        logsums = np.log(np.exp(np.float64(X[row]) @ router["router"]).sum(-1))
        np.testing.assert_allclose(routing["load"][row], load, rtol=8 * ULP)
        np.testing.assert_allclose(routing["balance"][row], 4 * (load * scores.mean(0)).sum(), rtol=16 * ULP)
        np.testing.assert_allclose(routing["router_z"][row], (logsums**2).mean(), rtol=32 * ULP)
        np.testing.assert_allclose(
            routing["router_entropy"][row], -(scores * np.log(scores)).sum(-1).mean(), rtol=32 * ULP
        )


@pytest.mark.parametrize("name", ["mixtral", "tight"])
def test_bfloat16_keeps_its_dtype_and_errs_by_its_rounding(name):
    """The routing of the rounded input is exact: of its float32 products, not of bfloat16 ones."""
    chosen, x = config(name), jnp.asarray(X, jnp.bfloat16)
    p = params(chosen)
    y, _ = moe(p, x, chosen)
    assert y.dtype == jnp.bfloat16
    expected = reference(p, np.asarray(x, np.float64), chosen)
    # Three or two matrices, their products, the activation, weights and the sum: about ten roundings of 2^-9.
    error = np.linalg.norm(np.asarray(y, np.float64) - expected) / np.linalg.norm(expected)
    assert error < 10**0.5 * 2**-9


@pytest.mark.parametrize("E", [1, 3, 20])
@pytest.mark.parametrize("choices", [1, 7, 300])
def test_every_choice_has_one_row_of_a_block_of_its_expert(choices, E):
    experts = np.random.default_rng(E).integers(0, E + 1, (1, choices, 1))  # E: of no expert here
    rows = place_rows(jnp.asarray(experts), E, None)
    found, size = np.asarray(rows.row_M), block_rows(choices, E)
    assert len(rows.choice_R) == rows.blocks * size
    here = experts.ravel() < E
    assert len(set(found[here])) == here.sum()
    assert np.all(found[~here] == len(rows.choice_R))
    np.testing.assert_array_equal(np.asarray(rows.expert_Z)[found[here] // size], experts.ravel()[here])
    np.testing.assert_array_equal(np.asarray(rows.choice_R)[found[here]], np.flatnonzero(here))


@pytest.mark.parametrize("devices", [2, 8])
def test_an_even_share_of_the_choices_needs_no_more_than_its_blocks(devices):
    """However it is spread over the experts; and in all there are blocks for every choice."""
    rng, E, choices = np.random.default_rng(devices), 5, 40 * devices
    for part in (rng.dirichlet([0.1] * E) for _ in range(20)):
        mine = rng.choice(E, 40, p=part)
        experts = rng.permutation(np.concatenate([mine, np.full(choices - 40, E)]))
        rows = place_rows(jnp.asarray(experts)[None, :, None], E, None, devices)
        used = (np.asarray(rows.expert_Z) < E).sum()
        assert used <= rows.even < rows.blocks
        np.testing.assert_array_equal(np.asarray(rows.expert_Z)[used:], E)
    everything = place_rows(jnp.zeros((1, choices, 1), jnp.int32), E, None, devices)
    assert (np.asarray(everything.row_M) < len(everything.choice_R)).all()


@pytest.mark.parametrize("even", [None, 5, 2, 0])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_product_of_blocks_equals_ragged_dot(even, platform, monkeypatch):
    """JAX's own, with blocks full; also where some are beyond an even share, and where two of seven are empty."""
    if platform == "gpu":  # its form, here
        monkeypatch.setattr(product, "_even", lambda cpu, gpu, even, *arrays: gpu(even, *arrays))
    rng = np.random.default_rng(0)
    x, w = (jnp.float32(rng.standard_normal(shape)) for shape in ((5, 8, 6), (3, 6, 7)))
    expert, sizes = jnp.array([0, 0, 2, 2, 2]), jnp.array([16, 0, 24])

    def ours(x, w):
        if even is None:
            return expert_product(x, w, expert)
        padded = jnp.concatenate([x, jnp.zeros((2, 8, 6))])
        return expert_product(padded, w, jnp.append(expert, jnp.array([3, 3])), even)[:5]

    def theirs(x, w):
        return jax.lax.ragged_dot(x.reshape(40, 6), w, sizes).reshape(5, 8, 7)

    dy = jnp.float32(rng.standard_normal((5, 8, 7)))
    for found, expected in zip(
        jax.tree.leaves((ours(x, w), jax.vjp(ours, x, w)[1](dy))),
        jax.tree.leaves((theirs(x, w), jax.vjp(theirs, x, w)[1](dy))),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=0, atol=24 * ULP * np.abs(expected).max())


def run_config(name="mixtral", accumulate=1, **changes):
    return RunConfig(
        model=config(name, **changes),
        train=TrainConfig(steps=40, batch_size=4, accumulate=accumulate),
        optimizer=OptimizerConfig("adamw"),
        schedule=ScheduleConfig(peak=0.01, warmup=2),
        engine=EngineConfig(blocks="scan"),
    )


def batch(seed=0):
    """Texts that count up in steps of their own, which is learned soon."""
    rng = np.random.default_rng(seed)
    tokens = (rng.integers(0, 17, (4, 1)) + rng.integers(1, 3, (4, 1)) * np.arange(T + 1)) % 17
    weights = rng.uniform(0, 2, (4, T)) * np.array([[1], [0.01], [0], [3]])
    return {
        "tokens_BT": jnp.int32(tokens[:, :-1]),
        "targets_BT": jnp.int32(tokens[:, 1:]),
        "weights_BT": jnp.float32(weights),
    }


@pytest.mark.parametrize("name", ["mixtral", "tight"])
def test_accumulated_parts_equal_the_whole_batch_with_the_routers_losses(name):
    changes = dict(balance_weight=0.3, router_z_weight=0.2)
    p = init_params(jax.random.key(0), config(name))
    whole, parted = (
        jax.jit(partial(loss_and_gradient, config=run_config(name, parts, **changes), dropout_key=None))(p, batch())
        for parts in (1, 4)
    )
    for (path, found), expected in zip(jax.tree.leaves_with_path(parted), jax.tree.leaves(whole), strict=True):
        atol = 32 * ULP * np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=atol, err_msg=str(path))
    loss, nll, _, routing = whole
    added = 0.3 * routing["balance"].sum() + 0.2 * routing["router_z"].sum()
    np.testing.assert_allclose(loss, nll + added, rtol=8 * ULP)
    assert float(added) > 0.5
    np.testing.assert_allclose(routing["load"].sum(-1), [1, 1], rtol=8 * ULP)


@pytest.mark.parametrize(("blocks", "remat"), [("unroll", "none"), ("scan", "block"), ("unroll", "block")])
def test_in_a_loop_or_not_recomputed_or_not_the_loss_is_the_same(blocks, remat):
    p = init_params(jax.random.key(0), config())
    base = run_config(balance_weight=0.3)
    other = dataclasses.replace(base, engine=EngineConfig(blocks=blocks, remat=remat))
    results = [jax.jit(partial(loss_and_gradient, config=c, dropout_key=None))(p, batch()) for c in (base, other)]
    for (path, found), expected in zip(jax.tree.leaves_with_path(results[1]), jax.tree.leaves(results[0]), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=64 * ULP * np.abs(expected).max(), err_msg=str(path))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_short_run_learns_and_says_how_its_experts_are_used(kind):
    base = run_config("biased", balance_weight=0.01)
    run = dataclasses.replace(base, optimizer=OptimizerConfig(kind))
    step, state = jax.jit(make_train_step(run)), init_state(run)
    data = batch() | {"weights_BT": jnp.ones((4, T))}
    losses = []
    for _ in range(40):
        state, metrics = step(state, data)
        losses.append(float(metrics["nll"]))
    assert losses[-1] < losses[0] - 1  # a nat; the first loss is about ln 17 = 2.8
    assert 1 / 5 <= metrics["moe_busiest_load"] <= 1 / 3 + ULP
    assert np.log(3) - 1e-6 <= metrics["moe_load_entropy"] <= np.log(5) + 1e-6
    assert metrics["moe_dropped"] == 0
    loads = [float(metrics[f"moe_load_{e}"]) for e in range(5)]
    assert sum(loads) == pytest.approx(1, abs=8 * ULP)
    assert max(loads) <= metrics["moe_busiest_load"] + ULP  # the mean of each block's busiest
    assert f"moe_load_{len(loads)}" not in metrics


def test_the_bias_moves_by_its_rate_towards_even_loads_and_by_nothing_else():
    run = run_config("biased")
    state = init_state(run)
    after, _ = jax.jit(make_train_step(run))(state, batch())
    load = loss_and_gradient(state.params, batch(), run, None)[3]["load"]
    found = np.asarray(after.params["blocks"]["moe"]["router_bias"])
    np.testing.assert_allclose(found, 0.1 * np.sign(1 / 5 - np.asarray(load)), rtol=2 * ULP)
    broken = {**state.params, "token_embedding": state.params["token_embedding"].at[0, 0].set(jnp.nan)}
    kept, _ = jax.jit(make_train_step(run))(State(state.step, broken, state.optimizer), batch())
    np.testing.assert_array_equal(kept.params["blocks"]["moe"]["router_bias"], 0)


def test_what_a_token_meets_is_counted_by_hand():
    chosen = config("sigmoid", n_shared_expert=1, mlp_bias=False)
    dense = config("one", n_expert=None, expert_top_k=2, activation="silu", mlp_size=5, mlp_bias=False)
    expert, router = 3 * D * 5, D * 6
    assert count_parameters(chosen) - count_parameters(dense) == 2 * (6 * expert + router)
    assert count_active_parameters(chosen) - count_parameters(dense) == 2 * (2 * expert + router)
    assert flops_per_token(chosen) - flops_per_token(dense) == 6 * 2 * (2 * expert + router)
    assert count_active_parameters(dense) == count_parameters(dense)
    assert f"{count_active_parameters(chosen):,} of them active" in str(parameter_table(chosen).title)
    assert "active" not in str(parameter_table(dense).title)


def test_the_axes_of_use_are_those_of_the_specs():
    for name in ("biased", "sigmoid"):
        for path, spec in named_specs(config(name)).items():
            if path.startswith("blocks.moe."):
                table = SHARED if ".shared." in path else AXES
                assert spec.axes == ("layer", *table[path.rpartition(".")[2]])


def test_every_layout_of_eight_devices_gives_the_same_step():
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # the same HLO, sooner
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {flags}"}
    program = Path(__file__).parent.parent / "moe_layouts_program.py"
    found = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-3000:]
    assert "rematerialization" not in found.stderr
    assert found.stdout.splitlines()[-1] == "8 layouts"
