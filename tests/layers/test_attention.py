import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_model
from jax.extend.core import jaxprs_in_params

from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.layers.attention import (
    EXPLICIT_UP_TO,
    attention,
    causal_attend,
    check_attention,
    choose_back_end,
    why_not_cudnn,
)
from andrea_jax.layers.blockwise_attention import blockwise_attention
from andrea_jax.layers.scores import Scores
from andrea_jax.settings import UserError

ULP, BF16 = 2.0**-23, 2.0**-8  # rounding: half a unit in the last of 24 and 8 bits, relative to the power of two below
QUICKLY = {"xla_backend_optimization_level": 0}  # the same arithmetic, compiled in half the time
B, T, N, H = 2, 11, 3, 8
MODEL = ModelConfig(d_model=N * H, n_head=N)
SEGMENTS = np.array([[0] * 3 + [1] * 5 + [2] * 3, [4] * 10 + [0]], np.int32)
BACK_ENDS = [("explicit", 1), ("xla", 1), ("blockwise", 4)]
GROUPED = dict(d_model=6 * H, n_head=6, n_kv_head=2)
# Windows that are narrower than a block of queries, as wide, wider, wider than the text, and one position.
OPTIONS = {
    "window 1": dict(window=1),
    "window 3": dict(window=3),
    "window 4": dict(window=4),
    "window 6": dict(window=6),
    "window 64": dict(window=64),
    "capped": dict(attention_soft_cap=1.5),
    "alibi": dict(position="alibi"),
    "grouped": GROUPED,
    "one for all": dict(d_model=3 * H, n_kv_head=1),
    "scaled": dict(attention_scale=0.9),
    "all": dict(window=5, attention_soft_cap=2.0, position="alibi", attention_scale=0.5, **GROUPED),
    "all but the cap": dict(window=5, position="alibi", attention_scale=0.5, **GROUPED),
}


def drawn(seed=0, scale=1.0, dtype=np.float32, model=MODEL):
    """q, k, v and a cotangent, [B, T, N or K, H]."""
    rng = np.random.default_rng(seed)
    heads = (model.n_head, model.kv_heads, model.kv_heads, model.n_head)
    return [jnp.asarray(scale * rng.standard_normal((B, T, n, H)), dtype) for n in heads]


def attend_with(back_end, block, segments=None, model=MODEL):
    return causal_attend(model, EngineConfig(attention=back_end, attention_block=block), segments)


def reference(q, k, v, dy, segments=None, model=MODEL):
    """Output, and the gradients of q, k, v for the cotangent dy, in float64; written from the formulas."""
    q, k, v, dy = (np.asarray(x, np.float64) for x in (q, k, v, dy))
    group = model.n_head // model.kv_heads
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))  # head n reads keys and values n // group
    scale = 1 / np.sqrt(H) if model.attention_scale is None else model.attention_scale
    scores = np.einsum("btnh,bsnh->bnts", q, k) * scale
    slope_of_cap = 1.0
    if cap := model.attention_soft_cap:
        scores = cap * np.tanh(scores / cap)
        slope_of_cap = 1 - (scores / cap) ** 2
    distance = np.arange(T)[:, None] - np.arange(T)
    if model.position == "alibi":
        scores = scores - np.array(reference_model.slopes(model.n_head))[:, None, None] * distance
    visible = (distance >= 0) & (distance < (model.window or T))
    if segments is not None:
        visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    dweights = np.einsum("btnh,bsnh->bnts", dy, v)
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True)) * slope_of_cap * scale

    def per_group(x):
        return x.reshape(B, T, model.kv_heads, group, H).sum(3)

    return (
        np.einsum("bnts,bsnh->btnh", weights, v),
        np.einsum("bnts,bsnh->btnh", dscores, k),
        per_group(np.einsum("bnts,btnh->bsnh", dscores, q)),
        per_group(np.einsum("bnts,btnh->bsnh", weights, dy)),
    )


def output_and_gradients(attend, q, k, v, dy):
    y, vjp = jax.vjp(attend, q, k, v)
    return y, *vjp(dy)


