"""Modules, callbacks and data with state that nothing declares, and plain federations of them."""

import contextlib
import pickle
import sqlite3
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import Dataset

from flsv import FederatedLoop, Reporting
from flsv.data import FederatedDataModule, Loader, SizePartitioner, Splits
from flsv.sampling import FullParticipation
from flsv.server.round_server import NoModel
from helpers.data import CLASSES, FEATURES, toy_sets
from helpers.fits import state_vector, trainer_for
from helpers.forked import Forked
from helpers.recorded import Recorded

SEED, ROUNDS, RATE = 5, 3, 0.1
#: Coalitions of each size, that of all clients at last.
MEMBERS = [(0,), (2,), (0, 1), (0, 1, 2)]
entropy = nn.functional.cross_entropy


def make_data(
    sets: Callable[[], Any] = toy_sets, loader: Loader | None = None
) -> FederatedDataModule:
    return FederatedDataModule(
        sets(),
        SizePartitioner([4, 1, 2]),
        batch_size=8,
        splits=Splits(server_val=0.3),
        loader=loader or Loader(),
    )


class Base(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)
        )
        self.weight = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight * self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), RATE)


# ---- functions that hold the module


class OfGenerator(Base):
    def __init__(self) -> None:
        super().__init__()

        def steps() -> Iterator[nn.Module]:
            while True:
                yield self.net

        self.nets = steps()

    def loss(self, batch: Any) -> Tensor:
        return entropy(next(self.nets)(batch[0]), batch[1])


# ---- state elsewhere

CALLS = 0


class Counting(Base):
    """Its loss grows with each call."""

    def next(self) -> float:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (1 + 0.02 * self.next()) * self.loss(batch)


class Global(Counting):
    def next(self) -> float:
        global CALLS
        CALLS += 1
        return CALLS


class Closure(Counting):
    def __init__(self) -> None:
        super().__init__()
        calls = 0

        def count_calls() -> int:
            nonlocal calls
            calls += 1
            return calls

        self.count_calls = count_calls

    def next(self) -> float:
        return self.count_calls()


class OpenFile(Counting):
    def __init__(self) -> None:
        super().__init__()
        path = Path(tempfile.mkdtemp(), "numbers")
        path.write_bytes(bytes(range(256)) * 20)
        self.file = path.open("rb", buffering=0)

    def next(self) -> float:
        return self.file.read(1)[0]


# ---- callbacks


class AtTheEnd(L.Callback):
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.mul_(0.5)


def make_weight_averaging() -> L.Callback:
    from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging

    return EMAWeightAveraging(decay=0.8)


class SavesAndWeighs(ModelCheckpoint):
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        pl_module.weight = float(trainer.callback_metrics["val_loss"])


class HoldsTheModule(L.Callback):
    """Sees the module through something else."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.reach = {"net": [lambda: pl_module.net]}

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.reach["net"][0]().parameters():
                parameter.clamp_(-0.3, 0.3)


class RateAfterValidation(L.Callback):
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = RATE * float(
            trainer.callback_metrics["val_loss"]
        )


class WeightWhileValidating(Base):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.weight = float(self.loss(batch))


class SpectralNorm(Base):
    """Its buffers turn with every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net[3] = parametrizations.spectral_norm(self.net[3])


class TemporaryFolder(Base):
    """Writes in ``setup`` what its steps read and write."""

    def setup(self, stage: str) -> None:
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "calls.txt").write_text("0")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        calls = int((self.folder / "calls.txt").read_text()) + 1
        (self.folder / "calls.txt").write_text(str(calls))
        return (1 + 0.02 * calls) * self.loss(batch)


class Threaded(Counting):
    """A thread of each step computes, under a lock of the class."""

    lock: ClassVar[Any] = threading.Lock()
    calls: ClassVar[int] = 0

    def next(self) -> float:
        def count() -> None:
            with self.lock:
                type(self).calls += 1

        thread = threading.Thread(target=count)
        thread.start()
        thread.join()
        return self.calls


