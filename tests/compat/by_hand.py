"""Federated averaging by hand with a Lightning Trainer per client and round.

It shares with flsv the order of the clients' batches and the seeds, and nothing else. Every visit resumes the client's
own checkpoint of its last one, with the federation's weights in it and without the optimizer's state: what else goes on
from round to round (epochs, schedules, callbacks) is Lightning's to say.
"""

import copy
import inspect
import itertools
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import lightning as L
import torch

from flsv.utilities.seeding import generator_for, isolated_rngs, seed_global_rngs
from helpers.fits import ListLoader, plain_trainer
from helpers.loops_by_hand import average_models, federate
from zoo.program import SEED

#: Of two clients.
ALL_CLIENTS = (0, 1)
COALITIONS = [(), (0,), (1,), ALL_CLIENTS]
#: Checkpoints hold more than weights; Lightning before 2.6 does not ask.
WHOLE = (
    {"weights_only": False} if "weights_only" in inspect.signature(L.Trainer.fit).parameters else {}
)


@dataclass(frozen=True)
class HandRound:
    """The model at the start of a round, and what every client has made of it."""

    model: L.LightningModule
    clients: list[L.LightningModule]
    sizes: list[float]


class ClientBatches:
    """A client's batches, one local epoch after the other, in a federation's order and with its random state."""

    def __init__(self, data, round_index, client):
        self.data = data
        self.round_index = round_index
        self.client = client
        self.epochs = itertools.count()

    def __len__(self):
        return len(self.data.client_loader(self.client, "train"))

    def __iter__(self):
        epoch = next(self.epochs)
        key = (self.round_index, self.client, epoch)
        stream = generator_for(SEED, "shuffle", *key)

        with isolated_rngs(SEED, "first batch", *key):
            loader = self.data.client_loader(self.client, "train", generator=stream)
            batches = iter(loader)
            first_batch = next(batches)

        if epoch == 0:
            # What the transfer hooks draw for the first batch comes before the training's own.
            seed_global_rngs(SEED, "transfer", self.round_index, self.client)

        yield first_batch
        yield from batches


class OneRound(L.Callback):
    """Seeds the client's training, and ends the fit after its epochs of the many that the schedules are made for."""

    def __init__(self, round_index, client, epochs):
        self.round_index = round_index
        self.client = client
        self._begun = False
        self._epochs_to_go = epochs

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if not self._begun:
            seed_global_rngs(SEED, "train", self.round_index, self.client)
        self._begun = True

    def on_train_epoch_end(self, trainer, module):
        self._epochs_to_go -= 1
        trainer.should_stop = self._epochs_to_go == 0


def fedavg_by_trainers(program, folder, rounds, epochs=1, members=None):
    """Train a program's clients, or some of them, in every round. Return the last global model, and the rounds."""
    source = program.samples()
    data = program.data()
    data.setup("fit")
    clients = list(range(data.num_clients) if members is None else members)
    sizes = [float(data.num_samples[client]) for client in clients]
    history = []

    def visit(model, round_index, client):
        path = folder / f"by_hand_{client}.ckpt"
        options = {}
        if round_index > 0:
            begin_anew_with(model, path)
            options = {"ckpt_path": path, **WHOLE}
        trainer = plain_trainer(
            folder,
            rounds * epochs,
            callbacks=[OneRound(round_index, client, epochs), *program.callbacks()],
            **{"limit_val_batches": 0, **program.trainer},
        )
        client_source = copy.copy(source)
        client_source.train_dataloader = partial(ClientBatches, data, round_index, client)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(model, datamodule=client_source, **options)
            trainer.save_checkpoint(path)
        model.trainer = None

    def combine(server, models):
        trained = [*models.values()]
        history.append(HandRound(server, trained, sizes))
        return average_models(trained, sizes)

    return federate(program.module(), [clients] * rounds, visit, combine), history


def begin_anew_with(model, path):
    """Put a model into a checkpoint, and take the optimizers' states out of it."""
    checkpoint = torch.load(path, weights_only=False)
    checkpoint["state_dict"] = model.state_dict()
    for state in checkpoint["optimizer_states"]:
        state["state"] = {}
        for group in state["param_groups"]:
            group.pop("step", None)  # which timm's optimizers count there
    torch.save(checkpoint, path)


def coalition_values(round, measure):
    """The Shapley values of a round's two clients, whose models are averaged by their sizes."""
    worth = {}
    for members in COALITIONS:
        model = copy.deepcopy(round.model)
        if members:
            # Counters and what is not saved are the round's own in every coalition.
            chosen = [round.clients[i] for i in members]
            mean = average_models(chosen, [round.sizes[i] for i in members]).state_dict()
            for name, value in model.state_dict().items():
                if not value.is_floating_point():
                    mean[name] = value
            model.load_state_dict(mean)
        worth[members] = measure(model)

    return shapley_values_of_two(worth)


def shapley_values_of_two(worth):
    """The mean of what each adds to nobody and to the other one."""
    alone = torch.tensor([worth[0,], worth[1,]], dtype=torch.float64)
    added_last = worth[0, 1] - alone.flip(0)
    return (alone - worth[()] + added_last) / 2


def validate_with_trainer(module, source, name, **trainer):
    """Validate with a Trainer, from the random state of every such model. Return what is logged as ``name``."""
    validated_source = copy.copy(source)
    loaders = source.val_dataloader()
    if not isinstance(loaders, list):
        loaders = [loaders]

    # Batches that are there already: a DataLoader draws from the global generator when it starts.
    batches = [ListLoader(list(loader)) for loader in loaders]
    validated_source.val_dataloader = lambda: batches
    with warnings.catch_warnings(), isolated_rngs(SEED, "utility"):
        warnings.simplefilter("ignore")
        trainer_of_one = plain_trainer(Path(), **trainer)
        results = trainer_of_one.validate(module, datamodule=validated_source, verbose=False)

    return next(result[name] for result in results if name in result)
