"""What a client that returns the model as it got it is paid, in the paper's game and without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toys import Plain, fit, network, toy_data

from flsv import Reporting
from flsv.aggregation import ShapleyWeighted
from flsv.attacks import FreeRider
from flsv.functional import normalize_shapley
from flsv.loop import FederatedLoop
from flsv.metrics import PartialFederatedShapley, SurrogateFederatedShapley

RIDER = 3
STRICT: dict[str, Any] = {"normalize": "positive", "weighting": "fixed", "init": None}


@pytest.mark.parametrize("seed", [1, 2])
def test_under_afedsv_a_free_rider_has_exactly_nothing_and_the_others_have_all(tmp_path: Path, seed: int) -> None:
    metrics = {
        "strict": SurrogateFederatedShapley(**STRICT),
        "paper": SurrogateFederatedShapley(),
        "null": PartialFederatedShapley(weighting="fixed"),
    }
    attacks: list[Any] = [FreeRider(clients=[RIDER])]
    loop = FederatedLoop(
        ShapleyWeighted("strict"), metrics, uploads=attacks, seed=seed, reporting=Reporting(table=False)
    )
    data = toy_data((1, 1, 1, 1), server_val=0.3)
    fit(loop, tmp_path, Plain(network(batch_norm=False)), data, rounds=6)
    honest = torch.arange(RIDER)
    assert loop.contributions["null"][RIDER] == 0
    assert loop.contributions["strict"][RIDER] == 0
    assert (loop.contributions["strict"][honest] > 0.01).all()
    assert loop.weights is not None
    assert loop.weights[RIDER] == 0
    assert loop.weights[honest].sum() == pytest.approx(1)
    assert loop.contributions["paper"][RIDER] > 0.1  # which is why there is another


def test_in_an_average_doing_nothing_pays_where_the_others_overshoot() -> None:
    """Two clients step twice as far as is best, the third does nothing: of a gain of 2/3 its value is 5/9."""
    steps = torch.tensor([2.0, 2.0, 0.0])

    def average(masks: torch.Tensor) -> torch.Tensor:
        return 1 - (masks @ steps / masks.sum(1).clamp_min(1) - 1).abs()

    def fixed(masks: torch.Tensor) -> torch.Tensor:
        return 1 - (masks @ steps / 3 - 1).abs()

    for game, expected in ((average, 5 / 9), (fixed, 0)):
        metric = PartialFederatedShapley(num_clients=3)
        metric.update(torch.arange(3), lambda masks, game=game: game(masks.float()))
        assert metric.compute()[2].item() == pytest.approx(expected)


def test_positive_normalization() -> None:
    values = torch.tensor([-1.0, 0.0, 2.0, 4.0, torch.nan])
    expected = torch.tensor([0.0, 0.0, 0.5, 1.0, torch.nan])
    torch.testing.assert_close(normalize_shapley(values, "positive"), expected, equal_nan=True)
    assert normalize_shapley(values)[1] == pytest.approx(0.2)  # min-max pays the client with value 0
    assert normalize_shapley(torch.tensor([-2.0, -1.0]), "positive").tolist() == [0, 0]
    rounding = torch.tensor([1e-9, 1.0])  # what is left of a null player's 0 in float32
    assert normalize_shapley(rounding, "positive").tolist() == [0, 1]
    with pytest.raises(ValueError, match="expected"):
        normalize_shapley(values, "max")  # type: ignore[arg-type]
