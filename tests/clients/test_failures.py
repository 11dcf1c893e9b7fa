"""A client whose own code fails is named, and nothing that was learnt before is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor
from torch.utils.data import Dataset
from toys import Plain, fit, toy_sets, vector

from flsv.data import FederatedDataModule, SizePartitioner, Splits
from flsv.loop import FederatedLoop

ROUND, CLIENT, BATCH = 1, 2, 1
PLACE = f"while client {CLIENT} trained in round {ROUND + 1}"


class Failing(Plain):
    """Fails in the middle of one client's training."""

    def __init__(self, failure: BaseException | None, where: str = "training_step", manual: bool = False) -> None:
        super().__init__()
        self.failure, self.where, self.automatic_optimization = failure, where, not manual
        self.seen = 0

    def maybe_fail(self, where: str) -> None:
        if where == self.where and self.failure is not None:
            loop = next(c for c in self.trainer.callbacks if isinstance(c, FederatedLoop))
            if loop.round_index == ROUND and loop.current_client == CLIENT and self.seen >= BATCH:
                raise self.failure
            self.seen += loop.round_index == ROUND and loop.current_client == CLIENT

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.maybe_fail("training_step")
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.maybe_fail("on_before_optimizer_step")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.maybe_fail("on_train_batch_start")
        if self.where == "skip" and self.trainer.current_epoch == ROUND:
            return -1
        return None


class Samples(Dataset[Any]):
    """A data set that fails at one sample once it has been read often enough."""

    def __init__(self, failure: type[BaseException]) -> None:
        self.samples, self.failure = toy_sets()[0], failure
        self.targets = self.samples.tensors[1]
        self.bad, self.reads = -1, 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            self.reads += 1
            if self.reads > ROUND:
                raise self.failure("bad sample")
        return self.samples[index]


def federation(**kwargs: Any) -> FederatedLoop:
    return FederatedLoop(seed=1, **kwargs)


def after(rounds: int, folder: Path) -> Tensor:
    return vector(fit(federation(), folder, rounds=rounds))


def said(error: pytest.ExceptionInfo[BaseException]) -> str:
    return "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])


@pytest.mark.parametrize("where", ["training_step", "on_before_optimizer_step", "on_train_batch_start"])
@pytest.mark.parametrize("failure", [ZeroDivisionError("mine"), torch.cuda.OutOfMemoryError("CUDA out of memory.")])
def test_the_error_names_client_and_round_and_the_global_model_is_there(
    tmp_path: Path, where: str, failure: BaseException
) -> None:
    loop, module = federation(), Failing(failure, where)
    last = ModelCheckpoint(tmp_path, filename="last", enable_version_counter=False)
    with (
        pytest.warns(UserWarning, match=f"round {ROUND + 1} is discarded: .* {PLACE}"),
        pytest.raises(type(failure), match=str(failure)) as error,
    ):
        fit(
            loop,
            tmp_path,
            module,
            enable_checkpointing=True,
            callbacks=[last, OnExceptionCheckpoint(tmp_path, "exception")],
        )
    assert PLACE in said(error)
    assert loop.round_index == ROUND
    assert torch.equal(vector(module), after(ROUND, tmp_path))
    whole = after(3, tmp_path)
    for checkpoint in ("last.ckpt", "exception.ckpt"):
        resumed = fit(federation(), tmp_path, Plain(), ckpt_path=tmp_path / checkpoint)
        assert torch.equal(vector(resumed), whole), checkpoint


@pytest.mark.parametrize(
    ("where", "manual", "match"),
    [
        ("training_step", False, f"last batch {PLACE}: a hook raised"),
        ("on_train_batch_start", False, f"last batch {PLACE}: a hook raised"),
        ("skip", False, f"last batch while client 0 trained in round {ROUND + 1}: .* on_train_batch_start returned -1"),
    ],
)
def test_stop_iteration_does_not_end_the_training(tmp_path: Path, where: str, manual: bool, match: str) -> None:
    loop, module = federation(), Failing(StopIteration("mine"), where, manual)
    with pytest.warns(UserWarning, match="is discarded"), pytest.raises(RuntimeError, match=match):
        fit(loop, tmp_path, module)
    assert loop.round_index == ROUND
    if not manual:
        assert torch.equal(vector(module), after(ROUND, tmp_path))


@pytest.mark.parametrize("failure", [ValueError, StopIteration])
def test_a_sample_that_cannot_be_read(tmp_path: Path, failure: type[BaseException]) -> None:
    samples = Samples(failure)
    data = FederatedDataModule(samples, SizePartitioner([4, 1, 2]), batch_size=8, splits=Splits(client_test=0.2))
    data.prepare_data()
    data.setup("fit")
    samples.bad = int(data.client_indices(CLIENT)[0])
    loop, module = federation(), Plain()
    expected = RuntimeError if failure is StopIteration else failure
    with pytest.warns(UserWarning, match="is discarded"), pytest.raises(expected) as error:
        fit(loop, tmp_path, module, data)
    assert f"client {CLIENT}" in said(error)
    assert f"round {ROUND + 1}" in said(error)
    if failure is StopIteration:
        assert "batches in round 2: its data set raised StopIteration" in str(error.value)
    assert loop.round_index == ROUND
    assert vector(module).isfinite().all()
