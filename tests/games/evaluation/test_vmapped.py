"""Models of a game at once, by vmap: chunks by free memory, and what vmap cannot do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from games.naive import CLASSES, Branching, a_round, all_masks, batches, module
from torch import Tensor, nn
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassF1Score

from flsv.games import CoalitionTable, CoalitionUtility, ModelEvaluator
from flsv.parameters import ParameterSpace
from flsv.seeding import isolated_rngs


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
    masks = all_masks(4)
    metric = MulticlassF1Score(CLASSES, average="macro")

    def scores(backend: Any, chunk: int = 64) -> Any:
        evaluator = ModelEvaluator(
            net, round.space, data, num_classes=CLASSES, metric=metric, backend=backend, chunk=chunk
        )
        table = CoalitionTable(round, evaluator)
        return table.scores(CoalitionUtility(round, evaluator)._models, masks)

    expected = scores("serial")
    for backend, chunk in [("serial", 64), ("vmap", 64), ("vmap", 1), ("vmap", 5), ("vmap", 100)]:
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
    with pytest.warns(UserWarning, match="vmap cannot run Branching") as caught:
        evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES, backend="vmap")
    assert len(caught) == 1
    values = CoalitionUtility(round, evaluator)(all_masks(4))
    reference = ModelEvaluator(net, round.space, data, num_classes=CLASSES)
    assert torch.equal(values, CoalitionUtility(round, reference)(all_masks(4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CoalitionUtility(round, evaluator)(all_masks(4))
