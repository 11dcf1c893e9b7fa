"""Fits of a moment: started, resumed, compared, looked into."""

import csv
import os
import signal
import warnings
from functools import partial

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from flsv.aggregation import FedAvg, ShapFedWA
from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley
from flsv.sampling import ClientSampler, UniformSampler
from helpers.data import toy_data
from helpers.loops_by_hand import LOCAL_EPOCHS, ROUNDING, SEED
from helpers.models import Plain


def trainer_for(loop, folder, rounds=3, *, callbacks=(), **trainer_options):
    return plain_trainer(folder, rounds, callbacks=[loop, *callbacks], **trainer_options)


def plain_trainer(folder, rounds=3, **trainer_options):
    """Return a Trainer without a loop, which prints and writes nothing but where an option says so."""
    options = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    options.update(trainer_options)
    return L.Trainer(max_epochs=rounds, default_root_dir=folder, **options)


def fit(loop, folder, module=None, data=None, rounds=3, ckpt_path=None, **trainer_options):
    """Fit a plain module and toy data, where none are given. Return the module."""
    if module is None:
        module = Plain()
    if data is None:
        data = toy_data()

    trainer = trainer_for(loop, folder, rounds, **trainer_options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*in eval mode at the start of training.*")
        trainer.fit(module, data, ckpt_path=ckpt_path)
    return module


def fit_and_save(loop, folder, *arguments, callbacks=(), **options):
    """Fit, and return the path of the last checkpoint."""
    saving = [make_checkpoint_callback(folder), *callbacks]
    fit(loop, folder, *arguments, callbacks=saving, enable_checkpointing=True, **options)
    return folder / "checkpoints" / "last.ckpt"


def make_checkpoint_callback(folder):
    return ModelCheckpoint(folder / "checkpoints", filename="last", enable_version_counter=False)


def validation_loss(module, space, vector, data):
    """Return the loss of the model ``state_vector``, in evaluation mode, on the server's samples."""
    space.write(module, vector)
    module.eval()
    x, y = all_samples(data.val_dataloader())
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(module(x), y))


def all_samples(batches):
    """Return the inputs and the labels of all batches, a tensor each."""
    inputs, labels = zip(*batches)
    return torch.cat(inputs), torch.cat(labels)


def state_vector(module):
    """All floating-point state, parameters before buffers, by state_dict and not by flsv."""
    parameters = dict(module.named_parameters())
    buffers = {}
    for name, tensor in module.state_dict().items():
        if name not in parameters and tensor.is_floating_point():
            buffers[name] = tensor

    tensors = [*parameters.values(), *buffers.values()]
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])


def read_logged_metrics(folder):
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        return list(csv.DictReader(file))


def make_shapfed_loop(**kwargs):
    kwargs.setdefault("seed", 1)
    return FederatedLoop(ShapFedWA("cssv"), {"cssv": ClassSpecificShapley()}, **kwargs)


def client_tensors(loop):
    """Return what clients keep as tensors by name."""
    states = loop.state_dict()["clients"]
    return {client: state["tensors"] for client, state in states.items() if "tensors" in state}


def assert_private_parts(loop, private_parts, prefix="net."):
    """The clients' states hold these parts of the model and nothing else, to rounding."""
    expected_states = {}
    for client, part in private_parts.items():
        if part:
            expected_states[client] = {
                f"module.{prefix}{name}": value for name, value in part.items()
            }

    states = client_tensors(loop)
    assert states.keys() == expected_states.keys()
    for client, expected_state in expected_states.items():
        torch.testing.assert_close(states[client], expected_state, rtol=ROUNDING, atol=ROUNDING)


