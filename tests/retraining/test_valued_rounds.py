"""By default ten rounds of a run have values, the last three among them, and these are the values of every round."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flsv import FederatedLoop, Reporting
from flsv.metrics import ShadowShapley
from flsv.sampling import UniformSampler
from helpers.fits import trainer_for
from helpers.hidden_state import SEED, Base, make_data

ROUNDS = 12


def values_by_round(folder: Path, every: int | None, **options: Any) -> dict[int, torch.Tensor]:
    """Return what ``contributions.csv`` would have: the values after each valued round."""
    metric = ShadowShapley(coalitions="all", performance="negative_loss", every=every)
    values: dict[int, torch.Tensor] = {}

    class Recording(ShadowShapley):
        def complete(self, *args: Any, **kwargs: Any) -> dict[int, torch.Tensor]:
            values.update(super().complete(*args, **kwargs))
            return values

    metric.__class__ = Recording
    loop = FederatedLoop(
        metrics={"shadow": metric},
        seed=SEED,
        reporting=Reporting(table=False, files=False),
        **options,
    )
    trainer_for(loop, folder, ROUNDS).fit(Base(), make_data())

    return values


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"sampler": UniformSampler(2)}, marks=pytest.mark.slow)]
)
def test_ten_rounds_have_the_values_that_they_have_if_all_are_valued(
    options: dict[str, Any], tmp_path: Path
) -> None:
    default_values = values_by_round(tmp_path / "default", None, **options)
    all_values = values_by_round(tmp_path / "all", 1, **options)

    assert len(all_values) == ROUNDS
    assert len(default_values) == 10
    assert [*default_values][-3:] == [9, 10, 11]

    compared_rounds = [*default_values]
    if options:  # means over the last rounds are of those that are valued
        compared_rounds = [ROUNDS - 1]

    for round_index in compared_rounds:
        assert torch.equal(default_values[round_index], all_values[round_index])
