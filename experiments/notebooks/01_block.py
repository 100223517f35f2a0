# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A block, a model, a run
#
# Everything here is a function of arrays; `python experiments/train.py` calls the same ones.

# %%
import dataclasses
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console

import andrea_jax as aj
from andrea_jax.data.windows import make_batches
from andrea_jax.inspect.parameter_table import parameter_table
from andrea_jax.train.config import RunConfig
from andrea_jax.train.corpus import open_corpus
from andrea_jax.train.loop import train

# %% [markdown]
# ## The config is the model
# It is checked when it is made. Counts come from the specs: nothing is allocated.

# %%
for preset in aj.PRESETS.values():
    print(f"{preset.__name__:16} {aj.count_parameters(preset()):>12,}")

try:
    aj.andrea_120m(d_model=770)
except aj.UserError as error:
    print(error)

# %%
config = aj.andrea_nano()
Console(width=110).print(parameter_table(config))

# %% [markdown]
# ## Real tokens
# The default corpus is the documentation that ships inside Python. A batch is a function of seed and step.

# %%
folder = Path(tempfile.mkdtemp())
settings = RunConfig(model=config)
settings = dataclasses.replace(
    settings,
    data=dataclasses.replace(settings.data, prepared=str(folder / "prepared")),
    train=dataclasses.replace(
        settings.train, steps=150, batch_size=8, eval_every=75, run_dir=str(folder / "run"), tensorboard=False
    ),
)
settings, corpus = open_corpus(settings)
batches = make_batches(corpus.train, batch_size=8, context_length=config.context_length, seed=0)
batch = batches[0]
print({name: (value.shape, value.dtype) for name, value in batch.items()})
print(corpus.tokenizer.decode(batch["tokens_BT"][0]).decode(errors="replace")[:300])

# %% [markdown]
# ## One block
# $x \leftarrow x + \mathrm{Attention}(\mathrm{LN}(x))$, then $x \leftarrow x + \mathrm{MLP}(\mathrm{LN}(x))$.
# At the start a block is nearly the identity.

# %%
params = aj.init_params(jax.random.key(0), config)
first_block = jax.tree.map(lambda stacked: stacked[0], params["blocks"])
x_BTD = params["token_embedding"][batch["tokens_BT"]]
y_BTD = aj.block_forward(first_block, x_BTD, config)
print(x_BTD.shape, "->", y_BTD.shape)
print(f"relative change {jnp.linalg.norm(y_BTD - x_BTD) / jnp.linalg.norm(x_BTD):.3f}")

# %% [markdown]
# ## The model, its loss, its gradients

# %%
logits_BTV = jax.jit(aj.model_forward, static_argnums=2)(params, batch["tokens_BT"], config)
print("logits", logits_BTV.shape, logits_BTV.dtype)


@jax.jit
def value_and_gradient(params):
    return jax.value_and_grad(lambda p: aj.loss_fn(p, batch, config)[0])(params)


loss, gradients = value_and_gradient(params)
print(f"loss {loss:.3f}; uniform guessing: {jnp.log(config.vocab_size):.3f}")
for path, gradient in jax.tree.leaves_with_path(gradients):
    print(f"{jax.tree_util.keystr(path, simple=True, separator='.'):30} {jnp.linalg.norm(gradient):9.5f}")

# %% [markdown]
# ## A short run

# %%
result = train(settings, corpus)
print(result.validation)
print(result.sample)

# %%
from IPython.display import Image  # noqa: E402

Image(filename=str(result.run_dir / "loss.png"))

# %% [markdown]
# ## From the checkpoint
# `load_checkpoint` restores parameters, config and tokenizer with orbax; the evaluation is that of the run.

# %%
from andrea_jax.data.windows import eval_batches  # noqa: E402
from andrea_jax.evaluate import evaluate  # noqa: E402

restored, restored_config, tokenizer = aj.load_checkpoint(result.run_dir)
windows = eval_batches(corpus.validation, batch_size=8, context_length=config.context_length)
again = evaluate(restored, windows, restored_config, tokenizer.byte_lengths)
print(f"{again['loss']:.6f} == {result.validation['loss']:.6f}")
assert restored_config == config
assert abs(again["loss"] - result.validation["loss"]) < 1e-5
