"""Plan a run on GPUs that are not here: compiles its training step for them and says what it would take.

Bytes and FLOPs are read from the compiled step, and set beside a formula; times are modelled from them. Nothing is
measured. Compiling needs jax-cuda12-plugin, jax-cuda12-pjrt, nvidia-cuda-nvcc-cu12 and nvidia-cudnn-cu12, but no GPU.
"""

from __future__ import annotations

import json
from typing import Any

import flags
from absl import flags as absl_flags

from andrea_jax.inspect.compile_for import cards
from andrea_jax.inspect.compiled_step import Cluster
from andrea_jax.inspect.links import LINKS, Links
from andrea_jax.inspect.plan import USABLE, make_plan
from andrea_jax.settings import UserError, nearest
from andrea_jax.train.config import RunConfig

FLAGS = absl_flags.FlagValues()
absl_flags.DEFINE_string("card", "h200", f"one of {', '.join(cards())}", flag_values=FLAGS)
absl_flags.DEFINE_integer("hosts", 1, "machines", 1, flag_values=FLAGS)
absl_flags.DEFINE_integer("gpus", 8, "GPUs of each machine", 1, flag_values=FLAGS)
absl_flags.DEFINE_float("mfu", 0.4, "modelled: share of peak that matrix products reach", 0.01, 1, flag_values=FLAGS)
absl_flags.DEFINE_float(
    "nvlink_gbs",
    None,
    "modelled: GB/s that a GPU sends within its machine; default: the card's",
    0.1,
    flag_values=FLAGS,
)
absl_flags.DEFINE_float(
    "network_gbs",
    None,
    "modelled: GB/s that a GPU sends to other machines; default: usual for it",
    0.1,
    flag_values=FLAGS,
)
absl_flags.DEFINE_bool("against_host", False, "compile the same run on one host too", flag_values=FLAGS)
absl_flags.DEFINE_bool("largest_batch", False, "find the largest batch that fits: compiles again", flag_values=FLAGS)
absl_flags.DEFINE_bool("json", False, "print one JSON object", flag_values=FLAGS)
TRAIN = ("train.batch_size", "train.accumulate", "train.steps", "train.parallel", "train.ema")
USES = ("ModelConfig", "engine", "mesh", "optimizer", *TRAIN)
GIB, GB = 2**30, 1e9


def run(config: RunConfig, bound: dict[str, str]) -> None:
    card = FLAGS["card"].value
    if card not in cards():
        raise UserError(f"--card={card}: no description of it{nearest(card, cards())}")
    cluster = Cluster(card, FLAGS["hosts"].value, FLAGS["gpus"].value)
    options = {name: FLAGS[name].value for name in ("mfu", "against_host", "largest_batch")}
    plan = make_plan(config, cluster, links_of(card), **options)
    print(json.dumps(plan) if FLAGS["json"].value else "\n".join(lines(plan)))


def links_of(card: str) -> Links:
    """The card's links, with the speeds that the user gave."""
    links, host, network = LINKS[card], FLAGS["nvlink_gbs"].value, FLAGS["network_gbs"].value
    source = "given" if host and network else f"given; else {links.source}" if host or network else links.source
    return Links(host or links.host, network or links.network, source)


def lines(plan: dict[str, Any]) -> list[str]:
    given, compiled, formula = plan["given"], plan["compiled"], plan["formula"]
    mesh = " x ".join(f"{name} {size}" for name, size in given["mesh"].items())
    devices = given["hosts"] * given["gpus_per_host"]
    engine, accumulate = given["engine"], given["accumulate"]
    return [
        f"given      {devices} x {given['card']}, {given['gpus_per_host']} a host, mesh {mesh}"
        + (", pmap" if given["parallel"] == "pmap" else ""),
        f"           {given['parameters']:,} parameters; {given['optimizer']}, {engine['dtype']}, attention "
        f"{engine['attention']}, blocks {engine['blocks']}, remat {engine['remat']}",
        f"           {given['tokens_per_step']:,} tokens a step: {given['batch_size']} windows"
        + (f" in {accumulate} parts" if accumulate > 1 else "")
        + f", {given['windows_at_once']} at once on a GPU",
        *memory_lines(compiled),
        *flops_lines(compiled, formula, given),
        *sent_lines(compiled, formula),
        *muon_lines(compiled),
        *time_lines(plan),
    ]


