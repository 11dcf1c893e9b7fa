"""The scenarios of papers deal out what the papers say."""

import os
from pathlib import Path

import pytest
import torch

from flsv.data import LongTail, ShardPartitioner
from helpers.data import CONFIGS, SCENARIOS, count_by_client_and_class

ROOT = os.environ.get("FLSV_DATA_ROOT", "")
CHEST_X_RAYS = Path(ROOT, "pneumoniamnist.npz")


@pytest.mark.slow
def test_shapfed_imbalanced_gives_one_client_70_percent(deal):
    counts = count_by_client_and_class(deal("shapfed_imbalanced"))
    assert ((counts - torch.tensor([[0.7], [0.1], [0.1], [0.1]]) * counts.sum(0)).abs() < 1).all()


@pytest.mark.slow
def test_shapfed_heterogeneous_gives_class_0_to_one_client(deal):
    counts = count_by_client_and_class(deal("shapfed_heterogeneous"))
    total = counts.sum(0)
    assert counts[:, 0].tolist() == [int(total[0]), 0, 0, 0]
    assert ((counts[:, 1:] - 0.25 * total[1:]).abs() < 1).all()
    assert total.min() > 100


@pytest.mark.slow
@pytest.mark.skipif(not CHEST_X_RAYS.exists(), reason="FLSV_DATA_ROOT has no pneumoniamnist.npz")
def test_shapfed_chest_xray_has_the_papers_class_shares(deal):
    scenario = "shapfed_chest_xray"
    options = ["--data.files.root", ROOT]
    shares_of_clients_by_class = torch.tensor(
        [
            [0.4, 0.0],
            [0.3, 0.1],
            [0.2, 0.2],
            [0.1, 0.3],
            [0.0, 0.4],
        ]
    )
    # The file has validation images of its own, so all of its training images are dealt out.
    class_sizes = torch.tensor([1214, 3494])

    counts = deal(scenario, base="fashion_mnist", arguments=options).class_counts

    differences = counts - shares_of_clients_by_class * class_sizes
    assert (differences.abs() < 1).all()

    # With shares of a client instead of a class, all clients have equal sizes.
    options += ["--data.partitioner.init_args.of", "client"]
    equal_counts = deal(scenario, base="fashion_mnist", arguments=options).class_counts

    sizes = equal_counts.sum(1)
    scarcer_class_size = class_sizes[0]  # limits both
    differences = equal_counts - shares_of_clients_by_class * scarcer_class_size
    assert sizes.max() - sizes.min() <= 1
    assert (differences.abs() <= 1).all()


@pytest.mark.slow
def test_shapleyfl_shards_gives_100_clients_two_shards_each(load):
    _, data, loop = load(CONFIGS / "digits.yaml", SCENARIOS / "shapleyfl_shards.yaml")
    data.setup("fit")

    assert loop.sampler.cohort_size == 10

    counts = count_by_client_and_class(data)
    assert len(counts) == 100
    assert counts.sum(1).max() - counts.sum(1).min() <= 2
    assert (counts > 0).sum(1).max() <= 4  # two shards, each with one border of classes at most
    training_samples_of_digits = 1437
    assert counts.sum() == training_samples_of_digits - len(data.server_val_indices)


@pytest.mark.slow
def test_shapleyfl_long_tail_class_sizes_fall_by_a_factor_of_100(deal):
    data = deal("shapleyfl_long_tail")

    assert isinstance(data.partitioner, LongTail)
    assert isinstance(data.partitioner.partitioner, ShardPartitioner)
    assert data.num_clients == 100

    sizes = count_by_client_and_class(data).sum(0)
    exponents = torch.arange(10) / 9
    expected = sizes[0] * (1 / 100) ** exponents
    deviations = (sizes - expected).abs()
    assert deviations.max() <= 0.5


@pytest.mark.slow
def test_shapleyfl_open_set_makes_half_of_five_clients_samples_irrelevant(deal):
    data = deal("shapleyfl_open_set")

    is_corrupted = torch.cat([data.corrupted_samples(client) for client in range(5)])
    validation_labels = torch.cat([y for _, y in data.val_dataloader()])
    test_labels = torch.cat([y for _, y in data.test_dataloader()])
    assert is_corrupted.float().mean().item() == pytest.approx(0.5, abs=0.03)
    even_classes = [0, 2, 4, 6, 8]
    assert data.class_counts[:, even_classes].sum() == 0
    assert (validation_labels % 2 == 1).all()
    assert (test_labels % 2 == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["shapleyfl_closed_set", "shapleyfl_data_noise"])
