"""The cells of pFedSV's tables (Wu et al., IEEE TMC 2024, section VI), and what is measured of them.

Used by ``tools/pfedsv_table.py``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import lightning as L
import torch
from pfedsv_informed import Informed, Weights
from table_runs import Cell, Measured, built, federated_loop
from torch import Tensor

from flsv import FederatedLoop
from flsv.cli.compare import run
from flsv.data import FederatedDataModule
from flsv.functional import discovery_bound, label_overlap, relevance_auroc

Overrides = Mapping[str, Any]
Deployed = Literal["received", "trained"]

K = 5
SOURCES = {"MNIST": "mnist", "Fashion-MNIST": "fashion_mnist", "CIFAR-10": "cifar10", "CIFAR-100": "cifar100"}
OPTIMIZER = {"class_path": "torch.optim.SGD"}
JUDGES = {"relevance": "flsv.metrics.DomainRelevance", "communication": "flsv.metrics.CommunicationCost"}
#: The clients' splits, which some algorithms' files set for themselves.
SPLITS = {"data.splits.client_val": 0.2, "data.splits.client_test": 0.6}
#: Ours: values of joining a client's own model, and training that starts from the shared one, or half-way to it.
JOINING = {"federation.personalizer.init_args.game": "joining", "federation.personalizer.init_args.shared": 1.0}
HALF = {**JOINING, "federation.personalizer.init_args.shared": 0.5}
SAFE = {"federation.personalizer.init_args.safeguard": True}
#: Row to its file and what is not in it. A batch of pFedMe's is five steps, so one epoch of it is five of the others'.
METHODS: dict[str, tuple[str, Overrides]] = {
    "Separate": ("separate", {}),
    "FedAvg": ("fedavg", {}),
    "FedProx": ("fedprox", {}),
    "IFCA": ("ifca", {}),
    "FedEM": ("fedem", {}),
    "pFedMe": ("pfedme", {"federation.local_epochs": 1}),
    "FedFomo": ("fedfomo", {"federation.metrics": JUDGES}),
    "FedAMP": ("fedamp", {}),
    "pFedHN": ("pfedhn", {}),
    "pFedSV": ("pfedsv", {}),
    "pFedSV, safeguarded": ("pfedsv", SAFE),
    "pFedSV, shared extractor": ("pfedsv", {"federation.personalizer.init_args.mode": "extractor"}),
    "pFedSV, joining, shared start": ("pfedsv", JOINING),
    "pFedSV, joining, half-way": ("pfedsv", HALF),
}
#: Rows of the tables, in the paper's order: the cells' row and which of a client's models their authors deploy.
ROWS: dict[str, tuple[str, Deployed]] = {name: (name, "received") for name in METHODS}
ROWS |= {name: (name, "trained") for name in ("pFedMe", "FedAMP")}
ROWS["FedAvg+FT"] = ("FedAvg", "trained")
ORDER = ["Separate", "FedAvg", "FedProx", "IFCA", "FedEM", "FedAvg+FT", "pFedMe", "FedFomo", "FedAMP", "pFedHN"]
OURS = [name for name in METHODS if name.startswith("pFedSV")]
ORDER += OURS
NOISES = (0.01, 1.0, 2.0)
#: Of those who are known to be relevant.
WEIGHTS = get_args(Weights)
MEASURE = "pfedsv_cells:measured"


def cells(full: bool, seeds: Sequence[int]) -> list[Cell]:
    """Tables I and II, with III and IV's noise, then figure 2, CIFAR-10, figure 4, 100 clients."""
    made: list[Cell] = []
    for source in ("MNIST", "Fashion-MNIST"):
        for partition in ("Dirichlet", "pathological"):
            made += comparison(partition, source, 10, full, seeds)
    made += relevance(seeds)
    for partition in ("Dirichlet", "pathological"):
        made += comparison(partition, "CIFAR-10", 10, full, seeds)
    for source in ("MNIST", "CIFAR-10"):
        made += informed(source, full, seeds)
    if full:
        for partition in ("Dirichlet", "pathological"):
            made += comparison(partition, "CIFAR-100", 10, full, seeds)
    for partition in ("Dirichlet", "pathological"):
        for source in SOURCES if full else ("MNIST",):
            made += comparison(partition, source, 100, full, seeds)
    return made


