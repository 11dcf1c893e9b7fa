"""Clients score coalitions: the same game by hand, what is reported, and what is refused."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from games.all_coalitions import partition_in_three
from torch import nn
from torch.testing import assert_close
from torchmetrics.classification import BinaryAUROC

from flsv import FederatedLoop, value_round
from flsv.aggregation import FedAvg
from flsv.core import Client, LocalData, RespondingClient
from flsv.core.responses import expected_response
from flsv.data import FederatedDataModule, SizePartitioner, Splits
from flsv.functional import few_coalitions, predicted_shapley
from flsv.functional.shapley.predicted_outputs import OutputMeasure
from flsv.games import client_evaluation
from flsv.games.client_evaluation import MIN_HELD_OUT, hits_by_class, score_coalitions, score_models
from flsv.games.members import members_of
from flsv.metrics import (
    CoalitionValue,
    ContributionEstimation,
    PartialFederatedShapley,
    ShadowShapley,
)
from flsv.privacy import GaussianPrivacy
from flsv.sampling import FixedCohort
from helpers import refused
from helpers.data import CLASSES, FEATURES, toy_sets
from helpers.fits import all_samples, fit, make_untrainable
from helpers.models import Plain, network
from zoo.tasks import HELD_OUT, Segmentation

NUM_CLIENTS = 3


def make_data(client_val=0.4):
    """Three equally large clients, each of which by default holds out five samples and more of each class."""
    data = FederatedDataModule(
        toy_sets(samples=200),
        SizePartitioner([1] * NUM_CLIENTS),
        splits=Splits(server_val=0.0, client_val=client_val),
        batch_size=8,
    )
    data.setup("fit")
    return data


def make_module(kind=Plain):
    return kind(network(batch_norm=False))


def make_loop(metrics, **options):
    return FederatedLoop(metrics=metrics, seed=3, **options)


def held_out_samples(data):
    """Inputs and labels of the samples that clients hold out."""
    batches = []
    for client in range(NUM_CLIENTS):
        batches += data.client_loader(client, "val", shuffle=False)
    return all_samples(batches)


class BalancedAccuracy:
    """The mean over classes of the recalls of models' outputs ``[K, V, M]`` on clients' held-out samples ``[V]``."""

    def __init__(self, data):
        self.inputs, self.labels = held_out_samples(data)

    def __call__(self, outputs):
        is_right = (outputs.argmax(-1) == self.labels).double()
        recalls = [is_right[:, self.labels == label].mean(1) for label in range(CLASSES)]
        return torch.stack(recalls).mean(0)

    def of_model(self, model):
        outputs = model(self.inputs)
        return float(self(outputs[None]))


@pytest.fixture(scope="module")
def federation_with_client_scores(tmp_path_factory):
    """A round in which clients score the coalitions of three metrics, and its model. A request holds one model."""
    metrics = {
        "sv": PartialFederatedShapley(evaluators="clients"),
        "shadow": ShadowShapley(coalitions="all", evaluators="clients"),
        "class": CoalitionValue(per_class=True, evaluators="clients"),
    }
    loop = make_loop(metrics)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_evaluation, "MAX_BYTES_OF_MODELS", 1)
        folder = tmp_path_factory.mktemp("client_scores")
        model = fit(loop, folder, make_module(), make_data(), rounds=1)
    return loop, model


@pytest.mark.slow
def test_values_by_client_scores_sum_to_the_gain_on_held_out_samples(federation_with_client_scores):
    loop, model = federation_with_client_scores
    balanced_accuracy = BalancedAccuracy(make_data())

    accuracy = balanced_accuracy.of_model(model)
    untrained_accuracy = balanced_accuracy.of_model(make_module())

    sum_of_values = float(loop.contributions["shadow"].sum())
    assert sum_of_values == pytest.approx(accuracy - untrained_accuracy, abs=1e-6)
    logged_accuracy = float(model.trainer.callback_metrics["shadow/client_scores"])
    assert logged_accuracy == pytest.approx(accuracy, abs=1e-6)


@pytest.mark.slow
def test_metrics_of_one_federation_share_the_scores_of_clients(federation_with_client_scores):
    loop, _ = federation_with_client_scores

    coalition_values = loop.contributions["class"]
    shapley_values = loop.contributions["sv"]
    assert loop.values["class"].by_class.shape == (NUM_CLIENTS, CLASSES)
    assert_close(coalition_values, shapley_values, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_scores_of_clients_are_requested_and_reported_as_such(federation_with_client_scores):
    loop, _ = federation_with_client_scores

    messages = loop.channel.names()
    assert ("down", "score_models") in messages
    assert ("up", "score_models") in messages
    assert loop.metrics["shadow"].guide()["unit"] == "gain in clients' balanced accuracy"


def train_alone(members, folder):
    """Return the model of a fit of these clients, or an untrained one for nobody."""
    model = make_module()
    if members:
        loop = make_loop({}, sampler=FixedCohort(members))
        fit(loop, folder, model, make_data(), rounds=1, limit_val_batches=0)
    return model


@pytest.mark.slow
def test_values_predicted_from_client_scores_equal_those_by_hand(tmp_path):
    data = make_data()
    balanced_accuracy = BalancedAccuracy(data)
    masks = few_coalitions(NUM_CLIENTS, "singles")
    models = [train_alone(members, tmp_path) for members in members_of(masks)]
    with torch.no_grad():
        outputs = torch.stack([model(balanced_accuracy.inputs).double() for model in models])
    expected = predicted_shapley(
        masks,
        balanced_accuracy(outputs),
        outputs,
        weights=data.num_samples,
        score=balanced_accuracy,
        logits=True,
    )

    loop = make_loop({"shadow": ShadowShapley(evaluators="clients")})
    fit(loop, tmp_path / "evaluated_by_clients", make_module(), make_data(), rounds=1)

    values = loop.contributions["shadow"].double()
    assert_close(values, expected.values, rtol=0, atol=1e-6)


class LogsLossAndSumsIt(Plain):
    """Logs the validation loss. The sum of its training losses keeps coalitions from being trained as one batch."""

    sum_of_losses = 0.0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.sum_of_losses += float(loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y))


@pytest.mark.slow
def test_values_by_logged_loss_of_clients_sum_to_the_gain_on_held_out_samples(tmp_path):
    metrics = {
        "loss": PartialFederatedShapley(performance="val_loss", mode="min", evaluators="clients"),
        "roc": PartialFederatedShapley(performance="auroc", evaluators="clients"),
    }
    loop = make_loop(metrics, aggregator=FedAvg("uniform"))
    data = make_data()

    model = fit(loop, tmp_path, make_module(LogsLossAndSumsIt), data, rounds=1)

    inputs, labels = held_out_samples(data)
    untrained_loss = nn.functional.cross_entropy(make_module()(inputs), labels)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    gain = float(untrained_loss - loss)
    # Clients respond in three digits.
    assert float(loop.contributions["loss"].sum()) == pytest.approx(gain, abs=5e-3)
    assert loop.contributions["roc"].isfinite().all()


class ScoresOfModelsThatAreHits:
    """The scores of models whose vectors are themselves their numbers of hits by class."""

    def __init__(self, support, models, keep=False):
        self.support = support
        self.values = {"correct": models.long()}


@pytest.mark.parametrize(
    ("num_held_out", "expected_columns"),
    [
        pytest.param([7, 3, 2], [7, 0, 0, 3 + 2], id="two rare classes with five samples together"),
        pytest.param([7, 3, 6], [7, 0, 0, 0], id="a rare class, with which the next one is hidden"),
        pytest.param([7, 6, 3], [0, 6, 0, 0], id="a rare class, after which the first one is next"),
    ],
)
def test_client_that_scores_models_counts_classes_of_five_samples(num_held_out, expected_columns):
    """Columns: each of three classes, and the rare ones, with fewer than five samples each, together."""
    num_samples = sum(num_held_out)
    held_out_batch = (torch.zeros(num_samples, 1), torch.zeros(num_samples))
    class_counts = torch.tensor(num_held_out)
    local_data = LocalData(
        name="client",
        batches=lambda split: [held_out_batch],
        class_counts=class_counts,
        federation_class_counts=class_counts,
        evaluator=lambda batches: partial(ScoresOfModelsThatAreHits, class_counts),
    )
    model_with_all_hits = class_counts.float()
    model_without_hits = torch.zeros(3)
    models = torch.stack([model_with_all_hits, model_without_hits])

    response = Client(0, local_data).request(score_models, models)

    support, hits_of_first_model, hits_of_second_model = response.tolist()
    assert support == hits_of_first_model == expected_columns
    assert hits_of_second_model == [0, 0, 0, 0]


class LocalDataWithAllHits:
    """In the place of a client's data, of which all models classify all samples correctly."""

    def __init__(self, class_counts, num_models):
        hits = class_counts.double().repeat(num_models, 1)
        outputs = torch.zeros(num_models, int(class_counts.sum()), len(class_counts))
        self.scores = SimpleNamespace(
            support=class_counts, values={"correct": hits}, outputs=outputs
        )

    def evaluate(self, models, keep):
        return self.scores

    def output_measure(self, name):
        return OutputMeasure(lambda outputs: self.scores.values[name], logits=True)