@pytest.mark.parametrize(
    ("back_end", "block", "segments"),
    [
        *((back_end, block, segments) for back_end, block in BACK_ENDS for segments in (None, SEGMENTS)),
        ("blockwise", 1, None),
        ("blockwise", T, SEGMENTS),
        ("blockwise", 64, None),
    ],
)
def test_output_and_gradients_equal_float64(back_end, block, segments):
    inputs = drawn()
    attend = attend_with(back_end, block, segments)
    found = jax.jit(lambda *inputs: output_and_gradients(attend, *inputs))(*inputs)
    for name, x, expected in zip(("y", "dq", "dk", "dv"), found, reference(*inputs, segments), strict=True):
        # Scores of size 1 are off by a few ulp, so are weights; then sums of at most 11 terms.
        np.testing.assert_allclose(x, expected, rtol=0, atol=32 * ULP * np.abs(expected).max(), err_msg=name)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("back_end", "block"), [*BACK_ENDS, ("blockwise", 64)])
def test_every_option_in_every_back_end_equals_float64(back_end, block, option):
    model = dataclasses.replace(MODEL, **OPTIONS[option])
    if back_end == "xla" and model.attention_soft_cap is not None:
        return  # refused: see below
    inputs = drawn(model=model)
    attend = attend_with(back_end, block, SEGMENTS, model)
    found = jax.jit(lambda *inputs: output_and_gradients(attend, *inputs), compiler_options=QUICKLY)(*inputs)
    for name, x, expected in zip(("y", "dq", "dk", "dv"), found, reference(*inputs, SEGMENTS, model), strict=True):
        # As above, and keys sum over 3 heads. Gradients are differences of numbers of size 1, also where they are 0.
        atol = 48 * ULP * max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(x, expected, rtol=0, atol=atol, err_msg=name)


def test_all_heads_at_once_as_on_a_gpu_equal_float64(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    model = dataclasses.replace(MODEL, **OPTIONS["all"])
    inputs = drawn(model=model)
    attend = attend_with("blockwise", 4, SEGMENTS, model)
    found = jax.jit(lambda *inputs: output_and_gradients(attend, *inputs), compiler_options=QUICKLY)(*inputs)
    for x, expected in zip(found, reference(*inputs, SEGMENTS, model), strict=True):
        np.testing.assert_allclose(x, expected, rtol=0, atol=48 * ULP * np.abs(expected).max())


@pytest.mark.parametrize("back_end", ["explicit", "blockwise"])
def test_blocks_may_differ_in_what_they_see(back_end):
    """A number of a block that is known when it runs only; each second sees everything."""
    model = dataclasses.replace(MODEL, window=3, global_every=2)
    engine = EngineConfig(attention=back_end, attention_block=4)
    inputs = drawn()
    found = jax.jit(
        lambda layer, *inputs: output_and_gradients(causal_attend(model, engine, SEGMENTS, layer=layer), *inputs)
    )
    for layer, window in enumerate([3, None, 3, None]):
        same = dataclasses.replace(MODEL, window=window)
        for x, expected in zip(found(layer, *inputs), reference(*inputs, SEGMENTS, same), strict=True):
            np.testing.assert_allclose(x, expected, rtol=0, atol=32 * ULP * np.abs(expected).max())


@pytest.mark.parametrize("model", [MODEL, dataclasses.replace(MODEL, position="alibi", window=8)], ids=["", "alibi"])
@pytest.mark.parametrize(("back_end", "block"), BACK_ENDS)
def test_bfloat16_errs_by_its_rounding(back_end, block, model):
    inputs = drawn(dtype=jnp.bfloat16)
    attend = attend_with(back_end, block, model=model)
    found = jax.jit(lambda *inputs: output_and_gradients(attend, *inputs))(*inputs)
    assert {x.dtype for x in found} == {jnp.dtype("bfloat16")}
    y, *gradients = (np.asarray(x, np.float64) for x in found)
    expected_y, *expected = reference(*inputs, model=model)
    largest_v = np.abs(np.asarray(inputs[2], np.float64)).max()
    # The weights (of sum 1) are rounded, and the output.
    np.testing.assert_allclose(y, expected_y, rtol=BF16, atol=1.01 * BF16 * largest_v)
    for x, gradient in zip(gradients, expected, strict=True):
        # Rounded: y, the weights or their gradient, the result; the difference of two sums doubles the first ones.
        assert np.linalg.norm(x - gradient) < 3 * BF16 * np.linalg.norm(gradient)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("back_end", "block"), BACK_ENDS)
