"""What a run says of the coalitions that it will train."""

import pytest
import torch
from torch.utils.data import TensorDataset

from flsv import Reporting
from flsv.data import FederatedDataModule, Splits
from flsv.metrics import ShadowShapley
from flsv.retraining.coalition_plan import num_verified_rounds
from helpers.coalitions_by_hand import make_shadow_loop, make_three_clients
from helpers.data import toy_sets
from helpers.fits import fit
from helpers.models import Plain, network


@pytest.mark.slow
def test_cost_of_coalitions_is_said_before_the_first_round(tmp_path, caplog):
    logged = {"performance": "val_acc", "mode": "max"}
    messages = []
    for options in ({}, {"coalitions": "all"}, {"coalitions": [[0], [1, 2]]}, logged):
        caplog.clear()
        with caplog.at_level("INFO", "lightning.pytorch"):
            fit(
                make_shadow_loop(ShadowShapley(**options)),
                tmp_path,
                Plain(network(batch_norm=False)),
                make_three_clients(),
                rounds=1,
            )
        (line,) = (text for text in caplog.messages if "trained after the run (" in text)
        messages.append(line)

    assert "a model of each of 3 clients alone is trained" in messages[0]
    assert (
        "(as long as 1 more fit, and 3 validations). The predictions of the models" in messages[0]
    )
    assert "models of 6 groups of clients are trained" in messages[1]
    assert messages[1].endswith("(as long as 3 more fits, and 6 validations).")
    for message in messages[2:]:
        assert "choose a performance that is computed from outputs" in message


def make_clients_by_class():
    """Three clients, each with the samples of one class."""
    train, test = toy_sets()
    labels = train.tensors[1].tolist()
    return FederatedDataModule(
        (train, test),
        groups=labels,
        batch_size=8,
        splits=Splits(server_val=0.2),
    )


def make_two_clients_by_class():
    """Two clients, of whom each alone is all but one, too."""
    train, test = toy_sets()
    inputs, labels = train.tensors
    is_known = labels < 2
    pair = TensorDataset(inputs[is_known], labels[is_known])

    return FederatedDataModule(
        (pair, test),
        groups=labels[is_known].tolist(),
        batch_size=8,
        splits=Splits(server_val=0.2),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_data", "coalitions", "is_warned"),
    [
        (make_clients_by_class, "singles", True),
        (make_two_clients_by_class, "singles", False),
        (make_clients_by_class, "both", False),
        (make_three_clients, "singles", False),
    ],
)
def test_clients_without_a_common_class_are_told_after_the_run(
    make_data,
    coalitions,
    is_warned,
    tmp_path,
    capsys,
):
    loop = make_shadow_loop(ShadowShapley(coalitions=coalitions))
    loop = loop.replace(reporting=Reporting(table=True, figures=0))
    module = Plain(network(batch_norm=False))
    fit(loop, tmp_path, module, make_data(), rounds=1)

    text = " ".join(capsys.readouterr().out.split())
    assert "trained after the run" in text
    assert ("no two clients have a class in common" in text) == is_warned


@pytest.mark.parametrize(
    ("num_rounds", "num_verified"),
    [(1, 1), (19, 1), (20, 2), (-1, 2), (None, 2)],
)
def test_second_round_is_trained_again_where_two_are_at_most_a_tenth(num_rounds, num_verified):
    assert num_verified_rounds(num_rounds) == num_verified


def rounds_and_last_values(folder, **options):
    """The rounds after which a run of five rounds has values, and the values after the last one."""
    loop = make_shadow_loop(ShadowShapley(coalitions="singles", **options))
    fit(loop, folder, Plain(network(batch_norm=False)), make_three_clients(), rounds=5)
    history = loop.history()
    is_valued = history["metric"] == "shadow"
    return set(history[is_valued]["round"]), loop.contributions["shadow"]


@pytest.mark.slow
def test_large_validation_set_is_scored_after_the_last_three_rounds_with_the_same_last_values(
    tmp_path,
):
    rounds, values = rounds_and_last_values(tmp_path / "some")
    all_rounds, values_of_all = rounds_and_last_values(tmp_path / "all", every=1)

    assert rounds == {2, 3, 4}
    assert all_rounds == {0, 1, 2, 3, 4}
    assert torch.equal(values, values_of_all)
