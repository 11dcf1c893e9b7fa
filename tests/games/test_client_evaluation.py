"""Clients score coalitions: the same game by hand, what is reported, and what is refused."""

import itertools
from typing import Any

import lightning as L
import pytest
import torch
from games.all_coalitions import partition_in_three
from torch import Tensor, nn
from torch.testing import assert_close
from torchmetrics.classification import BinaryAUROC

from flsv import FederatedLoop, value_round
from flsv.aggregation import FedAvg
from flsv.core import Client, LocalData, RespondingClient
from flsv.core.responses import expected_response
from flsv.data import FederatedDataModule, SizePartitioner, Splits
from flsv.functional import predicted_shapley
from flsv.games import client_evaluation
from flsv.games.client_evaluation import (
    MIN_HELD_OUT as LEAST,
    hits_by_class,
    score_coalitions,
    score_models,
)
from flsv.games.members import members_of
from flsv.metrics import (
    CoalitionValue,
    ContributionEstimation,
    PartialFederatedShapley,
    ShadowShapley,
)
from flsv.privacy import GaussianPrivacy
from flsv.sampling import FixedCohort
from helpers import make_generator, refused
from helpers.coalitions_by_hand import GameByFits
from helpers.data import CLASSES, FEATURES, toy_data, toy_sets
from helpers.fits import fit, make_untrainable, trainer_for
from helpers.models import Plain, network
from zoo.tasks import Segmentation

HELD = {"server_val": 0.0, "client_val": 0.4, "client_test": 0.0}
CLIENTS = (4, 1, 2, 3)


def make_data(**options) -> FederatedDataModule:
    return toy_data(CLIENTS, **{**HELD, **options})


def make_module(kind: type[Plain] = Plain) -> Plain:
    return kind(network(batch_norm=False))


def make_loop(metrics: dict[str, Any], **options) -> FederatedLoop:
    return FederatedLoop(metrics=metrics, seed=3, **options)


class Logging(Plain):
    """Keeps what rows of one batched model do not allow, and logs a loss."""

    steps = 0.0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.steps += float(loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y))


def counted_classes(labels: Tensor) -> list[int]:
    """The classes of which a client tells the number of its held-out samples: those with five samples. If the samples
    of all smaller ones are fewer than five, the next class in order is left out, too."""
    sizes = torch.bincount(labels, minlength=CLASSES)
    counted = [label for label in range(CLASSES) if sizes[label] >= LEAST]
    rare = [label for label in range(CLASSES) if 0 < sizes[label] < LEAST]
    if rare and sizes[rare].sum() < LEAST:
        next_classes = [label for label in counted if label > rare[-1]] + counted
        counted.remove(next_classes[0])
    return counted


def pooled_classes(labels: Tensor) -> list[int]:
    """The rare classes that a client tells together: if they have five samples together."""
    sizes = torch.bincount(labels, minlength=CLASSES)
    rare = [label for label in range(CLASSES) if 0 < sizes[label] < LEAST]
    is_large = sizes[rare].sum() >= LEAST
    return rare if is_large else []


def balanced_accuracy_by_hand(model: Plain, client_data: FederatedDataModule) -> float:
    """The mean over classes of the share of the clients' held-out samples that are right."""
    model.eval()
    num_right = torch.zeros(CLASSES)
    num_samples = torch.zeros(CLASSES)
    num_pooled_right = torch.zeros(())
    num_pooled = 0
    for client in range(len(CLIENTS)):
        inputs, labels = zip(*client_data.client_loader(client, "val", shuffle=False))
        x = torch.cat(inputs)
        y = torch.cat(labels)
        for label in counted_classes(y):
            of_class = x[y == label]
            predicted = model(of_class).argmax(-1)
            num_samples[label] += len(of_class)
            num_right[label] += (predicted == label).sum()

        for label in pooled_classes(y):
            of_class = x[y == label]
            num_pooled += len(of_class)
            num_pooled_right += (model(of_class).argmax(-1) == label).sum()

    recalls = num_right.double() / num_samples.double()
    pooled_recall = num_pooled_right.double() / num_pooled
    return float(recalls.where(num_samples > 0, pooled_recall).mean())


