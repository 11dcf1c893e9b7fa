"""By default ten rounds of a run have values, the last three among them, and these are the values of every round."""

import pytest
import torch

from flsv import Reporting
from flsv.metrics import ShadowShapley
from flsv.sampling import UniformSampler
from helpers.hidden_state import Base, fit_valued

NUM_ROUNDS = 12


class RecordsValues(ShadowShapley):
    """Keeps the values after each valued round, which ``contributions.csv`` would have."""

    values_by_round: dict[int, torch.Tensor]

    def complete(self, *args, **kwargs):
        self.values_by_round = super().complete(*args, **kwargs)
        return self.values_by_round


def fit_and_record_values(folder, every, **options):
    metric = RecordsValues(coalitions="all", performance="negative_loss", every=every)
    options["reporting"] = Reporting(table=False, files=False)
    fit_valued(folder, Base(), NUM_ROUNDS, metric=metric, loop=options)

    return metric.values_by_round


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"sampler": UniformSampler(2)}])
def test_ten_rounds_have_the_values_that_they_have_if_all_are_valued(options, tmp_path):
    default_values = fit_and_record_values(tmp_path / "default", every=None, **options)
    all_values = fit_and_record_values(tmp_path / "all", every=1, **options)

    assert len(all_values) == NUM_ROUNDS
    assert len(default_values) == 10
    assert sorted(default_values)[-3:] == [9, 10, 11]  # the last three of 12

    if options:  # means over the last rounds are of those that are valued
        compared_rounds = [NUM_ROUNDS - 1]
    else:
        compared_rounds = [*default_values]

    for round_index in compared_rounds:
        assert torch.equal(default_values[round_index], all_values[round_index])