class KeepsRounds(FedAvg):
    """Keeps each round with the clients' models."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.rounds = []

    def end_round(self, round):
        self.rounds.append(round)


class ListLoader:
    """A loader of these batches: Lightning takes a list for several loaders."""

    def __init__(self, batches):
        self._batches = batches

    def __len__(self):
        return len(self._batches)

    def __iter__(self):
        return iter(self._batches)


def make_loop_of_three_clients(**options):
    return FederatedLoop(sampler=UniformSampler(3), local_epochs=LOCAL_EPOCHS, seed=SEED, **options)


class Cohorts(ClientSampler):
    """Draws these clients in the rounds, one cohort after the other."""

    def __init__(self, cohorts):
        self.cohorts = cohorts

    def sample(self, num_clients, contributions, generator, round_index=0):
        return torch.tensor(self.cohorts[round_index])

    def inclusion_probabilities(self, num_clients, *_, **__):
        return torch.ones(num_clients)


def make_untrainable(kind):
    class FailsIfTrained(kind):
        def training_step(self, batch, batch_idx):
            raise AssertionError("training had started")

    FailsIfTrained.__name__ = kind.__name__
    return FailsIfTrained()


def assert_resumes(
    make, folder, module=Plain, data=toy_data, rounds=(2, 4), callbacks=list, **options
):
    """Assert that a fit that is resumed after the first rounds ends bitwise as an uninterrupted one, whose loop is
    returned.

    That is the global model, start points, what clients keep, their trained models, buffers and strategies' states.
    """
    first_rounds, all_rounds = rounds

    def make_fit_arguments():
        return {"module": module(), "data": data(), "callbacks": callbacks(), **options}

    uninterrupted_loop = make()
    uninterrupted_module = fit(
        uninterrupted_loop, folder / "whole", rounds=all_rounds, **make_fit_arguments()
    )

    checkpoint = fit_and_save(make(), folder, rounds=first_rounds, **make_fit_arguments())
    torch.load(checkpoint, weights_only=True)
    resumed_loop = make()
    resumed_module = fit(
        resumed_loop, folder, rounds=all_rounds, ckpt_path=checkpoint, **make_fit_arguments()
    )

    assert torch.equal(state_vector(resumed_module), state_vector(uninterrupted_module))
    state = resumed_loop.state_dict()
    expected_state = uninterrupted_loop.state_dict()
    for name in ("starts", "clients", "trained", "buffers", "strategies", "client_scores"):
        assert same_values(state[name], expected_state[name]), name
    values = state["metrics"]["values"]
    assert same_values(values, expected_state["metrics"]["values"])

    return uninterrupted_loop


def same_values(value, expected):
    """Whether two values, or all that they contain, are the same to the bit; NaN is NaN."""
    if isinstance(value, Tensor):
        return value.shape == expected.shape and torch.allclose(
            value, expected, rtol=0, atol=0, equal_nan=True
        )

    if isinstance(value, dict):
        if value.keys() != expected.keys():
            return False
        return all(same_values(value[key], expected[key]) for key in value)

    if isinstance(value, list | tuple):
        return len(value) == len(expected) and all(map(same_values, value, expected))

    return value == expected


class InRound(Callback):
    """Knows the number, from 0, of the present batch among all of the round."""

    first_batch = 0

    def on_train_epoch_start(self, trainer, module):
        self.first_batch = trainer.fit_loop.total_batch_idx + 1

    def batch_of_round(self, trainer):
        return trainer.fit_loop.total_batch_idx - self.first_batch


class SavesInHooks(Callback):
    """Saves a checkpoint in the second round's hooks ``hooks``, once in each batch."""

    def __init__(self, folder, *hooks):
        self.folder = folder
        for name in hooks:
            setattr(self, name, partial(self.save, name))

    def save(self, name, trainer, *_, **__):
        is_second_round = trainer.current_epoch == 1
        if is_second_round:
            batch = "all" if "epoch" in name else trainer.fit_loop.total_batch_idx
            trainer.save_checkpoint(self.folder / f"{name}-{batch}.ckpt")


class StopInRound(InRound):
    """Ends the run in the middle of a round: by SIGKILL, or by an exception."""

    def __init__(self, round_index, batch, error=None):
        self.round_index = round_index
        self.batch = batch
        self.error = error

    def on_train_batch_end(self, trainer, module, *args):
        position = (trainer.current_epoch, self.batch_of_round(trainer))
        if position != (self.round_index, self.batch):
            return
        if self.error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise self.error("stopped by the test")
