"""On a device, against the CPU: CUDA, or the emulated accelerator of ``emulated.py``, whose results are the CPU's to
the bit (``make emulated``)."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torchmetrics.classification import MulticlassF1Score

import flsv
from flsv import Reporting
from flsv.aggregation import CGSV, FedAdam, ShapFedWA
from flsv.contrib import InRunShapley, InRunValues
from flsv.data import ClosedSetLabelNoise
from flsv.engines.several_ranks import is_rounded
from flsv.federation import FederatedLoop
from flsv.metrics import (
    ClassSpecificShapley,
    CosineGradientShapley,
    CumulativeShapley,
    DecayedShapley,
    DomainRelevance,
    ShadowShapley,
)
from flsv.models.mixture import MixtureClient
from flsv.personalization import FedEM, PFedHN, PFedSV
from flsv.privacy import GaussianPrivacy
from flsv.training.algorithms import SCAFFOLD
from flsv.valuation import FedBary, participants_of
from flsv.valuation.features import Backbone
from helpers import make_generator
from helpers.data import CLASSES, FEATURES, toy_data
from helpers.fits import fit, fit_and_save, make_checkpoint_callback, state_vector, trainer_for
from helpers.models import Plain, make_sgd, network, sgd

if EMULATED := bool(os.environ.get("FLSV_EMULATED")):
    from device.emulated import DEVICE, on_the_device

    def device_options():
        """Arguments of a Trainer that trains on the device."""
        return on_the_device()

else:
    DEVICE = torch.device("cuda", 0)

    def device_options():
        """Arguments of a Trainer that trains on the device."""
        return {"accelerator": "cuda", "devices": 1}


pytestmark = [
    *([] if EMULATED else [pytest.mark.cuda]),
    pytest.mark.skipif(
        not EMULATED and not torch.cuda.is_available(), reason="torch finds no CUDA device"
    ),
    pytest.mark.filterwarnings("ignore"),
]


# ---- federations of every kind


def make_plain(kind=Plain):
    return kind(network(batch_norm=False), make_sgd())


def make_mixture():
    torch.manual_seed(0)
    return MixtureClient(
        num_components=2, optimizer=sgd, network=network(False), num_classes=CLASSES
    )


#: The loop's options, and the module.
FEDERATIONS = {
    "scores of games, noise": (
        lambda: {
            "aggregator": FedAdam(),
            "uploads": [GaussianPrivacy(1.0, 1.0)],
            "metrics": {
                "logged": DecayedShapley(performance="val_acc", mode="max"),
                "of outputs": DecayedShapley(performance=MulticlassF1Score(CLASSES)),
            },
        },
        make_plain,
    ),
    "pfedsv": (
        lambda: {
            "metrics": {"relevance": DomainRelevance()},
            "personalizer": PFedSV("relevance", k=2),
        },
        make_plain,
    ),
    "fedem": (lambda: {"personalizer": FedEM()}, make_mixture),
    "pfedhn": (lambda: {"personalizer": PFedHN(hidden=8)}, make_plain),
    "scaffold": (lambda: {"client_algorithm": SCAFFOLD()}, make_plain),
    "in-run": (
        lambda: {"metrics": {"value": InRunShapley()}, "client_algorithm": InRunValues()},
        make_plain,
    ),
    "coalitions that a server weighs": (
        lambda: {
            "aggregator": CGSV("cgsv"),
            "metrics": {
                "value": ShadowShapley(),
                "by clients": ShadowShapley(evaluators="clients"),
                "cgsv": CosineGradientShapley(),
            },
        },
        make_plain,
    ),
    "many at once": (
        lambda: {"metrics": {"sv": CumulativeShapley()}, "engine": "vmap"},
        make_plain,
    ),
}


@pytest.mark.parametrize("name", FEDERATIONS)
def test_federation_on_the_device_equals_that_on_the_cpu(tmp_path, name):
    options, module = FEDERATIONS[name]
    vectors = []
    tables = []
    for folder, trainer_options in (
        (tmp_path / "cpu", {}),
        (tmp_path / "device", device_options()),
    ):
        data = toy_data(client_val=0.2, corruptions=[ClosedSetLabelNoise(fraction=0.5)])
        loop = FederatedLoop(seed=1, **options())
        trained = fit(
            loop,
            folder,
            module(),
            data,
            rounds=2,
            logger=CSVLogger(folder, name="log"),
            **trainer_options,
        )
        vectors.append(state_vector(trained).cpu())
        tables.append(next(folder.rglob("contributions.csv")).read_text())

    if EMULATED and name != "pfedhn":  # whose large layer sums in another order
        assert torch.equal(*vectors)
        assert tables[0] == tables[1]

    torch.testing.assert_close(vectors[1], vectors[0], rtol=1e-3, atol=1e-4)


def make_loop_with_states():
    metrics = {"relevance": DomainRelevance(), "sv": CumulativeShapley()}
    personalizer = PFedSV("relevance", k=2)
    return FederatedLoop(
        metrics=metrics, personalizer=personalizer, optimizer_state="persist", seed=1
    )


@pytest.mark.parametrize("first_device", ["cpu", DEVICE])
def test_checkpoint_of_one_device_resumes_on_the_other(tmp_path, first_device):
    if first_device == "cpu":
        options_of_half, options_of_rest = {}, device_options()
    else:
        options_of_half, options_of_rest = device_options(), {}
    data = toy_data(client_val=0.2)

    checkpoint = fit_and_save(
        make_loop_with_states(), tmp_path, make_plain(), data, 2, **options_of_half
    )
    resumed = fit(
        make_loop_with_states(),
        tmp_path / "rest",
        make_plain(),
        data,
        3,
        checkpoint,
        **options_of_rest,
    )
    uninterrupted = fit(make_loop_with_states(), tmp_path / "whole", make_plain(), data, 3)

    torch.testing.assert_close(
        state_vector(resumed).cpu(), state_vector(uninterrupted), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize(
    "features",
    [
        "pixels",
        Backbone("mlp", options={"hidden": [8]}),
        "pca",
    ],
)
def test_valuation_on_the_device_equals_that_on_the_cpu(features):
    data = toy_data(server_val=0.3)
    data.setup("fit")

    def valuation_on(device):
        method = FedBary(features=features, support=4, iterations=2)
        participants = participants_of(data, torch.device(device))
        return method.value(*participants, make_generator())

    valuation = valuation_on("cpu")
    device_valuation = valuation_on(DEVICE)

    distances = device_valuation.distances.cpu()
    torch.testing.assert_close(distances, valuation.distances, rtol=1e-4, atol=1e-5)
    assert torch.equal(device_valuation.flagged.cpu(), valuation.flagged)


def test_values_of_ranks_may_differ_by_rounding_on_a_device_only():
    value = torch.tensor([1.0, float("nan"), -0.2])
    rounded = value + 1e-4

    assert is_rounded(value.to(DEVICE), rounded.to(DEVICE))
    assert not is_rounded(value, rounded)
    assert not is_rounded(value.to(DEVICE), (value + 0.1).to(DEVICE))
    assert not is_rounded(value.to(DEVICE), None)


# ---- coalitions

#: The process and the device of each fit of a :class:`Recorded`.
#: A file, since a coalition's fit changes no global of the program. It is open: what a coalition opens is put back.
PLACES = Path(tempfile.mkdtemp()) / "places.txt"
OPEN_PLACES = os.open(PLACES, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


class Recorded(Plain):
    def on_train_start(self):
        os.write(OPEN_PLACES, f"{os.getpid()} {self.device}\n".encode())


def test_coalitions_train_on_the_device_in_this_process(tmp_path):
    tables = []
    for options in ({}, device_options()):
        PLACES.write_text("")
        loop = FederatedLoop(seed=1, metrics={"value": ShadowShapley()}, optimizer_state="persist")
        fit(loop, tmp_path, make_plain(Recorded), toy_data(), rounds=2, **options)
        values = loop.contributions["value"].tolist()

        trainer = trainer_for(
            FederatedLoop(seed=1, reporting=Reporting(table=False)), tmp_path, 2, **options
        )
        table = flsv.retrain(
            trainer,
            make_plain(Recorded),
            toy_data(),
            "all",
            metric="negative_loss",
            seeds=1,
        )
        tables.append(values + table["value"].tolist())

    places = PLACES.read_text().splitlines()
    assert set(places) == {f"{os.getpid()} {DEVICE}"}
    # The run and its coalitions, and then a run, two clients alone, and all coalitions at once.
    assert len(places) > 1 + 3 + 1 + 2 + 1

    tolerance = 0 if EMULATED else 1e-3
    assert tables[0] == pytest.approx(tables[1], abs=tolerance)


# ---- copies and waits


#: How many operators a batch may launch, and how many waits a client and a round may take, a copy to the host being
#: one. Six of a round are Lightning's own, who compares loaders' lengths on the device.
MOST_OPERATORS_OF_BATCH = 38
MOST_WAITS_OF_CLIENT = 1
MOST_WAITS_OF_ROUND = 12


def count_operations(folder, rounds=3, clients=3, batch_size=8, **options):
    """Copies, waits and operators of a fit."""
    from device.emulated import counts

    data = toy_data([1] * clients, batch_size=batch_size, eval_batch_size=64)
    initial_counts = counts()
    loop = FederatedLoop(ShapFedWA("cssv"), {"cssv": ClassSpecificShapley()}, seed=1)
    fit(loop, folder, Plain(), data, rounds=rounds, **device_options(), **options)

    differences = {name: number - initial_counts[name] for name, number in counts().items()}
    differences["waits"] += differences["to_host"]  # a copy to the host waits for the device
    return differences


@pytest.mark.skipif(not EMULATED, reason="CUDA does not count what waits for it")
def test_operators_and_host_copies_per_batch_client_and_round_are_limited(tmp_path):
    count_operations(tmp_path)  # some things are looked at once in a process
    rounds, clients = 3, 3
    operations = count_operations(tmp_path, rounds=rounds, clients=clients, batch_size=8)
    of_more_batches = count_operations(tmp_path, rounds=rounds, clients=clients, batch_size=4)
    more_batches = 4 * clients * rounds
    more_operators = of_more_batches["operators"] - operations["operators"]
    operators_per_batch = more_operators / more_batches

    assert 0 < operators_per_batch <= MOST_OPERATORS_OF_BATCH
    assert of_more_batches["to_device"] == operations["to_device"]
    assert of_more_batches["waits"] == operations["waits"]

    of_more_clients = count_operations(tmp_path, rounds=rounds, clients=2 * clients)
    more_visits = clients * rounds
    waits_per_client = (of_more_clients["waits"] - operations["waits"]) / more_visits

    assert waits_per_client <= MOST_WAITS_OF_CLIENT

    of_more_rounds = count_operations(tmp_path, rounds=2 * rounds, clients=clients)
    waits_per_round = (of_more_rounds["waits"] - operations["waits"]) / rounds
    waits_of_round_alone = waits_per_round - clients * waits_per_client

    assert waits_of_round_alone <= MOST_WAITS_OF_ROUND + 0.01


@pytest.mark.skipif(not EMULATED, reason="CUDA does not count what is copied")
def test_a_model_is_copied_to_the_host_for_a_checkpoint_alone(tmp_path):
    from device.emulated import count_by_line

    def files_that_copy_a_model(**options):
        with count_by_line(at_least=8 * FEATURES) as counts:
            count_operations(tmp_path, **options)
        return {line.partition(":")[0] for kind, line in counts if kind == "to_host"}

    without_checkpoints = files_that_copy_a_model()
    with_checkpoints = files_that_copy_a_model(
        enable_checkpointing=True,
        callbacks=[make_checkpoint_callback(tmp_path)],
    )

    # Lightning moves the module back after the fit; a validation's outputs are scored on the host, and samples hashed.
    expected = {
        "device_dtype_mixin.py",
        "flsv/utilities/host_copies.py",
        "flsv/data/sample_hashes.py",
    }
    assert without_checkpoints <= expected
    assert "flsv/_lightning/round_boundary.py" in with_checkpoints


@pytest.mark.skipif(not EMULATED, reason="the emulated device's own")
def test_emulated_device_refuses_to_mix_with_cpu_tensors(tmp_path):
    class Mixed(Plain):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * torch.ones(2).mean(0, keepdim=True)

    with pytest.raises(RuntimeError, match="Expected all tensors to be"):
        fit(FederatedLoop(seed=1), tmp_path, Mixed(), toy_data(), rounds=1, **device_options())
