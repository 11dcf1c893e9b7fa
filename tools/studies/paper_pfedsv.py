"""What is measured for pFedSV's tables (Wu et al., IEEE TMC 2024, section VI; ``tables/pfedsv.yaml``)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import lightning as L
import torch
import torchvision.models
from cells import Cell, Measured, built, federated_loop
from own_models import OwnModels
from torch import Generator, Tensor

from flsv import FederatedLoop
from flsv.core import LocalData
from flsv.core.strategy import Contributions
from flsv.data import FederatedDataModule
from flsv.functional import label_overlap, personalized_weights, relevance_auroc
from flsv.functional.common_columns import keep_common
from flsv.models import LeNet5
from flsv.personalization import PFedSV
from flsv.personalization.base import OWN_MODEL
from flsv.personalization.fedfomo import first_order_weights
from flsv.privacy import gaussian_epsilon

K = 5
#: Whose authors deploy a client's own trained model.
TRAINED = ("pFedMe", "FedAMP")
#: Network, classes, and the layers that the paper counts as its classifier: the last linear layer of ResNet-34 (2.35 %,
#: the paper says 2.3 %), all fully connected ones of VGG-19 (86.06 %, the paper: 89.74 %). Its 49.57 % of LeNet-5 are
#: those of no split by layers.
NETWORKS = (
    ("lenet5", 10, "classifier.4."),
    ("resnet34", 1000, "fc."),
    ("vgg19", 1000, "classifier."),
)
Weights = Literal["together", "by loss", "by distance", "equally"]


# ---- what is measured


class Record(L.Callback):
    """Keeps, of a loop of the same trainer, the scores and what crossed of every round."""

    def __init__(self, loop: FederatedLoop) -> None:
        self.loop = loop
        self.relevance: list[Tensor] = []
        self.received: list[Tensor] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        known = self.loop.contribution_metrics.contributions
        if "relevance" in known:
            self.relevance.append(known["relevance"].cpu().clone())
        if "communication" in known:
            self.received.append(
                known["communication"][:, 1].nan_to_num().float().cpu() / self.loop.space.size
            )


def measured(cell: Cell, root: str) -> Measured:
    """A client's own test accuracy, %, of both its models; and where the clients judge each other, how well they do
    (:func:`judged`)."""
    with built(cell, root, **{"federation.evaluation.keep_trained": True}) as cli:
        loop = federated_loop(cli.trainer)
        record, own = Record(loop), OwnModels(loop, "own")
        cli.trainer.callbacks += [record, own]  # type: ignore[attr-defined]
        if isinstance(loop.personalizer, Informed):
            cli.datamodule.setup("fit")
            loop.personalizer.relevant = relevant(cell, cli.datamodule)
        L.seed_everything(cell.seed, verbose=False)  # all rows start from the same weights
        cli.trainer.fit(cli.model, cli.datamodule)
    everybody, truth = cli.datamodule.num_clients, relevant(cell, cli.datamodule)
    found: Measured = {
        models: [100 * float(value) for value in own.scores[models]["accuracy"]]
        for models in ("received", "trained")
    }
    if len(loop.trained) == everybody:
        vectors = torch.stack([loop.trained[client] for client in range(everybody)])
        found["distance_auroc"] = float(relevance_auroc(-torch.cdist(vectors, vectors), truth))
    if record.relevance:
        found |= judged(torch.stack(record.relevance), truth)
    if record.received:
        so_far = torch.stack(record.received)
        found["downloads"] = (
            so_far.diff(dim=0, prepend=torch.zeros_like(so_far[:1])).mean(1).tolist()
        )
    return found


def relevant(cell: Cell, data: FederatedDataModule) -> Tensor:
    """Bool ``[n, n]``: who shares labels with whom; under Dirichlet, where hardly anybody shares none, a tenth."""
    overlap = label_overlap(data.class_counts)
    return (overlap > (0.1 if cell.column.startswith("Dirichlet") else 0)).fill_diagonal_(False)


def judged(relevance: Tensor, truth: Tensor) -> Measured:
    """Of the scores ``[T, n, n]`` and who is relevant to whom ``[n, n]``: the AUROC after 10 rounds and the last, the
    shares of relevant and of other pairs with a score above 0, %."""
    last, others = relevance[-1] > 0, ~truth.clone().fill_diagonal_(True)
    return {
        "auroc_10": float(relevance_auroc(relevance[min(10, len(relevance)) - 1], truth)),
        "auroc": float(relevance_auroc(relevance[-1], truth)),
        "above": [
            100 * float(last[pairs].float().mean()) if pairs.any() else float("nan")
            for pairs in (truth, others)
        ],
    }


# ---- figure 4


class Informed(PFedSV):
    """Every client downloads who is relevant to it.

    Args:
        weights: ``"together"``: pFedSV's, by Shapley value; the others look at one model at a time, at its loss or
            distance, or at nothing.
        metric: as of :class:`flsv.personalization.PFedSV`.

    Attributes:
        relevant: bool ``[n, n]``, who is relevant to whom; to be set before training.
    """

    def __init__(self, weights: Weights = "together", metric: str = "relevance") -> None:
        super().__init__(metric)
        self.weights = weights
        self.relevant = torch.zeros(0, 0, dtype=torch.bool)

    def question(self, num_parameters: int) -> Callable[..., Tensor]:
        if self.weights == "together":
            return super().client_function(num_parameters)
        return partial(one_by_one, weights=self.weights, num_parameters=num_parameters)

    def _relevance(self, contributions: Contributions) -> Tensor:
        return torch.where(self.relevant, 1.0, -1.0)


def one_by_one(
    local: LocalData,
    others: list[Tensor],
    extractor: None,
    *,
    weights: str,
    num_parameters: int,
    generator: Generator,
) -> Tensor:
    """At a client: the weights ``[1 + s]`` of its own model and of s others, each found without looking at the rest. It
    keeps their mixture."""
    assert local.model is not None
    assert local.start is not None
    models = torch.stack([local.model, *others])
    if weights == "by loss":
        start = local.start
        losses = -local.utility(torch.cat([start[None], models]), "negative_loss")
        distances = (models - start)[:, :num_parameters].norm(dim=1)
        found = first_order_weights(losses[0], losses[1:], distances.to(losses)).clamp_min(0)
        if not found.any():
            found[0] = 1
        found = found / found.sum()
    else:
        distances = (models - models[0])[:, :num_parameters].norm(dim=1)
        same = torch.ones(len(models))
        found = (
            personalized_weights(same, distances.cpu(), own=0)
            if weights == "by distance"
            else same / len(same)
        )
    local.state[OWN_MODEL] = keep_common(found.to(models) @ models, models)
    return found


# ---- what the tables show


def deployed(
    run: Measured, beside: Mapping[str, Measured], row: str, column: str
) -> dict[str, float]:
    """Mean accuracy of the model that a method's authors deploy; of FedAvg also the fine-tuned one."""
    if "sigma" in row or "received" not in run:
        return {}
    found = {row: statistics.mean(run["trained" if row in TRAINED else "received"])}
    return {**found, "FedAvg+FT": statistics.mean(run["trained"])} if row == "FedAvg" else found


