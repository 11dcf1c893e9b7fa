"""Round: what is derived from the clients' vectors, in memory or in a file; what the server leaves as it is."""

import os
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from flsv import FederatedLoop
from flsv.aggregation import Aggregator, FedAdam
from flsv.attacks import Scaling
from flsv.core import VOCABULARY, Channel, FederationState, Round, matrix, stage_of
from flsv.core.parameter_space import ParameterSpace
from flsv.filters import MultiKrum, OutlierFilter
from flsv.metrics import ClassSpecificShapley, ContributionEstimation, CumulativeShapley
from flsv.server import ContributionMetrics
from flsv.server.round_server import RoundServer
from helpers.data import toy_data
from helpers.fits import fit, state_vector


def make_round(starts=False, module=None):
    module = module or nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    space = ParameterSpace(module)
    torch.manual_seed(1)
    return Round(
        round_index=0,
        client_ids=torch.tensor([0, 2]),
        num_samples=torch.tensor([10, 30]),
        global_vector=torch.randn(space.size),
        client_vectors=torch.randn(2, space.size),
        starts=list(torch.randn(2, space.size)) if starts else None,
        space=space,
    )


def test_unmeasured_client_is_a_sender_of_the_round_that_metrics_see():
    round = replace(make_round(), unmeasured=[2])

    measured = round.measured()

    assert measured.client_ids.tolist() == [0]
    assert measured.senders.tolist() == [0, 2]


@pytest.mark.parametrize("starts", [False, True])
def test_client_updates_and_heads_are_differences_from_the_clients_start(starts):
    round = make_round(starts)
    origin = torch.stack(list(round.matrix.starts)) if starts else round.global_vector
    differences = round.client_vectors - origin

    assert torch.equal(round.state_updates, differences)

    num_parameters = round.space.num_parameters
    assert num_parameters < round.space.size
    assert torch.equal(round.client_updates, differences[:, :num_parameters])

    expected = round.space.head.rows(round.client_updates)
    assert torch.equal(round.client_heads, expected)
    assert round.client_heads.shape == (2, 3, 7)
    torch.testing.assert_close(
        round.matrix.norms(),
        round.state_updates.double().norm(dim=1),
    )


def test_chances_are_those_of_the_cohorts_clients():
    round = make_round()
    with_chances = replace(round, drawing_probabilities=lambda: torch.tensor([0.5, 0.125, 0.25]))

    assert round.inclusion_probabilities.tolist() == [1, 1]
    assert with_chances.inclusion_probabilities.tolist() == [0.5, 0.25]


def test_combine_moves_parameters_by_the_weighted_updates_and_averages_buffers():
    """Whatever the weights sum to: running statistics are never extrapolated."""
    round = make_round()
    x = round.global_vector
    cut = round.space.num_parameters
    model_0, model_1 = round.client_vectors

    by_shares = round.combine(torch.tensor([0.25, 0.75]))
    by_larger_weights = round.combine(torch.tensor([0.5, 1.5]))
    by_zeros = round.combine(torch.zeros(2))

    torch.testing.assert_close(by_shares, 0.25 * model_0 + 0.75 * model_1)

    moved = x + 0.5 * (model_0 - x) + 1.5 * (model_1 - x)
    torch.testing.assert_close(by_larger_weights[:cut], moved[:cut])

    average = 0.25 * model_0 + 0.75 * model_1
    torch.testing.assert_close(by_larger_weights[cut:], average[cut:])
    torch.testing.assert_close(by_zeros, x)


def test_combine_takes_buffers_that_all_clients_changed_alike_unless_weights_are_zero():
    """Buffers that all have changed alike, such as BatchNorm's count of batches."""
    round = make_round()
    cut = round.space.num_parameters
    changed_buffers = round.global_vector[cut:] + 1
    round.client_vectors[:, cut:] = changed_buffers

    without_weights = round.combine(torch.zeros(2))
    with_weights = round.combine(torch.tensor([0.25, 0.25]))

    assert torch.equal(without_weights, round.global_vector)
    assert torch.equal(with_weights[cut:], changed_buffers)


def test_combine_keeps_parameters_that_no_client_changed_bitwise():
    """To the bit: weights that are frozen must not drift."""
    round = make_round()
    x = round.global_vector
    unchanged = slice(1, round.space.num_parameters - 1)
    round.client_vectors[:, unchanged] = x[unchanged]
    round.client_vectors[:, 0] = x[0] + 1
    weights = torch.tensor([0.3, 0.4])

    result = round.combine(weights)

    torch.testing.assert_close(result[0], x[0] + weights.sum())
    assert torch.equal(result[unchanged], x[unchanged])


def test_server_fields_exist_only_after_aggregation():
    round = make_round()
    heads = round.client_heads
    names = {name for name in VOCABULARY if stage_of([name]) == "aggregation"}

    assert names == {
        "server_vector",
        "server_update",
        "server_head",
        "server_head_weights",
        "aggregation_weights",
    }
    for name in sorted(names - {"server_vector", "aggregation_weights"}):
        with pytest.raises(RuntimeError, match="only after aggregation"):
            getattr(round, name)

    weights = torch.tensor([0.2, 0.8])

    aggregated = round.aggregated(round.combine(weights), weights)

    assert aggregated.client_heads is heads  # not computed twice
    torch.testing.assert_close(aggregated.server_head, 0.2 * heads[0] + 0.8 * heads[1])

    update = aggregated.server_update
    torch.testing.assert_close(update, aggregated.server_vector - round.global_vector)

    # With weights that sum to 1 and a common start, the head of the server's update is the average of the heads.
    head_of_update = round.space.head.rows(update)
    torch.testing.assert_close(aggregated.server_head, head_of_update, rtol=1e-4, atol=1e-5)


