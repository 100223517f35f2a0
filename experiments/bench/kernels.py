"""Times fused operations and the whole training step, forward and backward, beside autodiff, XLA and other people's.

python experiments/bench/kernels.py [--small] [names ...]

A line each: microseconds (median, 95th and 99th percentile), the floor's bytes divided by the median (the same bytes
for all), and the error against float64 on 256 rows. Prints a table and writes a JSON file.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
from bench.cases import Sizes, names
from bench.compare import Row, time_operation, time_step

SMALL = Sizes(rows=512, width=64, vocab=300)
STEPS = ("train_step", "train_step_unrolled")
PACKAGES = ("jax", "numpy", "jax_triton", "torch", "triton", "liger_kernel", "tokamax")
RESULTS = Path(__file__).parent / "results"


def conditions(sizes: Sizes) -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    device = {"device": jax.devices()[0].device_kind, "date": time.strftime("%Y-%m-%d")}
    return {**device, **sizes._asdict(), "dtype": sizes.dtype.__name__, "versions": versions}


def table(rows: list[Row]) -> str:
    lines = [f"{'':22}{'':16}{'p50 us':>11}{'p95':>11}{'p99':>11}{'GB/s':>8}{'error':>10}"]
    for row in rows:
        start = f"{row['name']:22}{row['form']:16}"
        if "problem" in row:
            lines.append(f"{start}  {row['problem']}")
            continue
        times = "".join(f"{row[p]:11.1f}" for p in ("p50", "p95", "p99"))
        speed = f"{row['GB/s']:8.1f}{row['error']:10.1e}" if "GB/s" in row else f"{row['tokens/s']:10.0f} tokens/s"
        lines.append(start + times + speed)
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    known = [*names(SMALL), *STEPS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=known, help=f"of {', '.join(known)}; all if none is given")
    parser.add_argument("--small", action="store_true", help="sizes that any machine runs in seconds")
    parser.add_argument("--rows", type=int, default=Sizes().rows, help="N: tokens")
    parser.add_argument("--width", type=int, default=Sizes().width, help="D; the training step is ANDREA-120M's")
    parser.add_argument("--vocab", type=int, default=Sizes().vocab, help="V, rounded up to a multiple of 128")
    parser.add_argument("--samples", type=int, default=50, help="samples of which the percentiles are taken")
    parser.add_argument("--out", type=Path, default=RESULTS / "kernels.json", help="where the JSON goes")
    options = parser.parse_args(argv)
    if wrong := sorted(set(options.names) - set(known)):
        parser.error(f"there is no {', '.join(wrong)} to time; there are {', '.join(known)}")
    sizes = SMALL if options.small else Sizes(options.rows, options.width, options.vocab)
    rows: list[Row] = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        if name in STEPS:
            rows += time_step(name, sizes, options.small, options.samples)
        else:
            rows += time_operation(name, sizes, options.samples)
        options.out.write_text(json.dumps({"conditions": conditions(sizes), "rows": rows}, indent=1) + "\n")
        print(f"{name} done", file=sys.stderr, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
