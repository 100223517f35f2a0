"""Tensors in and out, without torch: names, shapes, values, files."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from andrea_jax.config import ModelConfig
from andrea_jax.data.tokenizer import bytes_tokenizer
from andrea_jax.interop.hugging_face import read_model, write_model
from andrea_jax.interop.hugging_face.canonical import canonical
from andrea_jax.model import model_forward
from andrea_jax.parameters import abstract_params
from andrea_jax.settings import UserError

SMALL = ModelConfig(vocab_size=300, context_length=16, d_model=24, n_layer=3, n_head=4)
ROTARY = dict(position="rotary", norm="rms", norm_shift=False, gated=True, activation="silu", mlp_bias=False)
LLAMA = dataclasses.replace(SMALL, **ROTARY, n_kv_head=2, tie_embeddings=False)
GEMMA = dataclasses.replace(SMALL, **ROTARY, norm_position="sandwich", embedding_scale=24**0.5)
BYTES = bytes_tokenizer()


def random_params(config):
    """Bits that differ everywhere; gains lie between 1/2 and 2, where Gemma's layout is exact."""
    rng = np.random.default_rng(0)

    def random(path, leaf):
        gain = path[-1].key == "gain"
        return rng.uniform(0.5, 2, leaf.shape).astype("f") if gain else rng.standard_normal(leaf.shape, np.float32)

    return jax.tree.map_with_path(random, abstract_params(config))


def written(folder, config, **options):
    write_model(folder, random_params(config), config, BYTES, **options)
    return folder


