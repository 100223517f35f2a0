"""Bytes that each operation moves, compiled for a named GPU that need not be there, against the least possible.

python experiments/bench/hlo_bytes.py --card h200 norm_backward gelu_backward cross_entropy train_step

One line each: autodiff (fused as XLA likes; `stored`: the same after a forward pass that stores what it needs, as
inside a loop over layers), our XLA form, the Pallas kernels, what `auto` runs on the card, and the floor. In units of
one [N, D] array for norms, [N, 4 D] for activations, [N, V] for the cross-entropy, and GB for the training step; in
brackets the number of kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.cases import Sizes, cases, names
from bench.directions import direct
from bench.hlo_kernels import Kernel, bytes_of, total
from bench.steps import BLOCKS, step_arguments, step_config

from andrea_jax.inspect.compile_for import cards, compile_for, kernels_as_on
from andrea_jax.settings import UserError, nearest
from andrea_jax.train.step import make_train_step

FORMS = ("autodiff", "stored", "xla", "pallas", "auto")
Kernels = dict[str, list[Kernel]]


def measure(card: str, name: str, sizes: Sizes, forms: Sequence[str] = FORMS) -> tuple[Kernels, int, float | None]:
    """The kernels of those of the `forms` that `name` has, the bytes of its unit, and its floor in units."""
    with kernels_as_on(card):
        if name in BLOCKS:
            return {form: _step(card, name, form, sizes) for form in FORMS[2:] if form in forms}, 10**9, None
        operation, direction = names(sizes)[name]
        case = cases(sizes)[operation]
        ways = {form: (f, direction) for form, f in case.forms.items()}
        if direction == "backward":
            ways |= {"autodiff": (case.forms["autodiff"], "gradient"), "stored": (case.forms["autodiff"], "backward")}
        kernels = {}
        for form in ways.keys() & forms:
            f, way = ways[form]
            function, arguments = direct(f, case.arguments, way)
            kernels[form] = bytes_of(compile_for(card, function, *arguments))
        return kernels, case.unit, case.floors[direction]


def _step(card: str, name: str, form: str, sizes: Sizes) -> list[Kernel]:
    config = step_config(name, form, sizes.rows)
    return bytes_of(compile_for(card, make_train_step(config), *step_arguments(config), donate_argnums=0))


def line(name: str, kernels: Kernels, unit: int, floor: float | None) -> str:
    def cell(form: str) -> str:
        if form not in kernels:
            return "-"
        return f"{total(kernels[form]) / unit:.2f} ({sum(kernel.times for kernel in kernels[form])})"

    return f"{name:22}" + "".join(f"{cell(form):>15}" for form in FORMS) + f"{'-' if floor is None else floor:>8}"


def listing(form: str, kernels: list[Kernel], unit: int) -> str:
    """Read, written, launches, kind, origin and name; launches that are alike in all but the name on one line."""
    alike: dict[tuple[str, str, int, int], list[Kernel]] = {}
    for kernel in kernels:
        alike.setdefault((kernel.kind, kernel.op_name, kernel.read, kernel.written), []).append(kernel)
    rows = [f"  {form}"]
    for (kind, op_name, read, written), group in sorted(alike.items(), key=lambda item: -total(item[1])):
        times = sum(kernel.times for kernel in group)
        amounts = f"{times * read / unit:9.3f} {times * written / unit:9.3f} {times:5}"
        rows.append(f"    {amounts} {kind:10} {op_name} {group[0].name}")
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> None:
    known = [*names(Sizes()), *BLOCKS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=known, help=f"of {', '.join(known)}; all if none is given")
    parser.add_argument("--card", default="h200", help=f"one of {', '.join(cards())}")
    parser.add_argument("--rows", type=int, default=Sizes().rows, help="N: tokens")
    parser.add_argument("--width", type=int, default=Sizes().width, help="D; the training step is ANDREA-120M's")
    parser.add_argument("--vocab", type=int, default=Sizes().vocab, help="V, rounded up to a multiple of 128")
    parser.add_argument("--kernels", action="store_true", help="list read, written, launches and kind of every kernel")
    parser.add_argument("--json", action="store_true", help="bytes as JSON instead of the table")
    options = parser.parse_args(argv)
    sizes = Sizes(options.rows, options.width, options.vocab)
    try:
        results = {name: _checked(options.card, name, known, sizes) for name in options.names}
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if options.json:
        print(json.dumps({name: {form: total(k) for form, k in found[0].items()} for name, found in results.items()}))
        return
    print(f"{options.card}, N = {sizes.rows}, D = {sizes.width}, V = {sizes.vocab}, {sizes.dtype.__name__}")
    print(f"{'':22}" + "".join(f"{form:>15}" for form in FORMS) + f"{'floor':>8}")
    for name, (kernels, unit, floor) in results.items():
        print(line(name, kernels, unit, floor))
        if options.kernels:
            print("\n".join(listing(form, kernels[form], unit) for form in FORMS if form in kernels))


def _checked(card: str, name: str, known: list[str], sizes: Sizes) -> tuple[Kernels, int, float | None]:
    if name not in known:
        raise UserError(f"there is no {name!r} to measure{nearest(name, known)}")
    return measure(card, name, sizes)


if __name__ == "__main__":
    main()