def test_no_gradient_reaches_a_later_position_or_another_segment_or_beyond_the_window(back_end, block, window):
    q, k, v, _ = drawn()
    distance = np.arange(T)[:, None] - np.arange(T)
    visible = (distance >= 0) & (distance < (window or T)) & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])
    attend = attend_with(back_end, block, SEGMENTS, dataclasses.replace(MODEL, window=window))

    @jax.jit
    def reached(t):
        """[T] for each row: how strongly the output at t depends on each key and value."""
        dk, dv = jax.grad(lambda k, v: (attend(q, k, v)[:, t] ** 2).sum(), argnums=(0, 1))(k, v)
        return jnp.abs(dk).sum((2, 3)), jnp.abs(dv).sum((2, 3))

    for t in (0, 2, 3, 6, 7, 10):
        for strength in reached(t):
            strength = np.asarray(strength)
            assert np.all(strength[~visible[:, t]] == 0)
        assert np.all(strength[visible[:, t]] > 0)  # of values; a key alone in its segment has none


@pytest.mark.parametrize(("back_end", "block"), BACK_ENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extreme_scores_give_no_nan(back_end, block, dtype):
    inputs = drawn(scale=300.0, dtype=dtype)  # scores of size 10^5
    attend = attend_with(back_end, block, SEGMENTS)
    found = jax.jit(lambda *inputs: output_and_gradients(attend, *inputs))(*inputs)
    assert all(np.all(np.isfinite(np.asarray(x, np.float32))) for x in found)
    np.testing.assert_array_equal(found[0][:, 0], inputs[2][:, 0])  # the first position sees itself only


def sizes(jaxpr):
    """Numbers in each array that is made anywhere inside."""
    for eqn in jaxpr.eqns:
        yield from (variable.aval.size for variable in eqn.outvars)
        for inner in jaxprs_in_params(eqn.params):
            yield from sizes(inner)


def largest_array(attend, T):
    inputs = [jax.ShapeDtypeStruct((1, T, 2, 8), jnp.float32)] * 4
    return max(sizes(jax.make_jaxpr(lambda *inputs: output_and_gradients(attend, *inputs))(*inputs).jaxpr))


@pytest.mark.parametrize("remat", ["none", "attention"])
def test_blockwise_attention_never_holds_the_scores_of_a_head(remat):
    T, block = 160, 16
    engine = EngineConfig(attention="blockwise", attention_block=block, remat=remat)
    for change in ({}, dict(window=24), dict(position="alibi"), dict(attention_soft_cap=5.0)):
        model = ModelConfig(d_model=16, n_head=2, **change)
        assert largest_array(causal_attend(model, engine), T) <= T * block  # also the size of q: 2 heads of 8
    assert largest_array(attend_with("explicit", 1), T) >= T * T  # the counting does see such arrays


@pytest.mark.parametrize("model", [MODEL, dataclasses.replace(MODEL, **GROUPED)], ids=["", "grouped"])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_layer_is_projections_around_attention(model, biases, qk_norm):
    model = dataclasses.replace(model, attention_bias=biases, qk_norm=qk_norm)
    rng, D, K, G = np.random.default_rng(5), model.d_model, model.kv_heads, model.n_head // model.kv_heads
    shapes = {"qkv": (D, K, G + 2, H), "out": (K * G, H, D)}
    shapes |= {"b_qkv": (K, G + 2, H), "b_out": (D,)} if biases else {}
    p = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    p |= {name: {"gain": rng.uniform(0.5, 1, H).astype(np.float32)} for name in ("q_norm", "k_norm") if qk_norm}
    x = rng.standard_normal((B, T, D)).astype(np.float32)
    p64 = jax.tree.map(lambda w: w.astype(np.float64), p)
    qkv = np.einsum("btd,dkch->btkch", x, p64["qkv"]) + p64.get("b_qkv", 0)
    q, k, v = qkv[..., :G, :].reshape(B, T, K * G, H), qkv[..., G, :], qkv[..., G + 1, :]
    if qk_norm:
        q, k = (
            z / np.sqrt((z**2).mean(-1, keepdims=True) + model.norm_eps) * p64[name]["gain"]
            for name, z in (("q_norm", q), ("k_norm", k))
        )
    y = reference(q, k, v, q, model=model)[0]
    expected = np.einsum("btnh,nhd->btd", y, p64["out"]) + p64.get("b_out", 0)
    found = attention(p, jnp.asarray(x), model, attend_with("explicit", 1, model=model))
    # q and k are of size sqrt(D), scores of size D: an ulp of a score moves its weight by D ulp.
    np.testing.assert_allclose(found, expected, rtol=0, atol=D * 16 * ULP * np.abs(expected).max())


@pytest.mark.parametrize("option", ["scaled", "all"])
def test_blockwise_attention_under_vmap(option):
    model = dataclasses.replace(MODEL, **OPTIONS[option])
    scores = Scores.of(model, sees_all=False)
    slopes = jnp.float32(reference_model.slopes(model.n_head)) if model.position == "alibi" else None

    def attend(q, k, v):
        return blockwise_attention(q, k, v, scores, None, slopes, 4)

    inputs = drawn(model=model)
    found = jax.jit(jax.vmap(lambda *x: output_and_gradients(attend, *x)))(*(x[:, None] for x in inputs))
    for x, expected in zip(found, reference(*inputs, model=model), strict=True):
        np.testing.assert_allclose(x[:, 0], expected, rtol=0, atol=48 * ULP * np.abs(expected).max())


def test_the_scores_of_a_block():
    model = ModelConfig(d_model=64, n_head=1, window=5, global_every=2, attention_soft_cap=7.0)
    assert Scores.of(model, sees_all=False) == Scores(0.125, 7.0, 5)
    assert Scores.of(model, sees_all=True) == Scores(0.125, 7.0, None)
    assert Scores.of(dataclasses.replace(model, attention_scale=0.3), sees_all=True).scale == 0.3


@pytest.mark.parametrize(
    ("device", "attention", "dtype", "T", "H", "cap", "expected"),
    [
        ("cpu", "auto", "float32", EXPLICIT_UP_TO, 64, None, "explicit"),
        ("cpu", "auto", "float32", EXPLICIT_UP_TO + 1, 64, None, "blockwise"),
        ("gpu", "auto", "bfloat16", 1024, 64, None, "cudnn"),
        ("gpu", "auto", "float16", 1024, 128, None, "cudnn"),
        ("gpu", "auto", "float32", 1024, 64, None, "xla"),
        ("gpu", "auto", "bfloat16", 1024, 36, None, "xla"),
        ("gpu", "auto", "bfloat16", 1024, 136, None, "xla"),
        ("gpu", "auto", "bfloat16", 1024, 64, 50.0, "blockwise"),
        ("gpu", "explicit", "bfloat16", 1024, 64, None, "explicit"),
        ("cpu", "xla", "float32", 16, 64, None, "xla"),
    ],
)
def test_the_back_end_follows_device_dtype_and_sizes(monkeypatch, device, attention, dtype, T, H, cap, expected):
    monkeypatch.setattr(jax, "default_backend", lambda: device)
    model = ModelConfig(head_size=H, attention_soft_cap=cap)
    assert choose_back_end(EngineConfig(attention=attention), model, jnp.dtype(dtype), T) == expected


def test_cudnn_that_cannot_run_is_refused_with_every_reason(monkeypatch):
    model = ModelConfig(head_size=36, attention_soft_cap=50.0)
    with pytest.raises(UserError) as error:
        check_attention(EngineConfig(attention="cudnn"), model, jnp.dtype("float32"))
    assert str(error.value) == (
        "engine.attention = 'cudnn' cannot run: the device is cpu, not a GPU; activations are float32, not bfloat16 or "
        "float16; head_dim is 36, not a multiple of 8 up to 128; it has no attention_soft_cap. 'auto' chooses one that "
        "can"
    )
    check_attention(EngineConfig(attention="auto"), model, jnp.dtype("float32"))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert why_not_cudnn(MODEL, jnp.dtype("bfloat16")) == []
    check_attention(EngineConfig(attention="cudnn"), MODEL, jnp.dtype("bfloat16"))


@pytest.mark.parametrize("back_end", ["xla", "cudnn"])
def test_a_back_end_without_soft_cap_is_refused_where_there_is_one(back_end):
    """Also by the function itself: it would leave the cap out without a word."""
    model = dataclasses.replace(MODEL, attention_soft_cap=50.0)
    message = rf"^engine\.attention = '{back_end}' cannot run: it has no attention_soft_cap\. 'auto' chooses"
    with pytest.raises(UserError, match=message):
        attend_with(back_end, 1, model=model)(*drawn()[:3])
    if back_end == "xla":
        with pytest.raises(UserError, match=message):
            check_attention(EngineConfig(attention="xla"), model, jnp.dtype("float32"))


@pytest.mark.parametrize(("T", "segments", "expected"), [(10, True, "cudnn"), (11, True, "xla"), (11, False, "cudnn")])
def test_auto_leaves_cudnn_where_its_backward_pass_takes_no_mask(monkeypatch, T, segments, expected):
    """It takes none for odd lengths."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    asked = []
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda q, k, v, implementation, **_: (asked.append(implementation), q)[1]
    )
    q = jnp.zeros((1, T, N, H), jnp.bfloat16)
    causal_attend(MODEL, EngineConfig(), jnp.zeros((1, T), int) if segments else None)(q, q, q)
    assert asked == [expected]
