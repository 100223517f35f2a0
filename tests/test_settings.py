import dataclasses
import math
from typing import ClassVar, Literal

import pytest

from andrea_jax.settings import UserError, accepts, check_fields, nearest, setting


@dataclasses.dataclass(frozen=True)
class Oven:
    SECTION: ClassVar[str] = "oven"
    trays: int = setting(2, "trays", at_least=1, at_most=4)
    heat: float = setting(180.0, "degrees", above=0)
    fan: bool = setting(False, "fan")
    mode: Literal["bake", "grill", "auto"] = setting("auto", "mode")
    minutes: int | None = setting(None, "None: by eye", at_least=1)
    scale: float | None = setting(None, "of the recipe", at_least=0)
    names: tuple[str, ...] = setting((), "of the dishes")

    def __post_init__(self) -> None:
        check_fields(self)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("trays", "2", "oven.trays = '2': expected a whole number"),
        ("trays", 2.0, "oven.trays = 2.0: expected a whole number; write 2"),
        ("trays", 2.5, "oven.trays = 2.5: expected a whole number"),
        ("trays", True, "oven.trays = True: expected a whole number"),
        ("trays", None, "oven.trays = None: expected a whole number"),
        ("heat", "180", "oven.heat = '180': expected a number"),
        ("heat", True, "oven.heat = True: expected a number"),
        ("heat", 10**400, f"oven.heat = {10**400}: expected a number"),
        ("fan", 1, "oven.fan = 1: expected True or False"),
        ("fan", "True", "oven.fan = 'True': expected True or False"),
        ("minutes", "5", "oven.minutes = '5': expected a whole number or None"),
        ("mode", "gril", "oven.mode = 'gril': expected 'bake' or 'grill' or 'auto'; did you mean 'grill'?"),
        ("mode", "zzz", "oven.mode = 'zzz': expected 'bake' or 'grill' or 'auto'"),
        ("mode", 3, "oven.mode = 3: expected 'bake' or 'grill' or 'auto'"),
    ],
)
def test_a_value_of_the_wrong_type_or_choice_is_refused_with_what_would_be_right(field, value, message):
    with pytest.raises(UserError) as error:
        Oven(**{field: value})
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("trays", 0, "oven.trays = 0: must be at least 1"),
        ("trays", 5, "oven.trays = 5: must be at most 4"),
        ("heat", 0.0, "oven.heat = 0.0: must be above 0"),
        ("heat", 0, "oven.heat = 0.0: must be above 0"),
        ("heat", -1, "oven.heat = -1.0: must be above 0"),
        ("minutes", 0, "oven.minutes = 0: must be at least 1"),
        ("heat", math.inf, "oven.heat = inf: must be finite"),
        ("heat", math.nan, "oven.heat = nan: must be finite"),
        ("scale", -math.inf, "oven.scale = -inf: must be finite"),
    ],
)
def test_a_value_outside_its_range_is_refused_with_the_limit(field, value, message):
    with pytest.raises(UserError) as error:
        Oven(**{field: value})
    assert str(error.value) == message


@pytest.mark.parametrize(("field", "value"), [("trays", 1), ("trays", 4), ("minutes", 1), ("scale", 0.0)])
def test_the_limits_themselves_are_accepted(field, value):
    assert getattr(Oven(**{field: value}), field) == value


def test_a_whole_number_where_a_float_is_expected_is_stored_as_a_float():
    oven = Oven(heat=200, scale=2)
    assert (oven.heat, type(oven.heat)) == (200.0, float)
    assert (oven.scale, type(oven.scale)) == (2.0, float)
    assert oven == Oven(heat=200.0, scale=2.0)


@pytest.mark.parametrize(("value", "right"), [((), True), (("a", "b"), True), (("a", 1), False), (["a"], False)])
def test_a_tuple_is_checked_item_by_item(value, right):
    if right:
        assert Oven(names=value).names == value
    else:
        with pytest.raises(UserError, match=r"oven\.names"):
            Oven(names=value)


def test_a_config_without_a_section_is_called_by_its_class():
    @dataclasses.dataclass(frozen=True)
    class Plain:
        size: int = dataclasses.field(metadata={"at_least": 1})

    with pytest.raises(UserError, match=r"^Plain\.size = 0: must be at least 1$"):
        check_fields(Plain(0))


def test_no_type_stands_in_for_another():
    assert not accepts(int, True)
    assert not accepts(float, 1)
    assert not accepts(Literal[1, 2], True)
    assert not accepts(Literal["1"], 1)
    assert accepts(int | None, None)


def test_a_misspelt_name_gets_the_nearest_one_and_a_strange_one_the_list():
    known = ["warmup", "peak", "floor"]
    assert nearest("warmpu", known) == "; did you mean warmup?"
    assert nearest("zzz", known) == "; there are floor, peak, warmup"
