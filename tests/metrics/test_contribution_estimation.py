"""ContributionEstimation (FedCE) against the formulas, worked out by hand from the clients' models."""

import numpy as np
import pytest
import torch
import torchmetrics
from numpy.testing import assert_allclose
from testing.metric_cases import make_client_evaluator
from torch.testing import assert_close

from flsv.aggregation import FedAvg, FedCE
from flsv.core import Round
from flsv.core.parameter_space import ParameterSpace
from flsv.data import FederatedDataModule
from flsv.federation import FederatedLoop
from flsv.metrics import ContributionEstimation
from flsv.uploads import Upload
from helpers import make_generator, refused
from helpers.data import toy_data
from helpers.fits import fit
from helpers.models import Plain, network

PROPORTIONS = (4.0, 1.0, 2.0)


def make_data(**kwargs) -> FederatedDataModule:
    return toy_data(PROPORTIONS, **{"client_val": 0.3, **kwargs})


def reference_cosines(updates: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    consensus = (coefficients[:, None] * updates).sum(0)
    cosines = []
    for update, coefficient in zip(updates, coefficients):
        sum_of_others = consensus - coefficient * update
        lengths = np.linalg.norm(update) * np.linalg.norm(sum_of_others)
        cosines.append(update @ sum_of_others / lengths)
    return np.array(cosines)


def clipped_shares(amounts: np.ndarray, smallest_share: float = 1e-3) -> np.ndarray:
    return np.clip(amounts / amounts.sum(), smallest_share, None)


def reference_coefficients(
    cosines: np.ndarray, minus_scores: np.ndarray, combine: str
) -> np.ndarray:
    """Rounds by clients; the score of the first round is the 0 that every client starts with."""
    directions = 1.0 - cosines.mean(0)
    errors = 1.0 - minus_scores.mean(0)
    direction_shares = clipped_shares(directions)
    error_shares = clipped_shares(errors)

    if combine == "times":
        return clipped_shares(direction_shares * error_shares)
    return clipped_shares(direction_shares + error_shares)


class FedCEThatKeepsRounds(FedCE):
    def __init__(self):
        super().__init__()
        self.rounds: list[Round] = []

    def end_round(self, round):
        self.rounds.append(round)


def accuracy_at_client(vector: torch.Tensor, dealt: FederatedDataModule, client: int) -> float:
    """Return the accuracy of a model ``[P]`` on a client's validation samples."""
    module = Plain(network(batch_norm=False))
    ParameterSpace(module).write(module, vector)
    module.eval()

    is_right = []
    for x, y in dealt.client_loader(client, "val", shuffle=False):
        predicted = module(x).argmax(-1)
        is_right.append((predicted == y).float())
    return float(torch.cat(is_right).mean())


def scores_without_each_client(
    models: torch.Tensor, weights: torch.Tensor, dealt: FederatedDataModule
) -> np.ndarray:
    """Return each client's accuracy by the mean of the others' models ``[k, P]`` with these weights."""
    scores = []
    for client in range(len(models)):
        weights_of_others = weights.clone()
        weights_of_others[client] = 0
        model_of_others = (weights_of_others / weights_of_others.sum()) @ models
        scores.append(accuracy_at_client(model_of_others.float(), dealt, client))
    return np.array(scores)


@pytest.mark.fast_rows
@pytest.mark.parametrize("combine", ["times", "plus"])
def test_contribution_estimation_of_a_federation_equals_that_by_hand(tmp_path, combine):
    aggregator = FedCEThatKeepsRounds()
    dealt = make_data()
    metrics = {"fedce": ContributionEstimation(combine=combine)}
    loop = FederatedLoop(aggregator, metrics, seed=1)

    fit(loop, tmp_path, Plain(network(batch_norm=False)), dealt, rounds=3)

    coefficients = np.full(3, 1 / 3)
    cosines = []
    scores = [np.zeros(3)]
    for round in aggregator.rounds:
        assert round.aggregation_weights is not None
        weights = round.aggregation_weights.double()
        expected_weights = coefficients / coefficients.sum()
        assert_allclose(weights.numpy(), expected_weights, atol=1e-6)

        models = round.client_vectors.double()
        updates = (models - round.global_vector).numpy()
        cosines.append(reference_cosines(updates, weights.numpy()))
        scores.append(scores_without_each_client(models, weights, dealt))
        coefficients = reference_coefficients(np.array(cosines), np.array(scores), combine)

    assert_allclose(loop.contributions["fedce"].numpy(), coefficients, atol=1e-5)
    assert np.ptp(coefficients) > 0.01, "the clients' coefficients must differ"

    diagnostics = loop.metrics["fedce"].diagnostics()
    mean_cosines = np.mean(cosines, axis=0)
    mean_errors = 1 - np.mean(scores, axis=0)
    assert_allclose(diagnostics["cosine"].numpy(), mean_cosines, atol=1e-5)
    assert_allclose(diagnostics["error"].numpy(), mean_errors, atol=1e-5)


class SendsConstantUpdate(Upload):
    def apply(self, update, departure):
        return torch.full_like(update, 0.3)


@pytest.mark.slow
def test_client_subtracts_its_sent_model_from_the_aggregate(tmp_path):
    """Not what it has trained: under an attack, noise or compression that is not in the sum."""
    aggregator = FedCEThatKeepsRounds()
    data = make_data()
    metric = ContributionEstimation()
    loop = FederatedLoop(aggregator, {"fedce": metric}, uploads=[SendsConstantUpdate()], seed=1)

    fit(loop, tmp_path, Plain(network(batch_norm=False)), data, rounds=1)

    sent_models = aggregator.rounds[0].client_vectors
    expected = []
    for client in range(3):
        is_other = torch.arange(3) != client
        model_without_client = sent_models[is_other].mean(0)
        expected.append(accuracy_at_client(model_without_client, data, client))
    assert_allclose(metric.scores.numpy(), expected, atol=1e-6)


def test_absent_client_keeps_its_contribution_estimate():
    metric = ContributionEstimation(4)
    models = torch.randn(3, 5, generator=make_generator())
    for cohort_size in (3, 2):
        cohort = torch.arange(cohort_size)
        cohort_models = models[:cohort_size]
        metric.update(
            client_ids=cohort,
            client_updates=cohort_models,
            aggregation_weights=torch.ones(cohort_size),
            aggregate=cohort_models.mean(0),
            clients=make_client_evaluator(cohort, cohort_models),
        )

    assert metric.participations.tolist() == [2, 2, 1, 0]
    is_missing = metric.diagnostics()["cosine"].isnan()
    assert is_missing.tolist() == [False, False, False, True]


def test_fedce_weights_a_client_without_an_estimate_by_the_mean_of_the_others():
    round = Round(
        round_index=0,
        client_ids=torch.tensor([2, 3]),
        num_samples=torch.ones(2),
        global_vector=torch.zeros(3),
        client_vectors=torch.zeros(2, 3),
        space=ParameterSpace(torch.nn.Linear(2, 1)),
    )
    estimates = torch.tensor([0.2, 0.3, 0.4, torch.nan])
    mean_estimate = (0.2 + 0.3 + 0.4) / 3

    weights = FedCE().weights(round, {"fedce": estimates})

    expected = torch.tensor([0.4, mean_estimate]) / (0.4 + mean_estimate)
    assert_close(weights.float(), expected)


def test_only_client_of_a_round_scores_the_model_it_started_from():
    metric = ContributionEstimation(2)
    client_ids = torch.tensor([1])
    model = torch.tensor([[1.0, 2.0]])

    metric.update(
        client_ids=client_ids,
        client_updates=model,
        aggregation_weights=torch.tensor([1.0]),
        aggregate=model[0],
        clients=make_client_evaluator(client_ids, model),
    )

    sigmoid_of_zero = 0.5
    assert metric.scores.tolist() == [0, sigmoid_of_zero]


def test_contribution_estimation_without_held_out_samples_of_clients_is_refused(tmp_path):
    loop = FederatedLoop(FedAvg(), {"fedce": ContributionEstimation()})

    with refused(r"metrics \['fedce'\] need validation.*client.*0.2"):
        fit(loop, tmp_path, data=toy_data())


@pytest.mark.parametrize("performance", ["negative_loss", torchmetrics.MeanSquaredError()])
def test_contribution_estimation_by_a_loss_is_refused(performance):
    with refused("of which more is better"):
        ContributionEstimation(performance=performance)
