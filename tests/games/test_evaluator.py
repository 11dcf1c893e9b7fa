"""ModelEvaluator: precision, inputs, batches, chunks of models by vmap, what it refuses and what it leaves behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from games.naive import CLASSES, FIXED, Branching, a_round, all_masks, batches, module, naive_model, naive_scores
from torch import Tensor, nn
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassF1Score

from flsv.errors import ConfigurationError
from flsv.games import CoalitionGames, CoalitionUtility, ModelEvaluator
from flsv.parameters import ParameterSpace
from flsv.seeding import isolated_rngs


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


class Drawing(nn.Module):
    """Two numbers of each input, moved by random ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(36, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1)) + 0.1 * torch.randn(len(x), 2)


def test_any_output_is_measured_at_once_with_the_same_random_numbers() -> None:
    """A regression of two numbers, against the metric of each model's outputs."""
    torch.manual_seed(0)
    net = Drawing()
    data = [(x, torch.stack([x.sum((1, 2, 3)), y.float()], 1)) for x, y in batches()]
    space = ParameterSpace(net)
    vectors = space.read(net) + 0.1 * torch.randn(5, space.size)

    def values(backend: Any) -> Tensor:
        evaluator = ModelEvaluator(net, space, data, metric=MeanSquaredError(), backend=backend, chunk=2, seed=4)
        found = evaluator(vectors).value("metric")
        assert evaluator.backend == backend
        return found

    torch.testing.assert_close(values("vmap"), values("serial"), rtol=1e-6, atol=0)
    with isolated_rngs(4, "utility"), torch.no_grad():
        space.write(net, vectors[3])
        expected = torch.cat([(net(x) - y) ** 2 for x, y in data]).mean().item()
    assert values("serial")[3].item() == pytest.approx(expected, rel=1e-5)


def test_vmap_gives_what_one_model_at_a_time_gives() -> None:
    net, data = module(), batches()
    round = a_round(net)
    options: dict[str, Any] = {"num_classes": CLASSES, "metric": MulticlassF1Score(CLASSES, average="macro")}

    def scores(backend: Any, chunk: int = 64) -> Any:
        evaluator = ModelEvaluator(net, round.space, data, backend=backend, chunk=chunk, **options)
        return evaluator(round.client_vectors)

    expected = scores("serial")
    for backend, chunk in [("serial", 64), ("vmap", 64), ("vmap", 1), ("vmap", 3)]:
        found = scores(backend, chunk)
        assert torch.equal(found.values["correct"], expected.values["correct"])
        torch.testing.assert_close(found.values["loss"], expected.values["loss"], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.values["metric"], expected.values["metric"], rtol=1e-6, atol=1e-6)


def test_a_chunk_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    net = module()
    round = a_round(net)
    evaluator = ModelEvaluator(net, round.space, batches(), num_classes=CLASSES, backend="vmap", chunk=7)
    original, chunks = evaluator._score, []

    def score(rows: range, *rest: Any) -> None:
        original(rows, *rest)  # what has been written is overwritten
        chunks.append(len(rows))
        if len(rows) > 3:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(evaluator, "_score", score)
    values = CoalitionUtility(round, evaluator)(all_masks(4))
    assert chunks == [7, 3, 3, 3, 3, 3, 1]
    assert evaluator.chunk == 3
    reference = ModelEvaluator(net, round.space, batches(), num_classes=CLASSES)
    assert torch.equal(values, CoalitionUtility(round, reference)(all_masks(4)))


def test_a_module_that_vmap_cannot_handle_is_evaluated_one_at_a_time() -> None:
    net, data = Branching(), batches()
    round = a_round(net)
    with pytest.warns(UserWarning, match="vmap cannot run Branching"):
        evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES, backend="vmap")
    reference = ModelEvaluator(net, round.space, data, num_classes=CLASSES)
    expected = reference(round.client_vectors).value("negative_loss")
    assert torch.equal(evaluator(round.client_vectors).value("negative_loss"), expected)


@pytest.mark.parametrize("backend", ["vmap", "serial"])
def test_the_module_and_the_process_are_left_alone(backend: Any) -> None:
    net = module()
    net.train()
    net.norm.eval()
    net.conv.weight.grad = torch.ones_like(net.conv.weight)
    net.norm.num_batches_tracked.fill_(17)
    before = copy.deepcopy(net.state_dict())
    tensors = {name: (id(t), t.data_ptr(), t._version) for name, t in net.state_dict(keep_vars=True).items()}
    flags = [(layer.training, p.requires_grad) for layer in net.modules() for p in layer.parameters()]
    round = a_round(net)
    metric = MulticlassF1Score(CLASSES)
    rng = torch.get_rng_state()

    evaluator = ModelEvaluator(net, round.space, batches(), num_classes=CLASSES, metric=metric, backend=backend)
    CoalitionUtility(round, evaluator)(all_masks(4))
    evaluator.gradient_products(round.global_vector, round.matrix)

    after = net.state_dict(keep_vars=True)
    assert {name: (id(t), t.data_ptr(), t._version) for name, t in after.items()} == tensors
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert [(layer.training, p.requires_grad) for layer in net.modules() for p in layer.parameters()] == flags
    assert net.conv.weight.grad.eq(1).all()
    assert metric.update_count == 0
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.is_grad_enabled()


def test_metrics_of_a_round_share_every_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    net = module()
    round = a_round(net)
    evaluator = ModelEvaluator(net, round.space, batches(), num_classes=CLASSES)
    evaluated: list[int] = []
    original = evaluator.evaluate
    monkeypatch.setattr(evaluator, "evaluate", lambda build, count: evaluated.append(count) or original(build, count))
    games = CoalitionGames(evaluator)
    games.begin(round)
    accuracy, loss = games.utility("accuracy"), games.utility("negative_loss")
    twice = torch.tensor([[True, True, False, False], [True, True, False, False], [False, False, False, False]])
    first = accuracy(twice)
    assert first[0] == first[1]
    assert evaluated == [2]
    everything = loss(all_masks(4))
    assert evaluated == [2, 14]
    assert torch.equal(accuracy(all_masks(4))[[12, 12, 0]], first)
    assert loss(twice).equal(everything[[12, 12, 0]])
    assert evaluated == [2, 14]
    assert accuracy.evaluations == loss.evaluations == games.evaluations == 16

    # Other weightings are other models, apart from the empty coalition's.
    games.utility("accuracy", "samples")(all_masks(4))
    assert evaluated == [2, 14, 15]
    games.utility("accuracy", FIXED)(all_masks(4))
    games.utility("negative_loss", FIXED.double())(all_masks(4))
    games.utility("accuracy", FIXED.clone())(all_masks(4))
    assert evaluated[:4] == [2, 14, 15, 15]
    games.begin(a_round(net))
    assert games.evaluations == 0
    games.utility()(twice)
    assert evaluated[-1] == 2
    games.end()
    with pytest.raises(RuntimeError, match="begin"):
        games.utility()
