"""A client whose own code fails is named, and nothing that was learnt before is lost."""

import re

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import TensorDataset

from flsv.data import FederatedDataModule, SizePartitioner, Splits
from flsv.federation import FederatedLoop
from helpers import warns
from helpers.data import toy_sets
from helpers.fits import fit, state_vector
from helpers.models import Plain, loop_of
from zoo.tasks import Items

ROUND, CLIENT, BATCH = 1, 2, 1
PLACE = f"while client {CLIENT} trained in round {ROUND + 1}"


class Failing(Plain):
    def __init__(self, failure, where):
        super().__init__()
        self.failure = failure
        self.where = where
        self.num_calls = 0

    def maybe_fail(self, where):
        if where == self.where:
            loop = loop_of(self)
            is_at_client = loop.round_index == ROUND and loop.current_client == CLIENT
            if is_at_client and self.num_calls >= BATCH:
                raise self.failure
            self.num_calls += is_at_client

    def training_step(self, batch, batch_idx):
        self.maybe_fail("training_step")
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch, batch_idx):
        self.maybe_fail("on_train_batch_start")
        if self.where == "skip" and self.trainer.current_epoch == ROUND:
            return -1
        return None


def make_loop():
    return FederatedLoop(seed=1)


@pytest.fixture(scope="module")
def models_after_rounds(tmp_path_factory):
    """The global model after each round of a fit without failures."""
    models = []
    look = LambdaCallback(
        on_train_epoch_end=lambda trainer, module: models.append(state_vector(module))
    )
    fit(make_loop(), tmp_path_factory.mktemp("whole"), callbacks=[look])

    return models


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "failure"),
    [
        ("training_step", torch.cuda.OutOfMemoryError("CUDA out of memory.")),
        ("on_train_batch_start", ZeroDivisionError("mine")),
    ],
)
def test_error_in_client_code_names_client_and_round_and_keeps_the_global_model(
    tmp_path, models_after_rounds, where, failure
):
    loop = make_loop()
    module = Failing(failure, where)
    last_checkpoint = ModelCheckpoint(tmp_path, filename="last", enable_version_counter=False)
    savers = [last_checkpoint, OnExceptionCheckpoint(tmp_path, "exception")]
    with (
        warns(f"round {ROUND + 1} is discarded:.*{PLACE}"),
        pytest.raises(type(failure), match=str(failure)) as error,
    ):
        fit(loop, tmp_path, module, enable_checkpointing=True, callbacks=savers)

    notes = getattr(error.value, "__notes__", [])
    assert PLACE in "\n".join([str(error.value), *notes])
    assert loop.round_index == ROUND
    assert torch.equal(state_vector(module), models_after_rounds[ROUND - 1])

    for checkpoint in ("last.ckpt", "exception.ckpt"):
        resumed = fit(make_loop(), tmp_path, Plain(), ckpt_path=tmp_path / checkpoint)
        assert torch.equal(state_vector(resumed), models_after_rounds[-1]), checkpoint


def make_typed_data(inputs, labels):
    """Two clients whose samples have these types, as they were stored."""
    x, y = toy_sets()[0].tensors
    inputs_stored = (10 * x).to(inputs)
    labels_stored = y.to(labels)
    stored = TensorDataset(inputs_stored, labels_stored)
    return FederatedDataModule(clients={"Boston": stored, "Lyon": stored}, batch_size=8)


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("inputs", "labels"),
    [
        (torch.int32, torch.int64),
        (torch.bool, torch.int64),
        (torch.float64, torch.int64),
        (torch.float32, torch.int32),
    ],
)
def test_types_that_torch_refuses_are_named_with_the_client_and_a_remedy(tmp_path, inputs, labels):
    data = make_typed_data(inputs, labels)
    with pytest.raises(RuntimeError) as error:
        fit(make_loop(), tmp_path, Plain(), data, rounds=1)

    notes = "\n".join(error.value.__notes__)
    assert re.search(r"'Boston'.* round 1", notes)
    assert f"The batch holds {inputs} [8, 6], {labels} [8]" in notes
    assert "x.float()" in notes


def test_types_of_validation_samples_are_named_too(tmp_path):
    train = toy_sets()[0]
    x, y = train.tensors
    integers = (10 * x).to(torch.int32)
    data = FederatedDataModule(
        train,
        SizePartitioner([1, 1]),
        val=TensorDataset(integers, y),
        batch_size=8,
    )

    with pytest.raises(RuntimeError) as error:
        fit(make_loop(), tmp_path, Plain(), data, rounds=1, num_sanity_val_steps=1)

    notes = "\n".join(error.value.__notes__)
    assert re.search(r"at the server.* torch\.int32", notes)


@pytest.mark.parametrize(
    ("where", "match"),
    [
        ("training_step", f"last batch {PLACE}, since a hook raised"),
        (
            "skip",
            f"last batch while client 0 trained in round {ROUND + 1}, .* on_train_batch_start returned -1",
        ),
    ],
)
def test_stop_iteration_in_users_code_is_an_error_and_not_an_early_end(
    tmp_path, models_after_rounds, where, match
):
    loop = make_loop()
    module = Failing(StopIteration("mine"), where)
    with warns("is discarded"), pytest.raises(RuntimeError, match=match):
        fit(loop, tmp_path, module)
    assert loop.round_index == ROUND
    assert torch.equal(state_vector(module), models_after_rounds[ROUND - 1])


def test_unreadable_sample_raises_and_keeps_the_global_model(tmp_path):
    samples = toy_sets()[0]
    bad = [-1]
    loop = make_loop()
    module = Plain()

    def item(index):
        if index == bad[0] and loop.round_index == ROUND:
            raise StopIteration("bad sample")
        return samples[index]

    read = Items(item, range(len(samples)))
    read.targets = samples.tensors[1]
    data = FederatedDataModule(
        read, SizePartitioner([4, 1, 2]), batch_size=8, splits=Splits(client_test=0.2)
    )
    data.prepare_data()
    data.setup("fit")
    bad[0] = int(data.client_indices(CLIENT)[0])
    expected = rf"client {CLIENT} has only .* batches in round {ROUND + 1}. Either its data set raised StopIteration"

    with (
        warns("is discarded"),
        pytest.raises(RuntimeError, match=expected),
    ):
        fit(loop, tmp_path, module, data)

    assert loop.round_index == ROUND
    assert state_vector(module).isfinite().all()
