import dataclasses
import typing

import gin
import pytest
from gin_settings import CONFIGS, run_config
from settings_table import DEFAULT_PRESET, SECTIONS, SETTINGS, format_config, names_in

from andrea_jax.presets import PRESETS, andrea_12m
from andrea_jax.settings import UserError
from andrea_jax.train.config import RunConfig


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a gin file into the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        (tmp_path / name).write_text(text)
        return name

    return write


def refusal(*arguments, **keywords):
    with pytest.raises(UserError) as caught:
        run_config(*arguments, **keywords)
    return str(caught.value)


def test_nothing_bound_is_the_default_run():
    assert run_config() == (RunConfig(), {})
    assert RunConfig().model == PRESETS[DEFAULT_PRESET]()


def test_every_section_calls_itself_what_users_call_it():
    for section, (_, kind) in SECTIONS.items():
        assert getattr(kind, "SECTION", kind.__name__) == section


def test_every_setting_can_be_bound_to_its_default_in_each_place(write):
    """As a file, as --gin_bindings and as flags; a None, a choice and a text come out as what they were."""
    names = [name for name in SETTINGS if name != "ModelConfig.preset"]
    lines = [f"{name} = {SETTINGS[name].default!r}" for name in names]
    config, bound = run_config([write("all.gin", "\n".join(lines))])
    assert config == RunConfig()
    assert bound.keys() == set(names)
    assert run_config(bindings=lines)[0] == RunConfig()
    assert run_config(flags={name: str(SETTINGS[name].default) for name in names})[0] == RunConfig()


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_has_a_config_file(name):
    assert run_config([name])[0].model == PRESETS[name]()


def test_each_config_file_has_a_run_folder_of_its_own():
    configs = {path.stem: run_config([path.stem]) for path in CONFIGS.glob("*.gin")}
    assert all("train.run_dir" in bound for _, bound in configs.values())
    assert len({config.train.run_dir for config, _ in configs.values()}) == len(configs)


def test_the_printed_config_reads_back_equal(write):
    config, _ = run_config(
        ["andrea_120m_card"],
        ["train.eval_windows = None", "schedule.peak = 1e-05", "train.sample_prompt = 'a \\'b\\' \"c\"\\n# ü\\\\'"],
        {"ModelConfig.dropout": "0.25", "data.mask_documents": "true", "engine.remat": "none"},
    )
    assert config != RunConfig()
    again, bound = run_config([write("config.gin", format_config(config))])
    assert again == config
    assert bound.keys() == SETTINGS.keys() - {"ModelConfig.preset"}


def test_fields_replace_those_of_the_preset_wherever_they_stand():
    config, bound = run_config(bindings=["ModelConfig.n_layer = 3", "ModelConfig.preset = 'andrea_12m'"])
    assert config.model == andrea_12m(n_layer=3)
    assert "ModelConfig.vocab_size" not in bound
    flags = {"ModelConfig.vocab_size": "300"}
    assert run_config(bindings=["ModelConfig.preset = 'andrea_12m'"], flags=flags)[1].keys() == {
        "ModelConfig.preset",
        "ModelConfig.vocab_size",
    }


def test_later_places_override_earlier_ones(write):
    first = write("first.gin", "train.steps = 1\ntrain.seed = 1\ntrain.batch_size = 1\ntrain.log_every = 1")
    second = write("second.gin", "train.seed = 2\ntrain.batch_size = 2\ntrain.log_every = 2")
    bindings = ["train.batch_size = 3\ntrain.log_every = 3"]
    config, bound = run_config([first, second], bindings, {"train.log_every": "4"})
    train = config.train
    assert (train.steps, train.seed, train.batch_size, train.log_every) == (1, 2, 3, 4)
    assert bound["train.seed"] == "second.gin, line 1"
    assert (bound["train.batch_size"], bound["train.log_every"]) == ("--gin_bindings", "--gin.train.log_every")
    assert run_config([second, first])[0].train.seed == 1


def test_a_key_twice_in_one_place_names_both_values(write):
    path = write("a.gin", "train.steps = 5\n\ntrain:\n  seed = 1\n  steps = 7\n")
    assert refusal([path]) == "train.steps is bound twice: 5 (a.gin, line 1) and 7 (a.gin, line 5)"
    message = refusal(bindings=["train.steps = 5", "train.steps = 6"])
    assert message == "train.steps is bound twice: 5 (--gin_bindings) and 6 (--gin_bindings)"
    assert "x is bound twice: 1" in refusal(bindings=["x = 1", "x = 2", "train.steps = %x"])


