"""Values of rounds that somebody else ran: a FederatedLoop's on the same rounds, whatever form models come in."""

from functools import partial

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassF1Score

from flsv import FederatedLoop, ParameterSpace, Round, value_round
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
from helpers import refused
from helpers.data import CLASSES, toy_data
from helpers.fits import KeepsRounds, fit
from helpers.models import LogsLoss, Plain, network

SEED, ROUNDS = 5, 2


def make_all_metrics() -> dict[str, ContributionMetric]:
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
def trained_run(tmp_path_factory):
    """A run in which two of three clients take part in every round: its module, data, loop and rounds."""
    recorder = KeepsRounds()
    data = toy_data()
    loop = FederatedLoop(
        recorder,
        MetricCollection(make_all_metrics()),
        sampler=UniformSampler(2),
        seed=SEED,
    )

    module = fit(
        loop,
        tmp_path_factory.mktemp("run"),
        LogsLoss(),
        data,
        rounds=ROUNDS,
    )

    return module, data, loop, recorder.rounds


def values_of_last_round(module: nn.Module, data, rounds: list[Round], metrics, form, **options):
    """Value the rounds, one after another. ``form`` makes what value_round takes of a vector."""
    for round in rounds:
        ids = round.client_ids.tolist()
        updates = {client: form(model) for client, model in zip(ids, round.client_vectors)}
        values = value_round(
            module,
            form(round.global_vector),
            updates,
            data.val_dataloader(),
            metrics=metrics,
            num_samples=dict(zip(ids, round.num_samples.tolist())),
            num_clients=3,
            seed=SEED,
            **options,
        )
    return values


def assert_same_values(values: Tensor, expected: Tensor, name: str):
    """Clients that were never seen are NaN in both."""
    assert torch.equal(values.nan_to_num(9), expected.nan_to_num(9)), name


def as_state(vector: Tensor) -> dict[str, Tensor]:
    net = network()
    ParameterSpace(net).write(net, vector)
    return net.state_dict()


@pytest.fixture(scope="module")
def values_of_every_metric(trained_run):
    """By value_round, after the rounds of the run."""
    module, data, _, rounds = trained_run
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    values = values_of_last_round(module, data, rounds, make_all_metrics(), lambda vector: vector)

    for name, tensor in module.state_dict().items():
        assert torch.equal(state[name], tensor), "value_round has changed the module"
    return values


@pytest.mark.slow
def test_value_round_equals_the_federated_loop_for_every_metric(
    trained_run, values_of_every_metric
):
    _, _, loop, _ = trained_run
    values = values_of_every_metric

    assert values.values.keys() == loop.contributions.keys()
    for name, expected in loop.contributions.items():
        assert_same_values(values[name], expected, name)
        values_of_loop = loop.values[name]
        if values_of_loop.by_class is not None:
            assert_same_values(values.values[name].by_class, values_of_loop.by_class, name)

    assert values["sv"].isnan().sum() <= 1  # two of three clients are drawn in each round
    assert "cgsv/phi" in set(values.to_frame()["metric"])


@pytest.mark.slow
def test_table_of_value_round_has_the_values_of_classes(values_of_every_metric):
    values = values_of_every_metric
    table = values.to_frame()
    is_of_class_1 = (table["metric"] == "classes") & (table["class"] == "1")
    column = table[is_of_class_1].set_index("client")["value"]
    expected = values.values["classes"].by_class[:, 1]
    seen_clients = expected.isfinite().nonzero().flatten().tolist()

    assert column.to_dict() == pytest.approx(
        {client: expected[client].item() for client in seen_clients}
    )
    assert set(table["round"]) == {ROUNDS - 1}


PLAIN = {
    "sv": PartialFederatedShapley,
    "agreement": GradientAgreement,
    "cssv": ClassSpecificShapley,
}


@pytest.mark.fast_rows
@pytest.mark.parametrize("form", ["state_dict", "arrays", "fabric"])
def test_value_round_of_state_dicts_or_arrays_equals_that_of_vectors(trained_run, form):
    module, data, _, rounds = trained_run
    net = network()
    net.load_state_dict(module.net.state_dict())
    valued_module = net
    make_form = as_state

    if form == "arrays":
        make_form = as_arrays

    if form == "fabric":
        valued_module = Fabric(accelerator="cpu", devices=1).setup(net)

    metrics = {name: make() for name, make in PLAIN.items()}
    expected = values_of_last_round(net, data, rounds, metrics, lambda vector: vector)
    metrics = MetricCollection({name: make() for name, make in PLAIN.items()})
    values = values_of_last_round(valued_module, data, rounds, metrics, make_form)

    for name in PLAIN:
        assert_same_values(values[name], expected[name], name)


