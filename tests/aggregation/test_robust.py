"""Rules that a minority of bad clients cannot move far, against loops written from the papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import fit, toy_data

from flsv.aggregation import Aggregator, Bucketing, DivergenceWeighted, FedBuff, FedNova, ShapFedWA, TrimmedMean
from flsv.attacks import Scaling
from flsv.clients.algorithms import FedDynServer
from flsv.errors import ConfigurationError
from flsv.filters import MultiKrum
from flsv.filters.robust import scores
from flsv.loop import FederatedLoop
from flsv.round import Round
from flsv.sampling import UniformSampler


class Seen(TrimmedMean):
    """What it makes of which round."""

    def aggregate(self, round, contributions):
        self.results = [*getattr(self, "results", []), (round, *super().aggregate(round, contributions))]
        return self.results[-1][1:]


def seen(folder: Path, **options: Any) -> list[tuple[Round, Tensor, Tensor]]:
    aggregator = Seen(trim=0.2)
    fit(FederatedLoop(aggregator, seed=1, **options), folder, data=toy_data((4, 3, 4, 3, 2)), rounds=1)
    return aggregator.results


def test_the_trimmed_mean_entry_by_entry(tmp_path: Path) -> None:
    for round, result, weights in seen(tmp_path):
        cut, counts = round.space.num_parameters, [0] * 5
        for j in range(cut):
            ranked = sorted(range(5), key=lambda i: round.client_vectors[i, j].item())
            expected = sum(round.client_vectors[i, j].item() for i in ranked[1:4]) / 3
            assert result[j].item() == pytest.approx(expected, abs=1e-6)
            for i in ranked[1:4]:
                counts[i] += 1
        torch.testing.assert_close(weights, torch.tensor(counts).double() / (3 * cut))
        torch.testing.assert_close(result[cut:], weights.float() @ round.client_vectors[:, cut:])


def test_a_trim_that_leaves_out_nobody_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"leaves out nobody of 3 clients. The least trim that does is 0.334"):
        fit(FederatedLoop(TrimmedMean(0.1)), tmp_path)
    assert TrimmedMean(0.3)._cut(10) == 3


def test_a_cohort_of_which_nobody_is_left_out_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="is the plain mean: of 3 clients none is left out. Draw at least 5"):
        ((round, result, _),) = seen(tmp_path, sampler=UniformSampler(3))
    torch.testing.assert_close(result, round.client_vectors.mean(0))


@pytest.mark.parametrize("inner", [ShapFedWA("cssv"), FedBuff(), FedNova(), FedDynServer(), DivergenceWeighted()])
def test_a_bucket_has_no_contribution_nor_steps(inner: Aggregator) -> None:
    with pytest.raises(ConfigurationError, match="which a bucket has not"):
        Bucketing(inner)


def test_krums_scores_by_hand() -> None:
    points = torch.randn(8, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    squared = torch.cdist(points, points).square()
    for byzantine in (0, 1, 2):
        found = scores(squared, byzantine)
        for i in range(8):
            others = sorted(((points[i] - points[j]) ** 2).sum().item() for j in range(8) if j != i)
            assert found[i].item() == pytest.approx(sum(others[: 8 - byzantine - 2]))


@pytest.mark.parametrize(("keep", "kept"), [(None, [1, 1, 0, 1, 1]), (1, None)])
def test_multi_krum_leaves_out_who_lies_apart(tmp_path: Path, keep: int | None, kept: list[int] | None) -> None:
    loop = FederatedLoop(filters=[MultiKrum(1, keep)], uploads=[Scaling(-8.0, clients=[2])], seed=1)
    fit(loop, tmp_path, data=toy_data((4, 4, 4, 4, 4)), rounds=1)
    assert loop.participations.tolist() == kept or loop.participations.sum() == keep


@pytest.mark.parametrize(("arguments", "match"), [((2,), "it takes 7"), ((1, 5), "4 at most can be kept")])
def test_what_krum_cannot_do(tmp_path: Path, arguments: tuple[int, ...], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        fit(FederatedLoop(filters=[MultiKrum(*arguments)]), tmp_path, data=toy_data((4, 4, 4, 4, 4)))
