"""Participants: only requests read their data. And what is sent."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from flsv.core import Client, LocalData, Ranks
from flsv.core.artifacts import keep_table, write_tables
from flsv.core.ranks import ClientPlacement
from flsv.core.sharing import sharing
from flsv.data import ClosedSetLabelNoise
from flsv.federation import FederatedLoop
from flsv.metrics import ContributionMetric
from flsv.personalization import Personalizer
from flsv.valuation import clients_of
from helpers import refused
from helpers.data import toy_data
from helpers.fits import assert_resumes, fit


def count_samples(local):
    return int(local.class_counts.sum())


class SecondOfTwoRanks(Ranks):
    """What process 1 is told by process 0, in which everybody's response is 7."""

    rank = 1
    size = 2

    def broadcast(self, source, value, exchange_name):
        return 7 if source == 0 else value


def test_request_to_a_client_of_another_process_has_its_response():
    ranks = SecondOfTwoRanks()
    placement = ClientPlacement(ranks, costs=[1.0, 1.0])
    no_counts = torch.zeros(2)
    data = LocalData("client 0", lambda split: [], no_counts, no_counts)
    client = Client(0, data, owners=placement)

    assert not placement.has(0)
    response = client.request(count_samples)
    assert response == 7


class Asking(Personalizer):
    needs = ("clients",)

    def __init__(self, function):
        self.function = function
        self.responses = list[list[Any]]()

    def personalize(self, round, contributions, models):
        self.responses.append([client.request(self.function, round) for client in round.clients])
        return {}


def request_from_clients(function, folder, data=None, **kwargs):
    asking = Asking(function)
    loop = FederatedLoop(personalizer=asking, **kwargs)
    fit(loop, folder, data=data, rounds=1)
    return asking.responses[0], loop


def test_local_samples_in_a_request_are_the_clients_training_samples(tmp_path):
    data = toy_data(corruptions=[ClosedSetLabelNoise(clients=[1])])

    responses, _ = request_from_clients(lambda local, round: local.samples(), tmp_path, data)

    clean_inputs, clean_labels = data.source[0].tensors
    for client, (x, y) in enumerate(responses):
        indices = data.client_indices(client)
        expected_labels = clean_labels[indices]
        if client == 1:
            expected_labels = (expected_labels + 1) % 3  # the next class
        torch.testing.assert_close(x, clean_inputs[indices])
        assert torch.equal(y, expected_labels)


@pytest.mark.slow
def test_models_are_evaluated_on_each_clients_own_samples(tmp_path):
    def function(
        local,
        round,
    ):
        x, y = local.samples("test")
        expected = []
        for vector in round.client_vectors:
            is_right = local.module(vector)(x).argmax(-1) == y
            expected.append(is_right.double().mean())

        accuracy = local.evaluate(round.client_vectors, "test").value("accuracy")
        return accuracy, torch.stack(expected), len(y)

    responses, _ = request_from_clients(function, tmp_path)
    assert len({size for *_, size in responses}) == 3  # three sets, of different sizes
    for accuracy, expected, _ in responses:
        torch.testing.assert_close(accuracy, expected)


def test_reading_a_clients_data_outside_of_a_request_raises(tmp_path):
    leaked_data, _ = request_from_clients(lambda local, round: local, tmp_path)
    for read in (
        lambda local: local.samples(),
        lambda local: local.class_counts,
        lambda local: local.model,
        lambda local: local.evaluate(torch.zeros(1, 9)),
        lambda local: local.module(torch.zeros(9)),
    ):
        with pytest.raises(PermissionError, match="client 1 can be read only at the client"):
            read(leaked_data[1])


@pytest.mark.slow
def test_reading_a_clients_data_in_a_request_to_another_client_raises(tmp_path):
    leaked_data, _ = request_from_clients(lambda local, round: local, tmp_path)

    def read_client_0(local, round):
        leaked_data[0].samples()

    with pytest.raises(PermissionError, match="client 0"):
        request_from_clients(read_client_0, tmp_path)


def test_reading_a_clients_data_from_another_thread_raises(tmp_path):
    """Which is not in the request, though it runs in the meantime."""

    def read_in_a_thread(local, round):
        with ThreadPoolExecutor(1) as executor, pytest.raises(PermissionError):
            executor.submit(local.samples).result()

    request_from_clients(read_in_a_thread, tmp_path)


# ---- what a client keeps is its own


def count_requests(local):
    local.state["asked"] = local.state.get("asked", torch.tensor(0)) + 1
    return int(local.state["asked"])


class Asked(ContributionMetric):
    per_class = False

    def init_states(self, num_clients, num_classes):
        self.add_state("counts", torch.full((num_clients,), float("nan")), dist_reduce_fx="max")

    def update(self, client_ids, clients):
        self.counts[client_ids] = torch.tensor(
            [float(client.request(count_requests)) for client in clients]
        )

    def compute(self):
        return self.counts


