"""What parts read of a round is declared, checked before the first round, and refused where it is not declared."""

from dataclasses import fields as dataclass_fields
from functools import cached_property
from inspect import isfunction

import pytest
import torch

from flsv import FederatedLoop, Round
from flsv.aggregation import FedAvg
from flsv.core import map_clients
from flsv.core.needs import reads_of, requirements_of
from flsv.core.vocabulary import VOCABULARY
from flsv.data import FederatedDataModule, IIDPartitioner, Splits
from flsv.filters import SampleCap
from flsv.metrics import CumulativeShapley, LeaveOneOut, WassersteinContribution
from flsv.metrics.base import ContributionMetric
from flsv.privacy import GaussianPrivacy
from flsv.sampling import UniformSampler
from flsv.scores.performance import classifier_measure, performance_of
from helpers import refused
from helpers.data import toy_sets
from helpers.fits import fit
from helpers.models import Plain, network

#: Methods by which the loop makes and reads rounds. Parts do without.
OF_THE_LOOP = {"aggregated", "get", "measured", "personalized", "with_models"}


class PerClient(ContributionMetric):
    per_class = False

    def init_states(self, num_clients, num_classes):
        self.add_state("values", torch.zeros(num_clients), dist_reduce_fx="sum")

    def compute(self):
        return self.values


def values_of_each_alone(game, client_ids):
    coalitions = torch.eye(len(client_ids))
    return game(coalitions.bool()).float()


def accuracy_game(round):
    return round.game("accuracy")


def step_length(round):
    return round.server_update.norm()


class ByGame(PerClient):
    round_fields = {"game": accuracy_game}  # noqa: RUF012
    needs = ("game",)

    def update(self, client_ids, game):
        self.values[client_ids] += values_of_each_alone(game, client_ids)


class StepLength(PerClient):
    round_fields = {"step": step_length}  # noqa: RUF012
    needs = ("server_update",)

    def update(self, client_ids, step):
        self.values[client_ids] += step


class UndeclaredGame(ByGame):
    needs = ()


class WithoutNeeds(ByGame):
    needs = None


class ByLoss(ByGame):
    round_fields = {"game": lambda round: round.game("negative_loss")}  # noqa: RUF012
    measure = "negative_loss"


class MeasuredBy(ByGame):
    measured_by = "negative_loss"


class WithPerformance(FedAvg):
    needs = ("game",)

    def __init__(self):
        super().__init__()
        self.performance = performance_of(self, "val_loss", "min")


class ByValidationLoss(FedAvg):
    """Aggregator that weighs clients by their models' accuracy on the server's validation set."""

    needs = ("game",)

    def weights(self, round, contributions):
        accuracies = values_of_each_alone(round.game("accuracy"), round.client_ids)
        return torch.softmax(accuracies, 0)


class Undeclared(ByValidationLoss):
    needs = ()


class AskingAggregator(FedAvg):
    needs = ("clients",)

    def weights(self, round, contributions):
        for client in round.clients:
            client.request(num_classes)
        return super().weights(round, contributions)


class AskingBeforeFilters(FedAvg):
    def before_filters(self, updates, clients):
        map_clients(clients, lambda client: client.request(num_classes))


class AskingSampler(UniformSampler):
    def choose(self, clients, model, contributions, generator, round_index=0):
        clients[0].request(num_classes)
        return self.sample(len(clients), contributions, generator, round_index)


class NeedsPlay(SampleCap):
    needs = ("game",)


def num_classes(local):
    return len(local.class_counts)


def fit_loop(folder, validation=0.2, rounds=1, **options):
    loop = FederatedLoop(seed=0, **options)
    training_set, _ = toy_sets()
    splits = Splits(server_val=validation)
    data = FederatedDataModule(training_set, IIDPartitioner(3), batch_size=8, splits=splits)
    fit(loop, folder, Plain(network(batch_norm=False)), data, rounds=rounds)

    return loop


# ---- the vocabulary


def test_the_vocabulary_has_a_row_for_each_attribute_of_a_round():
    attributes = {field.name for field in dataclass_fields(Round)}
    for name, value in vars(Round).items():
        is_property = isinstance(value, cached_property | property)
        if is_property or isfunction(value):
            attributes.add(name)

    public = {name for name in attributes if name[0] != "_"}

    assert {*VOCABULARY} == public - OF_THE_LOOP


@pytest.mark.parametrize(
    ("part", "reads", "needs"),
    [
        (ByGame(), ("client_ids", "game"), ("validation", "updates")),
        (StepLength(), ("client_ids", "server_update"), ()),
        (ByValidationLoss(), ("game",), ("validation", "updates")),
        (AskingAggregator(), ("clients",), ("responses",)),
        (FedAvg(), (), ()),
    ],
)
def test_a_part_needs_what_its_arguments_functions_and_declaration_name(part, reads, needs):
    assert reads_of(part) == reads
    assert requirements_of(part) == needs


