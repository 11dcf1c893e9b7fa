"""Federations of every kind on a CUDA device, beside the same ones on the CPU. Skipped without one, as all here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_run import checkpoints
from torch import nn
from torchmetrics.classification import MulticlassF1Score
from toys import CLASSES, Plain, fit, network, sgd, toy_data, vector

from flsv.aggregation import FedAdam, FedBuff, StaleStarts
from flsv.clients.algorithms import SCAFFOLD, FedDyn, FedDynServer, MoreauSGD
from flsv.data.corruption import ClosedSetLabelNoise
from flsv.features import Backbone
from flsv.functional.shapley.normalize import importance_probabilities
from flsv.loop import FederatedLoop
from flsv.metrics import DecayedShapley, DomainRelevance
from flsv.models.mixture import MixtureClient
from flsv.personalization import FedAMP, FedEM, FedFomo, PFedHN, PFedSV
from flsv.privacy import GaussianPrivacy
from flsv.sampling import UniformSampler
from flsv.uploads import UploadContext
from flsv.valuation import FedBary, participants_of

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
DEVICE = "cuda"
ON: dict[str, Any] = {"accelerator": DEVICE, "devices": 1}
Options = Callable[[], dict[str, Any]]


def without_norm() -> Plain:
    return Plain(network(batch_norm=False), partial(torch.optim.SGD, lr=0.1))


def moreau() -> Plain:
    return Plain(network(False), partial(MoreauSGD, lr=0.05, outer_lr=0.02, lamda=15.0, inner_steps=2))


def mixture(**options: Any) -> MixtureClient:
    torch.manual_seed(0)
    return MixtureClient(num_components=2, optimizer=sgd, **options)


#: The loop's options, and the module where it is another than ``without_norm``.
FEDERATIONS: dict[str, tuple[Options, Callable[[], nn.Module]]] = {
    "a logged value": (lambda: {"metrics": {"sv": DecayedShapley(performance="val_acc", mode="max")}}, Plain),
    "a metric of outputs": (
        lambda: {"metrics": {"sv": DecayedShapley(performance=MulticlassF1Score(CLASSES))}},
        Plain,
    ),
    "pfedsv": (
        lambda: {"metrics": {"relevance": DomainRelevance()}, "personalizer": PFedSV("relevance", k=2)},
        without_norm,
    ),
    "fedem": (lambda: {"personalizer": FedEM()}, partial(mixture, network="mlp", network_args={"hidden": [8]})),
    "fedem of a network": (
        lambda: {"personalizer": FedEM()},
        lambda: mixture(network=network(False), num_classes=CLASSES),
    ),
    "pfedhn": (lambda: {"personalizer": PFedHN(hidden=8)}, Plain),
    "pfedme": (dict, moreau),
    "scaffold": (lambda: {"client_algorithm": SCAFFOLD()}, without_norm),
    "feddyn": (lambda: {"aggregator": FedDynServer(), "client_algorithm": FedDyn(0.1)}, without_norm),
    "fedbuff": (
        lambda: {"aggregator": FedBuff(), "personalizer": StaleStarts(), "sampler": UniformSampler(2)},
        Plain,
    ),
    "noise": (lambda: {"aggregator": FedAdam(), "uploads": [GaussianPrivacy(1.0, 1.0)]}, without_norm),
}


@pytest.mark.parametrize("name", FEDERATIONS)
def test_as_on_the_cpu(tmp_path: Path, name: str) -> None:
    options, module = FEDERATIONS[name]
    found = []
    for where in ({}, ON):
        data = toy_data(client_val=0.2 if name == "pfedsv" else 0.0, corruptions=[ClosedSetLabelNoise(fraction=0.5)])
        loop = FederatedLoop(seed=1, **options())
        found.append(vector(fit(loop, tmp_path / str(len(found)), module(), data, rounds=2, **where)).cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("first", ["cpu", DEVICE])
@pytest.mark.parametrize("personalizer", [FedAMP, FedFomo, partial(PFedSV, "relevance", k=2)])
def test_what_a_personalizer_keeps_resumes_on_the_other(tmp_path: Path, personalizer: Any, first: str) -> None:
    def make() -> FederatedLoop:
        # FedAMP asks nobody what others are worth to it.
        metrics = {} if personalizer is FedAMP else {"relevance": DomainRelevance()}
        return FederatedLoop(metrics=metrics, personalizer=personalizer(), optimizer_state="persist", seed=1)

    def run(folder: str, rounds: int, path: Path | None = None, **options: Any) -> torch.Tensor:
        data = toy_data(client_val=0.2)
        return vector(fit(make(), tmp_path / folder, without_norm(), data, rounds, path, **options)).cpu()

    before, after = ({}, ON) if first == "cpu" else (ON, {})
    run("half", 2, enable_checkpointing=True, callbacks=[checkpoints(tmp_path)], **before)
    resumed = run("rest", 3, tmp_path / "checkpoints/last.ckpt", **after)
    torch.testing.assert_close(resumed, run("whole", 3), rtol=1e-3, atol=1e-4)


def test_importance_sampling() -> None:
    weights = torch.tensor([0.5, 0.2, 0.0, 0.3])
    there = importance_probabilities(weights.to(DEVICE), 2.0).cpu()
    torch.testing.assert_close(there, importance_probabilities(weights, 2.0))


@pytest.mark.parametrize("features", ["pixels", Backbone("mlp", options={"hidden": [8]}), "pca"])
def test_features_of_a_valuation(features: Any) -> None:
    data = toy_data(server_val=0.3)
    data.setup("fit")

    def found(device: Any) -> Any:
        valuer = FedBary(features=features, support=4, iterations=2)
        return valuer.value(*participants_of(data, device), torch.Generator().manual_seed(0))

    there, here = found(DEVICE), found("cpu")
    torch.testing.assert_close(there.distances.cpu(), here.distances, rtol=1e-4, atol=1e-5)
    assert torch.equal(there.flagged.cpu(), here.flagged)


@pytest.mark.parametrize("on_device", [False, True])
def test_noise(on_device: bool) -> None:
    """Is the CPU's, or drawn there, from the same seed each time."""
    privacy = GaussianPrivacy(clip=1.0, noise_multiplier=2.0, noise_on_device=on_device)
    update = torch.zeros(20_000)
    here = privacy.apply(update, UploadContext(1, 3, 20_000, 4))
    first, again, other = (
        privacy.apply(update.to(DEVICE), UploadContext(seed, 3, 20_000, 4)).cpu() for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.std().item() == pytest.approx(2.0, rel=0.03)
    if not on_device:
        torch.testing.assert_close(first, here)
