"""Values of rounds that somebody else ran: a FederatedLoop's on the same rounds, whatever form models come in."""

from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassF1Score

from flsv import ConfigurationError, FederatedLoop, ParameterSpace, Round, value_round
from flsv.metrics import (
    ClassSpecificShapley,
    ContributionEstimation,
    ContributionMetric,
    CosineGradientShapley,
    CumulativeShapley,
    DecayedShapley,
    GradientAgreement,
    GradientShapley,
    LeaveOneOut,
    OneRoundShapley,
    PartialFederatedShapley,
    SurrogateFederatedShapley,
)
from flsv.sampling import UniformSampler
from helpers.data import CLASSES, toy_data
from helpers.fits import fit
from helpers.loops_by_hand import KeepsRounds
from helpers.models import Plain, network

SEED, ROUNDS = 5, 2


class Logs(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y))


def all_metrics() -> dict[str, ContributionMetric]:
    orders = {"num_permutations": 2}
    return {
        "cssv": ClassSpecificShapley(),
        "cgsv": CosineGradientShapley(),
        "sv": PartialFederatedShapley(performance="negative_loss"),
        "classes": CumulativeShapley(per_class=True),
        "drawn": CumulativeShapley(
            estimator="permutation", estimator_args=orders, weighting="samples"
        ),
        "ssv": SurrogateFederatedShapley(),
        "decayed": DecayedShapley(),
        "once": OneRoundShapley(ROUNDS),
        "gradient": GradientShapley(),
        "agreement": GradientAgreement(),
        "logged": LeaveOneOut(performance="val_loss", mode="min"),
        "f1": LeaveOneOut(performance=MulticlassF1Score(CLASSES)),
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run in which two of three clients take part in every round: its module, data, loop and rounds."""
    kept, data = KeepsRounds(), toy_data()
    loop = FederatedLoop(
        kept, MetricCollection(all_metrics()), sampler=UniformSampler(2), seed=SEED
    )
    module = fit(loop, tmp_path_factory.mktemp("run"), Logs(), data, rounds=ROUNDS)
    return module, data, loop, kept.rounds


def played(
    module: nn.Module, data: Any, rounds: list[Round], metrics: Any, form: Any, **more: Any
) -> Any:
    for round in rounds:
        ids = round.client_ids.tolist()
        updates = {client: form(model) for client, model in zip(ids, round.client_vectors)}
        samples = dict(zip(ids, round.num_samples.tolist()))
        found = value_round(
            module, form(round.global_vector), updates, data.val_dataloader(), metrics=metrics, num_samples=samples,
            num_clients=3, seed=SEED, **more,
        )  # fmt: skip
    return found


def as_state(vector: Tensor) -> dict[str, Tensor]:
    net = network()
    ParameterSpace(net).write(net, vector)
    return net.state_dict()


def test_value_round_equals_the_federated_loop_for_every_metric(trained: Any) -> None:
    module, data, loop, rounds = trained
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    found = played(module, data, rounds, all_metrics(), lambda vector: vector)
    assert found.values.keys() == loop.contributions.keys()
    for name, expected in loop.contributions.items():
        assert torch.equal(found[name].nan_to_num(9), expected.nan_to_num(9)), name
        if expected.by_class is not None:
            assert torch.equal(
                found.per_class[name].nan_to_num(9), expected.by_class.nan_to_num(9)
            ), name
    assert found["sv"].isnan().sum() <= 1
    assert found.diagnostics["cgsv"].keys() == {"phi"}
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    table = found.to_frame()
    mine = table[(table["metric"] == "classes") & (table["class"] == "1")].set_index("client")[
        "value"
    ]
    known = {i: v for i, v in enumerate(found.per_class["classes"][:, 1].tolist()) if v == v}
    assert mine.to_dict() == pytest.approx(known)
    assert set(table["round"]) == {ROUNDS - 1}


PLAIN = {
    "sv": PartialFederatedShapley,
    "agreement": GradientAgreement,
    "cssv": ClassSpecificShapley,
}


@pytest.mark.parametrize("what", ["state_dict", "arrays", "deltas", "fabric"])
def test_value_round_of_state_dicts_arrays_or_deltas_equals_that_of_vectors(
    trained: Any, what: str
) -> None:
    module, data, _, rounds = trained
    net = network()
    net.load_state_dict(module.net.state_dict())
    metrics = MetricCollection({name: make() for name, make in PLAIN.items()})
    expected = played(
        net, data, rounds, {name: make() for name, make in PLAIN.items()}, lambda vector: vector
    )
    if what == "deltas":
        kind, samples = CosineGradientShapley, rounds[0].num_samples.tolist()
        start, models = rounds[0].global_vector, rounds[0].client_vectors
        found = value_round(
            net, start, [*(models - start)], metrics=kind(), num_samples=samples, deltas=True
        )
        again = value_round(net, start, [*models], metrics=[kind()], num_samples=samples)
        torch.testing.assert_close(found[kind.__name__], again[kind.__name__])
        return
    form = (
        (lambda vector: [np.asarray(v) for v in as_state(vector).values()])
        if what == "arrays"
        else as_state
    )
    given = Fabric(accelerator="cpu", devices=1).setup(net) if what == "fabric" else net
    found = played(given, data, rounds, metrics, form)
    for name in PLAIN:
        assert torch.equal(found[name].nan_to_num(9), expected[name].nan_to_num(9)), name


def test_values_by_a_plain_modules_loss_equal_a_plain_loop(trained: Any) -> None:
    module, data, _, rounds = trained
    net, start, models = module.net, rounds[0].global_vector, rounds[0].client_vectors
    batches = [
        (torch.randn(4, 6), torch.randn(4, CLASSES)),
        (torch.randn(2, 6), torch.randn(2, CLASSES)),
    ]

    def worth(vector: Tensor) -> float:
        own, space = network(), ParameterSpace(net)
        space.write(own.eval(), vector)
        with torch.no_grad():
            total = sum(float(((own(x) - y) ** 2).mean()) * len(y) for x, y in batches)
        return -total / 6

    found = value_round(net, start, list(models), batches, loss=nn.functional.mse_loss)
    empty, both = worth(start), worth((models[0] + models[1]) / 2)
    alone = [worth(model) for model in models]
    expected = [(alone[i] - empty + both - alone[1 - i]) / 2 for i in range(2)]
    assert found["PartialFederatedShapley"].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert found.evaluations == 4
    own = value_round(
        net, start, list(models), batches, loss=nn.functional.mse_loss,
        metrics=[PartialFederatedShapley(performance="loss", mode="min"), GradientAgreement(loss="loss")],
    )  # fmt: skip
    assert torch.equal(own["PartialFederatedShapley"], found["PartialFederatedShapley"])
    assert own["GradientAgreement"].sum() == pytest.approx(1)


def test_value_round_leaves_the_global_generator_unchanged(trained: Any) -> None:
    module, _, _, rounds = trained
    batches = DataLoader(
        TensorDataset(torch.randn(20, 6), torch.randint(CLASSES, (20,))), 10, shuffle=True
    )
    before = torch.get_rng_state()
    value_round(
        module,
        rounds[0].global_vector,
        list(rounds[0].client_vectors),
        batches,
        metrics=LeaveOneOut(),
    )
    assert torch.equal(torch.get_rng_state(), before)


def test_value_round_takes_clients_by_name_and_aggregation_weights(trained: Any) -> None:
    module, data, _, rounds = trained
    models, names = rounds[0].client_vectors, ["Lyon", "Boston", "Kyoto"]
    updates = {"Kyoto": models[0], "Lyon": models[1]}
    metric = DecayedShapley(normalize=False)
    found = value_round(
        module, rounds[0].global_vector, updates, data.val_dataloader(), metrics=metric, client_names=names,
        weights={"Kyoto": 0.25, "Lyon": 0.75},
    )  # fmt: skip
    assert found["DecayedShapley"].isnan().tolist() == [False, True, False]
    frame = found.to_frame()
    assert set(frame["client_name"]) == {"Kyoto", "Lyon"}
    mean = value_round(
        module, rounds[0].global_vector, [models[1], models[1], models[0]], data.val_dataloader(),
        metrics=DecayedShapley(normalize=False), weights=[0.75, 0.0, 0.25],
    )  # fmt: skip
    torch.testing.assert_close(mean["DecayedShapley"][[0, 2]], found["DecayedShapley"][[0, 2]])
    assert metric.rounds == 1
    value_round(
        module,
        rounds[0].global_vector,
        updates,
        data.val_dataloader(),
        metrics=metric,
        client_names=names,
    )
    assert metric.rounds == 2  # and its omega is the second round's


NET = network()
VECTOR = ParameterSpace(NET).read(NET)
STATE = NET.state_dict()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": VECTOR[1:]}, r"model of start does not fit.*a vector \[\d+\].*ParameterSpace"),
        (
            {"updates": [VECTOR, {"0.weight": STATE["0.weight"]}]},
            r"client 1 does not fit.*'1.weight'",
        ),
        (
            {"updates": [VECTOR, {**STATE, "5.bias": VECTOR}]},
            r"client 1 does not fit.*\['5.bias'\] differ",
        ),
        ({"updates": [VECTOR, VECTOR * float("nan")]}, "model of client 1 holds NaN"),
        ({"updates": []}, "models of at least one client"),
        (
            {"updates": {"Lyon": VECTOR, 1: VECTOR}},
            r"\['Lyon', 1\] are not all among .*client_names",
        ),
        ({"num_samples": [3, 0]}, "num_samples=0.*at least 1"),
        ({"weights": {0: 1.0, 1: 2.0}}, r"weights=...\) is given of \[0, 1\], expected of 2 as"),
        (
            {"metrics": CosineGradientShapley(), "val_loader": [1], "loss": nn.functional.mse_loss},
            "measures it",
        ),
        (
            {"updates": [VECTOR]},
            r"there are the clients \['0'\].*at least 2.*against other clients'",
        ),
        ({"client_names": ["Lyon", "Lyon"]}, "each once"),
        ({"metrics": LeaveOneOut(num_clients=4), "num_clients": 3}, "num_clients=4.*does not fit"),
        (
            {"metrics": LeaveOneOut()},
            "metrics \\['LeaveOneOut'\\] evaluate models.*give val_loader",
        ),
        ({"metrics": ContributionEstimation()}, r"asks for \['clients'\].*only a FederatedLoop"),
        (
            {"metrics": ClassSpecificShapley(head="4"), "num_classes": 7},
            "has 3 rows and the data have 7 classes",
        ),
        (
            {"module": Logs(), "val_loader": [1], "loss": nn.functional.mse_loss},
            "name what the LightningModule logs",
        ),
    ],
)
def test_value_round_with_mismatched_arguments_raises(
    arguments: dict[str, Any], message: str
) -> None:
    given = {"module": NET, "start": VECTOR, "updates": [VECTOR, VECTOR]}
    with pytest.raises(ConfigurationError, match=message):
        value_round(**{**given, **arguments})


def test_value_round_refuses_other_client_names_in_a_later_round() -> None:
    metric, updates = CosineGradientShapley(), [VECTOR + 1, VECTOR - 1]
    value_round(NET, VECTOR, updates, metrics=metric, client_names=["Lyon", "Kyoto"])
    with pytest.raises(ConfigurationError, match=r"rounds of the clients \['Lyon', 'Kyoto'\]"):
        value_round(NET, VECTOR, updates, metrics=metric, client_names=["Kyoto", "Lyon"])
    value_round(NET, VECTOR, updates, metrics=metric, client_names=["Lyon", "Kyoto"])
    assert metric.rounds == 2


def test_value_round_of_a_module_without_a_head_and_num_classes_is_refused() -> None:
    convolution = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    own = ParameterSpace(convolution).read(convolution)
    batches = [(torch.ones(2, 1, 4, 4), torch.tensor([0, 1]))]
    with pytest.raises(ConfigurationError, match="say num_classes"):
        value_round(convolution, own, [own, own], batches)
    found = value_round(convolution, own, [own, own], batches, num_classes=2)
    assert found["PartialFederatedShapley"].tolist() == [0, 0]


class Normalizes(Plain):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (batch[0] / 10 - 3, batch[1]) if self.trainer.validating else batch


def test_value_round_applies_the_modules_batch_hooks_in_validation_mode() -> None:
    x, y, module = torch.randn(60, 6), torch.arange(60) % 3, Normalizes(network(batch_norm=False))
    start = ParameterSpace(module).read(module)
    updates = [start + torch.randn_like(start) for _ in range(3)]
    found = value_round(module, start, updates, [(x, y)], metrics=CumulativeShapley())
    by_hand = value_round(
        module.net, start, updates, [(x / 10 - 3, y)], metrics=CumulativeShapley()
    )
    torch.testing.assert_close(found["CumulativeShapley"], by_hand["CumulativeShapley"])
    assert module._trainer is None  # it is read, not written


class OfDictionaries(Plain):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        hits = (self(batch["x"]).argmax(1) == batch["y"]).float().mean()
        self.log_dict({"dev/hits": hits, "dev/loss": 1 - hits}, batch_size=len(batch["y"]))


def test_batches_that_are_dictionaries_are_measured_by_what_is_logged() -> None:
    x, y, module = (
        torch.randn(60, 6),
        torch.arange(60) % 3,
        OfDictionaries(network(batch_norm=False)),
    )
    start = ParameterSpace(module).read(module)
    updates = [start + torch.randn_like(start) for _ in range(3)]
    logged = PartialFederatedShapley(performance="dev/hits", mode="max")
    found = value_round(module, start, updates, [{"x": x, "y": y}], metrics=logged)
    plain = value_round(module, start, updates, [(x, y)], metrics=PartialFederatedShapley())
    torch.testing.assert_close(found["PartialFederatedShapley"], plain["PartialFederatedShapley"])
    with pytest.raises(
        ConfigurationError,
        match=r"a batch is dict\. Or measure by a value that validation_step logs",
    ):
        value_round(module, start, updates, [{"x": x, "y": y}], metrics=PartialFederatedShapley())
