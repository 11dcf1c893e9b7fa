"""Coalition games against the naive way: average state_dicts, load, predict, score with scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from games.naive import CLASSES, FIXED, a_round, all_masks, batches, module, naive_model, naive_scores
from torch import nn
from torchmetrics.classification import MulticlassF1Score

from flsv.errors import ConfigurationError
from flsv.games import CoalitionGames, CoalitionUtility, ModelEvaluator, ModelScore, Renormalized
from flsv.parameters import ParameterSpace
from flsv.round import Round

F1 = ModelScore(MulticlassF1Score(CLASSES, average="macro"), "max")
METRICS = ["accuracy", "balanced_accuracy", "negative_loss", "per_class_accuracy"]


@pytest.mark.parametrize(
    ("weighting", "server_lr", "own_starts"),
    [
        ("uniform", 1.0, False),
        ("samples", 0.6, False),
        (FIXED, 1.7, True),
        (Renormalized(FIXED), 0.6, True),
    ],
)
@pytest.mark.parametrize("backend", ["vmap", "serial"])
def test_every_metric_against_naive_averaging_and_scikit_learn(
    backend: Any, weighting: Any, server_lr: float, own_starts: bool
) -> None:
    net, data = module(), batches()
    round = a_round(net, own_starts=own_starts)
    evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES, backend=backend)
    by_metric = ModelEvaluator(net, round.space, data, metric=F1.of, backend=backend)
    games = CoalitionGames(evaluator, server_lr=server_lr, validated={F1: by_metric})
    games.begin(round)
    masks = all_masks(4)
    expected = []
    for mask in masks:
        if not isinstance(weighting, str) and mask.any() and not FIXED[mask].any():
            mask = torch.zeros_like(mask)  # nobody with a weight: the global model
        expected.append(naive_scores(naive_model(net, round, mask, weighting, server_lr), data))
    for name in [*METRICS, F1]:
        utility = games.utility(name, weighting)
        reference = np.stack([scores["f1" if name is F1 else name] for scores in expected])
        np.testing.assert_allclose(utility(masks).numpy(), reference, rtol=0, atol=2e-6, err_msg=str(name))
    assert games.evaluations == 2 * 16


def test_buffers_outside_the_vector_are_read_from_the_module() -> None:
    net, data = module(), batches()
    round = a_round(net)
    for backend in ("vmap", "serial"):
        net.scale = torch.tensor(1.0)
        evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES, backend=backend)
        mask = torch.tensor([[True, False, False, True]])
        before = CoalitionUtility(round, evaluator, metric="negative_loss")(mask)
        net.scale = torch.tensor(3.0)
        after = CoalitionUtility(round, evaluator, metric="negative_loss")(mask).item()
        expected = naive_scores(naive_model(net, round, mask[0], "uniform"), data)["negative_loss"]
        assert after == pytest.approx(expected, abs=1e-5) != before.item()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weighting": "equal"}, "weighting='equal'"),
        ({"weighting": torch.ones(3)}, "expected 4 weights"),
        ({"weighting": torch.tensor([1, 1, 1, -0.1])}, "not negative"),
        ({"weighting": Renormalized(torch.ones(3))}, "expected 4 weights"),
    ],
)
def test_wrong_arguments_of_the_utility(change: dict[str, Any], message: str) -> None:
    net = module()
    round = a_round(net)
    evaluator = ModelEvaluator(net, round.space, batches(), num_classes=CLASSES)
    with pytest.raises(ConfigurationError, match=message):
        CoalitionUtility(round, evaluator, **change)


def test_what_does_not_fit_together() -> None:
    net = module()
    round = a_round(net)
    evaluator = ModelEvaluator(net, round.space, batches(), num_classes=CLASSES)
    utility = CoalitionUtility(round, evaluator)
    for wrong in (torch.ones(2, 4), torch.ones(2, 5, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"masks bool \[K, 4\]"):
            utility(wrong)
    with pytest.raises(ValueError, match="expected vectors"):
        evaluator(torch.zeros(3))


def linear_games() -> tuple[CoalitionGames, ModelEvaluator, ParameterSpace]:
    space = ParameterSpace(module := nn.Linear(2, 2, bias=False))
    evaluator = ModelEvaluator(module, space, [(torch.eye(2), torch.tensor([0, 1]))], num_classes=2)
    return CoalitionGames(evaluator), evaluator, space


def linear_round(index: int, space: ParameterSpace, models: torch.Tensor) -> Round:
    return Round(index, torch.arange(2), torch.tensor([9, 1]), torch.zeros(4), models, space)


def test_the_gradient_is_that_of_the_model_that_is_asked_about() -> None:
    """Anew for any other model, within the same round too."""
    games, _, space = linear_games()
    first, second = torch.zeros(4), torch.tensor([1.0, 0, 0, 1])
    games.begin(linear_round(0, space, torch.stack([first, second])))
    for vector in (first, second):
        weight = vector.view(2, 2).clone().requires_grad_()
        nn.functional.cross_entropy(torch.eye(2) @ weight.T, torch.tensor([0, 1])).backward()
        torch.testing.assert_close(games.gradient(vector).float(), weight.grad.flatten())


def test_every_model_that_was_evaluated_counts_also_after_its_round() -> None:
    games, _, space = linear_games()
    for index in range(2):
        games.begin(linear_round(index, space, torch.eye(4)[:2]))
        games.utility()(torch.tensor([[True, False], [True, True]]))
        games.utility_of_models(lambda i, out: out.fill_(i), 3)
        assert (games.evaluations, games.total_evaluations) == (5, 5 * (index + 1))
        games.end()
        assert games.total_evaluations == 5 * (index + 1)


def test_products_are_worked_out_once_a_round() -> None:
    """Hessian products take a pass of the validation set for every client, and a metric asks for them twice."""
    (games, evaluator, space), asked, draw = linear_games(), [], torch.Generator().manual_seed(0)
    whole = evaluator.gradient_products
    evaluator.gradient_products = lambda *rest: asked.append(rest) or whole(*rest)  # type: ignore[func-returns-value, method-assign]
    for index in range(2):
        round = linear_round(index, space, torch.randn(2, 4, generator=draw))
        games.begin(round)
        for order in (1, 2, 1, 2):
            found, expected = games.gradient_products(order), whole(round.global_vector, round.matrix)
            torch.testing.assert_close(found.gradient, expected.gradient)
            assert (found.hessian is None) == (order == 1)
            if found.hessian is not None:
                torch.testing.assert_close(found.hessian, expected.hessian)
        assert games.slopes() is games.slopes()
    assert len(asked) == 2
