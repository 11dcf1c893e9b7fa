"""DomainRelevance against equation 5, and its diagnostics against label overlap."""

import pytest
import torch

from flsv.federation import FederatedLoop
from flsv.functional import label_overlap, relevance_auroc
from flsv.metrics import DomainRelevance
from helpers import make_generator, refused
from helpers.fits import fit

nan = float("nan")
N = 5


def make_rounds(count=6, seed=0):
    """Cohorts of random sizes, each client looking at some others."""
    generator = make_generator(seed)
    for _ in range(count):
        shuffled_ids = torch.randperm(N, generator=generator)
        cohort_size = 1 + int(
            torch.randint(
                N,
                (),
                generator=generator,
            )
        )
        ids = shuffled_ids[:cohort_size]

        values = torch.randn(len(ids), N, generator=generator)
        is_unknown = torch.rand(len(ids), N, generator=generator) > 0.5
        values[is_unknown] = nan
        yield ids, values


@pytest.mark.parametrize("alpha", [0.0, 0.9])
def test_domain_relevance_equals_the_moving_average_of_pfedsvs_equation_5(alpha):
    metric = DomainRelevance(N, alpha=alpha)
    assert metric.compute().isnan().all()

    expected = torch.zeros(N, N)
    has_value = torch.zeros(N, N, dtype=torch.bool)
    for ids, values in make_rounds():
        metric.update(ids, values)

        for client, row in zip(ids.tolist(), values):
            is_new = row.isfinite()
            average = alpha * expected[client] + (1 - alpha) * row
            expected[client] = torch.where(is_new, average, expected[client])
            has_value[client] |= is_new
        torch.testing.assert_close(
            metric.compute(),
            expected.where(has_value, nan),
            equal_nan=True,
        )


def test_relevance_diagnostics_give_auroc_and_found_share_by_label_overlap():
    # Clients with a class in common are relevant for each other.
    class_counts = torch.eye(2, dtype=torch.long)[torch.arange(N) % 2]
    metric = DomainRelevance()
    metric.bind(N, 2, class_counts=class_counts)
    for arguments in make_rounds(3):
        metric.update(*arguments)

    scores = metric.compute()
    diagnostics = metric.diagnostics()
    is_relevant = label_overlap(class_counts) > 0

    assert diagnostics["auroc"] == relevance_auroc(scores, is_relevant)

    is_relevant.fill_diagonal_(False)
    share_measured = scores[is_relevant].isfinite().double().mean().item()

    assert diagnostics["found"].item() == pytest.approx(share_measured)


def test_domain_relevance_without_a_strategy_that_scores_models_is_refused(tmp_path):
    with refused(r"metrics \['relevance'\] need the clients' values"):
        fit(FederatedLoop(metrics={"relevance": DomainRelevance()}), tmp_path)
