"""What a run says of the coalitions that it will train."""

from functools import partial

import pytest
import torch
from torch.utils.data import TensorDataset

from flsv import Reporting
from flsv.data import FederatedDataModule, Splits
from flsv.metrics import ShadowShapley
from helpers.coalitions_by_hand import make_shadow_loop, make_three_clients
from helpers.data import toy_sets
from helpers.fits import fit
from helpers.models import Plainest
from helpers.runs import read_output


def fit_small_module(loop, folder, data=None, rounds=1):
    fit(loop, folder, Plainest(), data or make_three_clients(), rounds)


COST_OF_SINGLES = "(as long as 1 more fit, and 3 validations). The predictions of the models"
# A run of one round is shorter than the set-up of a fit that trains them at once.
COST_OF_ALL = "models of 6 groups of clients are trained after the run (as long as 3 more fits, and 6 validations)."
COST_OF_TWO = "models of 2 groups of clients are trained after the run (as long as 1 more fit, and 2 validations)."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected_text"),
    [
        ({"max_fits": 1}, COST_OF_SINGLES),
        ({}, COST_OF_ALL),
        ({"coalitions": "all"}, COST_OF_ALL),
        ({"coalitions": [[0], [1, 2]]}, COST_OF_TWO),
        (
            {"coalitions": "singles", "performance": "val_acc", "mode": "max"},
            "choose a performance that is computed from outputs",
        ),
    ],
    ids=["singles", "by default", "all", "few", "logged"],
)
def test_plan_logs_the_cost_of_coalitions(options, expected_text, tmp_path, caplog):
    with caplog.at_level("INFO", "lightning.pytorch"):
        fit_small_module(make_shadow_loop(ShadowShapley(**options)), tmp_path)

    (message,) = [text for text in caplog.messages if "after the run (" in text]
    assert expected_text in message


def make_one_client_per_class(num_classes):
    """Clients of whom each has the samples of one class."""
    train, test = toy_sets()
    inputs, labels = train.tensors
    is_used = labels < num_classes
    used_samples = TensorDataset(inputs[is_used], labels[is_used])

    return FederatedDataModule(
        (used_samples, test),
        groups=labels[is_used].tolist(),
        batch_size=8,
        splits=Splits(server_val=0.2),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_data", "coalitions", "is_warned"),
    [
        (partial(make_one_client_per_class, 3), "singles", True),
        # Of two clients, each alone is also the coalition of all but one.
        (partial(make_one_client_per_class, 2), "singles", False),
        (partial(make_one_client_per_class, 3), "both", False),
        (make_three_clients, "singles", False),
    ],
    ids=["no common class", "two clients", "pairs are trained, too", "common classes"],
)
def test_summary_warns_if_single_clients_have_no_class_in_common(
    make_data, coalitions, is_warned, tmp_path, capsys
):
    reporting = Reporting(table=True, figures=0)
    loop = make_shadow_loop(ShadowShapley(coalitions=coalitions), reporting=reporting)

    fit_small_module(loop, tmp_path, make_data())

    text = read_output(capsys)
    assert "after the run (" in text
    assert ("no two clients have a class in common" in text) == is_warned


def fit_five_rounds(folder, **options):
    """Return the rounds after which a run of five rounds has values, and the last values."""
    metric = ShadowShapley(coalitions="singles", **options)
    loop = make_shadow_loop(metric)
    fit_small_module(loop, folder, rounds=5)
    rows = loop.history().query("metric == 'shadow'")
    return set(rows["round"]), loop.contributions["shadow"]


@pytest.mark.slow
def test_last_three_rounds_are_valued_by_default_with_the_same_last_values(tmp_path):
    valued_rounds, last_values = fit_five_rounds(tmp_path / "default")
    all_rounds, expected_last_values = fit_five_rounds(tmp_path / "every round", every=1)

    assert valued_rounds == {2, 3, 4}
    assert all_rounds == {0, 1, 2, 3, 4}
    assert torch.equal(last_values, expected_last_values)
