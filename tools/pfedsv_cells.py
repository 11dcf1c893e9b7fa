"""What is measured of the cells of pFedSV's tables (Wu et al., IEEE TMC 2024, section VI; ``tables/pfedsv.yaml``)."""

from __future__ import annotations

import time
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

Deployed = Literal["received", "trained"]

K = 5
#: Rows of the tables, in the paper's order: the cells' row and which of a client's models their authors deploy.
OURS = [
    "pFedSV",
    "pFedSV, safeguarded",
    "pFedSV, shared extractor",
    "pFedSV, joining, shared start",
    "pFedSV, joining, half-way",
]
ORDER = ["Separate", "FedAvg", "FedProx", "IFCA", "FedEM", "FedAvg+FT", "pFedMe", "FedFomo", "FedAMP", "pFedHN", *OURS]
ROWS: dict[str, tuple[str, Deployed]] = {name: (name, "received") for name in ORDER}
ROWS |= {name: (name, "trained") for name in ("pFedMe", "FedAMP")}
ROWS["FedAvg+FT"] = ("FedAvg", "trained")
NOISES = (0.01, 1.0, 2.0)
#: Of those who are known to be relevant.
WEIGHTS = get_args(Weights)


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
