"""What an evaluator takes: precision, inputs, batches, metrics, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from games.naive import CLASSES, a_round, batches, module, naive_model, naive_scores
from torch import nn
from torchmetrics.classification import MulticlassF1Score

from flsv.errors import ConfigurationError
from flsv.games import CoalitionUtility, ModelEvaluator
from flsv.parameters import ParameterSpace


@pytest.mark.parametrize("backend", ["vmap", "serial"])
def test_the_context_is_around_the_forward_and_no_other_is(backend: Any) -> None:
    net, data = module(), batches()
    round = a_round(net)
    mask = torch.tensor([[True, False, True, True]])

    def loss(context: Any = None) -> float:
        evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES, backend=backend, context=context)
        return CoalitionUtility(round, evaluator, metric="negative_loss")(mask).item()

    model = naive_model(net, round, mask[0], "uniform")
    exact = naive_scores(model, data)["negative_loss"]
    with torch.autocast("cpu", torch.bfloat16):
        half = torch.cat([model(x) for x, _ in data]).float().detach()
    y = torch.cat([y for _, y in data])
    expected = -nn.functional.cross_entropy(half, y).item()
    found = loss(lambda: torch.autocast("cpu", torch.bfloat16))
    assert found == pytest.approx(expected, abs=2e-3)
    assert abs(found - exact) > 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        assert loss() == pytest.approx(exact, abs=1e-6)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("backend", ["vmap", "serial"])
def test_a_broken_model_has_no_hits_and_no_finite_loss(backend: Any) -> None:
    net = module()
    space = ParameterSpace(net)
    vectors = space.read(net).repeat(3, 1)
    vectors[1] = torch.nan
    vectors[2, space.head.weight] = torch.inf
    evaluator = ModelEvaluator(
        net, space, batches(), num_classes=CLASSES, backend=backend, metric=MulticlassF1Score(CLASSES)
    )
    scores = evaluator(vectors)
    assert scores.values["loss"].isfinite().tolist() == [True, False, False]
    assert scores.values["loss"][1].isnan()
    assert scores.values["correct"][1].sum() == 0
    assert scores.value("negative_loss").isfinite().tolist() == [True, False, False]


@pytest.mark.parametrize("size", [600, 7])
def test_batches_are_cut_or_put_together_and_count_as_before(size: int) -> None:
    net = module()
    space = ParameterSpace(net)
    data = batches(600, size)
    evaluator = ModelEvaluator(net, space, data, num_classes=CLASSES)
    assert [len(y) for _, y in evaluator._batches] == [256, 256, 88]
    scores = evaluator(space.read(net)[None])
    expected = naive_scores(net.eval(), data)
    assert scores.value("accuracy").item() == pytest.approx(expected["accuracy"])
    assert scores.value("negative_loss").item() == pytest.approx(expected["negative_loss"], abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_classes": None}, "num_classes of a classifier, or a metric"),
        ({"batches": []}, "no validation samples"),
        ({"batches": [torch.zeros(3)]}, "pair"),
        ({"batches": [(torch.zeros(3, 1, 6, 6), torch.zeros(3))]}, "integer classes"),
        ({"batches": [(torch.zeros(3, 1, 6, 6), torch.zeros(3, 1).long())]}, r"\[3, 1\]"),
        ({"batches": [(torch.zeros(3, 1, 6, 6), torch.zeros(2).long())]}, "3 inputs and 2 labels"),
        ({"batches": [(torch.zeros(1, 1, 6, 6), torch.tensor([4]))]}, r"4 \.\. 4.*0 \.\. 3"),
        ({"num_classes": 9}, r"expected logits \[1, 9\]"),
    ],
)
def test_wrong_arguments_of_the_evaluator(change: dict[str, Any], message: str) -> None:
    net = module()
    arguments = {"batches": batches(), "num_classes": CLASSES, **change}
    with pytest.raises(ConfigurationError, match=message):
        ModelEvaluator(net, ParameterSpace(net), arguments.pop("batches"), **arguments)
