import pytest

from andrea_jax import EngineConfig, UserError
from andrea_jax.schedule import ScheduleConfig
from andrea_jax.train.config import RunConfig, TrainConfig


def test_a_batch_that_does_not_divide_into_its_parts_is_refused():
    with pytest.raises(UserError, match=r"train\.batch_size = 16 does not divide into train\.accumulate = 3 parts"):
        TrainConfig(batch_size=16, accumulate=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": EngineConfig(dtype="float16")}, "use 'bfloat16'"),
        ({"schedule": ScheduleConfig("wsd", decay=50), "train": TrainConfig(steps=10)}, "longer than the schedule, 10"),
    ],
)
def test_sections_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        RunConfig(**changes)
