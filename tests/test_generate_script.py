import io
import json

import flags
import generate as script
import jax
import numpy as np
import pytest

from andrea_jax.config import ModelConfig
from andrea_jax.data.tokenizer import bytes_tokenizer, chars_tokenizer
from andrea_jax.generate import generate
from andrea_jax.parameters import abstract_params
from andrea_jax.sampling import SamplingConfig

CONFIG = ModelConfig(vocab_size=257, context_length=16, d_model=16, n_layer=1, n_head=2)
PLAIN = SamplingConfig(ignore_end=True)


def random_params():
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: 0.3 * rng.standard_normal(leaf.shape, np.float32), abstract_params(CONFIG))


MODEL = (random_params(), CONFIG, bytes_tokenizer())


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs the script on MODEL and returns (exit code, stdout, stderr)."""

    def call(*arguments, model=MODEL, checkpoint=("--checkpoint=runs/x",)):
        monkeypatch.setattr(script, "find_checkpoint", lambda path, step: (path, step or 70))
        monkeypatch.setattr(script, "load_checkpoint", lambda path, step, weights: model)
        argv = ["experiments/generate.py", *checkpoint, *arguments]
        with pytest.raises(SystemExit) as caught:
            flags.main(script.run, script.DESCRIPTION, script.OWN, uses=["engine"], argv=argv)
        return caught.value.code, *capsys.readouterr()

    return call


def test_a_prompt_is_printed_with_its_continuation(call):
    (text,) = generate(*MODEL, ["ab"], PLAIN, 12, seed=3)
    expected = (0, f"ab{text}\n", "")
    assert call("--prompt=ab", "--max_tokens=12", "--seed=3", "--ignore_end") == expected
    assert call("--prompt=ab", "--max_tokens=12", "--seed=3", "--ignore_end", "--stream") == expected


def test_every_sampling_flag_has_its_effect(call):
    def text(*arguments):
        return call("--max_tokens=12", "--ignore_end", *arguments)[1]

    plain = text()
    for flag in ("--temperature=0", "--top_k=1", "--top_p=0.01", "--min_p=1", "--seed=1", "--stop=T"):
        assert text(flag) != plain
    assert text("--stop=\0\0\0") == plain
    assert text("--gin.engine.dtype=float32") == plain


def test_json_holds_texts_settings_and_step(call):
    code, out, _ = call(
        "--json", "--prompt=a", "--prompt=b", "--max_tokens=9", "--ignore_end", "--step=30", "--top_k=7"
    )
    answer = json.loads(out)
    texts = generate(*MODEL, ["a", "b"], SamplingConfig(ignore_end=True, top_k=7), 9)
    assert code == 0
    assert answer.pop("samples") == [{"prompt": p, "text": t} for p, t in zip("ab", texts, strict=True)]
    assert answer == {
        "step": 30, "seed": 0, "max_tokens": 9, "temperature": 0.8, "top_k": 7, "top_p": 1.0, "min_p": 0.0,
        "stop": [], "ignore_end": True,
    }  # fmt: skip


def test_several_prompts_are_one_batch(call):
    texts = generate(*MODEL, ["a", "bcd"], PLAIN, 9)
    out = call("--prompt=a", "--prompt=bcd", "--max_tokens=9", "--ignore_end")[1]
    assert out == f"a{texts[0]}\n---\nbcd{texts[1]}\n"


def test_text_streams_on_a_terminal(call, monkeypatch):
    shown = []
    monkeypatch.setattr(script, "show", lambda pieces, prompt: shown.append((prompt, list(pieces))))
    monkeypatch.setattr("sys.stdout", Terminal())
    call("--prompt=ab", "--max_tokens=12", "--ignore_end")
    assert len(shown[0][1]) > 1
    call("--prompt=ab", "--max_tokens=12", "--nostream")
    call("--max_tokens=12", "--json")
    assert len(shown) == 1


def test_interactive_answers_each_prompt_and_goes_on_after_a_wrong_one(call, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n" + "x" * 16 + "\nab\n"))
    texts = [generate(*MODEL, ["ab"], PLAIN, 9, seed)[0] for seed in (5, 7)]
    code, out, err = call("--interactive", "--max_tokens=9", "--seed=5", "--ignore_end")
    assert (code, out) == (0, f"> ab{texts[0]}\n> > ab{texts[1]}\n> \n")
    assert err.startswith("error: a prompt has 17 tokens")


def test_interactive_ends_cleanly_at_ctrl_c(call, monkeypatch):
    def interrupted(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert call("--interactive") == (0, "\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature=-1"], "sample.temperature = -1.0: must be at least 0"),
        (["--top_p=0"], "sample.top_p = 0.0: must be above 0"),
        (["--max_tokens=0"], "--max_tokens=0"),
        (["--stop="], "sample.stop: an empty text"),
        (["--prompt=" + "x" * 16], "a prompt has 17 tokens with BOS, but context_length is 16"),
        (["--prompt=a\udcff"], r"--prompt='a\udcff' is not UTF-8 text"),
        (["--stop=\udcff"], r"--stop='\udcff' is not UTF-8 text"),
        (["--interactive", "--json"], "--interactive does not go with --json"),
        (["--interactive", "--prompt=a"], "--interactive does not go with --prompt"),
        (["--stream", "--json"], "--stream prints one text"),
        (["--stream", "--prompt=a", "--prompt=b"], "--stream prints one text"),
        (["--gin.train.steps=3"], "train.steps would never be used"),
    ],
    ids=str,
)
def test_wrong_input_is_one_line_and_exit_code_2(call, arguments, message):
    code, out, err = call(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_prompt_that_the_tokenizer_does_not_know_names_the_character(call):
    model = (*MODEL[:2], chars_tokenizer("ab", byte_fallback=False))
    code, _, err = call("--prompt=abz", model=model)
    assert code == 2
    assert "'z'" in err


def test_a_missing_checkpoint_flag_is_named(call):
    code, _, err = call(checkpoint=())
    assert code == 2
    assert "--checkpoint is missing" in err