def as_arrays(vector: Tensor) -> list[np.ndarray]:
    return [np.asarray(value) for value in as_state(vector).values()]


def test_value_round_of_deltas_equals_that_of_models(trained_run):
    module, _, _, rounds = trained_run
    model = rounds[0].global_vector
    client_models = rounds[0].client_vectors
    samples = rounds[0].num_samples.tolist()
    net = network()
    net.load_state_dict(module.net.state_dict())

    value = partial(value_round, net, model, num_samples=samples)

    deltas = [*(client_models - model)]
    of_deltas = value(deltas, metrics=CosineGradientShapley(), deltas=True)
    of_models = value([*client_models], metrics=[CosineGradientShapley()])

    name = "CosineGradientShapley"
    assert_close(of_deltas[name], of_models[name])


def test_differences_of_a_network_with_batch_norm_are_refused_without_deltas():
    net = nn.Sequential(
        nn.Linear(5, 4),
        nn.BatchNorm1d(4),
        nn.Linear(4, CLASSES),
    )
    global_vector = ParameterSpace(net).read(net)
    updates = [-0.1 * global_vector, -0.2 * global_vector]
    value = partial(value_round, net, global_vector, metrics=CosineGradientShapley())

    with refused(r"client 0.*1\.running_var has negative.*deltas=True"):
        value(updates)

    values = value(updates, deltas=True)
    assert values["CosineGradientShapley"].isfinite().all()


def test_values_by_a_plain_modules_loss_equal_a_plain_loop(trained_run):
    module, data, _, rounds = trained_run
    net = module.net
    model = rounds[0].global_vector
    client_models = rounds[0].client_vectors
    space = ParameterSpace(net)
    batches = [
        (torch.randn(4, 6), torch.randn(4, CLASSES)),
        (torch.randn(2, 6), torch.randn(2, CLASSES)),
    ]

    num_samples = 4 + 2

    def negative_loss(vector: Tensor) -> float:
        evaluated = network().eval()
        space.write(evaluated, vector)
        total_loss = 0.0
        with torch.no_grad():
            for x, y in batches:
                mean_of_batch = float(((evaluated(x) - y) ** 2).mean())
                total_loss += mean_of_batch * len(y)

        return -total_loss / num_samples

    values = value_round(net, model, list(client_models), batches, loss=nn.functional.mse_loss)

    empty = negative_loss(model)
    grand = negative_loss((client_models[0] + client_models[1]) / 2)
    singles = [negative_loss(client_model) for client_model in client_models]
    expected = [
        (singles[0] - empty + grand - singles[1]) / 2,
        (singles[1] - empty + grand - singles[0]) / 2,
    ]
    shapley_values = values["PartialFederatedShapley"]

    assert shapley_values.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert values.evaluations == 4

    metrics = [
        PartialFederatedShapley(performance="loss", mode="min"),
        GradientAgreement(loss="loss"),
    ]
    by_name = value_round(
        net, model, list(client_models), batches, loss=nn.functional.mse_loss, metrics=metrics
    )

    assert torch.equal(by_name["PartialFederatedShapley"], shapley_values)
    assert by_name["GradientAgreement"].sum() == pytest.approx(1)


def test_value_round_leaves_the_global_generator_unchanged(trained_run):
    module, _, _, rounds = trained_run
    samples = TensorDataset(torch.randn(20, 6), torch.randint(CLASSES, (20,)))
    batches = DataLoader(samples, 10, shuffle=True)
    generator_state = torch.get_rng_state()

    value_round(
        module,
        rounds[0].global_vector,
        list(rounds[0].client_vectors),
        batches,
        metrics=LeaveOneOut(),
    )

    assert torch.equal(torch.get_rng_state(), generator_state)