def test_an_includer_overrides_what_it_includes(write):
    write("base.gin", "train.steps = 5\ntrain.seed = 5")
    for text in ("include 'base.gin'\ntrain.steps = 6", "train.steps = 6\ninclude 'base.gin'"):
        config, _ = run_config([write("top.gin", text)])
        assert (config.train.steps, config.train.seed) == (6, 5)


def test_an_include_is_found_beside_the_file_that_includes_it(write, tmp_path):
    (tmp_path / "folder").mkdir()
    write("folder/base.gin", "train.steps = 5")
    write("folder/top.gin", "include 'base.gin'")
    assert run_config(["folder/top.gin"])[0].train.steps == 5


def test_a_file_that_includes_itself_is_refused(write):
    write("a.gin", "include 'b.gin'")
    write("b.gin", "include 'a.gin'")
    assert refusal(["a.gin"]) == "a.gin includes itself"


def test_macros(write):
    path = write("a.gin", "width = 96\nModelConfig.d_model = %width\nother = %width\ndata.piece_bytes = %other")
    config, _ = run_config([path])
    assert (config.model.d_model, config.data.piece_bytes) == (96, 96)
    assert run_config([path], ["width = 64"])[0].model.d_model == 64
    assert run_config([path], flags={"train.batch_size": "%width"})[0].train.batch_size == 96


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = 3", "a.gin, line 1: steps = 3 is never used; did you mean train.steps?"),
        ("wdth = 3\ntrain.steps = %width", "a.gin, line 2: %width is used but never bound; did you mean wdth?"),
        ("x = %x\ntrain.steps = %x", "a macro is defined by itself"),
    ],
)
def test_a_macro_that_is_unused_or_unbound_is_refused(write, text, message):
    assert refusal([write("a.gin", text)]) == message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train.stepz", "no setting train.stepz; did you mean train.steps?"),
        ("trian.sed", "no setting trian.sed; did you mean train.seed?"),
        ("model.d_model", "no setting model.d_model; did you mean ModelConfig.d_model?"),
        ("train.peak", "no setting train.peak; did you mean schedule.peak?"),
        ("qqqq.zzzz", "no setting qqqq.zzzz; there are ModelConfig, data,"),
    ],
)
def test_an_unknown_name_comes_with_the_nearest_in_each_place(write, name, message):
    assert refusal([write("a.gin", f"\n{name} = 1")]).startswith(f"a.gin, line 2: {message}")
    assert refusal(bindings=[f"{name} = 1"]).startswith(f"--gin_bindings: {message}")
    assert refusal(flags={name: "1"}).startswith(f"--gin.{name}: {message}")


