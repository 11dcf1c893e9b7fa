"""DomainRelevance against equation 5, and its diagnostics against label overlap."""

import pytest
import torch

from flsv.federation import FederatedLoop
from flsv.functional import label_overlap, relevance_auroc
from flsv.metrics import DomainRelevance
from helpers import refused
from helpers.fits import fit

NAN = float("nan")
NUM_CLIENTS = 5


def make_rounds(count=6, seed=0):
    """Cohorts of random sizes, each client looking at some others."""
    torch.manual_seed(seed)
    for _ in range(count):
        cohort_size = int(torch.randint(1, NUM_CLIENTS + 1, ()))
        client_ids = torch.randperm(NUM_CLIENTS)[:cohort_size]
        values = torch.randn(cohort_size, NUM_CLIENTS)
        is_unknown = torch.rand(cohort_size, NUM_CLIENTS) > 0.5
        yield client_ids, values.masked_fill(is_unknown, NAN)


@pytest.mark.parametrize("alpha", [0.0, 0.9])
def test_domain_relevance_equals_the_moving_average_of_pfedsvs_equation_5(alpha):
    metric = DomainRelevance(NUM_CLIENTS, alpha=alpha)
    assert metric.compute().isnan().all()

    expected = torch.zeros(NUM_CLIENTS, NUM_CLIENTS)
    has_value = torch.zeros(NUM_CLIENTS, NUM_CLIENTS, dtype=torch.bool)
    for ids, values in make_rounds():
        metric.update(ids, values)

        for client, row in zip(ids.tolist(), values):
            is_new = row.isfinite()
            average = alpha * expected[client] + (1 - alpha) * row
            expected[client] = torch.where(is_new, average, expected[client])
            has_value[client] |= is_new
        known_averages = expected.where(has_value, NAN)
        torch.testing.assert_close(metric.compute(), known_averages, equal_nan=True)


def test_relevance_diagnostics_give_auroc_and_found_share_by_label_overlap():
    # Each client has a sample of one of two classes. Clients of the same class are relevant for each other.
    class_of_client = torch.arange(NUM_CLIENTS) % 2
    class_counts = torch.nn.functional.one_hot(class_of_client)
    metric = DomainRelevance()
    metric.bind(NUM_CLIENTS, 2, class_counts=class_counts)
    for arguments in make_rounds(3):
        metric.update(*arguments)

    scores = metric.compute()
    diagnostics = metric.diagnostics()
    is_relevant = label_overlap(class_counts) > 0
    is_relevant_other = is_relevant & ~torch.eye(NUM_CLIENTS, dtype=torch.bool)
    share_measured = scores[is_relevant_other].isfinite().double().mean().item()

    assert diagnostics["auroc"] == relevance_auroc(scores, is_relevant)
    assert diagnostics["found"].item() == pytest.approx(share_measured)


def test_domain_relevance_without_a_strategy_that_scores_models_is_refused(tmp_path):
    with refused(r"metrics \['relevance'\] need the clients' values"):
        fit(FederatedLoop(metrics={"relevance": DomainRelevance()}), tmp_path)
