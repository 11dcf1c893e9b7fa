"""A client whose own code fails is named, and nothing that was learnt before is lost."""

import re

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import Dataset, TensorDataset

from flsv.data import FederatedDataModule, SizePartitioner, Splits
from flsv.federation import FederatedLoop
from helpers import warns
from helpers.data import toy_sets
from helpers.fits import fit, fit_and_save, state_vector
from helpers.models import Plain, loop_of

#: Where clients fail. Rounds are counted from 0, and from 1 in messages.
ROUND_INDEX = 1
CLIENT = 2
BATCH_INDEX = 1
PLACE = f"while client {CLIENT} trained in round {ROUND_INDEX + 1}"


class FailsInOneHook(Plain):
    """Raises ``failure`` in the hook of this name, in the round, client and batch above."""

    def __init__(self, failure, hook):
        super().__init__()
        self.failure = failure
        self.failing_hook = hook

    def fail_in(self, hook, batch_idx):
        loop = loop_of(self)
        present_position = (hook, loop.round_index, loop.current_client, batch_idx)
        if present_position == (self.failing_hook, ROUND_INDEX, CLIENT, BATCH_INDEX):
            raise self.failure

    def training_step(self, batch, batch_idx):
        self.fail_in("training_step", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch, batch_idx):
        self.fail_in("on_train_batch_start", batch_idx)


class SkipsRestOfEpoch(Plain):
    """Returns -1 where Lightning then leaves out the rest of an epoch."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.trainer.current_epoch == ROUND_INDEX else None


def make_loop():
    return FederatedLoop(seed=1)


class KeepsModels(L.Callback):
    """Keeps the global model after each round."""

    def __init__(self):
        self.models = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.models.append(state_vector(pl_module))


@pytest.fixture(scope="module")
def models_after_rounds(tmp_path_factory):
    """The global model after each round of a fit without failures."""
    callback = KeepsModels()
    fit(make_loop(), tmp_path_factory.mktemp("whole"), callbacks=[callback])
    return callback.models


def assert_last_round_was_discarded(loop, module, models_after_rounds):
    assert loop.round_index == ROUND_INDEX
    model_of_round_before = models_after_rounds[ROUND_INDEX - 1]
    assert torch.equal(state_vector(module), model_of_round_before)


ERRORS_IN_HOOKS = [
    ("training_step", torch.cuda.OutOfMemoryError("CUDA out of memory.")),
    ("on_train_batch_start", ZeroDivisionError("mine")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("hook", "failure"), ERRORS_IN_HOOKS)
def test_error_in_client_code_names_client_and_round_and_keeps_the_global_model(
    tmp_path, models_after_rounds, hook, failure
):
    loop = make_loop()
    module = FailsInOneHook(failure, hook)
    warning = f"round {ROUND_INDEX + 1} is discarded:.*{PLACE}"
    with warns(warning), pytest.raises(type(failure), match=str(failure)) as error:
        fit(loop, tmp_path, module)

    notes = getattr(error.value, "__notes__", [])
    assert PLACE in "\n".join([str(error.value), *notes])
    assert_last_round_was_discarded(loop, module, models_after_rounds)


@pytest.mark.slow
@pytest.mark.parametrize(("hook", "failure"), ERRORS_IN_HOOKS)
def test_checkpoints_of_a_run_that_client_code_ended_resume_bitwise(
    tmp_path, models_after_rounds, hook, failure
):
    module = FailsInOneHook(failure, hook)
    saving = OnExceptionCheckpoint(tmp_path, "exception")
    with warns("is discarded"), pytest.raises(type(failure)):
        fit_and_save(make_loop(), tmp_path, module, callbacks=[saving])

    last_model = models_after_rounds[-1]
    for checkpoint in ("checkpoints/last.ckpt", "exception.ckpt"):
        resumed_module = fit(make_loop(), tmp_path, ckpt_path=tmp_path / checkpoint)
        assert torch.equal(state_vector(resumed_module), last_model), checkpoint


def make_typed_data(input_type, label_type):
    """Two clients whose samples have these types, as they were stored."""
    samples, _ = toy_sets()
    x, y = samples.tensors
    stored = TensorDataset((10 * x).to(input_type), y.to(label_type))
    return FederatedDataModule(clients={"Boston": stored, "Lyon": stored}, batch_size=8)


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("input_type", "label_type"),
    [
        (torch.int32, torch.int64),
        (torch.bool, torch.int64),
        (torch.float64, torch.int64),
        (torch.float32, torch.int32),
    ],
)
def test_types_of_training_samples_that_torch_refuses_are_named_with_client_and_remedy(
    tmp_path, input_type, label_type
):
    data = make_typed_data(input_type, label_type)
    with pytest.raises(RuntimeError) as error:
        fit(make_loop(), tmp_path, Plain(), data, rounds=1)

    notes = "\n".join(error.value.__notes__)
    assert re.search(r"'Boston'.* round 1", notes)
    assert f"The batch holds {input_type} [8, 6], {label_type} [8]" in notes
    assert "x.float()" in notes


def test_types_of_validation_samples_that_torch_refuses_are_named(tmp_path):
    train, _ = toy_sets()
    x, y = train.tensors
    integer_samples = TensorDataset((10 * x).to(torch.int32), y)
    data = FederatedDataModule(train, SizePartitioner([1, 1]), val=integer_samples, batch_size=8)

    with pytest.raises(RuntimeError) as error:
        fit(make_loop(), tmp_path, Plain(), data, rounds=1, num_sanity_val_steps=1)

    notes = "\n".join(error.value.__notes__)
    assert re.search(r"at the server.* torch\.int32", notes)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            FailsInOneHook(StopIteration("mine"), "training_step"),
            f"last batch {PLACE}, since a hook raised",
        ),
        (
            SkipsRestOfEpoch(),
            f"last batch while client 0 trained in round {ROUND_INDEX + 1}, .* on_train_batch_start returned -1",
        ),
    ],
    ids=["training_step", "skip"],
)
def test_stop_iteration_in_users_code_is_an_error_and_not_an_early_end(
    tmp_path, models_after_rounds, module, message
):
    loop = make_loop()
    with warns("is discarded"), pytest.raises(RuntimeError, match=message):
        fit(loop, tmp_path, module)

    assert_last_round_was_discarded(loop, module, models_after_rounds)


class SamplesWithUnreadableOne(Dataset):
    """Raises StopIteration for one sample in the round above, as soon as ``unreadable_index`` is set."""

    def __init__(self, samples, loop):
        self.samples = samples
        self.targets = samples.tensors[1]
        self.loop = loop
        self.unreadable_index = None

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if index == self.unreadable_index and self.loop.round_index == ROUND_INDEX:
            raise StopIteration("bad sample")
        return self.samples[index]


def test_unreadable_sample_raises_and_keeps_the_global_model(tmp_path):
    loop = make_loop()
    module = Plain()
    train, _ = toy_sets()
    samples = SamplesWithUnreadableOne(train, loop)
    splits = Splits(client_test=0.2)
    data = FederatedDataModule(samples, SizePartitioner([4, 1, 2]), batch_size=8, splits=splits)
    data.prepare_data()
    data.setup("fit")
    samples.unreadable_index = int(data.client_indices(CLIENT)[0])

    message = (
        rf"client {CLIENT} has only .* batches in round {ROUND_INDEX + 1}. "
        "Either its data set raised StopIteration"
    )
    with warns("is discarded"), pytest.raises(RuntimeError, match=message):
        fit(loop, tmp_path, module, data)

    assert loop.round_index == ROUND_INDEX
    assert state_vector(module).isfinite().all()
