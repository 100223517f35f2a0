import jax
import jax.numpy as jnp
import pytest
from bench.hlo_kernels import bytes_of, total

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
STACKS = """
%read_layer (stack: f32[12,8,4], layer: s32[]) -> bf16[8,4] {
  %stack = f32[12,8,4]{2,1,0} parameter(0)
  %layer = s32[] parameter(1)
  %zero = s32[] constant(0)
  %part = f32[1,8,4]{2,1,0} dynamic-slice(%stack, %layer, %zero, %zero), dynamic_slice_sizes={1,8,4}
  %flat = f32[8,4]{1,0} bitcast(%part)
  ROOT %narrow = bf16[8,4]{1,0} convert(%flat)
}

%write_layer (stack: f32[12,8,4], layer: s32[], x: bf16[8,4]) -> (f32[12,8,4], f32[8,4]) {
  %stack = f32[12,8,4]{2,1,0} parameter(0)
  %layer = s32[] parameter(1)
  %x = bf16[8,4]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %wide = f32[8,4]{1,0} convert(%x)
  %part = f32[1,8,4]{2,1,0} bitcast(%wide)
  %view = f32[12,8,4]{2,1,0} bitcast(%stack)
  %updated = f32[12,8,4]{2,1,0} dynamic-update-slice(%view, %part, %layer, %zero, %zero)
  ROOT %both = (f32[12,8,4]{2,1,0}, f32[8,4]{1,0}) tuple(%updated, %wide)
}
"""


def hlo(entry, *computations):
    return "HloModule m\n" + "".join(computations) + "\nENTRY %main () -> f32[] {\n" + entry + "\n}\n"


def kernels(entry, *computations):
    return {k.name: k for k in bytes_of(hlo(entry, *computations))}


def test_operands_and_results_count_once_and_views_are_free():
    found = kernels(
        """
  %x = bf16[8,4]{1,0} parameter(0)
  %y = f32[32]{0} parameter(1)
  %view = f32[8,4]{1,0} bitcast(%y)
  %both = (f32[8,4]{1,0}, /*index=1*/f32[]) custom-call(%x, %view, %view), custom_call_target="f"
  %first = f32[8,4]{1,0} get-tuple-element(%both), index=0
  ROOT %copied = f32[8,4]{0,1} copy(%first), metadata={op_name="jit(f)/copy"}"""
    )
    assert list(found) == ["both", "copied"]
    assert (found["both"].read, found["both"].written) == (64 + 128, 128 + 4)
    assert (found["copied"].kind, found["copied"].op_name) == ("copy", "jit(f)/copy")
    assert (found["copied"].read, found["copied"].written) == (128, 128)


def test_a_layer_read_from_a_stack_and_written_into_one_counts_alone():
    found = kernels(
        """
  %stack = f32[12,8,4]{2,1,0} parameter(0)
  %layer = s32[] parameter(1)
  %x = bf16[8,4]{1,0} fusion(%stack, %layer), kind=kLoop, calls=%read_layer
  ROOT %y = (f32[12,8,4]{2,1,0}, f32[8,4]{1,0}) fusion(%stack, %layer, %x), kind=kLoop, calls=%write_layer""",
        STACKS,
    )
    assert (found["x"].read, found["x"].written) == (128 + 4, 64)
    assert (found["y"].read, found["y"].written) == (4 + 64, 128 + 128)


def test_an_update_of_a_fresh_array_writes_all_of_it():
    body = """
%pad (x: f32[1,4]) -> f32[8,4] {
  %x = f32[1,4]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %zeros = f32[8,4]{1,0} broadcast(%zero), dimensions={}
  %at = s32[] constant(0)
  ROOT %padded = f32[8,4]{1,0} dynamic-update-slice(%zeros, %x, %at, %at)
}
"""
    entry = """
  %x = f32[1,4]{1,0} parameter(0)
  ROOT %y = f32[8,4]{1,0} fusion(%x), kind=kLoop, calls=%pad"""
    assert kernels(entry, body)["y"].written == 128


def test_a_gather_reads_its_rows_and_a_scatter_reads_and_writes_them():
    found = kernels(
        """
  %table = f32[1000,4]{1,0} parameter(0)
  %ids = s32[8]{0} parameter(1)
  %rows = f32[8,4]{1,0} gather(%table, %ids), offset_dims={1}
  ROOT %grown = f32[1000,4]{1,0} scatter(%table, %ids, %rows), to_apply=%add""",
        ADD,
    )
    assert (found["rows"].read, found["rows"].written) == (128 + 32, 128)
    assert (found["grown"].read, found["grown"].written) == (128 + 32 + 128, 128)


LOOP = """
%step (state: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %state = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%state), index=1
  %twice = f32[8,4]{1,0} add(%x, %x)
  ROOT %next = (s32[], f32[8,4]{1,0}) tuple(%i, %twice)
}

%more (state: (s32[], f32[8,4])) -> pred[] {
  %state = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}
"""
WHILE = """
  %state = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %end = (s32[], f32[8,4]{1,0}) while(%state), condition=%more, body=%step"""


def test_a_loops_body_counts_as_often_as_it_runs():
    known = ', backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}'
    (kernel,) = bytes_of(hlo(WHILE + known, LOOP))
    assert (kernel.times, kernel.read, kernel.written, kernel.bytes) == (7, 128, 128, 7 * 256)


def test_a_loop_of_unknown_length_is_refused():
    with pytest.raises(ValueError, match="end: a loop whose trip count is not known"):
        bytes_of(hlo(WHILE, LOOP))


def test_a_librarys_workspace_is_not_traffic_and_its_kind_is_told():
    found = kernels(
        """
  %x = bf16[8,8]{1,0} parameter(0)
  %product = (bf16[8,8]{1,0}, s8[4194304]{0}) custom-call(%x, %x), custom_call_target="__cublas$gemm"
  %y = bf16[8,8]{1,0} get-tuple-element(%product), index=0
  %kept = (bf16[8,8]{1,0}, f32[8]{0}, u8[0]{0}) custom-call(%y), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %ours = s8[64]{0} custom-call(%y), custom_call_target="__gpu$xla.gpu.triton" """
    )
    assert {name: (k.kind, k.read, k.written) for name, k in found.items()} == {
        "product": ("gemm", 128, 128),
        "kept": ("attention", 128, 128 + 32),
        "ours": ("pallas", 128, 64),
    }


def test_of_two_branches_the_dearer_one_counts():
    branches = """
%cheap (x: f32[8,4]) -> f32[8,4] {
  ROOT %x = f32[8,4]{1,0} parameter(0)
}

%dear (x: f32[8,4]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  ROOT %y = f32[8,4]{1,0} negate(%x)
}
"""
    entry = """
  %which = s32[] parameter(0)
  %x = f32[8,4]{1,0} parameter(1)
  ROOT %y = f32[8,4]{1,0} conditional(%which, %x, %x), branch_computations={%cheap, %dear}"""
    assert [k.bytes for k in bytes_of(hlo(entry, branches))] == [256]


def test_a_compiled_function_is_read():
    def f(x, stack):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]

    x, stack = jnp.ones((64, 64)), jnp.ones((5, 64, 64))
    found = bytes_of(jax.jit(f).lower(x, stack).compile())
    inside = [k for k in found if k.times == 5]
    array = 64 * 64 * 4
    assert sum(k.read for k in inside) >= 2 * array
    assert 5 * 3 * array <= total(found) < 5 * 12 * array
