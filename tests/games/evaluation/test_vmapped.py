"""Models of a game at once, by vmap: chunks by free memory, and what vmap cannot do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from games.naive import CLASSES, Branching, a_round, all_masks, batches, module
from torch import Tensor
from torchmetrics.classification import MulticlassF1Score

from flsv.games import CoalitionTable, CoalitionUtility, ModelEvaluator, backends


def test_vmap_gives_what_one_model_at_a_time_gives() -> None:
    net, data = module(), batches()
    round = a_round(net)
    masks = all_masks(4)
    metric = MulticlassF1Score(CLASSES, average="macro")

    def scores(backend: Any, chunk: int | None = None) -> Any:
        evaluator = ModelEvaluator(
            net, round.space, data, num_classes=CLASSES, metric=metric, backend=backend, chunk=chunk
        )
        table = CoalitionTable(round, evaluator)
        return table.scores(CoalitionUtility(round, evaluator)._models, masks)

    expected = scores("serial")
    for backend, chunk in [("serial", None), ("vmap", None), ("vmap", 1), ("vmap", 5), ("vmap", 100)]:
        found = scores(backend, chunk)
        assert torch.equal(found.correct, expected.correct)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.custom, expected.custom, rtol=1e-6, atol=1e-6)


def test_the_chunk_follows_from_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    net = module()
    round = a_round(net)
    evaluator = ModelEvaluator(
        net, round.space, batches(), num_classes=CLASSES, backend="vmap", metric=MulticlassF1Score(CLASSES)
    )
    released: list[int] = []

    class Memory(backends.DeviceMemory):
        """A device on which a model takes 100 bytes, 1000 bytes are free, and only 3 models fit after all."""

        def free(self) -> int:
            return 1000

        def peak(self) -> int:
            return 200

        def release(self) -> None:
            released.append(1)

    chunks: list[int] = []
    runner = evaluator._vmap = backends.VmapRunner(evaluator._replica, None, Memory())
    original = runner._run_chunk

    def run_chunk(build: Any, rows: range, *rest: Any) -> None:
        original(build, rows, *rest)  # what has been written is overwritten
        chunks.append(len(rows))
        if len(rows) > 3:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(runner, "_run_chunk", run_chunk)
    values = CoalitionUtility(round, evaluator)(all_masks(4))
    custom = CoalitionUtility(round, evaluator, metric="custom")(all_masks(4))
    # 0.7 * 1000 / 100 = 7 models, so 4.
    assert chunks[:9] == [2, 4, 2, 2, 2, 2, 2, 2, 2]
    assert released == [1]
    reference = ModelEvaluator(net, round.space, batches(), num_classes=CLASSES, metric=MulticlassF1Score(CLASSES))
    assert torch.equal(values, CoalitionUtility(round, reference)(all_masks(4)))
    torch.testing.assert_close(custom, CoalitionUtility(round, reference, metric="custom")(all_masks(4)))


def test_the_memory_of_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"mem_get_info": (50, 999), "memory_reserved": 30, "memory_allocated": 10, "max_memory_allocated": 17}
    for name, number in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, number=number: number)
    called: list[str] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: called.append("reset"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("empty"))
    memory = backends.CudaMemory(torch.device("cuda", 0))
    assert memory.free() == 70
    memory.start()
    assert memory.peak() == 7
    memory.release()
    assert called == ["reset", "empty"]


def test_a_model_that_does_not_fit_alone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    net = module()
    round = a_round(net)
    evaluator = ModelEvaluator(net, round.space, batches(), num_classes=CLASSES, backend="vmap")

    def full(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(evaluator._vmap, "_run_chunk", full)
    utility = CoalitionUtility(round, evaluator)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        utility(all_masks(4))


def test_a_module_that_vmap_cannot_handle_is_evaluated_one_at_a_time() -> None:
    net, data = Branching(), batches()
    round = a_round(net)
    evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES, backend="vmap")
    with pytest.warns(UserWarning, match="vmap cannot run Branching") as caught:
        values = CoalitionUtility(round, evaluator)(all_masks(4))
    assert len(caught) == 1
    reference = ModelEvaluator(net, round.space, data, num_classes=CLASSES)
    assert torch.equal(values, CoalitionUtility(round, reference)(all_masks(4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CoalitionUtility(round, evaluator)(all_masks(4))


class Unwilling(MulticlassF1Score):
    """Fails at its first update."""

    def update(self, *args: Any) -> None:
        raise RuntimeError("tensors of two devices")


def test_only_what_vmap_cannot_do_is_held_against_it() -> None:
    """A failing metric is an error, and not the end of vmap for the rest of the run."""
    net, data = module(), batches()
    round = a_round(net)
    evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES, backend="vmap", metric=Unwilling(CLASSES))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="two devices"):
            CoalitionUtility(round, evaluator)(all_masks(4))
    assert evaluator.backend == "vmap"


class Failing(Branching):
    """Fails at its second model, in whatever way it is run."""

    broken = False

    def forward(self, x: Tensor) -> Tensor:
        if self.broken:
            raise RuntimeError("tensors of two devices")
        return super().forward(x)


def test_a_forward_that_fails_one_by_one_too_is_an_error() -> None:
    net, data = Failing(), batches()
    round = a_round(net)
    evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES, backend="vmap")
    evaluator._replica.module.broken = True  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="two devices"):
            CoalitionUtility(round, evaluator)(all_masks(4))
    assert evaluator.backend == "vmap"
