"""Federated averaging written by hand: a Lightning Trainer per client and round, and a mean of state dicts.

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
from helpers.fits import plain_trainer
from helpers.loops_by_hand import Batches, average_models

SEED = 5
#: Of two clients.
COALITIONS = [(), (0,), (1,), (0, 1)]
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
        self._data = data
        self._client = client
        self._visit = (round_index, client)
        self._epochs = itertools.count()

    def __len__(self):
        return len(self._data.client_loader(self._client, "train"))

    def __iter__(self):
        epoch = next(self._epochs)
        key = (*self._visit, epoch)
        stream = generator_for(SEED, "shuffle", *key)

        with isolated_rngs(SEED, "first batch", *key):
            loader = self._data.client_loader(self._client, "train", generator=stream)
            batches = iter(loader)
            first_batch = next(batches)

        if epoch == 0:
            # What the transfer hooks draw for the first batch comes before the training's own.
            seed_global_rngs(SEED, "transfer", *self._visit)

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


def fedavg_by_hand(
    module,
    source,
    data,
    folder,
    rounds,
    callbacks=list,
    epochs=1,
    members=None,
    **trainer,
):
    """Every client takes part in every round, or some of them; ``data`` says who has which samples, ``source`` is the
    project's own data module, of which copies give a client's batches in place of all. The last global model, and the
    rounds."""
    data.setup("fit")
    if members is None:
        members = range(data.num_clients)
    server = copy.deepcopy(module)
    history = []
    for r in range(rounds):
        trained = []
        for client in members:
            model = copy.deepcopy(server)
            path = folder / f"by_hand_{client}.ckpt"
            if r:
                checkpoint = torch.load(path, weights_only=False)
                checkpoint["state_dict"] = server.state_dict()
                for state in checkpoint["optimizer_states"]:
                    state["state"] = {}
                    for group in state["param_groups"]:
                        group.pop("step", None)  # which timm's optimizers count there
                torch.save(checkpoint, path)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                client_trainer = plain_trainer(
                    folder,
                    rounds * epochs,
                    callbacks=[OneRound(r, client, epochs), *callbacks()],
                    **{"limit_val_batches": 0, **trainer},
                )
                client_source = copy.copy(source)
                client_source.train_dataloader = partial(ClientBatches, data, r, client)
                client_trainer.fit(
                    model,
                    datamodule=client_source,
                    ckpt_path=path if r else None,
                    **WHOLE,
                )
            client_trainer.save_checkpoint(path)
            model.trainer = None
            trained.append(model)
        sizes = [float(data.num_samples[client]) for client in members]
        history.append(HandRound(server, trained, sizes))
        server = average_models(trained, sizes)

    return server, history


def coalition_values(round, measure, weights):
    """The Shapley values of a round's two clients, whose models are averaged by these weights."""
    worth = {}
    for members in COALITIONS:
        model = copy.deepcopy(round.model)
        if members:
            # Counters and what is not saved are the round's own in every coalition.
            chosen = [round.clients[i] for i in members]
            mean = average_models(chosen, [weights[i] for i in members]).state_dict()
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
    batches = [Batches(list(loader)) for loader in loaders]
    validated_source.val_dataloader = lambda: batches
    with warnings.catch_warnings(), isolated_rngs(SEED, "utility"):
        warnings.simplefilter("ignore")
        trainer_of_one = plain_trainer(Path(), **trainer)
        results = trainer_of_one.validate(module, datamodule=validated_source, verbose=False)

    return next(result[name] for result in results if name in result)
