import dataclasses
import json

import numpy as np
import plan as script
import pytest

from andrea_jax.config import ModelConfig
from andrea_jax.engine import EngineConfig
from andrea_jax.inspect import plan as plans
from andrea_jax.inspect.collectives import Collective, collectives_of, device_groups
from andrea_jax.inspect.compiled_step import Cluster, CompiledStep, on_gpus, on_one_host
from andrea_jax.inspect.hlo_text import parse
from andrea_jax.inspect.links import LINKS, Links, seconds_on_links
from andrea_jax.inspect.plan import make_plan
from andrea_jax.inspect.product_flops import product_flops
from andrea_jax.inspect.traffic import traffic
from andrea_jax.optimizer import OptimizerConfig
from andrea_jax.settings import UserError
from andrea_jax.sharding import MeshConfig
from andrea_jax.train.config import RunConfig, TrainConfig

GIB = 2**30
MESH = {"data": 2, "fsdp": 2, "tensor": 2}

# A scan of 3 layers that gathers two weights over `fsdp` and sums activations over `tensor`; after it a
# reduce-scatter in a computation of its own, a sum over `data` and `fsdp`, one over nothing, and a shift along `data`.
TEXT = """
HloModule step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%body (p: (s32[], bf16[8,4], f32[16,4])) -> (s32[], bf16[8,4], f32[16,4]) {
  %p = (s32[], bf16[8,4]{1,0}, f32[16,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %w = bf16[8,4]{1,0} get-tuple-element(%p), index=1
  %x = f32[16,4]{1,0} get-tuple-element(%p), index=2
  %gathering = ((bf16[8,4]{1,0}, bf16[8,4]{1,0}), (bf16[16,4]{1,0}, bf16[16,4]{1,0})) all-gather-start(%w, %w), \
channel_id=1, replica_groups=[4,2]<=[4,2]T(1,0), dimensions={0}, use_global_device_ids=true
  %gathered = (bf16[16,4]{1,0}, bf16[16,4]{1,0}) all-gather-done(%gathering)
  %reducing = f32[16,4]{1,0} all-reduce-start(%x), channel_id=2, replica_groups=[4,2]<=[8], to_apply=%add
  %reduced = f32[16,4]{1,0} all-reduce-done(%reducing)
  ROOT %out = (s32[], bf16[8,4]{1,0}, f32[16,4]{1,0}) tuple(%i, %w, %reduced)
}

%condition (p: (s32[], bf16[8,4], f32[16,4])) -> pred[] {
  %p = (s32[], bf16[8,4]{1,0}, f32[16,4]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

%scattered (g: f32[16,4]) -> f32[8,4] {
  %g = f32[16,4]{1,0} parameter(0)
  ROOT %part = f32[8,4]{1,0} reduce-scatter(%g), channel_id=3, replica_groups={{0,2},{4,6},{1,3},{5,7}}, \
dimensions={0}, to_apply=%add
}

ENTRY %main (a: s32[], w: bf16[8,4], x: f32[16,4]) -> f32[8,4] {
  %a = s32[] parameter(0)
  %w = bf16[8,4]{1,0} parameter(1)
  %x = f32[16,4]{1,0} parameter(2)
  %start = (s32[], bf16[8,4]{1,0}, f32[16,4]{1,0}) tuple(%a, %w, %x)
  %loop = (s32[], bf16[8,4]{1,0}, f32[16,4]{1,0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %g = f32[16,4]{1,0} get-tuple-element(%loop), index=2
  %scatter = ((f32[16,4]{1,0}), f32[8,4]{1,0}, u32[]) async-start(%g), calls=%scattered
  %part = f32[8,4]{1,0} async-done(%scatter)
  %both = f32[8,4]{1,0} all-reduce(%part), channel_id=4, replica_groups=mesh['a'=4,'b'=2] {'a'}, to_apply=%add
  %alone = f32[8,4]{1,0} all-reduce(%both), channel_id=5, replica_groups=[8,1]<=[8], to_apply=%add
  ROOT %moved = f32[8,4]{1,0} collective-permute(%alone), channel_id=6, source_target_pairs={{0,4},{4,0},{1,5},{5,1}}
}
"""


