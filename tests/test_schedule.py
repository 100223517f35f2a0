import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from andrea_jax.schedule import ScheduleConfig, make_schedule
from andrea_jax.settings import UserError

ULP = 2.0**-23


def rates(config, steps, times):
    return np.asarray(jax.jit(jax.vmap(make_schedule(config, steps)))(jnp.asarray(times)), np.float64)


def test_the_lessons_warmup_factor():
    """lr(t) = cosine(t) * min(1, (t + 1) / 2000), t from 0: factor 0.0005 at t = 0, 1 at t = 1999."""
    factor = make_schedule(ScheduleConfig("constant", peak=1.0, warmup=2000), 200_000)
    assert factor(0) == np.float32(0.0005)
    assert factor(1998) < 1
    assert factor(1999) == factor(2000) == factor(199_999) == 1


def test_cosine_times_warmup_equals_float64():
    steps, peak, floor, warmup = 200_000, 3e-4, 0.1, 2000
    t = np.array([0, 1, 999, 1998, 1999, 2000, 50_000, 100_000, 150_001, 199_998, 199_999, 200_000, 10**6])
    cosine = floor + (1 - floor) * (1 + np.cos(math.pi * np.minimum(t / steps, 1))) / 2
    expected = peak * cosine * np.minimum(1, (t + 1) / warmup)
    found = rates(ScheduleConfig("cosine", peak, floor, warmup), steps, t)
    # pi t / length is off by an ulp of up to pi; the rest are single roundings.
    np.testing.assert_allclose(found, expected, rtol=0, atol=8 * ULP * peak)


def test_the_ends_of_the_cosine():
    schedule = make_schedule(ScheduleConfig("cosine", peak=1.0, floor=0.25, warmup=0), 100)
    assert schedule(0) == 1
    assert schedule(50) == pytest.approx((1 + 0.25) / 2, rel=4 * ULP)
    assert schedule(100) == schedule(10**6) == 0.25


def test_warmup_stable_decay_by_hand():
    config = ScheduleConfig("wsd", peak=2.0, floor=0.5, warmup=4, length=20, decay=8)
    table = {0: 0.5, 1: 1.0, 2: 1.5, 3: 2.0, 4: 2.0, 12: 2.0, 13: 1.875, 16: 1.5, 19: 1.125, 20: 1.0, 99: 1.0}
    np.testing.assert_array_equal(rates(config, 1000, list(table)), list(table.values()))


def test_wsd_decays_over_the_last_fifth_by_default():
    config = ScheduleConfig("wsd", peak=1.0, floor=0.0, warmup=0)
    np.testing.assert_array_equal(rates(config, 40, [0, 31, 32, 34, 36, 40]), [1, 1, 1, 0.75, 0.5, 0])
    np.testing.assert_array_equal(rates(config, 2, [0, 1, 2]), [1, 1, 0])


def test_inverse_square_root_by_hand():
    """A quarter of the peak at 16 times the warm-up, however long the run."""
    table = {0: 0.5, 1: 1.0, 3: 2.0, 15: 1.0, 63: 0.5, 255: 0.25}
    for steps in (10, 1000):
        found = rates(ScheduleConfig("inverse_sqrt", peak=2.0, warmup=4), steps, list(table))
        np.testing.assert_array_equal(found, list(table.values()))


def test_inverse_square_root_is_the_transformers_schedule():
    """D^-0.5 min(n^-0.5, n warmup^-1.5) at step n = t + 1, of which D^-0.5 warmup^-0.5 is the peak."""
    n, warmup, D = np.array([1, 2, 100, 3999, 4000, 4001, 100_000]), 4000, 512
    expected = D**-0.5 * np.minimum(n**-0.5, n * warmup**-1.5)
    found = rates(ScheduleConfig("inverse_sqrt", peak=(D * warmup) ** -0.5, warmup=warmup), 10**5, n - 1)
    np.testing.assert_allclose(found, expected, rtol=4 * ULP)  # a quotient, a root and two products


@pytest.mark.parametrize("warmup", [0, 1])
def test_no_warmup_starts_at_the_peak(warmup):
    np.testing.assert_array_equal(rates(ScheduleConfig("constant", 3.0, warmup=warmup), 10, [0, 1, 9]), [3, 3, 3])


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_a_length_of_its_own_replaces_the_steps(kind):
    times = [0, 10, 15, 20, 25]
    own = rates(ScheduleConfig(kind, 1.0, floor=0.1, warmup=0, length=20), 1000, times)
    np.testing.assert_array_equal(own, rates(ScheduleConfig(kind, 1.0, floor=0.1, warmup=0), 20, times))
    assert own[-1] == np.float32(0.1)


def test_the_rate_is_float32_also_for_traced_steps():
    schedule = make_schedule(ScheduleConfig(), 100)
    assert schedule(3).dtype == jax.jit(schedule)(jnp.int32(3)).dtype == jnp.float32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"kind": "cosine", "decay": 5},
            "schedule.decay = 5 has no effect with schedule.kind = 'cosine'; only with 'wsd'",
        ),
        ({"kind": "constant", "length": 5}, "schedule.length = 5 has no effect with schedule.kind = 'constant'"),
        ({"kind": "constant", "floor": 0.5}, "schedule.floor = 0.5 has no effect with schedule.kind = 'constant'"),
        (
            {"kind": "inverse_sqrt", "length": 5},
            "schedule.length = 5 has no effect with schedule.kind = 'inverse_sqrt'",
        ),
        ({"peak": 0}, "schedule.peak = 0.0: must be above 0"),
        ({"floor": 1.5}, "schedule.floor = 1.5: must be at most 1"),
        ({"warmup": -1}, "schedule.warmup = -1: must be at least 0"),
    ],
)
def test_settings_without_effect_or_outside_their_range_are_refused(fields, message):
    with pytest.raises(UserError) as error:
        ScheduleConfig(**fields)
    assert str(error.value) == message


@pytest.mark.parametrize(("fields", "steps"), [({"length": 5}, 100), ({}, 5)])
def test_a_decay_longer_than_the_schedule_is_refused(fields, steps):
    with pytest.raises(UserError, match=r"^schedule\.decay = 6 is longer than the schedule, 5 steps$"):
        make_schedule(ScheduleConfig("wsd", decay=6, **fields), steps)
