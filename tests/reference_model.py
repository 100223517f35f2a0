"""The model in float64 NumPy, one text, one head and one query at a time, written from the papers' formulas.

It shares only the layout of the parameters with andrea_jax, and reads the config's choices by name.
"""

import cmath
import math

import jax
import jax.numpy as jnp
import numpy as np

from andrea_jax.config import ModelConfig
from andrea_jax.parameters import abstract_params, path_name

B, T, V = 2, 10, 31
TOKENS = np.random.default_rng(0).integers(0, V, (B, T))
SEGMENTS = np.array([[0] * 4 + [1] * 6, [0] * 9 + [1]], np.int32)


def tiny(**changes):
    return ModelConfig(**dict(vocab_size=V, context_length=12, d_model=16, n_layer=2, n_head=2) | changes)


# As the named models have them, at odd sizes; each option is in one of them at least. Widths of heads, MLPs and windows
# are such that nothing fits by chance: 5 heads of 4 on a stream of 18, windows of 3 or 4 beside 10 positions.
LLAMA = dict(norm="rms", norm_shift=False, position="rotary", activation="silu", gated=True, mlp_bias=False)
VARIANTS = {
    "llama": tiny(d_model=18, n_head=6, n_kv_head=2, head_size=4, mlp_ratio=8 / 3, mlp_multiple=5, **LLAMA,
                  tie_embeddings=False),
    "llama3": tiny(n_head=4, n_kv_head=1, head_size=8, rotary_base=100.0, rotary_scaling="llama3", rotary_factor=8.0,
                   rotary_original=40, **LLAMA, tie_embeddings=False),
    "yarn": tiny(head_size=8, rotary_base=100.0, rotary_scaling="yarn", rotary_factor=4.0, rotary_original=40,
                 rotary_slow=0.5, rotary_fast=3.0, **LLAMA),
    "yarn_told_its_length": tiny(n_layer=1, context_length=64, position="rotary", rotary_scaling="yarn",
                                 rotary_factor=2.0, rotary_length=1.3),
    "gemma2": tiny(n_layer=3, d_model=18, n_head=5, head_size=4, norm="rms", norm_shift=False, position="rotary",
                   norm_position="sandwich", activation="gelu", gated=True, mlp_bias=False, window=4, global_every=2,
                   attention_scale=0.4, attention_soft_cap=1.5, logit_soft_cap=2.0, embedding_scale=18**0.5),
    "gemma3": tiny(n_layer=3, norm="rms", norm_shift=False, norm_position="sandwich", qk_norm=True, position="rotary",
                   rotary_base=1000.0, rotary_local_base=20.0, rotary_scaling="linear", rotary_factor=8.0, window=3,
                   global_every=3, gated=True, n_head=4, n_kv_head=2),
    "cohere": tiny(norm_shift=False, parallel_block=True, position="rotary", activation="silu", gated=True,
                   mlp_bias=False, logit_scale=0.25, n_head=3, head_size=6),
    "parallel_sandwich": tiny(norm_position="sandwich", parallel_block=True, branch_gain=0.5, activation="gelu_exact"),
    "transformer": tiny(norm_position="post", final_norm=False, activation="relu", attention_bias=True,
                        embedding_scale=4.0),
    "post_rms": tiny(norm="rms", norm_position="post", norm_eps=1e-3, branch_multiplier=0.5, activation="gelu_exact",
                     gated=True),
    "bloom": tiny(n_layer=1, n_head=6, n_kv_head=3, head_size=3, position="alibi", activation="relu2"),
    "alibi_window": tiny(n_head=3, n_kv_head=1, head_size=5, position="alibi", window=4, attention_soft_cap=2.0,
                         norm_gain=False, activation="relu2", gated=True),
    "rezero": tiny(norm="none", position="none", final_norm=False, branch_gain=0.0, activation="silu"),
    "wide_window": tiny(window=64, qk_norm=True, n_head=4, n_kv_head=1, head_size=3, attention_bias=True,
                        activation="relu", gated=True),
    "odd_mlp": tiny(mlp_size=13, vocab_multiple=8, norm_gain=False, norm_shift=False, tie_embeddings=False,
                    position="none", mup_width=10, mup_head=5, logit_soft_cap=2.0),
    "mixtral": tiny(n_expert=5, expert_top_k=2, expert_size=7, **LLAMA, balance_weight=0.1, n_head=4, n_kv_head=2),
    "deepseek": tiny(n_expert=6, expert_top_k=3, expert_size=5, n_shared_expert=2, router="sigmoid", balance_bias=0.01,
                     router_renormalize=False, router_z_weight=0.1, activation="relu2"),
    "roomy_switch": tiny(n_expert=3, expert_top_k=1, router_renormalize=False, capacity_factor=3.0, gated=True,
                         parallel_block=True),
}  # fmt: skip


