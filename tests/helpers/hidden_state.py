"""What a kind of state is that nothing declares, and its federations: plain, of some members, and with values."""

import pickle
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
from retraining.recorded import Recorded
from torch import nn

from flsv import FederatedLoop
from flsv.data import FederatedDataModule, Loader, SizePartitioner, Splits
from flsv.metrics import ShadowShapley
from flsv.sampling import FullParticipation
from flsv.server.round_server import NoModel
from helpers.coalitions_by_hand import make_shadow_loop
from helpers.data import CLASSES, FEATURES, toy_sets
from helpers.fits import fit, plain_trainer, state_vector, trainer_for
from helpers.forked import Forked

SEED, ROUNDS, RATE = 5, 3, 0.1
#: Coalitions of each size, that of all clients at last.
MEMBERS = [(0,), (2,), (0, 1), (0, 1, 2)]
entropy = nn.functional.cross_entropy


def make_data(sets=toy_sets, loader=None):
    return FederatedDataModule(
        sets(),
        SizePartitioner([4, 1, 2]),
        batch_size=8,
        splits=Splits(server_val=0.3),
        loader=loader or Loader(),
    )


class Base(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Linear(8, CLASSES),
        )
        self.weight = 1.0

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        x, y = batch
        return entropy(self(x), y)

    def training_step(self, batch, batch_idx):
        return self.weight * self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), RATE)


# ---- state elsewhere

CALLS = 0


class Counting(Base):
    """Its loss grows with each call."""

    def next(self):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        return (1 + 0.02 * self.next()) * self.loss(batch)


class Global(Counting):
    def next(self):
        global CALLS
        CALLS += 1
        return CALLS


#: What the values of a kind's coalitions are. "right": those of fits of the members alone. "by company": these, too,
#: with a warning that clients train otherwise in other company. "refused": there are none, since the run is refused
#: before its first round.
Outcome = Literal["right", "by company", "refused"]


@dataclass
class Kind:
    """A run, and what its coalitions are."""

    module: Callable[[], Any] = Base
    callback: Callable[[], L.Callback] | None = None
    sets: Callable[[], Any] = toy_sets
    trainer: dict[str, Any] = field(default_factory=dict)
    loop: Callable[[], dict[str, Any]] = dict
    rounds: int = ROUNDS
    #: By what coalitions are scored.
    performance: str = "negative_loss"
    outcome: Outcome = "right"
    #: What the refusal says: of the run, or of scores by a logged value where the state is outside of all copies.
    message: str = ""
    #: What is named as passing from client to client.
    passes: str = ""
    #: The fits of members to which coalitions are compared. None: they are of this kind.
    alone: "Kind | None" = None


def fit_kind(kind, folder, callbacks=(), **options):
    loop = FederatedLoop(seed=SEED, **{**kind.loop(), **options})
    module = kind.module()
    callbacks = list(callbacks)
    if kind.callback is not None:
        callbacks.append(kind.callback())

    trainer = trainer_for(loop, folder, kind.rounds, callbacks=callbacks, **kind.trainer)
    with suppress(NoModel):  # the last finite model counts
        trainer.fit(module, make_data(kind.sets))
    return loop, module


def utility_of_module(module, kind, folder):
    data = make_data()
    if kind.performance == "val_loss":
        trainer = plain_trainer(folder)
        trainer.validate(module, data, verbose=False)
        return -float(trainer.callback_metrics["val_loss"])

    data.setup("fit")
    inputs, labels = zip(*data.val_dataloader())

    module.eval()
    is_mixed = kind.trainer.get("precision") == "bf16-mixed"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        logits = module(torch.cat(inputs))
        loss = entropy(logits, torch.cat(labels))
    return -float(loss)


def fit_valued(
    folder,
    module,
    rounds=2,
    *,
    metric=None,
    loop=None,
    **options,
):
    """Fit three clients, and after them coalitions: each client alone, where no ``metric`` says otherwise."""
    metric = metric or ShadowShapley(coalitions="singles")
    federation = make_shadow_loop(metric, **(loop or {}))
    fit(federation, folder, module, make_data(), rounds, **options)
    return federation


def fit_members_alone(kind, members):
    """Train some clients only, by the federation of a kind. Return the model's utility, and the model."""
    sampler = kind.loop().get("sampler", FullParticipation())
    with tempfile.TemporaryDirectory() as folder:
        _, module = fit_kind(kind, Path(folder), sampler=sampler.among(members))
        model = state_vector(module).tolist()
        utility = utility_of_module(module, kind, Path(folder))
    return utility, model


class FitWithValues(NamedTuple):
    #: {members: utility of their model}
    game: dict[tuple[int, ...], float]
    #: Warnings of the metric.
    consistency_warnings: list[str]
    model: list[float]


class TrainsNothing(L.Callback):
    def on_train_batch_start(self, *_):
        raise AssertionError("it is trained")


def fit_with_values(kind):
    """Train the federation of a kind, and its coalitions. One that must be refused may not train."""
    callbacks = [TrainsNothing()] if kind.outcome == "refused" else []
    mode = "min" if kind.performance == "val_loss" else None
    metric = Recorded(coalitions=MEMBERS, performance=kind.performance, mode=mode)
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(record=True) as caught_warnings,
    ):
        warnings.simplefilter("always")
        loop, module = fit_kind(kind, Path(folder), callbacks, metrics={"shadow": metric})

    metric_of_run = loop.metrics["shadow"]
    messages = [str(warning.message) for warning in caught_warnings]
    consistency_warnings = [message for message in messages if message.startswith("shadow: ")]
    game = {}
    if "members" in vars(metric_of_run):
        utilities = metric_of_run.utilities.flatten().tolist()
        game = dict(zip(metric_of_run.members, utilities))
    return FitWithValues(game, consistency_warnings, state_vector(module).tolist())


def in_fork(function, *arguments):
    """Return what a function returns in a fork of this process, in which no kind is trained."""
    with tempfile.TemporaryDirectory() as folder:
        answer_file = Path(folder, "answer")
        process = Forked(Path(folder, "process"), store_response, answer_file, function, arguments)
        status, output = process.wait(300)
        assert status == 0, output
        response = pickle.loads(answer_file.read_bytes())
    if isinstance(response, Exception):
        raise response
    return response


def store_response(file, function, arguments):
    """Write what a function returns or raises into a file."""
    try:
        response = function(*arguments)
    except Exception as error:
        response = error
    file.write_bytes(pickle.dumps(response))
