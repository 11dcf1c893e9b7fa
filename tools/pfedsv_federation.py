"""One federation of pFedSV's comparison (Wu et al., IEEE TMC 2024, section VI): settings, methods, a run.

Used by ``tools/pfedsv_table.py``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from common import be_quiet, quiet_trainer
from torch import Tensor

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop
from flsv.aggregation import FedAvg
from flsv.clients.algorithms import FedProx, MoreauSGD
from flsv.data import DirichletPartitioner, Partitioner, PathologicalPartitioner
from flsv.functional import label_overlap
from flsv.metrics import CommunicationCost, DomainRelevance
from flsv.models.mixture import MixtureClient
from flsv.participants import LocalData
from flsv.personalization import IFCA, FedEM, FedFomo, HeurFedAMP, PFedHN, PFedSV, Standalone
from flsv.privacy import GaussianPrivacy
from flsv.sampling import UniformSampler
from flsv.strategy import Contributions

Deployed = Literal["received", "trained"]


@dataclass(frozen=True)
class Setting:
    """One column of the tables: data, partition, network and training.

    The default is what two cores can do: an MLP (784-200-200-10, 199,210 parameters) in place of the paper's CNN
    (``mcmahan_cnn``, 1.7 million), and 5000 samples in all: a client trains on a fifth of its own, validates on a fifth
    and is tested on the rest. A client makes 20 steps a round. LeNet-5 needs more than that to leave its plateau, and
    where models are averaged that early, some clients never do. Gradients are clipped to the norm ``clip``, for the
    same reason: a network that collapses to one class is rightly found worthless, and never looked at again.
    """

    source: str
    partition: Literal["pathological", "dirichlet"]
    network: str = "mlp"
    clients: int = 10
    cohort: int | None = None
    classes_per_client: int = 2
    alpha: float = 0.1
    min_samples: int = 100
    samples: int | None = 5000
    validation: float = 0.2
    test: float = 0.6
    rounds: int = 20
    local_epochs: int = 5
    batch_size: int = 25
    lr: float = 0.02
    clip: float = 1.0
    accelerator: str = "cpu"

    @property
    def name(self) -> str:
        source = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
        return f"{source.get(self.source, self.source)}, {self.clients} clients"

    def partitioner(self, seed: int) -> Partitioner:
        if self.partition == "pathological":
            return PathologicalPartitioner(self.clients, self.classes_per_client, seed=seed)
        return DirichletPartitioner(self.clients, self.alpha, min_samples=self.min_samples, seed=seed)

    def relevant(self, class_counts: Tensor) -> Tensor:
        """Bool ``[n, n]``, who is relevant to whom: a class in common, or (Dirichlet) a tenth of the distribution."""
        truth = label_overlap(class_counts) > (0 if self.partition == "pathological" else 0.1)
        return truth.fill_diagonal_(False)


DEFAULT = [
    Setting(source, partition)
    for partition in ("pathological", "dirichlet")
    for source in ("mnist", "fashion_mnist")  # type: ignore[arg-type]
]


def full() -> list[Setting]:
    """The paper's tables. It names neither the batch size nor the clients' splits."""
    settings = []
    for partition in ("pathological", "dirichlet"):
        for source in ("mnist", "fashion_mnist", "cifar10", "cifar100"):
            for clients, cohort, rounds in ((10, None, 20), (100, 10, 100)):
                setting = Setting(
                    source,
                    partition,  # type: ignore[arg-type]
                    network="mcmahan_cnn",
                    clients=clients,
                    cohort=cohort,
                    classes_per_client=20 if source == "cifar100" else 2,
                    min_samples=100 if clients == 10 else 20,
                    samples=None,
                    test=0.2,
                    rounds=rounds,
                    lr=0.1 if source.startswith("cifar") else 0.01,
                    accelerator="auto",
                )
                settings.append(setting)
    return settings


@dataclass(frozen=True)
class Method:
    """How an algorithm is run.

    Args:
        strategies: of the loop, made anew for every run, from the number of clients.
        deployed: which of a client's models the algorithm's authors deploy: the one it ``received`` after the last
            round, or the one it ``trained`` in it.
        optimizer: from the setting's learning rate to the clients' optimizer. Default: SGD.
        components: networks in the mixture (FedEM); 0 for no mixture.
    """

    strategies: Callable[[], dict[str, Any]]
    deployed: Deployed = "received"
    optimizer: Callable[[float], Callable[..., Any]] = lambda lr: partial(torch.optim.SGD, lr=lr)
    components: int = 0


def _scored(personalizer: Any) -> dict[str, Any]:
    return {"personalizer": personalizer, "metrics": {"relevance": DomainRelevance()}}


# Chosen on Fashion-MNIST, pathological, with seeds 100 and 101, which are in no table.
METHODS = {
    "Separate": Method(lambda: {"personalizer": Standalone()}),
    "FedAvg": Method(dict),
    "FedProx": Method(lambda: {"client_algorithm": FedProx(mu=0.1)}),
    "IFCA": Method(lambda: {"personalizer": IFCA(num_clusters=5)}),
    "FedEM": Method(
        lambda: {"personalizer": FedEM()},
        optimizer=lambda lr: partial(torch.optim.SGD, lr=2 * lr),
        components=3,
    ),
    # outer_lr * lamda is 1: FedAvg with fine-tuning at twice the steps, see docs/results/pfedsv.md.
    "pFedMe": Method(
        lambda: {"aggregator": FedAvg("uniform")},
        deployed="trained",
        optimizer=lambda lr: partial(MoreauSGD, lr=lr, outer_lr=0.2, lamda=5.0, inner_steps=2),
    ),
    "FedFomo": Method(lambda: _scored(FedFomo(num_downloads=5))),
    "FedAMP": Method(
        lambda: {"personalizer": HeurFedAMP(self_weight=0.8), "client_algorithm": FedProx(mu=1e-4, anchor="start")},
        deployed="trained",
    ),
    "pFedHN": Method(lambda: {"personalizer": PFedHN(lr=0.01)}),
    "pFedSV": Method(lambda: _scored(PFedSV(k=5))),
    "pFedSV, safeguarded": Method(lambda: _scored(PFedSV(k=5, safeguard=True))),
    "pFedSV, shared extractor": Method(lambda: _scored(PFedSV(k=5, mode="extractor"))),
}
K = 5
#: Rows of the tables, in the paper's order: the run and the models that they show.
ROWS: dict[str, tuple[str, Deployed]] = {}
for _name, _method in METHODS.items():
    ROWS[_name] = (_name, _method.deployed)
    if _name == "FedEM":
        ROWS["FedAvg+FT"] = ("FedAvg", "trained")


@dataclass(frozen=True)
class Job:
    """A run: what, with which seed, with how much noise on what clients share (a multiple of ``clip``; None: none)."""

    setting: Setting
    method: str
    seed: int
    noise: float | None = None
    clip: float = 1.0


@dataclass(frozen=True)
class Result:
    """What came of it: T rounds, n clients, M classes.

    Args:
        accuracy: ``"received"`` and ``"trained"`` to ``[n]``, on the clients' own test samples.
        class_counts: ``[n, M]``, training samples.
        relevance: ``[T, n, n]``, the scores after every round; None where clients do not judge each other.
        downloads: ``[T, n]``, what every client received in every round, in whole models.
        seconds: of training.
    """

    accuracy: dict[str, Tensor]
    class_counts: Tensor
    relevance: Tensor | None
    downloads: Tensor
    seconds: float

    def mean(self, models: Deployed) -> float:
        """Mean test accuracy over the clients, in %."""
        return 100 * float(self.accuracy[models].mean())


class EveryoneAtLast(UniformSampler):
    """The last round's cohort is everybody, so that every client ends with a model of its own."""

    def __init__(self, cohort_size: int, rounds: int) -> None:
        super().__init__(cohort_size)
        self.rounds = rounds

    def sample(
        self, num_clients: int, contributions: Contributions, generator: torch.Generator, round_index: int = 0
    ) -> Tensor:
        if round_index + 1 == self.rounds:
            return torch.arange(num_clients)
        return super().sample(num_clients, contributions, generator, round_index)


