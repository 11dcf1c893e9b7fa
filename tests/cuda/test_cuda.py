"""On a CUDA device, against the CPU. Nothing here has ever been run by the project's own CI, which has none."""

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torchmetrics.classification import MulticlassF1Score

from flsv import ClassifierClient, ClientEvaluation
from flsv.aggregation import FedAdam, FedBuff, ShapFedWA, StaleStarts
from flsv.core.parameter_space import ParameterSpace
from flsv.data import DirichletPartitioner, FederatedDataModule, Splits
from flsv.data.corruption import ClosedSetLabelNoise
from flsv.federation import FederatedLoop
from flsv.games import ModelEvaluator
from flsv.metrics import ClassSpecificShapley, CumulativeShapley, DecayedShapley, DomainRelevance
from flsv.models.mixture import MixtureClient
from flsv.personalization import FedAMP, FedEM, FedFomo, PFedHN, PFedSV
from flsv.privacy import GaussianPrivacy
from flsv.sampling import UniformSampler
from flsv.training.algorithms import SCAFFOLD, FedDyn, FedDynServer, MoreauSGD
from flsv.uploads import UploadContext
from flsv.valuation import FedBary, participants_of
from flsv.valuation.features import Backbone
from helpers.data import CLASSES, FEATURES, toy_data
from helpers.fits import checkpoints, fit, vector
from helpers.models import Plain, network, sgd

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
DEVICE = "cuda"
ON: dict[str, Any] = {"accelerator": DEVICE, "devices": 1}


def quickstart(folder: Path, **where: Any) -> list[dict[str, str]]:
    """The federation of ``configs/quickstart.yaml``, and its CSV."""
    torch.manual_seed(0)
    partitioner = DirichletPartitioner(num_clients=5, alpha=0.5, min_samples=40, seed=1)
    data = FederatedDataModule("digits", partitioner, batch_size=16, splits=Splits(client_test=0.2))
    module = ClassifierClient("mlp", network_args={"hidden": [64]}, optimizer=partial(torch.optim.SGD, lr=0.1))
    evaluation = ClientEvaluation(every=5)
    loop = FederatedLoop(ShapFedWA("cssv"), {"cssv": ClassSpecificShapley()}, evaluation=evaluation, seed=0)
    fit(loop, folder, module, data, rounds=5, logger=CSVLogger(folder, name="log"), **where)
    (path,) = folder.rglob("contributions.csv")
    return list(csv.DictReader(path.open()))


def test_quickstart_on_cuda_equals_the_cpus(tmp_path: Path) -> None:
    here, there = quickstart(tmp_path / "cpu"), quickstart(tmp_path / "cuda", **ON)
    assert len(here) == len(there) > 0
    for mine, theirs in zip(here, there):
        # One sample of a client's test set may be a tie that rounding decides.
        tolerance = 0.02 if "accuracy" in mine["metric"] else 1e-5
        for column in ("value", "low", "high"):
            one, other = (float(row.pop(column) or "nan") for row in (mine, theirs))
            assert other == pytest.approx(one, abs=tolerance, rel=1e-5, nan_ok=True), (mine, column)
        assert mine == theirs


def test_games_under_vmap_are_those_one_by_one() -> None:
    """And those on the CPU."""
    module = network().to(DEVICE).eval()
    space = ParameterSpace(module)
    draw = torch.Generator().manual_seed(0)
    batches = [(torch.randn(50, FEATURES, generator=draw), torch.arange(50) % CLASSES) for _ in range(3)]
    vectors = space.read(module) + 0.1 * torch.rand(40, space.size, generator=draw).to(DEVICE)
    metric = MulticlassF1Score(CLASSES, average="macro")

    def scores(backend: Any) -> Any:
        return ModelEvaluator(module, space, batches, num_classes=CLASSES, metric=metric, backend=backend)(vectors)

    mapped, serial = scores("vmap"), scores("serial")
    module.cpu()
    vectors = vectors.cpu()
    reference = scores("serial")
    for found in (mapped, serial):
        losses, hits = zip(*((each.values["loss"], each.values["correct"]) for each in (found, reference)))
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        assert (hits[0] - hits[1]).abs().max() <= 1
        torch.testing.assert_close(found.value("metric"), reference.value("metric"), rtol=0, atol=0.02)