def test_an_argument_with_a_default_is_not_required():
    assert "validation" in requirements_of(WassersteinContribution())
    assert "validation" not in requirements_of(WassersteinContribution(), only_required=True)
    assert "validation" in requirements_of(CumulativeShapley(), only_required=True)


# ---- what works


def test_a_metric_whose_function_names_the_aggregate_is_updated_after_it(tmp_path):
    loop = fit_loop(tmp_path, metrics={"step": StepLength()})

    assert loop.contribution_metrics.stage_of("step") == "aggregation"
    assert (loop.contributions["step"] > 0).all()


@pytest.mark.slow
def test_an_aggregator_weighs_by_the_servers_validation_set(tmp_path):
    loop = fit_loop(tmp_path, aggregator=ByValidationLoss())

    measured = fit_loop(tmp_path / "again", metrics={"game": ByGame()})
    weights = torch.softmax(measured.contributions["game"], 0)
    torch.testing.assert_close(loop.state.weights, weights)


def test_a_metric_may_name_its_measure_by_a_classifiers_score(tmp_path):
    loop = fit_loop(tmp_path, metrics={"loss": ByLoss()})

    assert loop.contribution_metrics.performances == {"loss": classifier_measure("negative_loss")}
    assert (loop.contributions["loss"] < 0).all()


# ---- what is refused before the first round


@pytest.mark.parametrize(
    ("options", "attribute"),
    [
        ({"metrics": {"mine": MeasuredBy()}}, "measured_by"),
        ({"aggregator": WithPerformance()}, "performance"),
    ],
)
def test_a_part_with_its_measure_in_another_attribute_is_told_the_name(
    options, attribute, tmp_path
):
    with refused(f"measure in the attribute '{attribute}'.*Name the attribute 'measure'"):
        fit_loop(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": {"mine": ByGame()}}, r"is empty, but these need it: metrics \['mine'\]"),
        (
            {"aggregator": ByValidationLoss()},
            r"is empty, but these need it: aggregator ByValidationLoss\(\)",
        ),
        ({"filters": [NeedsPlay(10)]}, r"is empty, but these need it: filter NeedsPlay\(cap=10\)"),
    ],
)
def test_a_part_without_the_validation_set_that_it_needs_is_refused(options, message, tmp_path):
    with refused(message):
        fit_loop(tmp_path, validation=0.0, **options)


def test_an_aggregator_that_asks_private_clients_is_refused_when_the_loop_is_made():
    privacy = GaussianPrivacy(clip=1.0, noise_multiplier=1.0)

    with refused("aggregator=AskingAggregator.*only their noised updates"):
        FederatedLoop(aggregator=AskingAggregator(), uploads=[privacy])


def test_a_need_that_no_round_has_is_refused(tmp_path):
    class Misspelt(FedAvg):
        needs = ("plays",)

    with refused(r"\['plays'\], but a round has no such"):
        fit_loop(tmp_path, aggregator=Misspelt())


def test_a_metric_whose_functions_read_what_it_does_not_say_is_refused():
    with refused("metric 'mine': round_fields has functions"):
        FederatedLoop(metrics={"mine": WithoutNeeds()})


# ---- what is read without having been declared


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"metrics": {"mine": UndeclaredGame()}}, r"needs = \('game',\)"),
        ({"metrics": {"mine": UndeclaredGame(), "loo": LeaveOneOut()}}, r"needs = \('game',\)"),
        ({"aggregator": Undeclared(), "metrics": {"loo": LeaveOneOut()}}, r"\('game',\)"),
    ],
)
def test_an_undeclared_read_names_the_line_to_add(options, line, tmp_path):
    with pytest.raises(AttributeError, match=line):
        fit_loop(tmp_path, **options)


@pytest.mark.parametrize("part", [AskingBeforeFilters(), AskingSampler(2)])
def test_private_clients_do_not_answer_a_part_that_has_not_declared_that_it_asks(part, tmp_path):
    role = "sampler" if isinstance(part, UniformSampler) else "aggregator"
    privacy = GaussianPrivacy(clip=1.0, noise_multiplier=1.0)

    with refused("only its noised update"):
        fit_loop(tmp_path, uploads=[privacy], **{role: part})


def test_an_aggregator_is_told_that_the_traffic_is_known_later(tmp_path):
    class Early(FedAvg):
        def weights(self, round, contributions):
            return round.uploaded.float()

    with pytest.raises(AttributeError, match="Round.uploaded, known after exchange"):
        fit_loop(tmp_path, aggregator=Early())
