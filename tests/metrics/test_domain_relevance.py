"""DomainRelevance: equation 5 round by round, and what it says of the truth."""

from pathlib import Path

import pytest
import torch
from sklearn.metrics import roc_auc_score
from toys import fit

from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import DomainRelevance

nan = float("nan")
N = 5


def rounds(count=6, seed=0):
    """Cohorts of random sizes, each client looking at some others."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = torch.randperm(N, generator=generator)[: 1 + int(torch.randint(N, (), generator=generator))]
        values = torch.randn(len(ids), N, generator=generator)
        values[torch.rand(len(ids), N, generator=generator) > 0.5] = nan
        yield ids, values


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
def test_equation_5(alpha):
    metric = DomainRelevance(N, alpha=alpha)
    phi, looked = torch.zeros(N, N), torch.zeros(N, N, dtype=torch.bool)
    assert metric.compute().isnan().all()
    for ids, values in rounds():
        metric.update(ids, values)
        for i, row in zip(ids.tolist(), values):
            for j in range(N):
                if row[j] == row[j]:
                    phi[i, j] = alpha * phi[i, j] + (1 - alpha) * row[j]
                    looked[i, j] = True
        torch.testing.assert_close(metric.compute(), phi.masked_fill(~looked, nan), equal_nan=True)


def test_auroc_and_found_against_a_given_truth():
    truth = torch.rand(N, N, generator=torch.Generator().manual_seed(1)) > 0.5
    metric = DomainRelevance(N, truth=truth)
    for each in rounds(3):
        metric.update(*each)
    scores = metric.compute()
    known = [(i, j) for i in range(N) for j in range(N) if i != j and scores[i, j] == scores[i, j]]
    said = metric.diagnostics()
    assert said["auroc"].item() == pytest.approx(
        roc_auc_score([bool(truth[p]) for p in known], [float(scores[p]) for p in known])
    )
    relevant = [(i, j) for i in range(N) for j in range(N) if i != j and truth[i, j]]
    assert said["found"].item() == pytest.approx(sum(p in known for p in relevant) / len(relevant))


def test_the_truth_is_the_label_overlap_of_the_federation():
    metric = DomainRelevance()
    assert metric.diagnostics() == {}
    metric.bind(3, 2, class_counts=torch.tensor([[4, 0], [2, 2], [0, 9]]))
    metric.update(torch.arange(3), torch.tensor([[nan, 0.2, 0.1], [0.3, nan, 0.3], [-0.1, 0.2, nan]]))
    assert metric.diagnostics()["auroc"].item() == 1
    given = DomainRelevance(truth=torch.zeros(3, 3))
    given.bind(3, 2, class_counts=torch.ones(3, 2))
    assert not given.truth.any()


def test_wrong_input():
    for alpha in (-0.1, 1.0):
        with pytest.raises(ConfigurationError, match="alpha"):
            DomainRelevance(N, alpha=alpha)
    with pytest.raises(ValueError, match="peer_values"):
        DomainRelevance(N).update(torch.tensor([0]), torch.zeros(1, N + 1))
    with pytest.raises(ConfigurationError, match="num_clients"):
        DomainRelevance().update(torch.tensor([0]), torch.zeros(1, N))


def test_without_anybody_who_judges_it_is_an_error_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"metrics \['relevance'\] ask what the clients find each other"):
        fit(FederatedLoop(metrics={"relevance": DomainRelevance()}), tmp_path)
