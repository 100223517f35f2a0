from andrea_jax.inspect.determinism import deterministic, fast, missing, xla_flags

OPS = "--xla_gpu_deterministic_ops"


def test_a_cpu_needs_nothing():
    assert missing({}, gpus=0) == {}
    assert deterministic({"A": "b"}, gpus=0) == {"A": "b"}


def test_one_gpu_needs_xlas_flag_and_several_an_ordered_nccl():
    assert missing({}, gpus=1) == {OPS: "true"}
    assert missing({}, gpus=2) == {OPS: "true", "NCCL_ALGO": "^NVLS"}
    assert missing({"XLA_FLAGS": OPS, "NCCL_ALGO": "Ring"}, gpus=8) == {}
    assert missing({"XLA_FLAGS": f"{OPS}=true"}, gpus=1) == {}
    assert missing({"XLA_FLAGS": f"{OPS}=true {OPS}=false"}, gpus=1) == {OPS: "true"}


def test_the_two_finer_flags_do_only_together():
    finer = "--xla_gpu_exclude_nondeterministic_ops=true"
    assert missing({"XLA_FLAGS": finer}, gpus=1) == {OPS: "true"}
    assert missing({"XLA_FLAGS": f"{finer} --xla_gpu_autotune_level=0"}, gpus=1) == {}


def test_what_is_missing_is_set_and_the_rest_of_xla_flags_stays():
    made = deterministic({"XLA_FLAGS": f"--xla_dump_to=/x {OPS}=false", "HOME": "/"}, gpus=2)
    assert xla_flags(made) == {"--xla_dump_to": "/x", OPS: "true"}
    assert made["HOME"] == "/"
    assert missing(made, gpus=2) == {}
    assert fast(made) == {"XLA_FLAGS": "--xla_dump_to=/x", "HOME": "/"}