@pytest.mark.slow
def test_counter_in_a_clients_memory_is_the_same_after_a_resume(tmp_path):
    def make_loop():
        return FederatedLoop(metrics={"asked": Asked()}, seed=0)

    loop = assert_resumes(make_loop, tmp_path)
    assert loop.contributions["asked"].tolist() == [4.0, 4.0, 4.0]


def test_memory_of_a_client_is_its_own():
    samples = (torch.zeros(2, 1), torch.tensor([0, 1]))
    client, other_client = clients_of([samples, samples])

    client.request(lambda local: local.memory.update(a=1))

    assert client.request(lambda local: dict(local.memory)) == {"a": 1}
    assert other_client.request(lambda local: dict(local.memory)) == {}


# ---- Tables for the client's own eyes


def make_table():
    return "sample,value"


def test_table_name_with_a_path_outside_the_clients_folder_is_refused(tmp_path):
    features = torch.zeros(2, 1)
    classes = torch.tensor([0, 1])
    (client,) = clients_of([(features, classes)])

    with refused("table .*: expected a plain"):
        client.request(keep_table, "a/b", make_table)

    def store_table(local):
        local.memory.update(tables={"../../x": make_table})

    client.request(store_table)
    folder = tmp_path / "run" / "clients" / "0"
    with refused("expected a plain name"):
        client.request(write_tables, folder)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not files


# ---- What travels, by words, patterns and functions; on modules whose names say nothing of what their layers are


def make_network():
    """0: linear, 1: BatchNorm, 2: GroupNorm, 3: linear, 4: linear."""
    return nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.Linear(4, 4), nn.Linear(4, 3)
    )


def names_of_layers(*layers):
    return {name for name in make_network().state_dict() if int(name[0]) in layers}


@pytest.mark.parametrize(
    ("share", "private"),
    [
        ("all", set()),
        ("trainable", set()),
        (["!norm"], names_of_layers(1, 2)),
        (["!head"], names_of_layers(4)),
        (["all", "!3.*", "!4.*"], names_of_layers(3, 4)),
        (["0.*", "norm"], names_of_layers(3, 4)),
        (["!?.*", "head", "!4.bias"], names_of_layers(0, 1, 2, 3) | {"4.bias"}),
        (
            lambda name, tensor: tensor.ndim == 2,
            names_of_layers(1, 2) | {"0.bias", "3.bias", "4.bias"},
        ),
    ],
)
def test_share_patterns_and_functions_choose_the_entries_that_stay_at_clients(share, private):
    assert sharing(["!head"], make_network(), head="3").kept == names_of_layers(3)
    assert sharing(share, make_network()) == (set(private), set())


def test_frozen_parameters_are_constant_unless_they_are_excluded_by_name():
    net = make_network()
    net[:2].requires_grad_(False)  # the linear layer, and BatchNorm but for its statistics
    frozen = {"0.weight", "0.bias", "1.weight", "1.bias"}

    # Statistics of a frozen BatchNorm change in training, too.
    trainable = sharing("trainable", net)
    assert trainable.kept == set()
    assert trainable.constant == frozen

    last_layers = sharing(["3.*", "4.*"], net)
    assert last_layers.kept == names_of_layers(1, 2) - frozen
    assert last_layers.constant == frozen

    without_head = sharing(["trainable", "!head"], net)
    assert without_head.kept == names_of_layers(4)
    assert without_head.constant == frozen

    without_first_layer = sharing(["trainable", "!0.*"], net)
    assert without_first_layer.kept == {"0.weight", "0.bias"}
    assert without_first_layer.constant == {"1.weight", "1.bias"}

    by_function = sharing(lambda name, _: name.startswith("4"), net)
    assert by_function.constant == frozen


def test_share_finds_normalization_layers_of_other_libraries():
    class TinyRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    class PreLayerNorm(nn.Module):  # a block, which has more in it
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.norm = nn.LayerNorm(3)

    net = nn.Sequential(
        TinyRMSNorm(),
        PreLayerNorm(),
        nn.SyncBatchNorm(3),
        nn.InstanceNorm1d(3, affine=True),
    )
    expected = {"0.weight", "1.norm.weight", "1.norm.bias", "3.weight", "3.bias"}
    expected |= {name for name in net.state_dict() if name.startswith("2.")}

    assert sharing(["!norm"], net).kept == expected


def test_share_treats_tied_weights_as_one_entry():
    net = make_network()
    net[4].weight = nn.Parameter(torch.zeros(4, 4))
    net[0].weight = net[4].weight
    assert sharing(["!head"], net).kept == {"0.weight", "4.bias"}


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (
            ["!bn.*"],
            "'!bn.*' matches no parameter or buffer of the module. It has '0.weight', '0.bias', '1.weight', ...",
        ),
        (["!*"], "excludes all parameters of the module"),
        (["*num_batches*"], "excludes all parameters of the module"),
    ],
)
def test_share_that_matches_no_entry_or_leaves_none_to_share_is_refused(share, message):
    with refused(re.escape(message)):
        sharing(share, make_network())