class FewerBatches(L.Callback):
    """Stops each epoch after a number of batches that grows."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> Any:
        return -1 if batch_idx > trainer.current_epoch else None


class Rows(Dataset):
    """Samples in an SQLite file with one connection."""

    def __init__(self) -> None:
        x, y = toy_sets()[0].tensors
        self.length = len(x)
        self.file = Path(tempfile.mkdtemp()) / "rows.db"
        self.connection = sqlite3.connect(self.file, check_same_thread=False)

        with contextlib.closing(self.connection.cursor()) as cursor:
            cursor.execute("create table rows (id integer primary key, x text, y integer)")
            table_rows = [
                (i, ",".join(map(repr, row.tolist())), int(label))
                for i, (row, label) in enumerate(zip(x, y))
            ]
            cursor.executemany("insert into rows values (?, ?, ?)", table_rows)

        self.connection.commit()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        x, y = self.connection.execute(
            "select x, y from rows where id = ?", (int(index),)
        ).fetchone()
        return torch.tensor([*map(float, x.split(","))]), torch.tensor(y)


#: What the values of a kind's coalitions are. "right": those of fits of the members alone. "by company": these, too,
#: with a warning that clients train otherwise in other company. "doubt": a warning is beside them. "refused": there are
#: none, since the run is refused before its first round. "cached": they are wrong, and only a fresh process can tell.
Outcome = Literal["right", "by company", "doubt", "refused", "cached"]


@dataclass
class Kind:
    """A run, and what its coalitions are."""

    module: Callable[[], Any] = Base
    callback: Callable[[], L.Callback] | None = None
    sets: Callable[[], Any] = toy_sets
    trainer: dict[str, Any] = field(default_factory=dict)
    loop: Callable[[], dict[str, Any]] = dict
    rounds: int = ROUNDS
    outcome: Outcome = "right"
    #: What the doubt or the refusal says.
    message: str = ""
    #: The fits of members to which coalitions are compared. None: they are of this kind.
    alone: "Kind | None" = None


#: A kind or two of each place: memory of the process, threads, files, hooks, and what is scored.
KINDS: dict[str, Kind] = {
    "a generator that holds the module": Kind(
        OfGenerator, outcome="refused", message="the module.nets .generator. cannot be pickled"
    ),
    "a global": Kind(Global, outcome="doubt", message="another model than the run"),
    "a closure": Kind(Closure, outcome="by company"),
    "an open file": Kind(
        OpenFile, outcome="refused", message="the module.file .FileIO. cannot be pickled"
    ),
    "spectral norm": Kind(SpectralNorm),
    "a temporary folder of `setup`": Kind(TemporaryFolder, outcome="by company"),
    "a thread in each step": Kind(Threaded, outcome="doubt", message="another model than the run"),
    "rows of SQLite": Kind(sets=lambda: (Rows(), toy_sets()[1])),
    "EMAWeightAveraging": Kind(callback=make_weight_averaging),
    "a callback that changes weights at the end": Kind(callback=AtTheEnd),
    "a callback that holds the module": Kind(callback=HoldsTheModule),
    "a callback that ends epochs": Kind(callback=FewerBatches),
    "a subclass of ModelCheckpoint": Kind(
        callback=SavesAndWeighs, trainer={"enable_checkpointing": True}
    ),
    "`GradientAccumulationScheduler`": Kind(
        callback=lambda: GradientAccumulationScheduler({0: 1, 1: 2})
    ),
    "a rate set after validation": Kind(callback=RateAfterValidation),
    "a weight set while validating": Kind(WeightWhileValidating),
}


def fit_kind(
    kind: Kind, folder: Path, callbacks: Sequence[L.Callback] = (), **options: Any
) -> tuple[FederatedLoop, Any]:
    loop_options = {**kind.loop(), **options}
    loop = FederatedLoop(seed=SEED, reporting=Reporting(table=False), **loop_options)
    module = kind.module()
    callbacks = list(callbacks)
    if kind.callback is not None:
        callbacks.append(kind.callback())

    trainer = trainer_for(loop, folder, kind.rounds, callbacks=callbacks, **kind.trainer)
    with suppress(NoModel):  # the last finite model counts
        trainer.fit(module, make_data(kind.sets))
    return loop, module


def utility_of_module(module: Any, precision: str = "32") -> float:
    data = make_data()
    data.setup("fit")
    inputs, labels = zip(*data.val_dataloader())

    module.eval()
    is_mixed = precision == "bf16-mixed"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        loss = entropy(module.net(torch.cat(inputs)), torch.cat(labels))
    return -float(loss)


class FitAlone(NamedTuple):
    utility: float
    model: list[float]


def fit_members_alone(kind: Kind, members: tuple[int, ...]) -> FitAlone:
    """Train some clients only, by the federation of a kind."""
    sampler = kind.loop().get("sampler", FullParticipation())
    with tempfile.TemporaryDirectory() as folder:
        _, module = fit_kind(kind, Path(folder), sampler=sampler.among(members))
    model = state_vector(module).tolist()
    utility = utility_of_module(module, kind.trainer.get("precision", "32"))
    return FitAlone(utility, model)


class FitWithValues(NamedTuple):
    #: {members: utility of their model}
    game: dict[tuple[int, ...], float]
    #: Warnings of the metric.
    doubts: list[str]
    model: list[float]


class TrainsNothing(L.Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        raise AssertionError("it is trained")


def fit_with_values(kind: Kind, **options: Any) -> FitWithValues:
    """Train the federation of a kind, and its coalitions. One that must be refused may not train."""
    callbacks = [TrainsNothing()] if kind.outcome == "refused" else []
    metric = Recorded(coalitions=MEMBERS, performance="negative_loss", **options)
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(record=True) as caught_warnings,
    ):
        warnings.simplefilter("always")
        loop, module = fit_kind(kind, Path(folder), callbacks, metrics={"shadow": metric})

    metric_of_run: Any = loop.metrics["shadow"]
    messages = [str(warning.message) for warning in caught_warnings]
    doubts = [message for message in messages if message.startswith("shadow: ")]
    game = {}
    if "members" in vars(metric_of_run):
        utilities = metric_of_run.game.flatten().tolist()
        game = dict(zip(metric_of_run.members, utilities))
    return FitWithValues(game, doubts, state_vector(module).tolist())


def in_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a fork of this process, in which no kind is trained."""
    with tempfile.TemporaryDirectory() as folder:
        answer_file = Path(folder, "answer")
        process = Forked(Path(folder, "process"), store_answer, answer_file, function, arguments)
        status, output = process.wait(300)
        assert status == 0, output
        answer = pickle.loads(answer_file.read_bytes())
    if isinstance(answer, Exception):
        raise answer
    return answer


def store_answer(file: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Write what a function returns or raises into a file."""
    try:
        answer = function(*arguments)
    except Exception as error:
        answer = error
    file.write_bytes(pickle.dumps(answer))
