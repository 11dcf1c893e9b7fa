"""What an evaluator takes: precision, inputs, batches, metrics, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from games.naive import CLASSES, a_round, all_masks, batches, module, naive_model, naive_scores
from lightning.pytorch.plugins import HalfPrecision
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torchmetrics.classification import BinaryAUROC, MulticlassF1Score, MulticlassHingeLoss

from flsv.errors import ConfigurationError
from flsv.games import CoalitionUtility, ModelEvaluator, performance_of
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


@pytest.mark.parametrize("backend", ["serial", "vmap"])
def test_a_module_in_half_precision(backend: Any) -> None:
    net = module().to(torch.bfloat16)
    data = [(x.to(torch.bfloat16), y) for x, y in batches()]
    round = a_round(net)
    assert round.global_vector.dtype == torch.float32
    # This context sets the process' default dtype, which threads that come and go could leave behind.
    context = HalfPrecision("bf16-true").forward_context
    evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES, backend=backend, context=context)
    found = CoalitionUtility(round, evaluator, metric="negative_loss")(all_masks(4))
    assert torch.get_default_dtype() == torch.float32
    for row in (0, 5, 15):
        logits = [naive_model(net, round, all_masks(4)[row], "uniform")(x).float() for x, _ in data]
        expected = -nn.functional.cross_entropy(torch.cat(logits), torch.cat([y for _, y in data])).item()
        assert found[row].item() == pytest.approx(expected, abs=2e-2)


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


def test_within_inference_mode() -> None:
    net = module()
    round = a_round(net)
    with torch.inference_mode():
        data = [(x.clone(), y.clone()) for x, y in batches()]
        inside = ModelEvaluator(net, round.space, data, num_classes=CLASSES)
        values = CoalitionUtility(round, inside)(all_masks(4))
        products = inside.gradient_products(round.global_vector, round.client_updates.clone())
    outside = ModelEvaluator(net, round.space, batches(), num_classes=CLASSES)
    assert torch.equal(values, CoalitionUtility(round, outside)(all_masks(4)))
    assert torch.equal(values, CoalitionUtility(round, inside)(all_masks(4)))
    expected = outside.gradient_products(round.global_vector, round.client_updates)
    assert torch.equal(products.hessian, expected.hessian)


class Pair(nn.Module):
    """Takes a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, CLASSES)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.layer(torch.stack([x["a"], x["b"]], -1))


@pytest.mark.parametrize("backend", ["vmap", "serial"])
def test_inputs_may_be_any_collection(backend: Any) -> None:
    net, space = Pair(), ParameterSpace(Pair())
    x = {"a": torch.randn(9), "b": torch.randn(9)}
    y = torch.arange(9) % CLASSES
    scores = ModelEvaluator(net, space, [(x, y)], num_classes=CLASSES, backend=backend)(space.read(net)[None])
    assert scores.value("accuracy").item() == pytest.approx((net(x).argmax(-1) == y).float().mean().item())


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


def test_a_metric_where_less_is_better_is_turned() -> None:
    net, data = module(), batches()
    round = a_round(net)
    metric = MulticlassHingeLoss(CLASSES)
    evaluator = ModelEvaluator(net, round.space, data, metric=metric)
    value = CoalitionUtility(round, evaluator, metric=performance_of("a test", metric, None))(
        torch.zeros(1, 4, dtype=torch.bool)
    )
    net.eval()
    reference = MulticlassHingeLoss(CLASSES)
    for x, y in data:
        reference.update(net(x), y)
    assert value.item() == pytest.approx(-reference.compute().item(), abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_classes": None}, "num_classes of a classifier, or a metric"),
        ({"num_classes": 0}, "num_classes=0"),
        ({"chunk": 0}, "chunk=0"),
        ({"backend": "gpu"}, "backend='gpu'"),
        ({"batches": []}, "no validation samples"),
        ({"batches": [(torch.zeros(0, 1, 6, 6), torch.zeros(0).long())]}, "no validation samples"),
        ({"batches": [torch.zeros(3)]}, "pair"),
        ({"batches": [(torch.zeros(3, 1, 6, 6), torch.zeros(3))]}, "integer classes"),
        ({"batches": [(torch.zeros(3, 1, 6, 6), torch.zeros(3, 1).long())]}, r"\[3, 1\]"),
        ({"batches": [(torch.zeros(3, 1, 6, 6), torch.zeros(2).long())]}, "3 inputs and 2 labels"),
        ({"batches": [(torch.zeros(1, 1, 6, 6), torch.tensor([4]))]}, r"4 \.\. 4.*0 \.\. 3"),
        ({"batches": [(torch.zeros(1, 1, 6, 6), torch.tensor([-100]))]}, "-100"),
        ({"num_classes": 9}, r"expected logits \[1, 9\]"),
    ],
)
def test_wrong_arguments_of_the_evaluator(change: dict[str, Any], message: str) -> None:
    net = module()
    arguments = {"batches": batches(), "num_classes": CLASSES, **change}
    with pytest.raises(ConfigurationError, match=message):
        ModelEvaluator(net, ParameterSpace(net), arguments.pop("batches"), **arguments)


def test_a_module_that_cannot_be_copied() -> None:
    net = module()
    net.cache = (number for number in range(3))
    with pytest.raises(ConfigurationError, match="Net cannot be copied"):
        ModelEvaluator(net, ParameterSpace(net), batches(), num_classes=CLASSES)


@pytest.mark.parametrize("backend", ["serial", "vmap"])
def test_a_metric_of_several_numbers(backend: Any) -> None:
    net = module()
    space = ParameterSpace(net)
    metric = MulticlassF1Score(CLASSES, average=None)
    with pytest.raises(ConfigurationError, match=r"MulticlassF1Score gives \[4\]"):
        ModelEvaluator(net, space, batches(), num_classes=CLASSES, metric=metric, backend=backend)


@pytest.mark.parametrize("backend", ["vmap", "serial"])
def test_a_metric_for_two_classes_is_given_class_1(backend: Any) -> None:
    torch.manual_seed(0)
    net, x, y = nn.Linear(3, 2), torch.randn(40, 3), torch.arange(40) % 2
    space = ParameterSpace(net)
    vectors = torch.randn(3, space.size)
    evaluator = ModelEvaluator(net, space, [(x, y)], num_classes=2, backend=backend, metric=BinaryAUROC())
    expected = []
    for vector in vectors:
        space.write(net, vector)
        expected.append(roc_auc_score(y, net(x).softmax(1)[:, 1].detach()))
    assert evaluator(vectors).value("metric").tolist() == pytest.approx(expected, abs=1e-6)