def drawn(config, seed=1):
    """Parameters that are random also where init puts zeros and ones, of a size that makes every part matter."""
    rng = np.random.default_rng(seed)

    def draw(path, x):
        name, z = path_name(path), rng.standard_normal(x.shape)
        if name.endswith("gain") or "embedding" in name or ".b_" in name or "norm" in name:
            return jnp.float32(name.endswith("gain") + 0.5 * z)
        return jnp.float32(z / math.sqrt(x.shape[-1] if "out" in name or name == "head" else config.d_model))

    return jax.tree.map_with_path(draw, abstract_params(config))


def logits(params, tokens, config, segments=None):
    """[B, T, V]."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    segments = np.zeros_like(tokens) if segments is None else segments
    return np.stack([_text(params, *row, config) for row in zip(tokens, segments, strict=True)])


def _text(params, tokens, segments, config):
    x = params["token_embedding"][tokens] * config.embedding_scale
    if config.position == "learned":
        x = x + params["position_embedding"][: len(tokens)]
    for layer in range(config.n_layer):
        x = _block(jax.tree.map(lambda stacked: stacked[layer], params["blocks"]), x, segments, layer, config)  # noqa: B023
    if config.final_norm:
        x = norm(config, params["final_norm"], x)
    head = params["token_embedding"].T if config.tie_embeddings else params["head"]
    return capped(config.logit_scale * _mup_output(config) * (x @ head[:, : config.vocab_size]), config.logit_soft_cap)


def _mup_output(config):
    return 1 if config.mup_width is None else config.mup_width / config.d_model


def _block(p, x, segments, layer, config):
    """x + a(x), x + m(x), or x + a(x) + m(x), where a and m are the two branches with what stands around them."""

    def branch(name, read):
        if name == "attention":
            y = _attention(p[name], read, segments, layer, config)
        else:
            y = _mlp(p[name], read, config) if config.n_expert is None else moe(p["moe"], read, config)
        if config.norm_position == "sandwich":
            y = norm(config, p[f"{name}_out_norm"], y)
        if config.branch_gain is not None:
            y = p[f"{name}_branch"]["gain"] * y
        return config.branch_multiplier * y

    if config.norm_position == "post":
        for name in ("attention", "mlp"):
            x = norm(config, p[f"{name}_norm"], x + branch(name, x))
    elif config.parallel_block:
        read = norm(config, p["attention_norm"], x)
        x = x + branch("attention", read) + branch("mlp", read)
    else:
        for name in ("attention", "mlp"):
            x = x + branch(name, norm(config, p[f"{name}_norm"], x))
    return x


def norm(config, p, x):
    if config.norm == "none":
        return x
    if config.norm == "layer":
        x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * p.get("gain", 1) + p.get("shift", 0)


def capped(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)


def activation(name, u):
    return {
        "gelu": lambda u: 0.5 * u * (1 + np.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))),
        "gelu_exact": lambda u: 0.5 * u * (1 + np.vectorize(math.erf)(u / math.sqrt(2))),  # u Phi(u)
        "relu": lambda u: np.where(u > 0, u, 0.0),
        "relu2": lambda u: np.where(u > 0, u, 0.0) ** 2,
        "silu": lambda u: u / (1 + np.exp(-u)),
    }[name](u)


def _mlp(p, x, config):
    h = x @ p["w_1"] + p.get("b_1", 0)
    if config.gated:
        h = activation(config.activation, x @ p["w_gate"] + p.get("b_gate", 0)) * h
    else:
        h = activation(config.activation, h)
    return h @ p["w_2"] + p.get("b_2", 0)


def moe(p, x, config):
    """Token by token; an expert that is full takes no more."""
    room = math.inf
    if config.capacity_factor is not None:
        room = math.ceil(round(config.capacity_factor * config.expert_top_k * len(x) / config.n_expert, 6))
    y, taken = np.zeros_like(x), [0] * config.n_expert
    for t in range(len(x)):
        scores = scores_of(p, x[t], config)
        biased = scores + p.get("router_bias", 0)
        chosen = np.argsort(-biased, kind="stable")[: config.expert_top_k]
        total = sum(scores[e] for e in chosen) if config.router_renormalize else 1
        for e in chosen:
            taken[e] += 1
            if taken[e] <= room:
                expert = {name: w[e] for name, w in p.items() if name[:2] in ("w_", "b_")}
                y[t] += scores[e] / total * _mlp(expert, x[t], config)
    return y + (_mlp(p["shared"], x, config) if config.n_shared_expert else 0)


def scores_of(p, x, config):
    logits = x @ p["router"]
    if config.router == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    exp = np.exp(logits - logits.max())
    return exp / exp.sum()


def _attention(p, x, segments, layer, config):
    group = config.n_head // config.kv_heads
    bias = p.get("b_qkv", np.zeros(p["qkv"].shape[1:]))
    y = np.zeros((len(x), p["out"].shape[-1])) + p.get("b_out", 0)
    for n in range(config.n_head):
        k, g = divmod(n, group)
        query, key, value = (x @ p["qkv"][:, k, i] + bias[k, i] for i in (g, group, group + 1))
        if config.qk_norm:
            query, key = (
                z / np.sqrt((z**2).mean(-1, keepdims=True) + config.norm_eps) * p[name]["gain"]
                for z, name in ((query, "q_norm"), (key, "k_norm"))
            )
        if config.position == "rotary":
            query, key = (turned(z, layer, config) for z in (query, key))
        weights = _weights(query, key, n, segments, layer, config)
        y = y + weights @ value @ p["out"][n]
    return y


def is_global(layer, config):
    return config.window is None or (
        config.global_every is not None and layer % config.global_every == config.global_every - 1
    )


def _weights(query, key, head, segments, layer, config):
    length = len(query)
    scale = 1 / math.sqrt(config.head_dim) if config.attention_scale is None else config.attention_scale
    if config.mup_head is not None:
        scale = math.sqrt(config.mup_head) / config.head_dim
    slope = slopes(config.n_head)[head] if config.position == "alibi" else 0.0
    weights = np.zeros((length, length))
    for t in range(length):
        reach = 0 if is_global(layer, config) else max(0, t - config.window + 1)
        seen = [s for s in range(reach, t + 1) if segments[s] == segments[t]]
        scores = [capped(scale * query[t] @ key[s], config.attention_soft_cap) - slope * (t - s) for s in seen]
        exp = np.exp(np.array(scores) - max(scores))
        weights[t, seen] = exp / exp.sum()
    return weights


def slopes(heads):
    """ALiBi's geometric sequence from 2^(-8/n) for a power of two; else that of the power below, then, of the power
    above, the first, third, ... numbers."""
    power = 1
    while 2 * power <= heads:
        power *= 2
    if power == heads:
        return [(2.0 ** (-8 / heads)) ** i for i in range(1, heads + 1)]
    return slopes(power) + slopes(2 * power)[0::2][: heads - power]


def turned(z, layer, config):
    """RoPE in complex numbers: component i and i + H/2 are one number, multiplied by e^(i m theta) at position m."""
    half = z.shape[1] // 2
    thetas, length = frequencies(layer, config)
    out = np.zeros_like(z)
    for m in range(len(z)):
        for i in range(half):
            number = complex(z[m, i], z[m, i + half]) * cmath.exp(1j * m * thetas[i]) * length
            out[m, i], out[m, i + half] = number.real, number.imag
    return out


def frequencies(layer, config):
    """(thetas, what multiplies the length of queries and keys) of a block."""
    width, base, factor = config.head_dim, config.rotary_base, config.rotary_factor
    scaling = config.rotary_scaling
    if config.rotary_local_base is not None and not is_global(layer, config):
        base, scaling = config.rotary_local_base, "none"
    original = config.rotary_original or config.context_length
    thetas = [base ** (-2 * i / width) for i in range(width // 2)]
    if scaling == "none":
        return thetas, 1.0
    if scaling == "linear":
        return [theta / factor for theta in thetas], 1.0
    if scaling == "llama3":
        return [llama3(theta, original, factor, config.rotary_slow, config.rotary_fast) for theta in thetas], 1.0
    length = 0.1 * math.log(factor) + 1 if config.rotary_length is None else config.rotary_length
    return yarn(thetas, base, original, factor, config.rotary_slow, config.rotary_fast), length


def llama3(theta, original, factor, low, high):
    """By wavelength, as Llama 3.1's code has it."""
    wavelength = 2 * math.pi / theta
    if wavelength < original / high:
        return theta
    if wavelength > original / low:
        return theta / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * theta / factor + smooth * theta


def yarn(thetas, base, original, factor, slow, fast):
    """YaRN's code: a ramp over the numbers of the frequencies, between those that turn `fast` and `slow` times."""
    width = 2 * len(thetas)

    def number(turns):
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(number(fast)), 0), min(math.ceil(number(slow)), width - 1)
    ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(len(thetas))]
    return [theta / factor * r + theta * (1 - r) for theta, r in zip(thetas, ramp, strict=True)]
