"""What a run says of the coalitions that it will train."""

from pathlib import Path
from typing import Any

import pytest

from flsv.metrics import ShadowShapley
from helpers.coalitions_by_hand import data, shadow_loop
from helpers.fits import fit
from helpers.models import Plain, network


def test_cost_of_coalitions_is_said_before_the_first_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logged: dict[str, Any] = {"performance": "val_acc", "mode": "max"}
    messages = []
    for options in ({}, {"coalitions": "all"}, {"coalitions": [[0], [1, 2]]}, logged):
        caplog.clear()
        with caplog.at_level("INFO", "lightning.pytorch"):
            fit(
                shadow_loop(ShadowShapley(**options)),
                tmp_path,
                Plain(network(batch_norm=False)),
                data(),
                rounds=1,
            )
        (line,) = (
            text
            for text in caplog.messages
            if "trained after the run, each by a fit of its own," in text
        )
        messages.append(line)
    assert "each of 3 clients alone is trained" in messages[0]
    assert (
        "costs 1 more fit and 3 models' validations. The others' outputs are predicted."
        in messages[0]
    )
    assert "6 coalitions are trained" in messages[1]
    assert messages[1].endswith("costs 3 more fits and 6 models' validations.")
    assert "to predict outputs, train each client alone" in messages[2]
    assert "logged values have no outputs" in messages[3]
