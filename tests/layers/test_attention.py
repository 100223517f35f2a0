import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from andrea_jax.engine import EngineConfig
from andrea_jax.layers.attention import (
    EXPLICIT_UP_TO,
    attention,
    causal_attend,
    check_attention,
    choose_back_end,
    explicit_attention,
    why_not_cudnn,
)
from andrea_jax.layers.blockwise_attention import blockwise_attention
from andrea_jax.settings import UserError

ULP, BF16 = 2.0**-23, 2.0**-8  # rounding: half a unit in the last of 24 and 8 bits, relative to the power of two below
B, T, N, H = 2, 11, 3, 8
SEGMENTS = np.array([[0] * 3 + [1] * 5 + [2] * 3, [4] * 10 + [0]], np.int32)
BACK_ENDS = [("explicit", 1), ("xla", 1), ("blockwise", 4)]


def drawn(seed=0, scale=1.0, dtype=np.float32):
    """q, k, v and a cotangent, [B, T, N, H]."""
    return [jnp.asarray(scale * x, dtype) for x in np.random.default_rng(seed).standard_normal((4, B, T, N, H))]


def attend_with(back_end, block, segments=None):
    return causal_attend(EngineConfig(attention=back_end, attention_block=block), segments)


def reference(q, k, v, dy, segments=None):
    """Output, and the gradients of q, k, v for the cotangent dy, in float64; written from the formulas."""
    q, k, v, dy = (np.asarray(x, np.float64) for x in (q, k, v, dy))
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H)
    visible = np.arange(T)[:, None] >= np.arange(T)
    if segments is not None:
        visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    dweights = np.einsum("btnh,bsnh->bnts", dy, v)
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True)) / np.sqrt(H)
    return (
        np.einsum("bnts,bsnh->btnh", weights, v),
        np.einsum("bnts,bsnh->btnh", dscores, k),
        np.einsum("bnts,btnh->bsnh", dscores, q),
        np.einsum("bnts,btnh->bsnh", weights, dy),
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


@pytest.mark.parametrize(("back_end", "block"), BACK_ENDS)
def test_bfloat16_errs_by_its_rounding(back_end, block):
    inputs = drawn(dtype=jnp.bfloat16)
    attend = attend_with(back_end, block)
    found = jax.jit(lambda *inputs: output_and_gradients(attend, *inputs))(*inputs)
    assert {x.dtype for x in found} == {jnp.dtype("bfloat16")}
    y, *gradients = (np.asarray(x, np.float64) for x in found)
    expected_y, *expected = reference(*inputs)
    largest_v = np.abs(np.asarray(inputs[2], np.float64)).max()
    # The weights (of sum 1) are rounded, and the output.
    np.testing.assert_allclose(y, expected_y, rtol=BF16, atol=1.01 * BF16 * largest_v)
    for x, gradient in zip(gradients, expected, strict=True):
        # Rounded: y, the weights or their gradient, the result; the difference of two sums doubles the first ones.
        assert np.linalg.norm(x - gradient) < 3 * BF16 * np.linalg.norm(gradient)


@pytest.mark.parametrize(("back_end", "block"), BACK_ENDS)
def test_no_gradient_reaches_a_later_position_or_another_segment(back_end, block):
    q, k, v, _ = drawn()
    visible = (np.arange(T)[:, None] >= np.arange(T)) & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])
    attend = attend_with(back_end, block, SEGMENTS)

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
    assert largest_array(causal_attend(engine), T) <= T * block  # also the size of q: 2 heads of 8
    assert largest_array(attend_with("explicit", 1), T) >= T * T  # the counting does see such arrays


def test_the_layer_is_projections_around_attention():
    rng = np.random.default_rng(5)
    D = N * H
    shapes = {"qkv": (D, N, 3, H), "out": (N, H, D), "b_qkv": (N, 3, H), "b_out": (D,)}
    p = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    x = rng.standard_normal((B, T, D)).astype(np.float32)
    for names in (("qkv", "out"), shapes):
        p64 = {name: p[name].astype(np.float64) for name in names}
        q, k, v = np.moveaxis(np.einsum("btd,dnch->btnch", x, p64["qkv"]) + p64.get("b_qkv", 0), 3, 0)
        y = reference(q, k, v, v)[0]
        expected = np.einsum("btnh,nhd->btd", y, p64["out"]) + p64.get("b_out", 0)
        found = attention({name: p[name] for name in names}, jnp.asarray(x), explicit_attention)
        # q and k are of size sqrt(D), scores of size D: an ulp of a score moves its weight by D ulp.
        np.testing.assert_allclose(found, expected, rtol=0, atol=D * 16 * ULP * np.abs(expected).max())


def test_blockwise_attention_under_vmap():
    q, k, v, dy = drawn()
    each = jax.jit(jax.vmap(lambda *x: output_and_gradients(lambda *qkv: blockwise_attention(*qkv, None, 4), *x)))
    found = each(*(x[:, None] for x in (q, k, v, dy)))
    for x, expected in zip(found, reference(q, k, v, dy), strict=True):
        np.testing.assert_allclose(x[:, 0], expected, rtol=0, atol=32 * ULP * np.abs(expected).max())


@pytest.mark.parametrize(
    ("device", "attention", "dtype", "T", "H", "expected"),
    [
        ("cpu", "auto", "float32", EXPLICIT_UP_TO, 64, "explicit"),
        ("cpu", "auto", "float32", EXPLICIT_UP_TO + 1, 64, "blockwise"),
        ("gpu", "auto", "bfloat16", 1024, 64, "cudnn"),
        ("gpu", "auto", "float16", 1024, 128, "cudnn"),
        ("gpu", "auto", "float32", 1024, 64, "xla"),
        ("gpu", "auto", "bfloat16", 1024, 36, "xla"),
        ("gpu", "auto", "bfloat16", 1024, 136, "xla"),
        ("gpu", "explicit", "bfloat16", 1024, 64, "explicit"),
        ("cpu", "xla", "float32", 16, 64, "xla"),
    ],
)
def test_the_back_end_follows_device_dtype_and_sizes(monkeypatch, device, attention, dtype, T, H, expected):
    monkeypatch.setattr(jax, "default_backend", lambda: device)
    assert choose_back_end(EngineConfig(attention=attention), jnp.dtype(dtype), T, H) == expected


def test_cudnn_that_cannot_run_is_refused_with_every_reason(monkeypatch):
    with pytest.raises(UserError) as error:
        check_attention(EngineConfig(attention="cudnn"), jnp.dtype("float32"), 36)
    assert str(error.value) == (
        "engine.attention = 'cudnn' cannot run: the device is cpu, not a GPU; activations are float32, not bfloat16 or "
        "float16; head_dim is 36, not a multiple of 8 up to 128. 'auto' chooses one that can"
    )
    check_attention(EngineConfig(attention="auto"), jnp.dtype("float32"), 36)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert why_not_cudnn(jnp.dtype("bfloat16"), 64) == []
    check_attention(EngineConfig(attention="cudnn"), jnp.dtype("bfloat16"), 64)