def test_shapleyfl_scenarios_corrupt_all_samples_of_two_of_five_clients(deal, scenario):
    data = deal(scenario, arguments=["--data.splits.client_test", "0"])
    assert len(data.malicious) == 2  # 30 % of 5, rounded
    assert data.malicious == deal("shapleyfl_closed_set").malicious

    true_counts = count_by_client_and_class(data)
    for client in range(5):
        is_malicious = client in data.malicious
        assert data.corrupted_samples(client).all() == is_malicious
        expected_counts = true_counts[client]
        if is_malicious and scenario == "shapleyfl_closed_set":
            expected_counts = expected_counts.roll(1)  # each label becomes the next class
        assert torch.equal(data.class_counts[client], expected_counts)


@pytest.mark.slow
def test_pfedsv_pathological_gives_each_client_two_classes(deal):
    data = deal("pfedsv_pathological")
    assert ((count_by_client_and_class(data) > 0).sum(1) == 2).all()
    for split in ("val", "test"):
        sizes = torch.tensor([len(data.client_indices(client, split)) for client in range(10)])
        assert (sizes / count_by_client_and_class(data).sum(1) - 0.2).abs().max() < 0.02


@pytest.mark.slow
def test_fedbary_scenarios_have_the_papers_sizes(deal):
    assert are_equally_sized(deal("fedbary_same"))
    assert are_equally_sized(deal("fedbary_sizes"), (10, 15, 20, 25, 30))


@pytest.mark.slow
def test_fedbary_classes_give_each_client_four_fifths_of_two_classes(deal):
    counts = count_by_client_and_class(deal("fedbary_classes")).double()

    sizes = counts.sum(1)
    shares = counts / sizes[:, None]
    for client in range(5):
        own_classes = shares[client, 2 * client : 2 * client + 2]
        assert own_classes.sum().item() == pytest.approx(0.8, abs=0.01)
        assert shares[client].min().item() == pytest.approx(0.2 / 8, abs=0.006)
    assert sizes.max() - sizes.min() <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "expected_shares"),
    [
        pytest.param("fedbary_label_noise", [0.0, 0.05, 0.1, 0.15, 0.2], id="labels"),
        pytest.param("fedbary_feature_noise", [0.0, 1.0, 1.0, 1.0, 1.0], id="features"),
    ],
)
def test_fedbary_scenarios_have_noise_on_the_papers_share_of_samples(
    deal, scenario, expected_shares
):
    data = deal(scenario)

    shares = []
    for client in range(5):
        shares.append(data.corrupted_samples(client).float().mean())
    assert are_equally_sized(data)
    assert data.malicious == [1, 2, 3, 4]
    torch.testing.assert_close(
        torch.stack(shares), torch.tensor(expected_shares), atol=0.004, rtol=0
    )


def are_equally_sized(data, sizes=(1, 1, 1, 1, 1)):
    """Return whether the clients' totals are as ``sizes`` and every client has the same number of every class."""
    counts = count_by_client_and_class(data).double()
    part = counts.sum() / sum(sizes) * torch.tensor(sizes) / 10
    return bool(((counts - part[:, None]).abs() <= 1).all()) and counts.sum() > 1000


@pytest.mark.slow
def test_guo_same_has_equal_distributions_for_equal_and_unequal_sizes(deal):
    assert are_equally_sized(deal("guo_same"))
    assert are_equally_sized(deal("guo_sizes"), (2, 3, 4, 5, 6))


@pytest.mark.slow
def test_guo_biased_gives_four_clients_two_classes_and_one_client_all(deal):
    counts = count_by_client_and_class(deal("guo_biased"))
    present = [(row > 0).nonzero().flatten().tolist() for row in counts]
    assert present == [[1, 2], [3, 4], [5, 6], [0, 7], list(range(10))]
    assert counts.sum(1).max() - counts.sum(1).min() <= 2
    assert counts[4].max() - counts[4].min() <= 1


@pytest.mark.slow
def test_fedbary_no_validation_has_one_bad_client_and_no_server_samples(deal):
    data = deal("fedbary_no_validation")

    assert are_equally_sized(data)
    assert data.malicious == [4]
    assert data.val_dataloader() == []


@pytest.mark.slow
def test_baseline_configurations_have_their_papers_hyper_parameters(load):
    """What the references have: S-FedAvg's first relevance and temperature, FedSV's half, CGSV's first reputations."""
    digits = CONFIGS / "digits.yaml"
    _, _, s_fedavg = load(digits, CONFIGS / "s_fedavg.yaml")
    _, _, fedsv = load(digits, CONFIGS / "fedsv.yaml")
    _, _, cgsv = load(digits, CONFIGS / "cgsv.yaml")

    relevance = s_fedavg.metrics["relevance"]
    assert relevance.momentum == 0.75
    assert relevance.init == "uniform"
    assert s_fedavg.sampler.temperature == 1

    assert fedsv.aggregator.metric == "sv"
    assert fedsv.aggregator.step == 0.5
    assert fedsv.aggregator.temperature == 1.0
    assert fedsv.metrics["sv"].momentum == 0

    assert cgsv.metrics["cgsv"].init == "zero"
