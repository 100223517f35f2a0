"""Evaluate a checkpoint on the whole validation split of its corpus, or on a text file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import flags
from absl import flags as absl_flags

from andrea_jax.checkpoint import find_checkpoint, load_checkpoint, read_meta, takes_average
from andrea_jax.config import ModelConfig
from andrea_jax.data.config import DataConfig
from andrea_jax.data.shards import Tokens, tokens_in_memory
from andrea_jax.data.tokenizer import Tokenizer
from andrea_jax.data.windows import eval_batches
from andrea_jax.evaluate import evaluate
from andrea_jax.settings import UserError
from andrea_jax.train.config import RunConfig
from andrea_jax.train.corpus import open_corpus
from andrea_jax.train.loop import describe

FLAGS = absl_flags.FlagValues()
absl_flags.DEFINE_string("checkpoint", None, "run folder, or one checkpoint in it", flag_values=FLAGS)
absl_flags.DEFINE_integer("step", None, "checkpoint of this step; default: the newest", flag_values=FLAGS)
flags.define_weights(FLAGS)
absl_flags.DEFINE_string("text", None, "evaluate on this file instead of the validation split", flag_values=FLAGS)
absl_flags.DEFINE_bool("json", False, "print one JSON object", flag_values=FLAGS)


def run(config: RunConfig, bound: dict[str, str]) -> None:
    if FLAGS["checkpoint"].value is None:
        raise UserError("--checkpoint is missing: the run folder to evaluate, such as --checkpoint runs/nano")
    folder, step = find_checkpoint(FLAGS["checkpoint"].value, FLAGS["step"].value)
    params, model, tokenizer = load_checkpoint(folder, step, FLAGS["weights"].value)
    check_model(config.model, model, bound)
    settings = read_meta(folder, step)["settings"]["data"]
    chosen = flags.bound_fields("data", config, bound)
    if "path" in chosen:
        chosen["tokenizer"] = saved_tokenizer(tokenizer, Path(config.data.prepared))
    data = DataConfig(**settings | chosen)
    text = FLAGS["text"].value
    tokens = text_tokens(text, tokenizer) if text else validation_tokens(config, model, data, tokenizer)
    batches = eval_batches(
        tokens,
        config.train.batch_size,
        model.context_length,
        config.train.eval_windows,
        data.mask_documents,
        tokenizer.bos,
    )
    found = evaluate(params, batches, model, tokenizer.byte_lengths, config.engine)
    average = takes_average(folder, step, FLAGS["weights"].value)
    source = text or f"the validation split of {data.path}"
    if FLAGS["json"].value:
        which = {"checkpoint": str(folder / str(step)), "step": step, "weights": "average" if average else "last"}
        print(json.dumps({**which, "data": source, **found}))
    else:
        averaged = ", averaged weights," if average else ""
        print(f"{folder / str(step)}{averaged} on {source}: {found['tokens']:,} tokens, {found['bytes']:,} bytes")
        print(describe(found))


def check_model(asked: ModelConfig, saved: ModelConfig, bound: dict[str, str]) -> None:
    """Refuses settings of the model that are not the checkpoint's."""
    names = {name.removeprefix("ModelConfig.") for name in bound if name.startswith("ModelConfig.")}
    different = [d for d in saved.differences(asked) if "preset" in names or d.partition(":")[0] in names]
    if different:
        raise UserError(f"the checkpoint holds another model (checkpoint != settings): {'; '.join(different)}")


def validation_tokens(config: RunConfig, model: ModelConfig, data: DataConfig, tokenizer: Tokenizer) -> Tokens:
    """The validation split of `data`, in the checkpoint's own tokenizer, also where the corpus has changed since."""
    _, corpus = open_corpus(dataclasses.replace(config, model=model, data=data))
    if corpus.tokenizer.to_dict() != tokenizer.to_dict():
        data = dataclasses.replace(data, tokenizer=saved_tokenizer(tokenizer, Path(data.prepared)))
        _, corpus = open_corpus(dataclasses.replace(config, model=model, data=data))
    return corpus.validation


def saved_tokenizer(tokenizer: Tokenizer, folder: Path) -> str:
    """The path of a file with the checkpoint's tokenizer, for a corpus that it has not seen."""
    digest = hashlib.blake2b(json.dumps(tokenizer.to_dict()).encode(), digest_size=6).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"tokenizer-{digest}.json"
    tokenizer.save(path)
    return str(path)


def text_tokens(path: str, tokenizer: Tokenizer) -> Tokens:
    """A whole file as tokens, a document of its own."""
    try:
        with open(path, "rb") as file:
            ids = tokenizer.encode(file.read())
    except OSError as error:
        raise UserError(f"--text {path}: {error.strerror}") from error
    return tokens_in_memory(ids if tokenizer.bos is None else [tokenizer.bos, *ids])


if __name__ == "__main__":
    fields = {field.name for field in dataclasses.fields(DataConfig)} - {"tokenizer", "byte_fallback"}
    data = [f"data.{name}" for name in sorted(fields)]
    uses = (*data, "ModelConfig", "engine", "train.batch_size", "train.eval_windows")
    flags.main(run, __doc__, FLAGS, uses)