def comparison(partition: str, source: str, clients: int, full: bool, seeds: Sequence[int]) -> list[Cell]:
    """One column: all methods, and noise on what clients share (Dirichlet: table III, pathological: table IV)."""
    column = f"{partition}, {source}" + (f", {clients} clients" if clients != 10 else "")
    files: tuple[str, ...] = (f"scenarios/pfedsv_{partition.lower()}.yaml", "tables/pfedsv.yaml")
    more: dict[str, Any] = {"data.source": SOURCES[source], "data.partitioner.init_args.num_clients": clients, **SPLITS}
    if full:
        files = (*files, "tables/pfedsv_full.yaml")
        more["data.splits.client_test"] = 0.2
        if source.startswith("CIFAR"):
            more["model.init_args.optimizer.init_args.lr"] = 0.1
        if source == "CIFAR-100" and partition == "pathological":
            more["data.partitioner.init_args.classes_per_client"] = 20
    if clients > 10:
        files = (*files, "tables/pfedsv_hundred.yaml")
        if not full:
            more |= {"data.splits.max_samples": 12000, "data.splits.client_test": 0.4, "trainer.max_epochs": 40}
    if partition == "Dirichlet":
        more["data.partitioner.init_args.min_samples"] = 100 if clients == 10 else 20
        if clients > 10 and not full:  # of fewer images no draw leaves the smallest of 100 clients with 20
            more |= {"data.splits.max_samples": 40000, "data.splits.client_test": 0.65}
    rows = dict(METHODS)
    private_too = {"pathological": ("MNIST", "Fashion-MNIST"), "Dirichlet": ("MNIST",)}
    if clients == 10 and source in private_too[partition]:
        for name in ("FedAvg", "pFedSV") if partition == "pathological" else ("pFedSV",):
            for noise in NOISES if partition == "pathological" else (1.0,):
                rows[f"{name}, sigma {noise:g}"] = (METHODS[name][0], {"federation.privacy": private(noise)})
    made = []
    for row, (file, overrides) in rows.items():
        extra = dict(more)
        if file in ("pfedme", "fedem"):  # their files have a model of their own
            extra.pop("model.init_args.optimizer.init_args.lr", None)
        made += [Cell(row, column, seed, (*files, f"{file}.yaml"), {**extra, **overrides}, MEASURE) for seed in seeds]
    return made


def informed(source: str, full: bool, seeds: Sequence[int]) -> list[Cell]:
    """Figure 4, of the pathological column's clients: all know who shares a label with them."""
    base = {cell.row: cell for cell in comparison("pathological", source, 10, full, [0])}
    given: dict[str, Cell] = {"alone": base["Separate"]}
    for weights in WEIGHTS:
        personalizer = {"class_path": "pfedsv_informed.Informed", "init_args": {"weights": weights}}
        cell = base["pFedSV"]
        given[weights] = replace(cell, overrides={**cell.overrides, "federation.personalizer": personalizer})
    return [
        replace(cell, row=row, column=f"figure 4, {source}", seed=seed) for row, cell in given.items() for seed in seeds
    ]


def private(noise: float) -> dict[str, Any]:
    return {"class_path": "flsv.privacy.GaussianPrivacy", "init_args": {"clip": 1.0, "noise_multiplier": noise}}


def relevance(seeds: Sequence[int]) -> list[Cell]:
    """Figure 2: FedAvg of all five clients, of the three that share labels with A, and A alone."""
    files = ("scenarios/pfedsv_relevance.yaml", "tables/pfedsv.yaml")
    few = {**SPLITS, "data.splits.max_samples": 3000, "federation.local_epochs": 1}
    three = [[1, 0, 1, 0, 1, 0, 1, 0, 1, 0], [1, 0, 1, 0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1, 0, 1, 0]]
    rows: dict[str, tuple[str, Overrides]] = {
        "A to E": ("fedavg", {}),
        "A to C": ("fedavg", {"data.partitioner.init_args.matrix": three}),
        "A": ("separate", {}),
    }
    return [
        Cell(row, "figure 2, MNIST", seed, (*files, f"{file}.yaml"), {**few, **more}, MEASURE)
        for row, (file, more) in rows.items()
        for seed in seeds
    ]