def test_client_that_scores_coalitions_hides_a_rare_class_and_the_next_one():
    masks = few_coalitions(2, "all")
    local_data = LocalDataWithAllHits(torch.tensor([7, 3, 9]), num_models=len(masks))

    responses = score_coalitions(
        local_data, models=torch.zeros(len(masks), 1), trained=masks, weights=torch.ones(2)
    )

    # Columns: each of the three classes, and the rare ones together.
    expected_row = torch.tensor([7, 0, 0, 0])
    assert (responses == expected_row).all()


def test_client_that_claims_more_than_it_trains_on_counts_for_what_it_trains_on():
    # Columns: each of the three classes, and the rare ones together, here classes 1 and 2.
    support = [7, 0, 0, 5]
    hits = [0, 0, 0, 2]
    honest_response = torch.tensor([support, hits])
    claim_of_100_samples = [100, 0, 0, 0]
    exaggerated_response = torch.tensor([claim_of_100_samples, claim_of_100_samples])
    num_trained_on = torch.tensor([20, 10])

    hits_of_all, support_of_all = hits_by_class(
        [honest_response, exaggerated_response], num_trained_on
    )

    (recalls,) = (hits_of_all / support_of_all).tolist()
    # The claim counts as 10 hits of 10 samples, beside none of the honest client's 7.
    recall_of_class_0 = (0 + 10) / (7 + 10)
    rare_recall = 2 / 5
    assert recalls == pytest.approx([recall_of_class_0, rare_recall, rare_recall])


