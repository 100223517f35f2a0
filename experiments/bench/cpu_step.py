"""Whole training steps on this CPU, ours and PyTorch's (a plain GPT-2 with fused attention), in turn in one process.

Both: forward, backward, clip by the global norm, AdamW, float32. Needs torch; prints tokens/s as medians of pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from andrea_jax import ModelConfig
from andrea_jax.optimizer import OptimizerConfig
from andrea_jax.train.config import RunConfig, TrainConfig
from andrea_jax.train.state import init_state
from andrea_jax.train.step import make_train_step

BARE = {"mlp_bias": False, "norm_shift": False}
SHAPES = {  # layers, heads, width, context, batch, vocabulary
    "char": (4, 4, 128, 64, 12, 65),
    "mid": (6, 6, 384, 256, 4, 65),
    "andrea_12m": (6, 12, 384, 1024, 1, 2305),
}


def our_step(shape: tuple[int, ...]) -> Callable[[np.ndarray], float]:
    layers, heads, width, context, batch, vocab = shape
    model = ModelConfig(vocab, context, width, layers, heads, **BARE)
    config = RunConfig(model=model, train=TrainConfig(batch_size=batch), optimizer=OptimizerConfig("adamw"))
    state, step = init_state(config), jax.jit(make_train_step(config), donate_argnums=0)

    def run(ids: np.ndarray) -> float:
        nonlocal state
        weights = np.ones((batch, context), np.float32)
        tokens = {"tokens_BT": ids[:, :-1], "targets_BT": ids[:, 1:], "weights_BT": weights}
        state, metrics = step(state, tokens)
        return float(jax.block_until_ready((state, metrics))[1]["loss"])

    return run


def torch_step(shape: tuple[int, ...]) -> Callable[[np.ndarray], float]:
    import torch
    from torch import nn
    from torch.nn import functional

    layers, heads, width, context, _, vocab = shape

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.w_1, self.w_2 = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

        def forward(self, x):  # type: ignore[no-untyped-def]
            B, T, D = x.shape
            q, k, v = self.qkv(self.norm_1(x)).view(B, T, 3, heads, D // heads).permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
            return x + self.w_2(functional.gelu(self.w_1(self.norm_2(x)), approximate="tanh"))

    torch.manual_seed(0)
    tokens, positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
    blocks, final = nn.ModuleList(Block() for _ in range(layers)), nn.LayerNorm(width, bias=False)
    modules = nn.ModuleList([tokens, positions, blocks, final])
    optimizer = torch.optim.AdamW(modules.parameters(), lr=1e-3, weight_decay=0.1)

    def run(ids: np.ndarray) -> float:
        ids = torch.from_numpy(ids.astype(np.int64))
        x = tokens(ids[:, :-1]) + positions.weight[:context]
        for block in blocks:
            x = block(x)
        logits = functional.linear(final(x), tokens.weight)
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    options = parser.parse_args()
    results = {}
    for name in options.shapes:
        shape = SHAPES[name]
        steps = {"andrea_jax": our_step(shape), "torch": torch_step(shape)}
        ids = np.random.default_rng(0).integers(0, shape[5], (shape[4], shape[3] + 1)).astype(np.int32)
        seconds: dict[str, list[float]] = {peer: [] for peer in steps}
        for pair in range(options.pairs + 2):
            for peer, step in steps.items():
                start = time.perf_counter()
                step(ids)
                if pair >= 2:  # the first two compile and warm up
                    seconds[peer].append(time.perf_counter() - start)
        rates = {peer: round(shape[3] * shape[4] / statistics.median(times)) for peer, times in seconds.items()}
        ratio = statistics.median(t / o for o, t in zip(seconds["andrea_jax"], seconds["torch"], strict=True))
        results[name] = {**rates, "ours_over_torch": round(ratio, 2)}
        print(name, results[name], flush=True)
    print(json.dumps({"cores": os.cpu_count(), "jax": jax.__version__, "pairs": options.pairs, "results": results}))


if __name__ == "__main__":
    main()
