"""Running moments against those of the whole."""

import torch
from functional.shapley.games import rng

from flsv.functional.shapley.permutation import Moments


def test_running_mean_and_stderr_over_batches_equal_those_of_all_samples() -> None:
    samples = torch.randn(23, 4, 2, generator=rng(), dtype=torch.float64) + 1e4
    moments = Moments()
    for batch in samples.split([1, 5, 1, 16]):
        moments.add(batch)
    assert moments.count == 23
    torch.testing.assert_close(moments.mean, samples.mean(dim=0))
    torch.testing.assert_close(moments.stderr, samples.std(dim=0) / 23**0.5)
