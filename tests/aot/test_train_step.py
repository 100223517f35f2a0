"""The training step compiled for named GPUs. Needs the CUDA plug-in; see .ci/run for the packages."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from aot.gpu import compile_for
from bench.hlo_kernels import bytes_of, total

from andrea_jax import EngineConfig, andrea_12m, andrea_120m
from andrea_jax.train.config import RunConfig, TrainConfig
from andrea_jax.train.state import abstract_state
from andrea_jax.train.step import make_train_step

pytestmark = pytest.mark.aot
GIB = 2**30
CUDNN = EngineConfig(dtype="bfloat16", attention="cudnn", blocks="scan")


def compiled_step(card, model, batch_size, engine, segments=False):
    config = RunConfig(model=model, train=TrainConfig(batch_size=batch_size), engine=engine)
    shape = (batch_size, model.context_length)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("tokens_BT", "targets_BT")}
    batch["weights_BT"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    if segments:
        batch["segments_BT"] = jax.ShapeDtypeStruct(shape, jnp.int32)
    return compile_for(card, make_train_step(config), abstract_state(config), batch, donate_argnums=0)


def test_cudnn_attention_is_called_forward_and_backward_and_no_scores_are_stored():
    text = compiled_step("h200", andrea_120m(n_layer=2), 8, CUDNN).as_text()
    assert "__cudnn$fmhaSoftmax" in text
    assert "__cudnn$fmhaSoftmaxBackward" in text
    assert "8,12,1024,1024" not in text


def test_packed_documents_compile_with_cudnn():
    text = compiled_step("a100", andrea_12m(n_layer=2), 2, CUDNN, segments=True).as_text()
    assert "__cudnn$fmha" in text


@pytest.mark.parametrize("card", ["rtx3060", "rtx4090"])
def test_andrea_120m_with_batch_8_fits_a_consumer_card(card):
    memory = compiled_step(card, andrea_120m(), 8, dataclasses.replace(CUDNN, remat="block")).memory_analysis()
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert needed < 3 * GIB, f"{needed / GIB:.2f} GiB"


def test_the_state_is_updated_in_place():
    memory = compiled_step("h200", andrea_12m(), 2, CUDNN).memory_analysis()
    assert memory.alias_size_in_bytes > 0.99 * memory.output_size_in_bytes


def test_the_loss_never_holds_the_logits_of_the_batch():
    model = andrea_12m(vocab_size=50257, n_layer=1, vocab_multiple=128)
    text = compiled_step("h200", model, 64, CUDNN).as_text()
    rows = 64 * 1024
    assert f"[{rows},50304]" not in text
    assert "[64,1024,50304]" not in text


def test_the_default_chunk_of_the_loss_saves_bytes_in_memory_that_the_blocks_take_anyway():
    model = andrea_120m(vocab_size=50257, vocab_multiple=128)

    def moved_and_held(chunk):
        compiled = compiled_step("h200", model, 64, dataclasses.replace(CUDNN, kernels="pallas", loss_chunk=chunk))
        return total(bytes_of(compiled)), compiled.memory_analysis().temp_size_in_bytes

    (moved, held), (moved_64_mib, held_64_mib), (moved_twice, held_twice) = map(moved_and_held, (0, 333, 8 * 768))
    assert moved < 0.8 * moved_64_mib
    assert moved < 1.02 * moved_twice
    assert held < held_64_mib + 0.1 * GIB
    assert held < held_twice - 0.3 * GIB
