"""Federations that are run on one, two and three ranks."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from toys import CLASSES, Plain, adam, network, toy_data

from flsv.aggregation import FedAvg, ShapFedWA, ShapleyWeighted
from flsv.attacks import Attack, SignFlip
from flsv.clients.algorithms import SCAFFOLD
from flsv.data import FederatedDataModule
from flsv.engines.ranks import ranks_of
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley, DomainRelevance, LeaveOneOut, SurrogateFederatedShapley
from flsv.metrics import WassersteinContribution
from flsv.personalization import PFedSV, ShapFedPersonalizer
from flsv.privacy import GaussianPrivacy
from flsv.sampling import FixedCohort, ShapleyImportanceSampler, UniformSampler

Case = tuple[FederatedLoop, L.LightningModule, FederatedDataModule, dict[str, Any]]


class Logging(Plain):
    """Logs everything that can be logged of a training step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen = torchmetrics.classification.MulticlassAccuracy(num_classes=CLASSES, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        self.log("worst", loss, reduce_fx="max", on_step=False, on_epoch=True)
        self.log(f"rows_{len(batch[1])}", float(len(batch[1])), reduce_fx=torch.sum, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_start(self) -> None:
        self.log("drawn", torch.rand(()))


class Broken(Attack):
    """Sends NaN."""

    def attack(self, update: Tensor, round_index: int, generator: torch.Generator) -> Tensor:
        return update * float("nan")


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def step_schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)


def five(**kwargs: Any) -> FederatedDataModule:
    return toy_data((4, 2, 3, 3, 2), **kwargs)


def shapfed_wa() -> Case:
    metrics = {"cssv": ClassSpecificShapley(), "loo": LeaveOneOut()}
    return FederatedLoop(ShapFedWA("cssv"), metrics, seed=3), Plain(network(batch_norm=False)), five(), {}


def afedsv_plus() -> Case:
    loop = FederatedLoop(
        ShapleyWeighted("ssv"),
        {"ssv": SurrogateFederatedShapley(beta=0.7)},
        sampler=ShapleyImportanceSampler(expected_cohort=3, metric="ssv"),
        seed=3,
    )
    return loop, Plain(network(batch_norm=False)), five(), {"rounds": 4}


def pfedsv() -> Case:
    loop = FederatedLoop(
        personalizer=PFedSV(),
        metrics={"relevance": DomainRelevance()},
        sampler=UniformSampler(4),
        evaluate_clients_every=2,
        seed=3,
    )
    return loop, Plain(), five(client_val_fraction=0.2), {"rounds": 4}


def scaffold() -> Case:
    loop = FederatedLoop(
        FedAvg(weighting="uniform"), client_algorithm=SCAFFOLD(), sampler=UniformSampler(3), server_lr=0.8, seed=3
    )
    return loop, Plain(network(batch_norm=False), plain_sgd), five(), {"rounds": 4}


def kept_momentum() -> Case:
    loop = FederatedLoop(
        metrics={"cssv": ClassSpecificShapley()},
        personalizer=ShapFedPersonalizer("cssv"),
        attacks=[SignFlip(clients=[1])],
        privacy=GaussianPrivacy(clip=1.0, noise_multiplier=0.1),
        client_optimizer="keep",
        evaluate_clients_every=2,
        evaluate_models="trained",
        seed=3,
    )
    return loop, Plain(network(batch_norm=False)), five(), {}


def adam_with_steps() -> Case:
    module = Logging(network(dropout=0.3), adam, step_schedule, interval="step")
    loop = FederatedLoop(ShapFedWA("cssv"), {"cssv": ClassSpecificShapley()}, local_epochs=2, seed=3)
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 1.0, "limit_train_batches": 4}
    return loop, module, five(batch_size=4), {**options, "monitor": "loss_epoch"}


def batch_norm() -> Case:
    module = Plain(network(dropout=0.3), scheduler=step_schedule)
    return FederatedLoop(sampler=UniformSampler(4), seed=3), module, five(), {"monitor": "val_acc"}


def one_client() -> Case:
    return FederatedLoop(sampler=FixedCohort([2]), client_optimizer="keep", seed=3), Logging(), five(), {}


def two_clients() -> Case:
    metrics = {"distance": WassersteinContribution()}
    return FederatedLoop(metrics=metrics, seed=3), Plain(), toy_data((1, 1)), {"rounds": 2}


def one_broken() -> Case:
    return FederatedLoop(attacks=[Broken(clients=[0])], client_optimizer="keep", seed=3), Plain(), five(), {}


def broken_rank() -> Case:
    # Of four clients of one size, the second and the fourth are on rank 1 of two, the second alone on rank 1 of three.
    return FederatedLoop(attacks=[Broken(clients=[1, 3])], seed=3), Logging(), toy_data((1, 1, 1, 1)), {}


CASES: dict[str, Callable[[], Case]] = {
    function.__name__: function
    for function in (
        shapfed_wa,
        afedsv_plus,
        pfedsv,
        scaffold,
        kept_momentum,
        adam_with_steps,
        batch_norm,
        one_client,
        two_clients,
        one_broken,
        broken_rank,
    )
}


def trainer(folder: Path, loop: FederatedLoop, options: dict[str, Any], callbacks: list[Callback]) -> L.Trainer:
    options = dict(options)
    size, nodes = int(os.environ["RANKS"]), int(os.environ.get("NODES", 1))
    saves = ModelCheckpoint(
        folder, save_last=True, monitor=options.pop("monitor", None), save_top_k=1, enable_version_counter=False
    )
    return L.Trainer(
        max_epochs=options.pop("rounds", 3),
        accelerator="cpu",
        devices=size // nodes,
        num_nodes=nodes,
        strategy=options.pop("strategy", "federated"),
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        callbacks=[loop, saves, *callbacks],
        **options,
    )


def fit(folder: Path, case: Case, callbacks: list[Callback] | None = None) -> L.Trainer:
    """Start it, or go on from its last checkpoint."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    loop, module, data, options = case
    loop.print_table = False
    there, last = trainer(folder, loop, options, callbacks or []), folder / "last.ckpt"
    there.fit(module, data, ckpt_path=last if last.exists() else None)
    return there


def run_all(folder: str, names: list[str]) -> None:
    """One federation after the other, in one group of ranks."""
    for name in names:
        done = fit(Path(folder) / name, CASES[name]())
        if done.is_global_zero:
            metrics = {key: float(value) for key, value in sorted(done.callback_metrics.items())}
            (Path(folder) / name / "metrics.txt").write_text(repr(metrics))
        print(name, done.global_step, ranks_of(done).rank, flush=True)