# ---- what is measured


class Record(L.Callback):
    """Keeps, of a loop of the same trainer, the scores and what crossed of every round, and counts gradient steps."""

    def __init__(self, loop: FederatedLoop) -> None:
        self.loop = loop
        self.relevance: list[Tensor] = []
        self.received: list[Tensor] = []
        self.steps = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.steps += trainer.optimizers[0].param_groups[0].get("inner_steps", 1)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        known = self.loop.contributions
        if "relevance" in known:
            self.relevance.append(known["relevance"].cpu().clone())
        if "communication" in known:
            self.received.append(known["communication"][:, 1].nan_to_num().float().cpu() / self.loop.space.size)


def measured(cell: Cell, root: str) -> Measured:
    """A client's own test accuracy, %, of both its models; gradient steps of a client in a round; cost; and where the
    clients judge each other, how well they do (:func:`judged`)."""
    with built(cell, root, **{"federation.evaluation.keep_trained": True}) as cli:
        loop = federated_loop(cli.trainer)
        record = Record(loop)
        cli.trainer.callbacks.append(record)  # type: ignore[attr-defined]
        if isinstance(loop.personalizer, Informed):
            cli.datamodule.setup("fit")
            loop.personalizer.relevant = relevant(cell, cli.datamodule)
        cpu = time.process_time()
        outcome = run(cell.row, cli.trainer, cli.model, cli.datamodule, "own")
        cpu = time.process_time() - cpu
        rounds, everybody = cli.trainer.max_epochs or 1, cli.datamodule.num_clients
    cohort = getattr(loop.sampler, "cohort_size", everybody)
    found: Measured = {
        models: [100 * float(value) for value in outcome.scores[models]["accuracy"]]
        for models in ("received", "trained")
    }
    found |= {"seconds": outcome.seconds, "cpu": cpu, "steps": record.steps / rounds / cohort}
    overlap, truth = label_overlap(cli.datamodule.class_counts), relevant(cell, cli.datamodule)
    if len(loop.trained) == everybody:
        vectors = torch.stack([loop.trained[client] for client in range(everybody)])
        found["distance_auroc"] = float(relevance_auroc(-torch.cdist(vectors, vectors), truth))
    if record.relevance:
        found |= judged(torch.stack(record.relevance), truth)
        if everybody <= 10:
            found |= {"relevance": record.relevance[-1].tolist(), "overlap": overlap.tolist()}
    if record.received:
        so_far = torch.stack(record.received)
        found["downloads"] = so_far.diff(dim=0, prepend=torch.zeros_like(so_far[:1])).mean(1).tolist()
    return found


def relevant(cell: Cell, data: FederatedDataModule) -> Tensor:
    """Bool ``[n, n]``: who shares labels with whom; under Dirichlet, where hardly anybody shares none, a tenth."""
    overlap = label_overlap(data.class_counts)
    return (overlap > (0.1 if cell.column.startswith("Dirichlet") else 0)).fill_diagonal_(False)


def judged(relevance: Tensor, truth: Tensor) -> Measured:
    """Of the scores ``[T, n, n]`` and who is relevant to whom ``[n, n]``: the AUROC after 10 rounds and the last, the
    shares of relevant and of other pairs with a score above 0, %, the round in which every client had looked at all who
    are relevant to it (None: never), and the paper's bound on it."""
    last, others = relevance[-1] > 0, ~truth.clone().fill_diagonal_(True)
    found = []
    for client, row in enumerate(truth):
        known = (~relevance[:, client, row].isnan()).all(1)  # [T]
        found.append(int(known.int().argmax()) + 1 if bool(known.any()) else None)
    return {
        "auroc_10": float(relevance_auroc(relevance[min(10, len(relevance)) - 1], truth)),
        "auroc": float(relevance_auroc(relevance[-1], truth)),
        "above": [
            100 * float(last[pairs].float().mean()) if pairs.any() else float("nan") for pairs in (truth, others)
        ],
        "found": found,
        "bound": [discovery_bound(len(truth), int(row.sum()), K) for row in truth],
    }
