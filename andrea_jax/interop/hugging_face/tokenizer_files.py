"""tokenizer.json beside a model, and which of its ids begin and end a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from andrea_jax.data.bpe import byte_letters
from andrea_jax.data.hf_tokenizer import BOS_NAMES, hf_tokenizer
from andrea_jax.data.tokenizer import BOS, Tokenizer
from andrea_jax.interop.hugging_face.safetensors_files import read_json
from andrea_jax.settings import UserError

MARK = BOS_NAMES[0]  # how BOS is written in the files of our own tokenizers


def read_tokenizer(folder: Path, options: dict[str, Any], vocab_size: int) -> tuple[Tokenizer, list[str]]:
    """The tokenizer of a model's folder, and the marks that were left out because the model has no row for them.

    BOS is config.json's bos_token_id, else tokenizer_config.json's bos_token, else guessed by name. The ends are the
    eos_token_id of generation_config.json, else of config.json.

    Raises:
        UserError: no tokenizer.json, or one with more ids than the model.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"{folder}: no tokenizer.json is in it; transformers writes one: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER). Or give another with --tokenizer"
        )
    content, definition = read_json(path), path.read_text(encoding="utf-8")
    tokenizer = hf_tokenizer(definition)
    added = content.get("added_tokens") or []
    marks = {mark["content"]: mark["id"] for mark in added if mark["id"] < vocab_size}
    left_out = [mark["content"] for mark in added if mark["id"] >= vocab_size]  # Gemma 3's has one, for pictures
    if left_out:
        content["added_tokens"] = [mark for mark in added if mark["id"] < vocab_size]
        definition = json.dumps(content, ensure_ascii=False)
    bos = _bos(folder, options, marks)
    ends = [i for i in _ends(folder, options, marks) if i != (tokenizer.bos if bos is None else bos)]
    return fitting(hf_tokenizer(definition, bos, ends), vocab_size), left_out


def fitting(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """The tokenizer. Raises UserError if the model lacks some of its ids."""
    if tokenizer.size > vocab_size:
        raise UserError(f"the tokenizer has {tokenizer.size} ids, but the model's vocab_size is {vocab_size}")
    return tokenizer


def _bos(folder: Path, options: dict[str, Any], marks: dict[str, int]) -> int | None:
    found = options.get("bos_token_id")
    if found in marks.values():  # else it is the default of a class, and no mark of this tokenizer
        return found
    name = _optional(folder / "tokenizer_config.json").get("bos_token")
    return marks.get(str(name.get("content") if isinstance(name, dict) else name))


def _ends(folder: Path, options: dict[str, Any], marks: dict[str, int]) -> list[int]:
    found = _optional(folder / "generation_config.json").get("eos_token_id", options.get("eos_token_id"))
    listed: list[Any] = found if isinstance(found, list) else [found]
    return [i for i in listed if i in marks.values()]


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def ends_of(tokenizer: Tokenizer) -> list[int]:
    """The ids that end a text. Documents of our own models end where the next begins, at BOS."""
    return [*tokenizer.ends] or [i for i in (tokenizer.bos,) if i is not None]


def token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """bos_token_id and eos_token_id."""
    ends = ends_of(tokenizer)
    return {"bos_token_id": tokenizer.bos, "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None)}


def write_tokenizer(folder: Path, tokenizer: Tokenizer, context_length: int) -> None:
    """tokenizer.json and tokenizer_config.json, which AutoTokenizer reads."""
    definition = tokenizer_json(tokenizer)
    (folder / "tokenizer.json").write_text(definition, encoding="utf-8")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],  # GPT-2 would add the embeddings of token types
    }
    names = {i: name for name, i in _vocabulary(definition).items()}
    if tokenizer.bos is not None:
        settings["bos_token"] = names[tokenizer.bos]
    for end in ends_of(tokenizer)[:1]:
        settings["eos_token"] = names[end]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _vocabulary(definition: str) -> dict[str, int]:
    from tokenizers import Tokenizer as Library

    return Library.from_str(definition).get_vocab(with_added_tokens=True)


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """The text of a tokenizer.json that gives the same ids for valid UTF-8, after BOS where there is one.

    Kind chars without byte_fallback: a character that is not among its own is left out there and refused here.
    """
    if tokenizer.kind == "hf":
        return tokenizer.recipe["definition"]
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Library

    if tokenizer.kind == "chars":
        library = Library(models.BPE(_characters(tokenizer), [], byte_fallback=tokenizer.bos is not None))
        library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    else:
        letters = byte_letters()
        spelled = ["".join(letters[byte] for byte in piece) for piece in tokenizer.pieces]
        merges = [(spelled[left], spelled[right]) for left, right in tokenizer.recipe.get("merges", [])]
        vocabulary = {text: i for i, text in enumerate(spelled) if i != BOS} | {MARK: BOS}
        library = Library(models.BPE(vocabulary, merges))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        library.decoder = decoders.ByteLevel()
    if tokenizer.bos is not None:
        library.add_special_tokens([AddedToken(MARK, special=True)])
        library.post_processor = processors.TemplateProcessing(single=f"{MARK} $A", special_tokens=[(MARK, BOS)])
    return library.to_str()


def _characters(tokenizer: Tokenizer) -> dict[str, int]:
    if tokenizer.bos is None:
        return {piece.decode(): i for i, piece in enumerate(tokenizer.pieces)}
    single = {f"<0x{byte:02X}>": byte for byte in range(BOS)}
    return single | {MARK: BOS} | {p.decode(): i for i, p in enumerate(tokenizer.pieces) if i > BOS}
