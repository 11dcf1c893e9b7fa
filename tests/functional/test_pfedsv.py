"""pFedSV: weights and downloads by hand, overlaps against NumPy, AUROC against scikit-learn."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from sklearn.metrics import roc_auc_score
from torch.testing import assert_close

from flsv.functional import (
    label_overlap,
    leave_one_out_cosines,
    personalized_weights,
    relevance_auroc,
    top_k_download,
)
from helpers import make_generator

POLICIES = ("mean", "exclude", "min", 0.7)


def weights_by_hand(values, distances, client, self_weight):
    positive = np.maximum(values.numpy(), 0)
    distances = distances.numpy().copy()
    distances_of_others = np.delete(distances, client)

    if self_weight == "exclude":
        positive[client] = 0
        distances[client] = 1
    elif self_weight == "mean":
        distances[client] = distances_of_others.mean()
    elif self_weight == "min":
        distances[client] = distances_of_others.min()
    else:
        distances[client] = self_weight

    weights = positive / distances
    return weights / weights.sum()


@pytest.mark.parametrize("self_weight", POLICIES)
@pytest.mark.parametrize("client", [0, 5])
def test_personalized_weights_equal_numpys(self_weight, client):
    generator = make_generator(client)
    for _ in range(20):
        values = torch.randn(6, generator=generator, dtype=torch.float64)
        distances = torch.rand(6, generator=generator, dtype=torch.float64) + 0.1
        if np.delete(values.numpy(), client).max() <= 0:
            continue

        weights = personalized_weights(values, distances, client, self_weight)

        expected = weights_by_hand(values, distances, client, self_weight)
        assert_allclose(weights, expected, rtol=1e-12)


@pytest.mark.parametrize("self_weight", POLICIES)
@pytest.mark.parametrize("values", [[-0.1, -0.2, -0.3], [0.0, 0.0, 0.0], [0.0, 0.5, -0.1]])
def test_weights_keep_the_own_model_if_no_other_has_a_positive_value(values, self_weight):
    weights = personalized_weights(
        torch.tensor(values), torch.tensor([1.0, 0.0, 2.0]), own=1, self_weight=self_weight
    )
    assert weights.tolist() == [0, 1, 0]


def test_identical_models_share_all_weight_in_proportion_to_their_values():
    values = torch.tensor([0.2, 0.1, 0.3, 0.9, -0.5])
    distances = torch.tensor([0.0, 0.0, 0.0, 2.0, 0.0])

    weights_of_others = personalized_weights(values, distances, 0)
    # The least distance is 0: the own model is one of them.
    weights_with_own = personalized_weights(values, distances, 0, self_weight="min")

    assert_close(
        weights_of_others,
        torch.tensor([0, 1, 3, 0, 0]) / 4,
    )
    assert_close(
        weights_with_own,
        torch.tensor([2, 1, 3, 0, 0]) / 6,
    )


@pytest.mark.parametrize(
    ("values", "distances", "client"),
    [
        ([0.1, 0.2], [0.0], 0),
        ([0.1, 0.2], [0.0, 1.0], 2),
        ([0.1, float("nan")], [0.0, 1.0], 0),
        ([0.1, 0.2], [0.0, float("nan")], 0),
        ([0.1, 0.2], [0.0, float("inf")], 0),
    ],
)
def test_personalized_weights_refuses_wrong_values_and_distances(values, distances, client):
    with pytest.raises(ValueError, match="expected"):
        personalized_weights(torch.tensor(values), torch.tensor(distances), client)


nan = float("nan")


def choose_top_k_peers(
    relevance,
    client=0,
    k=2,
    available=None,
    explore="score",
    seed=0,
):
    if available is None:
        available = [True] * len(relevance)

    download = top_k_download(
        relevance=torch.tensor(relevance),
        available=torch.tensor(available),
        own=client,
        k=k,
        explore=explore,
        generator=make_generator(seed),
    )
    return download.tolist()


def test_downloads_of_the_first_round_are_uniformly_random():
    num_rounds = 600
    counts = torch.zeros(6)

    for seed in range(num_rounds):
        peers = choose_top_k_peers(
            [nan] * 6,
            client=2,
            k=2,
            seed=seed,
        )
        assert len(set(peers)) == 2
        counts[peers] += 1

    # Two of five others are drawn: 240 times on average, standard deviation 12.
    expected = num_rounds * 2 / 5
    other_clients = [0, 1, 3, 4, 5]
    deviations = counts[other_clients] - expected
    assert counts[2] == 0
    assert deviations.abs().max() < 60


def test_downloads_are_by_score_and_limited_to_positive_scores_at_the_end():
    with_unvisited = [9.0, 0.1, 0.3, nan, -0.2]
    assert choose_top_k_peers(with_unvisited, k=2) == [2, 1]
    assert choose_top_k_peers(with_unvisited, k=3) == [2, 1, 3]
    explored = choose_top_k_peers(with_unvisited, k=2, explore="unvisited")
    assert explored == [3, 2]

    all_visited = [9.0, 0.1, 0.3, 0.2, -0.2]
    assert choose_top_k_peers(all_visited, k=1) == [2, 3, 1]

    one_positive = [9.0, -0.1, 0.3, -0.2, -0.2]
    assert choose_top_k_peers(one_positive, k=4) == [2]


def test_models_of_unavailable_clients_are_not_downloaded():
    # The only unvisited one cannot be had, so k is that of the positive scores.
    relevance = [9.0, 0.1, nan, 0.5, -1.0]
    available = [True, True, False, True, True]

    peers = choose_top_k_peers(relevance, k=1, available=available)

    assert peers == [3, 1]


def test_top_k_download_with_a_wrong_own_index_raises():
    with pytest.raises(ValueError, match="own"):
        choose_top_k_peers([nan, nan], client=2)


def test_pfedsv_functions_refuse_shapes_that_would_broadcast():
    """Broadcasting would give numbers for them."""
    with pytest.raises(ValueError, match=r"got \[1, 1\] and \[3\]"):
        leave_one_out_cosines(torch.ones(1, 1), torch.ones(3))
    with pytest.raises(ValueError, match=r"\[2, 3\] and \[2, 3\]"):
        relevance_auroc(torch.rand(2, 3), torch.ones(2, 3))


def test_label_overlap_equals_numpys():
    counts = torch.randint(0, 3, (12, 6), generator=make_generator()) * 7
    shares = (counts / counts.sum(1, keepdim=True).clamp_min(1)).numpy()
    expected = np.minimum(shares[:, None], shares).sum(-1)
    assert_allclose(label_overlap(counts), expected, rtol=1e-6)


@pytest.mark.parametrize("digits", [0, 6])
def test_relevance_auroc_equals_scikit_learns(digits):
    n = 15
    generator = make_generator(digits)
    truth = torch.rand(n, n, generator=generator) > 0.7
    noisy_truth = torch.randn(n, n, generator=generator) + truth
    relevance = (noisy_truth * 10**digits).round() / 10**digits
    is_unknown = torch.rand(n, n, generator=generator) > 0.8
    relevance[is_unknown] = float("nan")
    relevance.fill_diagonal_(1e6)  # must not count

    auroc = relevance_auroc(relevance, truth)

    is_own = torch.eye(n, dtype=torch.bool)
    is_measured = ~relevance.isnan() & ~is_own
    expected = roc_auc_score(truth[is_measured], relevance[is_measured])
    assert auroc.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "truth",
    [
        pytest.param(torch.ones(15, 15), id="all"),
        pytest.param(torch.eye(15), id="nobody else"),
    ],
)
def test_relevance_auroc_of_one_kind_of_clients_is_not_a_number(truth):
    generator = make_generator()
    relevance = torch.randn(15, 15, generator=generator)

    assert relevance_auroc(relevance, truth).isnan()