# ---- federations of every kind


def without_norm() -> Plain:
    return Plain(network(batch_norm=False), partial(torch.optim.SGD, lr=0.1))


def moreau() -> Plain:
    return Plain(network(False), partial(MoreauSGD, lr=0.05, outer_lr=0.02, lamda=15.0, inner_steps=2))


def mixture() -> MixtureClient:
    torch.manual_seed(0)
    return MixtureClient(num_components=2, optimizer=sgd, network=network(False), num_classes=CLASSES)


#: The loop's options, and the module.
FEDERATIONS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[], nn.Module]]] = {
    "a logged value": (lambda: {"metrics": {"sv": DecayedShapley(performance="val_acc", mode="max")}}, Plain),
    "a metric of outputs": (lambda: {"metrics": {"sv": DecayedShapley(performance=MulticlassF1Score(CLASSES))}}, Plain),
    "pfedsv": (
        lambda: {"metrics": {"relevance": DomainRelevance()}, "personalizer": PFedSV("relevance", k=2)},
        without_norm,
    ),
    "fedem": (lambda: {"personalizer": FedEM()}, mixture),
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
def test_federation_on_cuda_equals_the_cpus(tmp_path: Path, name: str) -> None:
    options, module = FEDERATIONS[name]
    found = []
    for where in ({}, ON):
        data = toy_data(client_val=0.2 if name == "pfedsv" else 0.0, corruptions=[ClosedSetLabelNoise(fraction=0.5)])
        loop = FederatedLoop(seed=1, **options())
        found.append(vector(fit(loop, tmp_path / str(len(found)), module(), data, rounds=2, **where)).cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("first", ["cpu", DEVICE])
@pytest.mark.parametrize("personalizer", [None, FedAMP, FedFomo, partial(PFedSV, "relevance", k=2)])
def test_a_run_goes_on_on_the_other_device(tmp_path: Path, personalizer: Any, first: str) -> None:
    def run(folder: str, rounds: int, path: Path | None = None, **options: Any) -> Tensor:
        # FedAMP asks nobody what others are worth to it.
        metrics = {"relevance": DomainRelevance()} if personalizer not in (None, FedAMP) else {}
        metrics |= {"sv": CumulativeShapley()} if personalizer is None else {}
        own = {} if personalizer is None else {"personalizer": personalizer()}
        loop = FederatedLoop(metrics=metrics, optimizer_state="persist", seed=1, **own)
        data = toy_data(client_val=0.2)
        return vector(fit(loop, tmp_path / folder, without_norm(), data, rounds, path, **options)).cpu()

    before, after = ({}, ON) if first == "cpu" else (ON, {})
    run("half", 2, enable_checkpointing=True, callbacks=[checkpoints(tmp_path)], **before)
    resumed = run("rest", 3, tmp_path / "checkpoints/last.ckpt", **after)
    torch.testing.assert_close(resumed, run("whole", 3), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("features", ["pixels", Backbone("mlp", options={"hidden": [8]}), "pca"])
def test_valuation_on_cuda_equals_the_cpus(features: Any) -> None:
    data = toy_data(server_val=0.3)
    data.setup("fit")
    there, here = (
        FedBary(features=features, support=4, iterations=2).value(
            *participants_of(data, device), torch.Generator().manual_seed(0)
        )
        for device in (torch.device(DEVICE), torch.device("cpu"))
    )
    torch.testing.assert_close(there.distances.cpu(), here.distances, rtol=1e-4, atol=1e-5)
    assert torch.equal(there.flagged.cpu(), here.flagged)


@pytest.mark.parametrize("on_device", [False, True])
def test_privacy_noise_on_cuda_follows_from_the_seed(on_device: bool) -> None:
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