#: Row 0: how many samples of class 0, of class 1 and of all rare classes a client holds out. Below it, how many of
#: them each of two models gets right.
SUPPORT = torch.tensor([[6, 5, 0]])
HITS = torch.tensor([[6, 2, 0], [0, 5, 0]])
RESPONSE = torch.cat([SUPPORT, HITS])
IMPOSSIBLE_RESPONSES = {
    "negative": torch.cat([SUPPORT, -1 - HITS]),
    "more hits than samples": torch.cat([SUPPORT, HITS + 1]),
    "more samples than it holds out": 10 * RESPONSE,
}
TWO_MODELS = torch.zeros(2, 3)
impossible_response = partial(
    pytest.raises, ValueError, match="expected numbers from 0|consistent with each other"
)


def make_responding_client():
    num_held_out = int(SUPPORT.sum())
    return RespondingClient({"val": num_held_out}, num_classes=2, model=lambda: torch.zeros(3))


@pytest.mark.parametrize("response", IMPOSSIBLE_RESPONSES.values(), ids=list(IMPOSSIBLE_RESPONSES))
def test_impossible_scores_of_models_are_refused(response):
    describe_response = expected_response(score_models)
    permitted = describe_response(make_responding_client(), TWO_MODELS)

    permitted.check(RESPONSE)
    with impossible_response():
        permitted.check(response)


def test_impossible_scores_of_coalitions_are_refused():
    masks_of_two_coalitions = torch.tensor([[False], [True]])
    weights = torch.ones(1)
    describe_response = expected_response(score_coalitions)
    permitted = describe_response(
        make_responding_client(), TWO_MODELS, masks_of_two_coalitions, weights
    )

    permitted.check(torch.stack([RESPONSE, RESPONSE]))
    with impossible_response():
        permitted.check(torch.stack([RESPONSE, IMPOSSIBLE_RESPONSES["negative"]]))