# ---- A cohort whose models lie in a file: the same numbers, no trace of the file, and a full disk said before it kills


pytestmark = pytest.mark.skipif(
    not hasattr(os, "posix_fallocate"), reason="files are mapped on Linux only"
)


def is_memory_mapped(rows):
    return rows.untyped_storage().filename is not None


class NotesWhereModelsAre(ClassSpecificShapley):
    """In each round, whether the cohort's models are in a file."""

    round_fields = {"client_vectors": lambda round: round.client_vectors}  # noqa: RUF012
    needs = ("client_vectors",)

    def update(self, client_ids, client_heads, server_head, client_vectors):
        former_rounds = getattr(self, "was_in_file", [])
        self.was_in_file = [*former_rounds, is_memory_mapped(client_vectors)]
        super().update(client_ids, client_heads, server_head)


class InspectedFit(NamedTuple):
    model: Tensor
    values: dict[str, Tensor]
    was_in_file: list[bool]  # by round, the models of the cohort


def fit_and_inspect(folder, **options):
    cssv = NotesWhereModelsAre()
    metrics = {
        "cssv": cssv,
        "sums": CumulativeShapley(),
        "fedce": ContributionEstimation(),
    }
    data = toy_data((1,) * 6, server_val=0.2, client_val=0.2)
    loop = FederatedLoop(metrics=metrics, seed=0, **options)
    module = fit(loop, folder, data=data, rounds=2)

    return InspectedFit(
        model=state_vector(module),
        values={name: metric.compute() for name, metric in metrics.items()},
        was_in_file=cssv.was_in_file,
    )


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        lambda: {"aggregator": FedAdam()},
        lambda: {
            "filters": [
                OutlierFilter(),
                MultiKrum(1, keep=3),
            ]
        },
        lambda: {
            "uploads": [Scaling(1e30, clients=[1])],
            "filters": [OutlierFilter(exclude=True)],
        },
    ],
    ids=["FedAdam", "some are left out", "one is far too large"],
)
@pytest.mark.filterwarnings("ignore")
def test_fit_with_cohort_models_in_a_file_equals_one_in_memory_bitwise(
    options, tmp_path, monkeypatch
):
    in_memory = fit_and_inspect(tmp_path / "memory", **options())
    assert in_memory.was_in_file == [False, False]

    monkeypatch.setattr(matrix, "MAX_SHARE_OF_MEMORY", 0)
    in_file = fit_and_inspect(tmp_path / "file", **options())

    assert in_file.was_in_file == [True, True]
    assert torch.equal(in_file.model, in_memory.model)
    torch.testing.assert_close(
        in_file.values,
        in_memory.values,
        rtol=0,
        atol=0,
        equal_nan=True,
    )
    assert not list(tmp_path.rglob(".flsv-cohort*"))


def test_memory_bytes_is_at_most_the_limit_of_the_control_group(tmp_path, monkeypatch):
    machine = matrix.memory_bytes()
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(matrix, "CONTAINER_LIMIT_FILE", limit)
    limit.write_text("max\n")

    assert matrix.memory_bytes() >= machine

    limit.write_text("4096\n")
    assert matrix.memory_bytes() == 4096


# ---- The server's part of a round leaves what clients have sent as it is


class TakesTheFirstModel(Aggregator):
    """Its aggregate is the row of client 0 itself, no copy of it."""

    def weights(self, round, contributions):
        return torch.tensor([1.0, 0.0])

    def aggregate(self, round, contributions):
        return round.client_vectors[0], self.weights(round, contributions)


def test_aggregate_that_aliases_a_clients_model_leaves_that_model_unchanged():
    """Part of the way to it, with buffers all the way, and metrics and clients still see what was sent."""
    space = ParameterSpace(nn.BatchNorm1d(1))
    models = torch.arange(2.0 * space.size).view(2, space.size)
    sent = models.clone()
    x = torch.full((space.size,), 10.0)
    strategies = {"aggregator": TakesTheFirstModel(server_lr=0.5)}
    server = RoundServer(ContributionMetrics({}), strategies, space, Channel())
    round = Round(
        round_index=0,
        client_ids=torch.arange(2),
        num_samples=torch.tensor([1, 1]),
        global_vector=x,
        client_vectors=models,
        space=space,
    )

    finished_round = server.finish(round, FederationState(2, global_vector=x))

    # Buffers follow the parameters.
    num_parameters = space.num_parameters
    assert 0 < num_parameters < space.size
    server_vector = finished_round.server_vector
    halfway = (sent[0, :num_parameters] + 10) / 2
    torch.testing.assert_close(server_vector[:num_parameters], halfway)
    assert torch.equal(server_vector[num_parameters:], sent[0, num_parameters:])
    assert torch.equal(finished_round.client_vectors, sent)
    assert x.eq(10).all()
