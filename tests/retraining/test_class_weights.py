"""Class weights of coalitions: those of their members, as in plain fits of these."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from flsv import ClassifierClient, FederatedLoop
from flsv.data import FederatedDataModule, Splits
from flsv.functional import exact_shapley
from flsv.metrics import ShadowShapley
from flsv.sampling import FixedCohort
from helpers.coalitions_by_hand import SEED, make_shadow_loop
from helpers.fits import fit

ROUNDS = 2
FEATURES = 4
CLASSES = 3
SHARES = {
    "a": (0.8, 0.1, 0.1),
    "b": (0.1, 0.8, 0.1),
    "c": (0.2, 0.0, 0.8),
}
ALL = [0, 1, 2]
SGD = partial(torch.optim.SGD, lr=0.3)


def make_skewed_client(shares, draw):
    probabilities = torch.tensor(shares)
    y = probabilities.multinomial(40, True, generator=draw)
    x = torch.randn(40, FEATURES, generator=draw)
    x[:, :CLASSES] += nn.functional.one_hot(y, CLASSES)
    return TensorDataset(x, y)


def make_skewed_data():
    draw = torch.Generator().manual_seed(3)
    clients = {}
    for name, shares in SHARES.items():
        clients[name] = make_skewed_client(shares, draw)

    return FederatedDataModule(
        clients=clients,
        batch_size=8,
        splits=Splits(server_val=0.3),
    )


def class_weights_of(members):
    data = make_skewed_data()
    data.setup("fit")
    labels = torch.cat([data.client_labels(member) for member in members])
    counts = labels.bincount(minlength=CLASSES)
    weights = counts.sum() / (CLASSES * counts)

    return torch.where(counts > 0, weights, 1.0).tolist()


def make_network():
    torch.manual_seed(1)
    return nn.Linear(FEATURES, CLASSES)


def make_weighted_client(class_weights="balanced"):
    return ClassifierClient(make_network(), optimizer=SGD, class_weights=class_weights)


def utility_by_hand(folder, performance, mask):
    members = mask.nonzero().flatten().tolist()
    data = make_skewed_data()
    module = make_weighted_client(class_weights_of(members or ALL))

    if members:
        loop = FederatedLoop(sampler=FixedCohort(members), seed=SEED)
        fit(loop, folder, module, data, ROUNDS)

    data.setup("fit")
    batches = list(data.val_dataloader())
    x, y = (torch.cat(parts) for parts in zip(*batches))
    weights = None
    if performance == "val_loss":
        weights = torch.tensor(class_weights_of(ALL))

    with torch.no_grad():
        loss = nn.functional.cross_entropy(module(x), y, weight=weights)
    return -float(loss)


def values_by_hand(folder, performance):
    utility_of = partial(utility_by_hand, folder, performance)

    def utility(masks):
        return torch.tensor([utility_of(mask) for mask in masks])

    estimate = exact_shapley(utility, len(SHARES))
    return estimate.values.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"performance": "negative_loss"}, {"performance": "val_loss", "mode": "min"}],
    ids=["of outputs", "logged"],
)
def test_coalitions_train_with_their_members_class_weights(tmp_path, options):
    loop = make_shadow_loop(ShadowShapley(coalitions="all", **options))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*clients train otherwise")
        fit(loop, tmp_path, make_weighted_client(), make_skewed_data(), ROUNDS)

    expected = values_by_hand(tmp_path, options["performance"])
    values = loop.contributions["shadow"].tolist()
    assert values == pytest.approx(expected, abs=1e-5)
