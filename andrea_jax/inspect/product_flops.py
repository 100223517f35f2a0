"""FLOPs of the matrix products in a compiled step, read from its optimized HLO: what runs, recomputation included."""

from __future__ import annotations

import math

from andrea_jax.inspect.hlo_text import Computation, Instruction, executed, numbers, parse

# cuDNN's attention in products of T x T x H: scores and output; backward scores again and four gradients
FMHA_PRODUCTS = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}


def product_flops(text: str) -> int:
    """FLOPs of all products of one device: 2 for each multiplication with its addition.

    Attention of cuDNN counts half where it is causal, as it leaves out what is masked.
    """
    computations, entry = parse(text)
    return sum(times * _flops(computation, i) for computation, i, times in executed(computations, entry))


def _flops(computation: Computation, i: Instruction) -> int:
    target = i.attribute(r'custom_call_target="([^"]*)"') if i.opcode == "custom-call" else ""
    if i.opcode == "dot" or target.startswith("__cublas"):
        contracted = numbers(i.attribute(r'"?lhs_contracting_dim(?:ension)?s"?[=:][{\[]([^}\]]*)'))
        summed = math.prod(_sizes(computation, i.operands[0])[axis] for axis in contracted)
        return 2 * math.prod(i.arrays[0][1]) * summed
    if products := FMHA_PRODUCTS.get(target):
        B, T, N, H = _sizes(computation, i.operands[0])
        S = _sizes(computation, i.operands[1])[1]
        return products * 2 * B * N * T * S * H // (2 if '"mask_type": "CAUSAL"' in i.attributes else 1)
    return 0


def _sizes(computation: Computation, name: str) -> tuple[int, ...]:
    return computation.instructions[name].arrays[0][1]