class Record(L.Callback):
    """Keeps, of a loop of the same trainer, the scores and what crossed of every round, and the clients' accuracies."""

    def __init__(self, loop: FederatedLoop) -> None:
        self.loop = loop
        self.relevance: list[Tensor] = []
        self.received: list[Tensor] = []
        self.accuracy: dict[str, Tensor] = {}

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        known = self.loop.contributions
        if "relevance" in known:
            self.relevance.append(known["relevance"].cpu().clone())
        self.received.append(known["communication"][:, 1].nan_to_num().float().cpu() / self.loop.space.size)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        server, own, trained = self.loop.space.read(pl_module), self.loop.received(), self.loop.trained
        scores = []
        for client in self.loop.clients:
            start = own.get(client.id, server)
            scores.append(client.ask(_test_accuracy, torch.stack([start, trained.get(client.id, start)])))
        self.accuracy = dict(zip(("received", "trained"), torch.stack(scores, dim=1)))


def _test_accuracy(local: LocalData, models: Tensor) -> Tensor:
    return local.evaluate(models, "test").value("accuracy")


def run(job: Job, root: str) -> Result:
    """One federation."""
    be_quiet()
    setting, method, seed = job.setting, METHODS[job.method], job.seed
    data = FederatedDataModule(
        setting.source,
        setting.partitioner(seed),
        root=root,
        batch_size=setting.batch_size,
        max_samples=setting.samples,
        server_val_fraction=0.0,
        client_val_fraction=setting.validation,
        client_test_fraction=setting.test,
        seed=seed,
    )
    strategies = method.strategies()
    strategies["metrics"] = {**strategies.get("metrics", {}), "communication": CommunicationCost()}
    loop = FederatedLoop(
        keep_trained=True,
        **strategies,
        sampler=None if setting.cohort is None else EveryoneAtLast(setting.cohort, setting.rounds),
        privacy=None if job.noise is None else GaussianPrivacy(job.clip, job.noise),
        local_epochs=setting.local_epochs,
        figures_every=0,
        print_table=False,
        seed=seed,
    )
    L.seed_everything(seed, verbose=False)
    optimizer = method.optimizer(setting.lr)
    client: L.LightningModule
    if method.components:
        client = MixtureClient(method.components, network=setting.network, optimizer=optimizer)
    else:
        client = ClassifierClient(setting.network, optimizer=optimizer)
    record = Record(loop)
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(
            folder, setting.rounds, [loop, record], setting.accelerator, gradient_clip_val=setting.clip
        )
        start = time.perf_counter()
        trainer.fit(client, data)
        seconds = time.perf_counter() - start
    so_far = torch.stack(record.received)
    return Result(
        accuracy=record.accuracy,
        class_counts=data.class_counts.clone(),
        relevance=torch.stack(record.relevance) if record.relevance else None,
        downloads=so_far.diff(dim=0, prepend=torch.zeros_like(so_far[:1])),
        seconds=seconds,
    )