def test_an_unknown_preset_comes_with_the_nearest():
    message = "ModelConfig.preset = 'andrea12m': no such preset; did you mean andrea_12m?"
    assert refusal(flags={"ModelConfig.preset": "andrea12m"}) == message
    assert "ModelConfig.preset = [1]: no such preset" in refusal(bindings=["ModelConfig.preset = [1]"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.steps = 1e5", "train.steps = 100000.0: expected a whole number; write 100000 (a.gin, line 1)"),
        ("train.steps = 1.5", "train.steps = 1.5: expected a whole number (a.gin, line 1)"),
        ("train.steps = True", "train.steps = True: expected a whole number (a.gin, line 1)"),
        ("train.steps = 0", "train.steps = 0: must be at least 1 (a.gin, line 1)"),
        (f"train.steps = 1{'0' * 400}", f"train.steps = 1{'0' * 400}: must be at most 2147483647 (a.gin, line 1)"),
        ("train.tensorboard = 1", "train.tensorboard = 1: expected True or False (a.gin, line 1)"),
        ("schedule.peak = 1e999", "schedule.peak = inf: must be finite (a.gin, line 1)"),
        ("data.path = 3", "data.path = 3: expected a text (a.gin, line 1)"),
        ("engine.remat = 'blok'", "expected 'none' or 'attention' or 'block'; did you mean 'block'? (a.gin, line 1)"),
        ("ModelConfig.d_model = 130", "does not divide into n_head = 4 heads; d_model = 128 would (a.gin, line 1)"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(write, text, message):
    assert refusal([write("a.gin", text)]).endswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\ndata.path = my.txt", "line 2: data.path = my.txt: 'my' is no value; text stands in quotes"),
        ("train.tensorboard = true", "line 1: train.tensorboard = true: 'true' is no value"),
        ("train.steps = (3", "line "),
        ("train.steps 3", "line 1: train.steps 3: Couldn't parse statement"),
        ("train.steps = 3 4", "line 1: train.steps = 3 4: Expected newline."),
        ("train.steps = 'abc", "line 1: train.steps = 'abc: "),
        ("train.steps = @train()", "line 1: train.steps = @train(): @train: no setting takes a reference"),
        ("import os", "line 1: import os: has no effect"),
        ("eval/train.steps = 3", "line 1: eval/train.steps: scopes have no effect; write train.steps"),
        ("include 'andrea_21m'", "line 1: include 'andrea_21m': no such file; did you mean andrea_12m?"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_line(write, text, message):
    assert refusal([write("a.gin", text)]).startswith(f"a.gin, {message}")


def test_a_missing_file_comes_with_the_nearest(write):
    write("mine.gin", "")
    assert refusal(["mnie.gin"]) == "--gin_file=mnie.gin: no such file; did you mean mine.gin?"
    assert refusal(["andrea_12"]) == "--gin_file=andrea_12: no such file; did you mean andrea_12m?"
    assert "there are andrea_120m," in refusal(["qqqq"])


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "a.gin").write_bytes(b"\xff\xfe")
    assert "a.gin: cannot be read as text" in refusal([str(tmp_path / "a.gin")])


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("data.path", "my.txt", "my.txt"),
        ("data.path", "a b/ü #1.txt", "a b/ü #1.txt"),
        ("data.path", "'quoted'", "quoted"),
        ("data.path", "none", "none"),
        ("data.path", "2024", "2024"),
        ("data.path", "2024-05/x", "2024-05/x"),
        ("data.path", "@x", "@x"),
        ("train.sample_prompt", "", ""),
        ("train.sample_prompt", "1\n2", "1\n2"),
        ("train.wandb", "None", None),
        ("train.wandb", "none", None),
        ("train.wandb", "project", "project"),
        ("engine.remat", "none", "none"),
        ("train.tensorboard", "false", False),
        ("train.tensorboard", "True", True),
        ("optimizer.clip_norm", "none", None),
        ("optimizer.clip_norm", "2", 2.0),
        ("schedule.peak", "1e-3", 1e-3),
        ("train.steps", "1_000", 1000),
    ],
)
def test_the_text_of_a_flag_becomes_what_its_setting_takes(name, text, value):
    section, field = name.split(".")
    result = getattr(getattr(run_config(flags={name: text})[0], section), field)
    assert result == value
    assert type(result) is type(value)


def test_a_flag_of_the_wrong_type_shows_the_value():
    assert refusal(flags={"train.steps": "1e5"}) == "train.steps = 100000.0: expected a whole number; write 100000"
    assert refusal(flags={"train.steps": "3 4"}) == "train.steps = '3 4': expected a whole number"


def test_gin_is_left_empty(write):
    path = write("a.gin", "train.steps = 5")
    run_config([path])
    assert gin.config_str().strip() == ""
    refusal([path], ["train.seed = 'x'"])
    assert gin.config_str().strip() == ""
    assert run_config()[0] == RunConfig()


def test_the_config_files_work_with_gin_alone():
    """Sections are registered: gin's own parser and its configurables give the same objects."""
    gin.parse_config_file(str(CONFIGS / "andrea_12m.gin"))
    try:
        assert gin.get_configurable("andrea_jax.ModelConfig")() == andrea_12m()
        assert gin.get_configurable("andrea_jax.train")().steps == 43587
    finally:
        gin.clear_config()


def test_a_section_is_named_whole_or_by_setting():
    names = names_in(["engine", "ModelConfig.vocab_size"])
    engine = {f"engine.{field.name}" for field in dataclasses.fields(typing.get_type_hints(RunConfig)["engine"])}
    assert names == engine | {"ModelConfig.vocab_size"}
    with pytest.raises(ValueError, match="modl"):
        names_in(["modl"])


def test_the_nano_file_says_what_happens_without_a_file():
    assert run_config(["andrea_nano"])[0] == RunConfig()
