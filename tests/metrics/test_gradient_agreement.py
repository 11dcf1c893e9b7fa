"""GradientAgreement against its formulas in NumPy: absent clients, logged losses, and refusals."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flsv import FederatedLoop, value_round
from flsv.metrics import GradientAgreement
from helpers.data import toy_data
from helpers.fits import KeepsRounds, all_samples, fit
from helpers.models import Plain


def gains_and_cosines(slopes: Tensor, updates: Tensor, num_samples: Tensor):
    """Of each client in a round, weighted by samples, by the docstring's formulas in NumPy."""
    sizes = num_samples.double().numpy()
    lengths = updates.norm(dim=1, keepdim=True)
    directions = (updates / lengths).double().numpy()
    sum_of_directions = sizes @ directions
    cosines = directions @ sum_of_directions / np.linalg.norm(sum_of_directions)
    return -sizes * slopes.double().numpy(), sizes * cosines


def positive_shares(amounts: np.ndarray) -> np.ndarray:
    positive = np.maximum(amounts, 0)
    return positive / positive.sum()


def test_gradient_agreement_does_not_punish_absence_in_early_rounds():
    """Slopes fall by half from round to round; two equal clients, one of which misses the first round."""
    metric = GradientAgreement(num_clients=3)
    sums_of_decreases = torch.zeros(3)
    cohorts = [[0, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2]]

    for index, cohort in enumerate(cohorts):
        k = len(cohort)
        slope = -(0.5**index)
        metric.update(
            client_ids=torch.tensor(cohort),
            gradient_products=torch.full((k,), slope),
            client_updates=torch.ones(k, 5),
            num_samples=torch.full((k,), 10),
        )
        sums_of_decreases[cohort] -= slope

    descents = metric.diagnostics()["descent"]
    assert torch.allclose(descents, descents.mean().expand(3))
    # Sums would punish client 1.
    assert sums_of_decreases[1] < sums_of_decreases[0] / 2


def test_gradient_agreement_in_a_loop_uses_slopes_of_the_validation_loss(tmp_path):
    data = toy_data((4, 1, 2), server_val=0.3)
    recorder = KeepsRounds()
    metric = GradientAgreement()
    loop = FederatedLoop(recorder, {"mine": metric}, seed=1)

    module = fit(loop, tmp_path, Plain(), data, rounds=2)
    module.eval()  # BatchNorm's statistics are those of the model

    x, y = all_samples(data.val_dataloader())
    class_sizes = y.bincount()
    assert class_sizes.unique().numel() > 1, "the mean over classes is another loss"

    gains = []
    cosines = []
    for round in recorder.rounds:
        loop.space.write(module, round.global_vector)
        module.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        slope = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
        updates = round.client_updates
        gains_of_round, cosines_of_round = gains_and_cosines(
            updates @ slope, updates, round.num_samples
        )
        gains.append(gains_of_round)
        cosines.append(cosines_of_round)

    share_of_gain = positive_shares(np.sum(gains, axis=0))
    share_of_cosine = positive_shares(np.mean(cosines, axis=0))
    np.testing.assert_allclose(
        loop.contributions["mine"].numpy(), (share_of_gain + share_of_cosine) / 2, rtol=1e-4
    )


def test_gradient_agreement_by_a_logged_loss_is_of_those_whose_updates_lower_it():
    """The targets have the slope 1. Two of three updates of the slope 0 go towards it, and one away from it."""
    line = nn.Linear(1, 1, bias=False)
    client_models = [torch.tensor([slope]) for slope in (0.5, -0.25, 0.5)]
    inputs = torch.ones(4, 1)
    targets_of_slope_1 = inputs
    batches = [(inputs, targets_of_slope_1)]

    values = value_round(
        line,
        torch.zeros(1),
        client_models,
        batches,
        loss=nn.functional.mse_loss,
        metrics=GradientAgreement(loss="loss"),
    )

    assert values["GradientAgreement"].tolist() == pytest.approx([0.5, 0.0, 0.5])


@pytest.mark.parametrize(
    ("num_products", "num_updates", "message"),
    [(2, 3, r"client_updates \[k=2, p\]"), (3, 2, "gradient_products")],
)
def test_gradient_agreement_refuses_wrong_shapes(num_products, num_updates, message):
    metric = GradientAgreement(num_clients=3)
    client_ids = torch.arange(2)
    products = torch.zeros(num_products)
    updates = torch.zeros(num_updates, 4)
    num_samples = torch.ones(2)

    with pytest.raises(ValueError, match=message):
        metric.update(client_ids, products, updates, num_samples)