def both_models(
    run: Measured, beside: Mapping[str, Measured], row: str, column: str
) -> dict[str, float]:
    """Mean accuracies of the models received and trained in the last round."""
    return {models: statistics.mean(run[models]) for models in ("received", "trained")}


def epsilon(run: Measured, beside: Mapping[str, Measured], row: str, column: str) -> float:
    """Of 20 rounds with a row's noise, delta = 1e-5."""
    return gaussian_epsilon(float(row.partition("sigma ")[2]), 20, delta=1e-5)


def communication(
    run: Measured, beside: Mapping[str, Measured], row: str, column: str
) -> dict[str, dict[str, float]]:
    """By method and network: millions of parameters that a client sends and receives in all rounds of a run of pFedSV.

    Every method sends a model up. Down come, of P parameters with C in the classifier, k P (FedFomo, pFedSV with k
    fixed), k_t P (dynamic), (P - C) + k_t C (with a common extractor, too), or P (FedAMP, FedAvg).
    """
    downloads = [round(each) for each in run.get("downloads", ())]
    found: dict[str, dict[str, float]] = {}
    for name, classes, layer in NETWORKS if row == "pFedSV" else ():
        with torch.device("meta"):
            network = (
                LeNet5()
                if name == "lenet5"
                else torchvision.models.get_model(name, num_classes=classes)
            )
        sizes = {key: parameter.numel() for key, parameter in network.named_parameters()}
        size = sum(sizes.values())
        classifier = sum(each for key, each in sizes.items() if key.startswith(layer))
        down = {
            "pFedSV (D+C)": [size - classifier + k * classifier for k in downloads],
            "pFedSV (D)": [k * size for k in downloads],
            "FedFomo, pFedSV with k fixed": [K * size for _ in downloads],
            "FedAMP, FedAvg": [size for _ in downloads],
        }
        for method, each in down.items():
            found.setdefault(method, {})[name] = (len(each) * size + sum(each)) / 1e6
        found.setdefault("classifier, % of the parameters", {})[name] = 100 * classifier / size
    return found
