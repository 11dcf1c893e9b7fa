"""What values say of their intervals, also after a checkpoint, on another device, and in a picture."""

import math

import pytest
import torch
from torch.testing import assert_close

from flsv.core import IntervalKind, Values
from flsv.core.values import on_cpu

VALUE = torch.tensor([0.5, 1.0])
LOW = torch.tensor([0.25, 0.5])
HIGH = torch.tensor([0.75, 2.5])

KINDS = {
    "normal": Values(VALUE, half_width=VALUE - LOW),
    "t": Values(VALUE, half_width=VALUE - LOW, freedom=4.0),
    "t by client": Values(VALUE, half_width=VALUE - LOW, freedom=torch.tensor([4.0, math.inf])),
    "ends": Values(VALUE, ends=(LOW, HIGH)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_intervals_are_the_same_after_a_checkpoint_and_on_the_host(kind):
    values = KINDS[kind]
    state = values.state_dict()
    assert ("ends" in state) == (
        kind != "normal"
    )  # earlier versions have written normal intervals only

    for restored in (Values(**state), on_cpu({"metric": values})["metric"]):
        assert_close(restored.low, values.low, check_dtype=False)
        assert_close(restored.high, values.high, check_dtype=False)
        assert restored.interval_kind.to_plain() == values.interval_kind.to_plain()
        assert_close(restored.error_bars, (restored.low, restored.high))


@pytest.mark.parametrize(
    ("kind", "plain", "common_freedom"),
    [
        ("normal", None, None),
        ("t", 4.0, 4),
        ("t by client", [4.0, math.inf], 4),
        ("ends", "ends", None),
    ],
)
def test_kind_of_intervals_is_the_same_after_run_json(kind, plain, common_freedom):
    interval_kind = KINDS[kind].interval_kind
    assert interval_kind.to_plain() == plain

    in_json = [4.0, None] if kind == "t by client" else plain  # JSON has no infinity
    restored = IntervalKind.from_plain(in_json)
    assert restored.common_freedom == interval_kind.common_freedom == common_freedom
    assert_close(
        restored.standard_error(LOW, HIGH),
        interval_kind.standard_error(LOW, HIGH),
        equal_nan=True,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ends": (LOW, HIGH), "half_width": LOW}, "Pass half_width=None"),
        ({"ends": (LOW, HIGH[:1])}, r"two tensors \[2\]"),
    ],
)
def test_intervals_in_two_ways_or_of_other_clients_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Values(VALUE, **options)
