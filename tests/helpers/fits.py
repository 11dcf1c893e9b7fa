"""Fits of a moment: started, resumed, compared, looked into."""

import copy
import csv
import itertools
import os
import signal
import warnings
from functools import partial

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from flsv import ClientEvaluation, Reporting
from flsv.aggregation import FedAvg, ShapFedWA
from flsv.core.parameter_space import ParameterSpace
from flsv.data import FederatedDataModule, SizePartitioner
from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley, LeaveOneOut
from flsv.personalization import Personalizer
from flsv.sampling import ClientSampler, UniformSampler
from helpers.data import toy_data
from helpers.loops_by_hand import LOCAL_EPOCHS, ROUNDING, SEED
from helpers.models import Plain, Plainest, adam, network


def trainer_for(
    loop,
    folder,
    rounds=3,
    *,
    callbacks=(),
    **kwargs,
):
    return plain_trainer(folder, rounds, callbacks=[loop, *callbacks], **kwargs)


def plain_trainer(folder, rounds=3, **kwargs):
    """Return a Trainer without a loop, which prints and writes nothing."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    return L.Trainer(max_epochs=rounds, default_root_dir=folder, **{**quiet, **kwargs})


def fit(
    loop,
    folder,
    module=None,
    data=None,
    rounds=3,
    ckpt_path=None,
    **kwargs,
):
    if module is None:
        module = Plain()
    if data is None:
        data = toy_data()

    trainer = trainer_for(loop, folder, rounds, **kwargs)
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
    x, y = (torch.cat(parts) for parts in zip(*data.val_dataloader()))
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(module(x), y))


def state_vector(module):
    """All floating-point state, parameters before buffers, by state_dict and not by flsv."""
    parameters = [name for name, _ in module.named_parameters()]
    return flatten_state(module.state_dict(), parameters)


def flatten_state(state, parameters):
    names = list(parameters)
    for name, tensor in state.items():
        if name not in parameters and tensor.is_floating_point():
            names.append(name)
    return torch.cat([state[name].reshape(-1).double() for name in names])


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


#: Their epochs have 5, 2, 4, 2 and 1 batches of 8, the last ones of 4, 5, 1, 4 and 8 samples.
SIZES = (31, 11, 21, 10, 7)


def make_engine_loop(engine, **kwargs):
    return FederatedLoop(engine=engine, seed=3, **kwargs)


def fit_by_both_engines(
    folder,
    make=Plainest,
    data=None,
    rounds=3,
    trainer=None,
    engine="vmap",
    tolerance=1e-5,
    **kwargs,
):
    make_data = data or partial(toy_data, SIZES)
    trainer_options = trainer or {}

    def fit_by(kind, name):
        """Fit once. Arguments that are partial functions make an object for each fit."""
        arguments = {}
        for argument, value in kwargs.items():
            arguments[argument] = value() if isinstance(value, partial) else value
        loop = make_engine_loop(kind, **arguments)
        module = fit(loop, folder / name, make(), make_data(), rounds, **trainer_options)
        return loop, module

    sequential_loop, sequential_module = fit_by("sequential", "sequential")
    other_loop, other_module = fit_by(engine, "other")

    assert_close = partial(
        torch.testing.assert_close, rtol=tolerance, atol=tolerance, equal_nan=True
    )
    assert_close(state_vector(other_module), state_vector(sequential_module))
    assert other_module.trainer.global_step == sequential_module.trainer.global_step
    assert_close(facts_of(other_loop), facts_of(sequential_loop))
    return sequential_loop, other_loop


def facts_of(loop):
    """What a fit leaves in its loop."""
    return {
        "contributions": dict(loop.contribution_metrics.contributions),
        "weights": loop.weights,
        "participations": loop.participations,
        "client_scores": dict(loop.client_scores),
        "starts": loop.state.starts,
        "tensors": client_tensors(loop),
        "trained": loop.trained,
    }


MASKS = torch.tensor(list(itertools.product([False, True], repeat=3)))


class KeepsGames(LeaveOneOut):
    """Plays all coalitions, and keeps each round with the coalitions' utilities."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.__dict__["games"] = []

    @property
    def round_fields(self):
        return {**super().round_fields, "generator": self.keep_round}

    def keep_round(self, round):
        self.games.append([round])
        return round.generator("x")

    def update(self, client_ids, utility, generator=None, round_index=0):
        self.games[-1].append(utility(MASKS))
        super().update(client_ids, utility, generator, round_index)


def partition_in_three(data):
    return FederatedDataModule(data, SizePartitioner([3, 1, 2]))


def play_all_coalitions(folder, module, data, rounds=1, **measures):
    """The utilities ``[8]`` of the last round's coalitions, and their models by hand."""
    metric = KeepsGames(**measures)
    loop = FederatedLoop(metrics={"mine": metric}, seed=3)
    fit(loop, folder, module, data, rounds=rounds)

    round, utilities = metric.games[-1]
    models = []
    for mask in MASKS:
        if mask.any():
            mean = round.client_vectors[mask].double().mean(0)
            models.append(mean.float())
        else:
            models.append(round.global_vector)
    return utilities, models


