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

#: The distance of a client's own model, by the option ``self_weight`` and of the distances of other models.
OWN_DISTANCES = {
    "exclude": lambda distances: np.inf,
    "mean": np.mean,
    "min": np.min,
    0.7: lambda distances: 0.7,
}


@pytest.mark.parametrize("self_weight", OWN_DISTANCES)
@pytest.mark.parametrize("client", [0, 5])
def test_personalized_weights_equal_numpys(self_weight, client):
    values = torch.tensor([0.3, -0.2, 0.5, 0.1, 0.0, 0.4]).double()
    distances = torch.tensor([1.0, 0.4, 0.7, 1.5, 0.2, 0.9]).double()

    weights = personalized_weights(values, distances, client, self_weight)

    distances[client] = OWN_DISTANCES[self_weight](
        np.delete(
            distances.numpy(),
            client,
        )
    )
    expected = (
        np.maximum(
            values.numpy(),
            0,
        )
        / distances.numpy()
    )
    assert_allclose(weights, expected / expected.sum(), rtol=1e-12)


@pytest.mark.parametrize("self_weight", OWN_DISTANCES)
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


NAN = float("nan")


def choose_top_k_peers(relevance, client=0, k=2, unavailable=(), explore="score", seed=0):
    available = torch.ones(len(relevance), dtype=torch.bool)
    available[list(unavailable)] = False
    download = top_k_download(
        relevance=torch.tensor(relevance),
        available=available,
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
            [NAN] * 6,
            client=2,
            k=2,
            seed=seed,
        )
        assert len(set(peers)) == 2
        counts[peers] += 1

    # Two of five others are drawn, so that each count is Binomial(600, 2/5).
    mean = num_rounds * 2 / 5
    deviation = (mean * 3 / 5) ** 0.5
    other_clients = [0, 1, 3, 4, 5]
    assert counts[2] == 0
    assert (counts[other_clients] - mean).abs().max() < 5 * deviation


WITH_UNVISITED = [9.0, 0.1, 0.3, NAN, -0.2]


@pytest.mark.parametrize(
    ("relevance", "options", "expected"),
    [
        (WITH_UNVISITED, {"k": 2}, [2, 1]),
        (WITH_UNVISITED, {"k": 3}, [2, 1, 3]),
        (WITH_UNVISITED, {"k": 2, "explore": "unvisited"}, [3, 2]),
        # Once all clients are visited, all with positive scores are downloaded, and no others.
        ([9.0, 0.1, 0.3, 0.2, -0.2], {"k": 1}, [2, 3, 1]),
        ([9.0, -0.1, 0.3, -0.2, -0.2], {"k": 4}, [2]),
        # So it is if the only client that is not visited is not available.
        ([9.0, 0.1, NAN, 0.5, -1.0], {"k": 1, "unavailable": [2]}, [3, 1]),
    ],
)
def test_downloads_are_by_score_and_those_of_positive_scores_at_the_end(
    relevance, options, expected
):
    assert choose_top_k_peers(relevance, **options) == expected


def test_top_k_download_with_a_wrong_own_index_raises():
    with pytest.raises(ValueError, match="own"):
        choose_top_k_peers([NAN, NAN], client=2)


def test_pfedsv_functions_refuse_shapes_that_would_broadcast():
    """Broadcasting would give numbers for them."""
    with pytest.raises(ValueError, match=r"got \[1, 1\] and \[3\]"):
        leave_one_out_cosines(torch.ones(1, 1), torch.ones(3))
    with pytest.raises(ValueError, match=r"\[2, 3\] and \[2, 3\]"):
        relevance_auroc(
            torch.rand(2, 3),
            torch.ones(2, 3),
        )


def test_label_overlap_equals_numpys():
    counts = (
        torch.randint(
            0,
            3,
            (12, 6),
            generator=make_generator(),
        )
        * 7
    )
    shares = (counts / counts.sum(1, keepdim=True).clamp_min(1)).numpy()
    expected = np.minimum(shares[:, None], shares).sum(-1)
    assert_allclose(label_overlap(counts), expected, rtol=1e-6)


@pytest.mark.parametrize("digits", [0, 6])
def test_relevance_auroc_equals_scikit_learns(digits):
    n = 15
    truth = torch.rand(n, n) > 0.7
    noisy_truth = torch.randn(n, n) + truth.float()
    relevance = noisy_truth.round(decimals=digits)
    is_unknown = torch.rand(n, n) > 0.8
    relevance[is_unknown] = NAN
    relevance.fill_diagonal_(1e6)  # a client's relevance to itself does not count

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
    assert relevance_auroc(torch.randn(15, 15), truth).isnan()