@pytest.mark.parametrize(
    ("client_val", "uploads", "message"),
    [
        (0.0, [], r"metrics \['m'\] need validation samples at every client"),
        (0.02, [], "no client holds out 5 samples|no client can score models"),
        (0.4, [GaussianPrivacy(1.0, 1.0)], r"metrics \['m'\] need reports or responses of clients"),
    ],
)
def test_client_scores_are_refused_before_training_if_impossible(
    client_val, uploads, message, tmp_path
):
    loop = make_loop({"m": PartialFederatedShapley(evaluators="clients")}, uploads=uploads)

    with refused(message):
        fit(loop, tmp_path, make_module(), make_data(client_val))


@pytest.mark.slow
def test_class_of_which_no_client_holds_out_samples_is_refused(tmp_path):
    train_set, _ = toy_sets()
    x, y = train_set.tensors
    is_used = y != 2
    is_used[:9] = True  # with three samples of class 2
    data = FederatedDataModule(
        (x[is_used], y[is_used]),
        SizePartitioner([1, 1]),
        splits=Splits(server_val=0.0, client_val=0.4),
        batch_size=8,
    )
    loop = make_loop({"m": PartialFederatedShapley(evaluators="clients")})

    with refused(r"no client can score models on the classes \['2'\]"):
        fit(loop, tmp_path, make_module(), data)


def test_value_round_refuses_metrics_with_client_side_evaluation():
    net = nn.Linear(2, 2)
    model = net.state_dict()
    metric = PartialFederatedShapley(evaluators="clients")

    with refused('needs evaluators="clients", which only a FederatedLoop provides'):
        value_round(net, model, [model, model], metrics=metric)


def make_hospitals(samples_of_zurich=80):
    """Patients with two outcomes, and with one only at Zurich."""
    clients = {
        "Cleveland": make_patients(torch.arange(120) % 2),
        "Budapest": make_patients(torch.arange(90) % 2),
        "Zurich": make_patients(torch.ones(samples_of_zurich, dtype=torch.long)),
    }
    return FederatedDataModule(
        clients=clients, splits=Splits(server_val=0.1, client_val=0.3), batch_size=16
    )


def make_patients(outcomes):
    return torch.randn(len(outcomes), FEATURES), outcomes


class TwoClasses(Plain):
    def __init__(self):
        super().__init__(nn.Linear(FEATURES, 2))


def make_auroc_by_clients():
    return PartialFederatedShapley(performance="auroc", evaluators="clients")


@pytest.mark.parametrize(
    "metric",
    [
        make_auroc_by_clients(),
        PartialFederatedShapley(performance=BinaryAUROC(), evaluators="clients"),
        ContributionEstimation(performance="average_precision"),
    ],
    ids=["auroc", "metric of torchmetrics", "score of a client's model"],
)
def test_client_with_one_class_is_named_before_training_if_a_score_needs_two(metric, tmp_path):
    loop = make_loop({"m": metric})
    message = r"client 2 \('Zurich'\): the \d+ labels .* of class 1, .* Hold out samples of"

    with refused(message):
        fit(loop, tmp_path, make_untrainable(TwoClasses), make_hospitals())


def test_segmentation_masks_of_one_class_are_refused_before_training(tmp_path):
    data = Segmentation.data()
    image = torch.ones(1, 4, 4)
    empty_mask = torch.zeros(4, 4, dtype=torch.long)
    data.item = lambda index: (image, empty_mask)
    loop = make_loop({"shapley": PartialFederatedShapley(performance=BinaryAUROC())})

    num_labels = HELD_OUT * empty_mask.numel()  # of all pixels of the validation images
    with refused(f"'shapley'.* the {num_labels} labels .* of class 0"):
        fit(loop, tmp_path, make_untrainable(Segmentation), partition_in_three(data))


@pytest.mark.slow
def test_client_that_holds_out_too_few_samples_to_score_models_may_have_one_class(tmp_path):
    loop = make_loop({"m": make_auroc_by_clients()})
    hospitals = make_hospitals(samples_of_zurich=6)

    fit(loop, tmp_path, TwoClasses(), hospitals, rounds=1)

    assert len(hospitals.client_labels(2, "val")) < MIN_HELD_OUT
    assert loop.contributions["m"].isfinite().all()
