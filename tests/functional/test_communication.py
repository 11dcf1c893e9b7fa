"""Figures 8-10 of pFedSV by counting, against formulas and published parameter counts."""

import pytest
import torch
from torchvision.models import resnet34, vgg19

from flsv.errors import ConfigurationError
from flsv.functional import classifier_size, communication_parameters, download_schedule, label_overlap
from flsv.models import LeNet5


@pytest.mark.parametrize(
    ("network", "layers", "size", "classifier", "percent"),
    [
        (LeNet5, ["classifier"], 44_426, 41_854, 94.21),
        (resnet34, ["fc"], 21_797_672, 513_000, 2.35),
        (vgg19, ["classifier"], 143_667_240, 123_642_856, 86.06),
        (vgg19, ["classifier.6"], 143_667_240, 4_097_000, 2.85),
    ],
)
def test_sizes_are_the_published_ones(network, layers, size, classifier, percent):
    with torch.device("meta"):
        module = network()
    assert classifier_size(module, layers) == (size, classifier)
    assert 100 * classifier / size == pytest.approx(percent, abs=0.005)


def test_layer_names_are_whole_names():
    network = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(11)])
    assert classifier_size(network, ["1"]) == (66, 6)
    assert classifier_size(network, ["1", "10"]) == (66, 12)
    for layers in (["11"], ["1", "11"], []):
        with pytest.raises(ConfigurationError, match="classifier layers"):
            classifier_size(network, layers)


def test_every_method_by_hand():
    downloads = torch.tensor([[5, 3], [2, 1]])
    expected = {
        "pfedsv": [[500, 500], [500, 500]],
        "pfedsv_d": [[500, 300], [200, 100]],
        "pfedsv_dc": [[70 + 150, 70 + 90], [70 + 60, 70 + 30]],
        "fedfomo": [[500, 500], [500, 500]],
        "fedamp": [[100, 100], [100, 100]],
        "fedavg": [[100, 100], [100, 100]],
    }
    for method, down in expected.items():
        up, received = communication_parameters(method, 100, 30, downloads)
        assert up.tolist() == [[100, 100], [100, 100]]
        assert received.tolist() == down
    assert communication_parameters("fedfomo", 100, 30, downloads, k=9)[1].tolist() == [[900] * 2] * 2


@pytest.mark.parametrize(
    "arguments", [("fedsgd", 100, 30), ("fedavg", 100, 101), ("fedavg", 100, -1), ("fedavg", 100, 30, -1)]
)
def test_wrong_arguments(arguments):
    method, size, classifier, *k = arguments
    with pytest.raises(ConfigurationError):
        communication_parameters(method, size, classifier, torch.ones(1, 1), *k)


def test_the_schedule_of_ten_clients_settles_on_the_relevant_ones():
    pairs = torch.zeros(10, 10)
    for client in range(10):
        pairs[client, [client, (client + 1) % 10]] = 50
    truth = label_overlap(pairs)
    downloads = download_schedule(truth, rounds=20, k=5, generator=torch.Generator().manual_seed(0))
    assert (downloads[0] == 5).all()
    assert (downloads[-1] == 2).all()
    assert (downloads.diff(dim=0) <= 0).all()


def test_figure_9_is_ordered_as_in_the_paper():
    """ResNet-34: D+C costs about as much as FedAvg, D more, FedFomo the most."""
    truth = torch.block_diag(*[torch.ones(2, 2)] * 5)
    downloads = download_schedule(truth, rounds=20, k=5, generator=torch.Generator().manual_seed(0))
    total = {
        method: sum(int(way.sum()) for way in communication_parameters(method, 21_797_672, 513_000, downloads, k=9))
        for method in ("pfedsv_d", "pfedsv_dc", "fedfomo", "fedamp", "fedavg")
    }
    assert total["fedamp"] == total["fedavg"] == 2 * 20 * 10 * 21_797_672
    assert total["fedavg"] < total["pfedsv_dc"] < 1.1 * total["fedavg"] < total["pfedsv_d"] < total["fedfomo"]