def test_value_round_takes_clients_by_name_and_aggregation_weights(trained_run):
    module, data, _, rounds = trained_run
    model = rounds[0].global_vector
    models = rounds[0].client_vectors
    metric = DecayedShapley(normalize=False)

    values = value_round(
        module,
        model,
        {"Kyoto": models[0], "Lyon": models[1]},
        data.val_dataloader(),
        metrics=metric,
        client_names=["Lyon", "Boston", "Kyoto"],
        weights={"Kyoto": 0.25, "Lyon": 0.75},
    )
    by_position = value_round(
        module,
        model,
        [models[1], models[1], models[0]],
        data.val_dataloader(),
        metrics=DecayedShapley(normalize=False),
        weights=[0.75, 0.0, 0.25],
    )

    decayed = values["DecayedShapley"]
    assert decayed.isnan().tolist() == [False, True, False]
    assert set(values.to_frame()["client_name"]) == {"Kyoto", "Lyon"}
    assert_close(by_position["DecayedShapley"][[0, 2]], decayed[[0, 2]])


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
        ({"updates": [VECTOR, VECTOR * float("nan")]}, "model of client 1 contains NaN"),
        ({"updates": [], "num_clients": 2}, "has values of 0 clients"),
        ({"updates": {"Lyon": VECTOR, 1: VECTOR}}, r"\['Lyon', 1\], but expected.*client_names"),
        (
            {"updates": {0: VECTOR, 1: VECTOR}, "client_names": ["Lyon", "Kyoto"]},
            r"but expected those of \['Lyon', 'Kyoto'\]",
        ),
        ({"num_samples": [3, 0]}, "num_samples=0.*at least 1"),
        ({"weights": [1.0]}, r"weights=...\) has values of 1 clients"),
        (
            {"updates": {1: VECTOR, 0: VECTOR}, "num_samples": [3, 5]},
            "num_samples is a list, but updates is a dict",
        ),
        (
            {"metrics": CosineGradientShapley(), "val_loader": [1], "loss": nn.functional.mse_loss},
            "measures the loss",
        ),
        ({"updates": [VECTOR]}, "at least 2.*against other clients'"),
        ({"client_names": ["Lyon", "Lyon"]}, "different names"),
        ({"metrics": LeaveOneOut(num_clients=4), "num_clients": 3}, "num_clients=4.*does not fit"),
        ({"metrics": LeaveOneOut()}, "evaluate models.*Pass val_loader"),
        ({"metrics": ContributionEstimation()}, r"needs \['clients'\].*only a FederatedLoop"),
        ({"metrics": ClassSpecificShapley(head="4"), "num_classes": 7}, "has 3 outputs"),
        (
            {"module": LogsLoss(), "val_loader": [1], "loss": nn.functional.mse_loss},
            "a value that the module logs",
        ),
    ],
)
def test_value_round_with_mismatched_arguments_raises(arguments, message):
    fitting_arguments = {"module": NET, "start": VECTOR, "updates": [VECTOR, VECTOR]}
    with refused(message):
        value_round(**{**fitting_arguments, **arguments})


def test_value_round_refuses_other_client_names_in_a_later_round():
    metric = CosineGradientShapley()
    updates = [VECTOR + 1, VECTOR - 1]
    value_round(NET, VECTOR, updates, metrics=metric, client_names=["Lyon", "Kyoto"])

    with refused(r"rounds of.*clients \['Lyon', 'Kyoto'\]"):
        value_round(NET, VECTOR, updates, metrics=metric, client_names=["Kyoto", "Lyon"])

    value_round(NET, VECTOR, updates, metrics=metric, client_names=["Lyon", "Kyoto"])
    assert metric.rounds == 2


def test_value_round_of_a_module_without_a_head_and_num_classes_is_refused():
    convolution = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    model = ParameterSpace(convolution).read(convolution)
    batches = [(torch.ones(2, 1, 4, 4), torch.tensor([0, 1]))]

    with refused("Pass num_classes"):
        value_round(convolution, model, [model, model], batches)

    values = value_round(convolution, model, [model, model], batches, num_classes=2)
    assert values["PartialFederatedShapley"].tolist() == [0, 0]


class Normalizes(Plain):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return (batch[0] / 10 - 3, batch[1]) if self.trainer.validating else batch


def test_value_round_applies_the_modules_batch_hooks_in_validation_mode():
    x = torch.randn(60, 6)
    y = torch.arange(60) % 3
    module = Normalizes(network(batch_norm=False))
    model = ParameterSpace(module).read(module)
    updates = [model + torch.randn_like(model) for _ in range(3)]

    values = value_round(module, model, updates, [(x, y)], metrics=CumulativeShapley())
    by_hand = value_round(
        module.net,
        model,
        updates,
        [(x / 10 - 3, y)],
        metrics=CumulativeShapley(),
    )

    assert_close(values["CumulativeShapley"], by_hand["CumulativeShapley"])
    assert module._trainer is None  # it is read, not written