def memory_lines(compiled: dict[str, Any]) -> list[str]:
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in compiled["memory"].items() if size > 0.005 * GIB)
    used, card = compiled["memory_in_all"], compiled["memory_of_card"]
    verdict = "fits" if compiled["fits"] else f"does not fit: {USABLE:.0%} of the card is taken to be usable"
    if compiled["fits"] and used > 0.75 * card:
        verdict += "; JAX takes 75% unless XLA_PYTHON_CLIENT_MEM_FRACTION says more"
    found = ["memory     compiled, GiB a GPU: " + parts, f"           {used / GIB:.2f} of {card / GIB:.1f}: {verdict}"]
    if "largest_windows_at_once" in compiled:
        largest, windows = compiled["largest_windows_at_once"], "windows at once on a GPU"
        found.append(f"           the largest batch that fits: {largest} {windows}")
    return found


def flops_lines(compiled: dict[str, Any], formula: dict[str, Any], given: dict[str, Any]) -> list[str]:
    devices = given["hosts"] * given["gpus_per_host"]
    per_token = compiled["flops"] * devices / given["tokens_per_step"]
    return [
        f"FLOPs      compiled {per_token:.4g} a token, {compiled['flops'] * devices:.4g} a step",
        f"           by formula, without what is recomputed, {formula['flops_per_token']:.4g} and "
        f"{formula['flops'] * devices:.4g}: ratio {compiled['flops'] / formula['flops']:.3f}",
    ]


def sent_lines(compiled: dict[str, Any], formula: dict[str, Any]) -> list[str]:
    """A line for each kind of collective along each set of axes, compiled and by formula."""
    expected = {(tuple(row["axes"]), row["kind"]): row["bytes"] for row in formula["sent"]}
    rows = {(tuple(row["axes"]), row["kind"]): row for row in compiled["sent"]}
    found = [f"sent       {'GB a GPU and step, along':26}{'compiled':>9}{'formula':>9}{'ratio':>7}{'times':>7}"]
    for axes, kind in sorted(rows.keys() | expected.keys(), key=lambda key: (key[0], key[1])):
        row, by_formula = rows.get((axes, kind), {"bytes": 0, "times": 0}), expected.get((axes, kind), 0)
        if max(row["bytes"], by_formula) >= 1e6:
            where = "  between hosts" if row.get("between_hosts") else ""
            found.append(sent_line(f"{'+'.join(axes)} {kind}", row["bytes"], by_formula, row["times"]) + where)
    if not rows:
        return ["sent       compiled: nothing"]
    times = sum(row["times"] for row in compiled["sent"])
    return [*found, sent_line("in all", compiled["sent_in_all"], formula["sent_in_all"], times)]


def sent_line(name: str, compiled: float, formula: float, times: int) -> str:
    ratio = f"{compiled / formula:.2f}" if formula else "-"
    return f"           {name:26}{compiled / GB:9.3f}{formula / GB:9.3f}{ratio:>7}{times:7}"


def muon_lines(compiled: dict[str, Any]) -> list[str]:
    if "muon_extra" not in compiled:
        return []
    extra = compiled["muon_extra"]
    more = f"{extra['sent'] / GB:.3f} GB sent, {extra['flops']:.3g} FLOPs, {extra['memory'] / GIB:.2f} GiB"
    return [f"muon       compiled, of the above what adamw would not take, a GPU and step: {more}"]


def time_lines(plan: dict[str, Any]) -> list[str]:
    if "modelled" not in plan:
        return ["time       not modelled: peaks are known for bfloat16 only"]
    given, modelled = plan["given"], plan["modelled"]
    parts = ", ".join(f"{modelled[key]:.3g} {name}" for key, name in TIMES.items())
    network = f", {given['network_gbs']:g} between hosts" if given["hosts"] > 1 else ""
    found = [
        f"time       modelled, s a step: {parts}",
        f"           from {given['mfu']:g} of peak while computing, and GB/s a GPU: {given['host_gbs']:g} in a host"
        f"{network} ({given['links']}); start-up times are left out",
    ]
    for name, what in (("no_overlap", "nothing overlaps"), ("full_overlap", "all overlaps")):
        at = modelled[name]
        host = at.get("efficiency_against_one_host")
        found.append(
            f"           modelled, {what}: {at['step_s']:.4g} s a step, {at['tokens_per_s']:,.0f} tokens/s "
            f"({at['tokens_per_s_per_gpu']:,.0f} a GPU), MFU {at['mfu']:.1%}, efficiency "
            f"{at['efficiency_against_one_gpu']:.1%} against one GPU"
            + (f", {host:.1%} against one host" if host else "")
            + f", {given['steps']:,} steps in {at['run_h']:.3g} h"
        )
    return found


TIMES = {"compute_s": "computing", "host_links_s": "sending within hosts", "network_s": "sending between hosts"}


if __name__ == "__main__":
    flags.main(run, __doc__, FLAGS, USES)