@pytest.mark.slow
def test_values_by_client_side_evaluation_equal_those_on_all_held_out_samples(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(client_evaluation, "MAX_BYTES_OF_MODELS", 1)  # a request for each model
    metrics = {
        "sv": PartialFederatedShapley(evaluators="clients"),
        "shadow": ShadowShapley(coalitions="all", evaluators="clients"),
        "class": CoalitionValue(per_class=True, evaluators="clients"),
    }
    federated = make_loop(metrics)
    client_data = with_setup(make_data())
    model = make_module()
    initial_accuracy = balanced_accuracy_by_hand(model, client_data)

    fit(federated, tmp_path, model, client_data, rounds=1)

    accuracy = balanced_accuracy_by_hand(model, client_data)
    values = federated.contributions
    gain = accuracy - initial_accuracy

    assert float(values["shadow"].sum()) == pytest.approx(gain, abs=1e-6)

    by_class = values["class"].by_class
    assert by_class is not None
    assert by_class.shape == (len(CLIENTS), CLASSES)
    assert_close(values["class"], values["sv"], rtol=0, atol=1e-6)
    assert {("down", "score_models"), ("up", "score_models")} <= federated.channel.names()

    client_score = float(model.trainer.callback_metrics["shadow/client_scores"])
    assert client_score == pytest.approx(accuracy, abs=1e-6)
    assert federated.metrics["shadow"].guide()["unit"] == "gain in clients' balanced accuracy"


def with_setup(client_data: FederatedDataModule) -> FederatedDataModule:
    client_data.setup("fit")
    return client_data


@pytest.mark.slow
def test_loss_by_client_side_evaluation_is_the_mean_over_held_out_samples(tmp_path):
    metrics = {
        "loss": PartialFederatedShapley(performance="val_loss", mode="min", evaluators="clients"),
        "roc": PartialFederatedShapley(performance="auroc", evaluators="clients"),
    }
    federated = make_loop(metrics, aggregator=FedAvg("uniform"))
    client_data = make_data()

    model = fit(federated, tmp_path, make_module(Logging), client_data, rounds=1)

    batches = []
    for client in range(len(CLIENTS)):
        batches += client_data.client_loader(client, "val", shuffle=False)
    inputs, labels = zip(*batches)

    def loss_of(net: Plain) -> float:
        logits = net.eval()(torch.cat(inputs))
        return float(nn.functional.cross_entropy(logits, torch.cat(labels)))

    gain = loss_of(make_module()) - loss_of(model)
    sum_of_values = float(federated.contributions["loss"].sum())
    # Clients respond in three digits.
    assert sum_of_values == pytest.approx(gain, abs=5e-3)
    assert federated.contributions["roc"].isfinite().all()


def test_evaluating_clients_omit_rare_classes_and_cap_their_counts():
    num_samples = torch.tensor([1, 1])
    x = torch.arange(12.0)[:, None]
    y = torch.tensor([0] * 7 + [1] * 3 + [2] * 2)

    class Scores:
        support = y.bincount()

        def __init__(self, models: Tensor, keep: bool = False):
            self.values = {"correct": models.long()}

    local = LocalData(
        "client",
        lambda split: [(x, y)],
        num_samples,
        num_samples,
        lambda batches: Scores,
    )
    hits_of_models = torch.tensor([[7.0, 1, 1], [0, 3, 2]])

    response = Client(0, local).request(score_models, hits_of_models)

    # The two rare classes are counted as one.
    support = [7, 0, 0, 5]
    hits_of_first_model = [7, 0, 0, 2]
    hits_of_second_model = [0, 0, 0, 5]
    assert response.tolist() == [support, hits_of_first_model, hits_of_second_model]

    # A client that claims ten times what it trains on counts for what it trains on.
    false_response = torch.tensor([[100, 0, 0, 0]] * 3)
    hits, supports = hits_by_class([response, false_response], torch.tensor([20, 10]))

    recalls = hits / supports
    assert recalls[0].tolist() == pytest.approx([1.0, 2 / 5, 2 / 5])
    assert recalls[1].tolist() == pytest.approx([10 / 17, 1.0, 1.0])


@pytest.mark.parametrize("kind", ["negative", "more than there are", "more than it holds out"])
def test_impossible_scores_of_a_client_are_refused(kind):
    """Row 0 has the held-out samples of two classes and of all rare ones, the others the correctly classified ones."""
    response = torch.tensor(
        [
            [6, 5, 0],
            [6, 2, 0],
            [0, 5, 0],
        ],
    )
    held_out = response[:1]
    right = response[1:]
    lies = {
        "negative": torch.cat([held_out, -1 - right]),
        "more than there are": torch.cat([held_out, right + 1]),
        "more than it holds out": 10 * response,
    }
    lie = lies[kind]
    client = RespondingClient({"val": 11}, num_classes=2, model=lambda: torch.zeros(3))
    models = torch.zeros(2, 3)
    impossible = pytest.raises(
        ValueError, match="expected numbers from 0|consistent with each other"
    )

    numbers = expected_response(score_models)(client, models)
    numbers.check(response)
    with impossible:
        numbers.check(lie)

    coalitions = torch.tensor([[False], [True]])
    expectation = expected_response(score_coalitions)
    coalition_numbers = expectation(client, models, coalitions, torch.ones(1))
    coalition_numbers.check(torch.stack([response, response]))

    with impossible:
        coalition_numbers.check(torch.stack([response, lie]))


@pytest.mark.slow
def test_values_predicted_by_the_clients_are_those_of_their_outputs_by_hand(tmp_path):
    """Each client predicts on its own samples, and tells of a class only if it holds out five samples."""
    client_data = with_setup(make_data())
    n = len(CLIENTS)
    batches_by_client = []
    for client in range(n):
        batches_by_client.append(list(client_data.client_loader(client, "val", shuffle=False)))
    counts = torch.tensor([sum(len(y) for _, y in batches) for batches in batches_by_client])
    owner = torch.arange(n).repeat_interleave(counts)

    def make_trainer(cohort: FixedCohort) -> L.Trainer:
        return trainer_for(make_loop({}, sampler=cohort), tmp_path, rounds=2, limit_val_batches=0)

    game = GameByFits(make_trainer, make_module(), client_data)
    client_data.val_dataloader = lambda: [*itertools.chain(*batches_by_client)]
    empty_and_full = torch.tensor([[False], [True]]).expand(2, n)
    singles = torch.eye(n).bool()
    trained = torch.cat([empty_and_full, singles])
    outputs = [game.outputs(members)[0] for members in members_of(trained)]
    _, y = game.outputs(())

    # The samples of a class that count: those of clients that tell their number.
    classes_by_client = [counted_classes(y[owner == client]) for client in range(n)]
    is_pooled = torch.zeros(len(y), dtype=torch.bool)
    for client in range(n):
        for label in pooled_classes(y[owner == client]):
            is_pooled |= (y == label) & (owner == client)
    counted_samples = []
    for label in range(CLASSES):
        is_counted = torch.zeros(len(y), dtype=torch.bool)
        for client in range(n):
            if label in classes_by_client[client]:
                is_counted |= (y == label) & (owner == client)
        if not is_counted.any():
            is_counted = is_pooled
        counted_samples.append(is_counted)

    def balanced(outputs: Tensor) -> Tensor:
        hits = (outputs.argmax(-1) == y).double()
        recalls = [hits[:, is_counted].mean(1) for is_counted in counted_samples]
        return torch.stack(recalls, 1).mean(1)

    stacked = torch.stack(outputs)
    expected = predicted_shapley(
        trained,
        balanced(stacked),
        stacked,
        client_data.num_samples,
        balanced,
        logits=True,
    ).values
    federated = make_loop({"shadow": ShadowShapley(evaluators="clients")})
    fit(federated, tmp_path / "evaluated_by_clients", make_module(), make_data(), rounds=2)
    values = federated.contributions["shadow"].double()

    assert_close(values, expected, rtol=0, atol=1e-6)


REFUSED = [
    ({}, {"client_val": 0.0}, r"metrics \['m'\] need validation samples at every client"),
    ({}, {"client_val": 0.02}, "no client holds out 5 samples|no client can score models"),
    (
        {"uploads": [GaussianPrivacy(1.0, 1.0)]},
        {},
        r"metrics \['m'\] need reports or responses of clients",
    ),
]


@pytest.mark.parametrize(("options", "splits", "message"), REFUSED)
def test_client_side_evaluation_is_refused_before_training_if_impossible(
    tmp_path, options, splits, message
):
    data = make_data(**splits)
    loop = make_loop({"m": PartialFederatedShapley(evaluators="clients")}, **options)

    with refused(message):
        fit(loop, tmp_path, make_module(), data)


def test_class_of_which_no_client_holds_out_samples_is_refused(tmp_path):
    x, y = toy_sets()[0].tensors
    is_kept = y != 2
    is_kept[:9] = True  # with three samples of class 2
    data = FederatedDataModule(
        (x[is_kept], y[is_kept]),
        SizePartitioner([1, 1]),
        splits=Splits(server_val=0.0, client_val=0.4),
        batch_size=8,
    )
    loop = make_loop({"m": PartialFederatedShapley(evaluators="clients")})

    with refused(r"no client can score models on the classes \['2'\]"):
        fit(loop, tmp_path, make_module(), data)


def test_value_round_refuses_metrics_with_client_side_evaluation():
    net = nn.Linear(2, 2)
    metric = PartialFederatedShapley(evaluators="clients")

    with refused('needs evaluators="clients", which only a FederatedLoop provides'):
        value_round(net, net.state_dict(), [net.state_dict()] * 2, metrics=metric)


def make_hospitals(samples_of_zurich: int = 80) -> FederatedDataModule:
    """Patients with two outcomes, and with one only at Zurich."""
    generator = make_generator()
    clients = {}
    sizes = {"Cleveland": 120, "Budapest": 90}
    sizes["Zurich"] = samples_of_zurich

    for name, size in sizes.items():
        x = torch.randn(size, FEATURES, generator=generator)
        y = torch.arange(size) % 2
        if name == "Zurich":
            y = torch.ones(size, dtype=torch.long)
        clients[name] = (x, y)

    return FederatedDataModule(
        clients=clients,
        splits=Splits(server_val=0.1, client_val=0.3),
        batch_size=16,
    )


class NeverTrained(Plain):
    def training_step(self, batch, batch_idx):
        raise AssertionError("a batch was trained on")


BY_CLIENTS = {
    "auroc": lambda: PartialFederatedShapley(performance="auroc", evaluators="clients"),
    "of torchmetrics": lambda: PartialFederatedShapley(
        performance=BinaryAUROC(), evaluators="clients"
    ),
    "of a client's model": lambda: ContributionEstimation(performance="average_precision"),
}


@pytest.mark.parametrize("kind", BY_CLIENTS)
def test_client_with_one_class_is_named_before_training_if_a_score_needs_two(kind, tmp_path):
    model = NeverTrained(nn.Linear(FEATURES, 2))
    message = r"client 2 \('Zurich'\): the \d+ labels .* of class 1, .* Hold out samples of"

    with refused(message):
        fit(
            make_loop({"m": BY_CLIENTS[kind]()}),
            tmp_path,
            model,
            make_hospitals(),
        )


def test_validation_masks_of_one_class_are_refused_before_training(tmp_path):
    data = Segmentation.data()
    image = torch.ones(1, 4, 4)
    empty_mask = torch.zeros(4, 4, dtype=torch.long)
    data.item = lambda index: (image, empty_mask)
    loop = make_loop({"shapley": PartialFederatedShapley(performance=BinaryAUROC())})

    num_labels = 11 * 4 * 4  # of the pixels of 11 validation images
    message = f"'shapley'.* the {num_labels} labels .* of class 0"
    with refused(message):
        fit(loop, tmp_path, make_untrainable(Segmentation), partition_in_three(data))


@pytest.mark.slow
def test_client_that_holds_out_too_few_samples_to_score_models_may_have_one_class(tmp_path):
    metric = PartialFederatedShapley(performance="auroc", evaluators="clients")
    model = Plain(nn.Linear(FEATURES, 2))
    data_module = make_hospitals(samples_of_zurich=6)
    data_module.setup("fit")
    held_out_at_zurich = data_module.client_labels(2, "val")

    assert len(held_out_at_zurich) < LEAST

    federated_loop = make_loop({"m": metric})
    fit(federated_loop, tmp_path, model, data_module)

    assert federated_loop.contributions["m"].isfinite().all()