def groups(attribute, devices=8):
    """What XLA's text stands for, in an all-reduce."""
    text = "ENTRY %e (x: f32[2]) -> f32[2] {\n  %x = f32[2]{0} parameter(0)\n  ROOT %r = f32[2]{0} all-reduce(%x), "
    computations, entry = parse(f"{text}{attribute}, use_global_device_ids=true, to_apply=%add\n}}\n")
    return device_groups(computations[entry].root, devices).tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups={{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("replica_groups=[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[4,2]T(1,0)", [[0, 2], [4, 6], [1, 3], [5, 7]]),
        ("replica_groups=[4,2]<=[2,2,2]T(2,1,0)", [[0, 4], [2, 6], [1, 5], [3, 7]]),
        ("replica_groups={}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=({{3,2},{1,0}}) {'b'}", [[3, 2], [1, 0]]),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b':(1)2}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ],
)
def test_groups_of_devices_in_each_way_that_xla_writes_them(text, expected):
    assert groups(text) == expected


def test_collectives_are_found_in_loops_and_asynchronous_forms_with_their_axes_and_bytes():
    """Bytes of operands: two of 8 x 4 bf16 = 128; 16 x 4 f32 = 256; 8 x 4 f32 = 128. Hosts of 4: `data` crosses."""
    found = collectives_of(TEXT, MESH, gpus_per_host=4)
    assert found == [
        Collective("all-gather", ("fsdp",), 2, 2, 128, 3),
        Collective("all-reduce", ("tensor",), 2, 2, 256, 3),
        Collective("reduce-scatter", ("fsdp",), 2, 2, 256, 1),
        Collective("all-reduce", ("data", "fsdp"), 4, 2, 128, 1),
        Collective("collective-permute", ("data",), 2, 1, 128, 1),
    ]
    assert [collective.sent for collective in found] == [3 * 128, 3 * 256, 128, 192, 128]
    assert [collective.between_hosts for collective in found] == [False, False, False, True, True]


def test_a_loop_of_unknown_length_is_an_error():
    with pytest.raises(ValueError, match="loop"):
        collectives_of(TEXT.replace("known_trip_count", "unknown"), MESH, 8)


def test_flops_of_products_in_fusions_loops_cublas_and_attention():
    text = """
%product (a: bf16[5,8,16], b: bf16[5,16,4]) -> f32[5,8,4] {
  %a = bf16[5,8,16]{2,1,0} parameter(0)
  %b = bf16[5,16,4]{2,1,0} parameter(1)
  ROOT %dot = f32[5,8,4]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, \
rhs_contracting_dims={1}
}

ENTRY %main (a: bf16[5,8,16], b: bf16[5,16,4], q: bf16[2,32,4,8]) -> f32[5,8,4] {
  %a = bf16[5,8,16]{2,1,0} parameter(0)
  %b = bf16[5,16,4]{2,1,0} parameter(1)
  %q = bf16[2,32,4,8]{3,2,1,0} parameter(2)
  %blas = (f32[5,8,4]{2,1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"]}}}
  %forward = (bf16[2,4,32,8]{3,2,1,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", \
backend_config={"cudnn_fmha_backend_config": {"mask_type": "CAUSAL"}}
  %backward = (bf16[2,4,32,8]{3,2,1,0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmaxBackward", \
backend_config={"cudnn_fmha_backend_config": {"mask_type": "NO_MASK"}}
  ROOT %fused = f32[5,8,4]{2,1,0} fusion(%a, %b), kind=kCustom, calls=%product
}
"""
    product = 2 * 5 * 8 * 4 * 16
    attention = 2 * (2 * 4 * 32 * 32 * 8)  # one of the products of T x T x H
    assert product_flops(text) == 2 * product + 2 * attention // 2 + 5 * attention


MODEL = ModelConfig(vocab_size=100, context_length=10, d_model=8, n_layer=3, n_head=2, mlp_bias=False)
BLOCKS, TABLE, POSITIONS, VECTORS = 3 * 12 * 64, 800, 80, (3 * 4 + 2) * 8  # parameters


def run_config(data=1, fsdp=1, tensor=1, expert=1, batch_size=16, model=MODEL, accumulate=1, kind="adamw", **engine):
    return RunConfig(
        model=model,
        train=TrainConfig(batch_size=batch_size, accumulate=accumulate, steps=7200),
        optimizer=OptimizerConfig(kind),
        engine=EngineConfig(**{"dtype": "bfloat16", **engine}),
        mesh=MeshConfig(data, fsdp, tensor, expert),
    )


def test_data_parallel_reduces_each_gradient_once():
    expected = 2 * 7 / 8 * (2 * BLOCKS + 4 * (TABLE + POSITIONS + VECTORS))
    assert traffic(run_config(data=8), 8) == {(("data",), "all-reduce"): pytest.approx(expected)}
    parts = traffic(run_config(data=8, accumulate=2), 8)
    assert parts == {(("data",), "all-reduce"): pytest.approx(2 * expected)}


def test_pmap_reduces_the_whole_gradient_in_float32_once():
    config = dataclasses.replace(run_config(8, 1, 1), train=TrainConfig(batch_size=16, accumulate=2, parallel="pmap"))
    assert traffic(config, 8) == {(("data",), "all-reduce"): 2 * 7 / 8 * 4 * (BLOCKS + TABLE + POSITIONS + VECTORS)}


def test_fsdp_gathers_weights_forward_and_backward_and_scatters_gradients():
    """The tied table is gathered as float32 to look up, and as bfloat16 for the output product."""
    found = traffic(run_config(data=2, fsdp=4), 8)
    gradients = 2 * BLOCKS + 4 * (TABLE + POSITIONS)
    assert found == {
        (("fsdp",), "all-gather"): pytest.approx(3 / 4 * (2 * 2 * BLOCKS + (4 + 2) * TABLE + 4 * POSITIONS)),
        (("fsdp",), "reduce-scatter"): pytest.approx(3 / 4 * gradients),
        (("data",), "all-reduce"): pytest.approx(2 * 1 / 2 * gradients / 4),
        (("data", "fsdp"), "all-reduce"): pytest.approx(2 * 7 / 8 * 4 * VECTORS),
    }


def test_a_head_of_its_own_is_gathered_as_activations_are_and_its_gradient_reduced_in_float32():
    tied, untied = (
        traffic(run_config(fsdp=4, model=dataclasses.replace(MODEL, tie_embeddings=t)), 4) for t in (True, False)
    )
    assert untied[("fsdp",), "all-gather"] == tied[("fsdp",), "all-gather"]
    more = untied[("fsdp",), "reduce-scatter"] - tied[("fsdp",), "reduce-scatter"]
    assert more == pytest.approx(3 / 4 * 4 * TABLE)


def test_tensor_parallel_reduces_activations_four_times_a_block_and_five_where_it_is_recomputed():
    activations = 16 * 10 * 8
    found = traffic(run_config(tensor=2), 2)
    assert found == {(("tensor",), "all-reduce"): pytest.approx(2 * 1 / 2 * activations * (3 * 4 * 2 + 4 + 2))}
    again = traffic(run_config(tensor=2, remat="block"), 2)
    assert again == {(("tensor",), "all-reduce"): pytest.approx(2 * 1 / 2 * activations * (3 * 5 * 2 + 4 + 2))}


MIXTURE = dataclasses.replace(MODEL, n_expert=4, expert_size=6, gated=True)
PARTS = 3 * 4 * 3 * 8 * 6  # parameters of its experts
ROUTERS = 3 * 8 * 4


def test_experts_gradients_are_reduced_over_data_alone_and_their_tokens_travel_along_expert():
    found = traffic(run_config(data=2, expert=4, model=MIXTURE), 8)
    tokens, row = 3 * 16 / 2 * 10, 2 * 8  # of a group of four, in all blocks; bytes of one
    assert found == {
        (("data",), "all-reduce"): pytest.approx(2 * 1 / 2 * 2 * PARTS / 4),
        (("expert",), "all-gather"): pytest.approx(3 / 4 * tokens * (2 * row + 2 * (4 + 4))),
        (("expert",), "reduce-scatter"): pytest.approx(3 / 4 * tokens * (2 * row + 2 * 4)),
        (("data", "expert"), "all-reduce"): pytest.approx(
            2 * 7 / 8 * (2 * (BLOCKS - 3 * 8 * 64) + 4 * (TABLE + POSITIONS + VECTORS + ROUTERS))
        ),
    }


@pytest.mark.parametrize(("remat", "times"), [("none", 4), ("block", 6)])
def test_places_are_sent_full_or_not_and_again_where_blocks_are_recomputed(remat, times):
    """ceil(1.1 x 2 x 10 / 4) = 6 places in each of 4 experts for each of a device's 4 rows."""
    model = dataclasses.replace(MIXTURE, capacity_factor=1.1)
    found = traffic(run_config(expert=4, model=model, remat=remat), 4)
    assert found[("expert",), "all-to-all"] == pytest.approx(times * 3 / 4 * 3 * 4 * 4 * 6 * 2 * 8)
    assert (("expert",), "all-gather") not in found


def test_a_mixture_over_fsdp_and_tensor_sends_what_a_dense_model_does():
    """The router in float32; its gradient, of which each device of `tensor` has a part, is added over that too."""
    found = traffic(run_config(fsdp=2, tensor=2, model=MIXTURE), 4)
    dense = traffic(run_config(fsdp=2, tensor=2, model=dataclasses.replace(MODEL, mlp_size=1)), 4)
    assert found[("tensor",), "all-reduce"] == pytest.approx(
        dense[("tensor",), "all-reduce"] + 2 * 1 / 2 * 4 * ROUTERS / 2
    )
    matrices = 2 * (PARTS - 3 * 2 * 8) / 2
    more = {kind: found[("fsdp",), kind] - dense[("fsdp",), kind] for kind in ("all-gather", "reduce-scatter")}
    assert more["all-gather"] == pytest.approx(1 / 2 * 2 * (matrices + 4 * ROUTERS))
    assert more["reduce-scatter"] == pytest.approx(1 / 2 * (matrices + 4 * ROUTERS))


def test_time_of_a_ring_is_that_of_its_slowest_link():
    """30 GB within a host at 10 GB/s; 12 GB over rings with two GPUs on a host, 6 GB with one, at 1 GB/s each."""
    inside = Collective("all-gather", ("fsdp",), 4, 4, 10 * 10**9, 1)
    two = Collective("all-reduce", ("data", "fsdp"), 4, 2, 8 * 10**9, 1)
    one = Collective("all-reduce", ("data",), 4, 1, 10**9, 4)
    assert seconds_on_links([inside, two, one], Links(10, 1, "")) == pytest.approx((3, 6 + 6))
    assert seconds_on_links([two], Links(0.5, 1, "")) == pytest.approx((0, 24))


def test_auto_is_what_it_is_on_a_gpu_and_what_cudnn_cannot_run_is_refused():
    assert on_gpus(run_config(dtype="auto")).engine == EngineConfig(dtype="bfloat16", attention="xla")  # heads of 4
    wide = run_config(dtype="auto", model=dataclasses.replace(MODEL, d_model=32))
    assert on_gpus(wide).engine == EngineConfig(dtype="bfloat16", attention="cudnn")
    with pytest.raises(UserError, match="head_dim is 4"):
        on_gpus(run_config(attention="cudnn"))


@pytest.mark.parametrize(
    ("mesh", "hosts", "expected"),
    [
        ((8, 2, 1), 2, (4, 2, 1, 1)),
        ((2, 8, 2), 8, (1, 2, 2, 1)),
        ((-1, 2, 1), 4, (2, 2, 1, 1)),
        ((2, 2, 2, 8), 8, (1, 1, 2, 4)),
    ],
)
def test_one_host_has_a_share_of_the_mesh_and_of_the_batch(mesh, hosts, expected):
    gpus = int(np.prod(expected))
    config, cluster = on_one_host(run_config(*mesh, batch_size=64), Cluster("h200", hosts, gpus))
    assert dataclasses.astuple(config.mesh) == expected
    assert config.train.batch_size == 64 // hosts
    assert cluster == Cluster("h200", 1, gpus)


def test_a_tensor_axis_that_crosses_hosts_has_no_one_host():
    with pytest.raises(UserError, match="tensor"):
        on_one_host(run_config(tensor=8), Cluster("h200", 2, 4))


@pytest.fixture
def compiled(monkeypatch):
    """Compiles nothing: 6 GiB a window at once on a GPU and 20 GiB besides, 0.4 x 989 TFLOP, 9 GB sent over `data`."""
    calls = []

    def compiled_step(config, cluster):
        calls.append(config)
        windows = config.train.batch_size // (cluster.devices * config.train.accumulate)
        per_host = min(cluster.gpus, cluster.devices)
        sent = 9 if config.optimizer.kind == "adamw" else 12
        ring = Collective("collective-permute", ("data",), cluster.devices, per_host, sent * 10**9, 1)
        flops = round(0.4 * 989e12)
        return CompiledStep(2 * GIB, 4 * GIB, GIB, windows * 6 * GIB, 13 * GIB, flops, [ring], text="")

    monkeypatch.setattr(plans, "compiled_step", compiled_step)
    return calls


def test_times_and_efficiencies_by_hand(compiled):
    """A second of computing. 9 GB take 9 / 400 s in rings of two hosts with 8 ports of 50 GB/s, 9 / 450 s in one."""
    config = run_config(data=16, batch_size=16)
    plan = make_plan(config, Cluster("h200", 2, 8), LINKS["h200"], mfu=0.4, against_host=True)
    modelled, sending = plan["modelled"], 9 / 400
    assert modelled["compute_s"] == pytest.approx(1)
    assert (modelled["host_links_s"], modelled["network_s"]) == pytest.approx((0, sending))
    slow, fast = modelled["no_overlap"], modelled["full_overlap"]
    assert slow["step_s"] == pytest.approx(1 + sending)
    assert slow["efficiency_against_one_gpu"] == pytest.approx(1 / (1 + sending))
    assert slow["efficiency_against_one_host"] == pytest.approx((1 + 9 / 450) / (1 + sending))
    assert fast["step_s"] == fast["efficiency_against_one_gpu"] == fast["efficiency_against_one_host"] == 1
    assert slow["tokens_per_s"] == pytest.approx(16 * 10 / (1 + sending))
    assert fast["run_h"] == pytest.approx(2)
    flops_per_token = 6 * (BLOCKS + TABLE) + 6 * 3 * 10 * 8
    assert plan["formula"]["flops_per_token"] == flops_per_token
    assert fast["mfu"] == pytest.approx(flops_per_token * 10 / 989e12)


def test_memory_and_the_largest_batch_that_fits(compiled):
    """90% of 140.4 GiB are 126.4: 20 GiB and 17 windows of 6 GiB."""
    fitting = make_plan(run_config(data=8, batch_size=8), Cluster("h200", 1, 8), LINKS["h200"], 0.4, largest_batch=True)
    assert fitting["compiled"]["memory_in_all"] == 26 * GIB
    assert fitting["compiled"]["fits"]
    assert fitting["compiled"]["largest_windows_at_once"] == 17
    assert max(config.train.batch_size for config in compiled) == 8 * 17  # it was compiled
    large = make_plan(run_config(data=8, batch_size=160), Cluster("h200", 1, 8), LINKS["h200"], 0.4, largest_batch=True)
    assert not large["compiled"]["fits"]
    assert large["compiled"]["largest_windows_at_once"] == 17
    parts = run_config(data=8, batch_size=32, accumulate=2)
    plan = make_plan(parts, Cluster("h200", 1, 8), LINKS["h200"], 0.4, largest_batch=True)
    assert plan["given"]["windows_at_once"] == 2
    assert plan["compiled"]["largest_windows_at_once"] == 17
    none = make_plan(run_config(data=8, batch_size=8), Cluster("rtx3060", 1, 8), LINKS["rtx3060"], 0.4, False, True)
    assert none["compiled"]["largest_windows_at_once"] == 0


def test_what_muon_adds_stands_by_itself(compiled):
    plan = make_plan(run_config(data=8, kind="muon"), Cluster("h200", 1, 8), LINKS["h200"], 0.4)
    assert plan["compiled"]["muon_extra"] == {"sent": 3 * 10**9, "flops": 0, "memory": 0}
    assert plan["compiled"]["sent_in_all"] == 12 * 10**9


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        script.flags.main(script.run, "", script.FLAGS, script.USES, ["experiments/plan.py", *arguments])
    return caught.value.code, *capsys.readouterr()


def test_the_script_labels_its_numbers_and_writes_json(compiled, capsys):
    arguments = ["--hosts=2", "--network_gbs=25", "--gin.ModelConfig.preset=andrea_480m", "--gin.train.batch_size=16"]
    code, out, _ = call(capsys, *arguments, "--gin.optimizer.kind=adamw")
    assert code == 0
    assert "467,759,616 parameters" in out
    assert "26.00 of 140.4: fits" in out
    line = next(line for line in out.splitlines() if "collective-permute" in line)
    assert line.split() == ["data", "collective-permute", "9.000", "0.000", "-", "1", "between", "hosts"]
    assert "25 between hosts (given; else NVLink" in out
    assert "measured" not in out
    labels = {"memory": "compiled", "FLOPs": "compiled", "time": "modelled"}
    for name, label in labels.items():
        assert next(line for line in out.splitlines() if line.startswith(name)).split()[1].startswith(label)
    code, out, _ = call(capsys, *arguments, "--json")
    plan = json.loads(out)
    assert plan.keys() == {"given", "compiled", "formula", "modelled"}
    assert plan["compiled"]["sent"][0]["kind"] == "collective-permute"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--card=h20"], "--card=h20: no description of it; did you mean h200?"),
        (["--card=rtx4090", "--hosts=2"], "--network_gbs is missing"),
        (["--against_host"], "there is one host"),
        (["--against_host", "--hosts=2", "--gin.engine.dtype=float32"], "bfloat16 only"),
        (["--gin.train.run_dir=x"], "train.run_dir would never be used"),
        (["--mfu=2"], "--mfu"),
    ],
)
def test_wrong_input_is_refused_in_a_line(compiled, capsys, arguments, message):
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not compiled