def altered(folder, change):
    """The folder, its tensors changed in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def assert_equal_bits(found, expected):
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(SMALL, attention_bias=True),
        dataclasses.replace(SMALL, attention_bias=True, tie_embeddings=False),
        LLAMA,
        dataclasses.replace(LLAMA, attention_bias=True, mlp_bias=True, tie_embeddings=True),
        dataclasses.replace(LLAMA, window=5),
        dataclasses.replace(LLAMA, qk_norm=True, attention_bias=True, head_size=10),
        dataclasses.replace(LLAMA, n_expert=3, expert_size=20),
        dataclasses.replace(LLAMA, n_expert=3, expert_top_k=1, qk_norm=True, router_renormalize=False, window=5),
        GEMMA,
        dataclasses.replace(GEMMA, qk_norm=True, n_kv_head=1, window=5, global_every=2, rotary_local_base=30.0),
    ],
    ids=range(10),
)
def test_a_model_comes_back_bit_by_bit(config, tmp_path):
    read = read_model(written(tmp_path / "x", config))
    assert_equal_bits(read.params, random_params(config))
    assert canonical(read.config) == canonical(config)
    assert read.notes == []


def test_their_names_and_layouts_are_those_of_the_papers_code(tmp_path):
    """A head's rows in q_proj, k_proj and v_proj; GPT-2's c_attn holds queries, keys and values in this order."""
    params = random_params(LLAMA)
    tensors = load_file(written(tmp_path / "llama", LLAMA) / "model.safetensors")
    qkv = params["blocks"]["attention"]["qkv"][1]  # [D, K, G + 2, H]
    q, k = (tensors[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qk")
    assert np.array_equal(q[3 * 6 : 4 * 6], qkv[:, 1, 1].T)
    assert np.array_equal(k[6:12], qkv[:, 1, 2].T)
    assert np.array_equal(tensors["model.layers.1.mlp.down_proj.weight"], params["blocks"]["mlp"]["w_2"][1].T)
    params = random_params(SMALL)
    tensors = load_file(written(tmp_path / "gpt2", SMALL) / "model.safetensors")
    qkv, c_attn = params["blocks"]["attention"]["qkv"][2], tensors["transformer.h.2.attn.c_attn.weight"]
    assert np.array_equal(c_attn[:, 24 + 6 : 24 + 12], qkv[:, 1, 1])
    assert np.array_equal(tensors["transformer.h.2.mlp.c_fc.weight"], params["blocks"]["mlp"]["w_1"][2])


def test_what_gpt2_has_and_a_model_lacks_is_written_as_ones_and_zeros(tmp_path):
    plain = dataclasses.replace(SMALL, norm_gain=False, norm_shift=False, mlp_bias=False)
    done = write_model(tmp_path / "x", random_params(plain), plain, BYTES)
    assert done.filled["blocks.attention_norm.gain"] == "ones"
    assert {value for name, value in done.filled.items() if "gain" not in name} == {"zeros"}
    tensors = load_file(tmp_path / "x" / "model.safetensors")
    assert (tensors["transformer.h.1.ln_1.weight"] == 1).all()
    assert (tensors["transformer.ln_f.weight"] == 1).all()
    assert not any(tensors[name].any() for name in tensors if name.endswith(".bias"))


@pytest.mark.parametrize(
    ("model", "changes"), [(LLAMA, dict(mup_width=12)), (SMALL, dict(logit_scale=0.3)), (LLAMA, dict(mup_width=7))]
)
def test_a_scale_of_the_logits_goes_into_the_last_norm(model, changes, tmp_path):
    """A product of three numbers, rounded once more; the ratio 2 is exact."""
    config = dataclasses.replace(model, **changes)
    params, tokens_BT = random_params(config), np.arange(12).reshape(1, 12) * 25
    write_model(tmp_path / "x", params, config, BYTES)
    read = read_model(tmp_path / "x")
    assert read.config.output_scale == 1
    expected = model_forward(params, tokens_BT, config)
    found = model_forward(read.params, tokens_BT, read.config)
    np.testing.assert_allclose(found, expected, rtol=0, atol=24 * 2.0**-23 * np.abs(expected).max())


def test_rows_that_pad_the_vocabulary_are_left_out(tmp_path):
    config = dataclasses.replace(LLAMA, vocab_multiple=128)
    params = random_params(config)
    write_model(tmp_path / "x", params, config, BYTES)
    read = read_model(tmp_path / "x")
    assert read.params["token_embedding"].shape == (300, 24)
    assert np.array_equal(read.params["token_embedding"], params["token_embedding"][:300])
    assert np.array_equal(read.params["head"], params["head"][:, :300])


def test_a_tied_table_is_stored_once_and_an_equal_head_beside_it_is_accepted(tmp_path):
    folder = written(tmp_path / "x", SMALL)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    altered(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"]}))
    assert "head" not in read_model(folder).params
    altered(folder, lambda tensors: tensors.update({"lm_head.weight": 2 * tensors["transformer.wte.weight"]}))
    with pytest.raises(UserError, match=r"lm_head\.weight is not transformer\.wte\.weight"):
        read_model(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_smaller_dtype_rounds_to_the_nearest_and_is_read_exactly(dtype, tmp_path):
    read = read_model(written(tmp_path / "x", LLAMA, dtype=dtype))
    expected = jax.tree.map(lambda x: np.asarray(jnp.asarray(x, dtype), np.float32), random_params(LLAMA))
    assert_equal_bits(read.params, expected)
    assert json.loads((tmp_path / "x" / "config.json").read_text())["torch_dtype"] == dtype


def test_a_value_that_float16_cannot_hold_is_refused(tmp_path):
    params = random_params(LLAMA)
    params["head"][0, 0] = 1e6
    with pytest.raises(UserError, match=r"lm_head\.weight has values up to 1e\+06, more than float16 holds"):
        write_model(tmp_path / "x", params, LLAMA, BYTES, dtype="float16")
    assert not list(tmp_path.iterdir())


def test_shards_hold_at_most_what_was_asked_and_read_back_as_one_model(tmp_path):
    done = write_model(tmp_path / "x", random_params(LLAMA), LLAMA, BYTES, shard_bytes=20_000)
    assert len(done.files) > 3
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    sizes = [sum(x.nbytes for x in load_file(tmp_path / "x" / file).values()) for file in done.files]
    largest = 4 * 300 * 24
    assert max(sizes) == largest  # a tensor by itself
    assert all(size <= 20_000 for size in sizes if size != largest)
    assert index["metadata"]["total_size"] == sum(sizes)
    assert set(index["weight_map"].values()) == set(done.files)
    assert len({(tmp_path / "x" / file).stat().st_mode for file in [*done.files, "config.json"]}) == 1
    assert_equal_bits(read_model(tmp_path / "x").params, random_params(LLAMA))


def test_a_shard_that_is_missing_or_lacks_a_tensor_is_named(tmp_path):
    done = write_model(tmp_path / "x", random_params(LLAMA), LLAMA, BYTES, shard_bytes=40_000)
    path = tmp_path / "x" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = done.files[-1]
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"model\.norm\.weight is not in it, though"):
        read_model(tmp_path / "x")
    (tmp_path / "x" / done.files[1]).unlink()
    with pytest.raises(UserError, match=f"{done.files[1]}: cannot be read"):
        read_model(tmp_path / "x")


def test_an_index_does_not_lead_out_of_the_folder(tmp_path):
    written(tmp_path / "secret", LLAMA)
    folder = written(tmp_path / "x", LLAMA)
    (folder / "model.safetensors").unlink()
    places = {"lm_head.weight": "../secret/model.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(UserError, match=r"x/model\.safetensors: cannot be read"):
        read_model(folder)


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME), rf"the tensor {NAME} \[96, 24\] is missing"),
        (lambda t: [t.pop(name) for name in list(t) if ".2." in name], r"layers\.2\..*is missing \(and 8 more\)"),
        (lambda t: t.update({NAME: t[NAME][:90].copy()}), rf"{NAME} is \[90, 24\], but config.json says \[96, 24\]"),
        (lambda t: t.update({NAME: t[NAME].T.copy()}), rf"{NAME} is \[24, 96\], but config.json says \[96, 24\]"),
        (lambda t: t.update({"model.layers.3.x": t[NAME]}), r"model\.layers\.3\.x is no tensor of this model"),
        (lambda t: t.update({NAME: t[NAME].astype(np.float64)}), f"{NAME} is of type F64; there are BF16, F16, F32"),
        (lambda t: t.update({NAME: t[NAME].astype(np.int8)}), f"{NAME} is of type I8"),
    ],
    ids=["missing", "a block missing", "rows", "transposed", "extra", "float64", "int8"],
)
def test_a_tensor_that_does_not_fit_is_named(change, message, tmp_path):
    with pytest.raises(UserError, match=message):
        read_model(altered(written(tmp_path / "x", LLAMA), change))


def test_buffers_of_older_versions_and_a_base_models_names_are_understood(tmp_path):
    def as_gpt2_on_the_hub(tensors):
        found = {name.removeprefix("transformer."): tensors.pop(name) for name in list(tensors)}
        tensors |= found | {f"h.{i}.attn.bias": np.ones((1, 1, 16, 16), np.float32) for i in range(3)}

    config = dataclasses.replace(SMALL, attention_bias=True)
    folder = altered(written(tmp_path / "gpt2", config), as_gpt2_on_the_hub)
    assert_equal_bits(read_model(folder).params, random_params(config))
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}
    folder = altered(written(tmp_path / "llama", LLAMA), lambda tensors: tensors.update(frequencies))
    assert_equal_bits(read_model(folder).params, random_params(LLAMA))


def test_a_pickle_is_refused_with_the_way_out(tmp_path):
    folder = written(tmp_path / "x", LLAMA)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is a pickle.*save_pretrained"):
        read_model(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match=r"neither model\.safetensors nor"):
        read_model(folder)


def test_a_damaged_file_is_named(tmp_path):
    folder = written(tmp_path / "x", LLAMA)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        read_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not JSON"):
        read_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json"):
        read_model(folder)


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "x").mkdir()
    written(tmp_path / "x", LLAMA)
    before = sorted(path.stat().st_mtime_ns for path in (tmp_path / "x").iterdir())
    with pytest.raises(UserError, match="is there already"):
        written(tmp_path / "x", LLAMA)
    assert before == sorted(path.stat().st_mtime_ns for path in (tmp_path / "x").iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_an_architecture_can_be_chosen_if_it_expresses_the_model(tmp_path):
    assert write_model(tmp_path / "x", random_params(LLAMA), LLAMA, BYTES, model_type="mistral").model_type == "mistral"
    assert_equal_bits(read_model(tmp_path / "x").params, random_params(LLAMA))
    for model_type, message in (("gpt2", "cannot be written as gpt2 .*norm: rms != layer"), ("bert", "there are gpt2")):
        with pytest.raises(UserError, match=message):
            write_model(tmp_path / "y", random_params(LLAMA), LLAMA, BYTES, model_type=model_type)


def test_a_shorter_context_keeps_the_wavelengths(tmp_path):
    scaled = dict(rotary_scaling="yarn", rotary_factor=4.0, rotary_fast=32.0)
    folder = written(tmp_path / "x", dataclasses.replace(LLAMA, **scaled))
    short = read_model(folder, context_length=8).config
    assert (short.context_length, short.rotary_original) == (8, 16)
    with pytest.raises(UserError, match="context_length=17"):
        read_model(folder, context_length=17)
    with pytest.raises(UserError, match="16 learned positions"):
        read_model(written(tmp_path / "y", SMALL), context_length=8)