def validate_with_lightning(module, vector, data, folder):
    """By Lightning: the vector set into a copy, ``trainer.validate``."""
    copied = copy.deepcopy(module)
    ParameterSpace(copied).write(copied, vector)
    trainer = plain_trainer(folder)
    trainer.validate(copied, data, verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def make_untrainable(kind):
    class Never(kind):
        def training_step(self, batch, batch_idx):
            raise AssertionError("training had started")

    Never.__name__ = kind.__name__
    return Never()


def assert_resumes(
    make,
    folder,
    module=Plain,
    data=toy_data,
    rounds=(2, 4),
    callbacks=list,
    **options,
):
    """The two end alike to the bit. Gives the first.

    That is the global model, start points, what clients keep, their trained models, buffers and strategies' states.
    """
    whole = make()
    half = make()
    remainder = make()
    first_rounds, all_rounds = rounds
    uninterrupted = fit(
        whole,
        folder / "whole",
        module(),
        data(),
        rounds=all_rounds,
        callbacks=callbacks(),
        **options,
    )

    path = fit_and_save(
        half, folder, module(), data(), first_rounds, callbacks=callbacks(), **options
    )
    torch.load(path, weights_only=True)
    resumed = fit(
        remainder,
        folder,
        module(),
        data(),
        all_rounds,
        path,
        callbacks=callbacks(),
        **options,
    )

    assert torch.equal(state_vector(resumed), state_vector(uninterrupted))

    state = remainder.state_dict()
    expected_state = whole.state_dict()

    for name in ("starts", "clients", "trained", "buffers", "strategies", "client_scores"):
        assert same_values(state[name], expected_state[name]), name

    return whole


def same_values(value, expected):
    if isinstance(value, Tensor):
        return torch.equal(value.nan_to_num(9), expected.nan_to_num(9))

    if isinstance(value, dict):
        if value.keys() != expected.keys():
            return False
        return all(same_values(value[key], expected[key]) for key in value)

    if isinstance(value, list | tuple):
        return len(value) == len(expected) and all(map(same_values, value, expected))

    return value == expected


class Mixture(Personalizer):
    """Half the global model, half the client's own."""

    def personalize(self, round, contributions, models):
        mixtures = {}
        for client, model in zip(round.client_ids.tolist(), round.client_vectors):
            mixtures[client] = (model + round.server_vector) / 2
        return mixtures


class Noisy(Plain):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val_noise", torch.rand(()))

    def on_train_epoch_start(self):
        self.log("epoch_noise", torch.rand(()))


class InRound(Callback):
    """Knows the number, from 0, of the present batch among all of the round."""

    first_batch = 0

    def on_train_epoch_start(self, trainer, module):
        self.first_batch = trainer.fit_loop.total_batch_idx + 1

    def place(self, trainer):
        return trainer.fit_loop.total_batch_idx - self.first_batch


class SavesInHooks(Callback):
    """Saves a checkpoint in the second round's hooks ``hooks``, once in each batch."""

    def __init__(self, folder, *hooks):
        self.folder = folder
        for name in hooks:
            setattr(self, name, partial(self.save, name))

    def save(self, name, trainer, *_, **__):
        if trainer.current_epoch == 1:
            batch = trainer.fit_loop.total_batch_idx if "epoch" not in name else "all"
            trainer.save_checkpoint(self.folder / f"{name}-{batch}.ckpt")


class StopInRound(InRound):
    """Ends the run in the middle of a round: by SIGKILL, or by an exception."""

    def __init__(self, round_index, batch, error=None):
        self.round_index = round_index
        self.batch = batch
        self.error = error

    def on_train_batch_end(self, trainer, module, *args):
        if trainer.current_epoch == self.round_index and self.place(trainer) == self.batch:
            if self.error is not None:
                raise self.error("stopped by the test")
            os.kill(os.getpid(), signal.SIGKILL)


def fit_with_everything(folder, rounds=5, callbacks=(), ckpt_path=None):
    loop = FederatedLoop(
        ShapFedWA("cssv"),
        {"cssv": ClassSpecificShapley(momentum=0.7)},
        personalizer=Mixture(),
        sampler=UniformSampler(3),
        optimizer_state="persist",
        evaluation=ClientEvaluation(every=2),
        reporting=Reporting(figures=4),
        local_epochs=2,
        seed=11,
    )
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=7, gamma=0.8)
    module = Noisy(network(dropout=0.3), adam, scheduler, interval="step")
    early_stopping = EarlyStopping("val_acc", mode="max", patience=100)

    fit(
        loop,
        folder,
        module,
        toy_data((4, 2, 3, 3, 2)),
        rounds,
        ckpt_path,
        logger=TensorBoardLogger(folder, name="", version="log"),
        enable_checkpointing=True,
        callbacks=[*callbacks, early_stopping, make_checkpoint_callback(folder)],
    )
    return loop, module
