"""What a run says of the coalitions that it will train."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import TensorDataset

from flsv.data import FederatedDataModule, Splits
from flsv.functional import few_coalitions
from flsv.metrics import ShadowShapley
from flsv.retraining import plan_in_words as plan
from flsv.retraining.price import PriceList
from flsv.values.designs import BySize, Halves
from helpers.coalitions_by_hand import make_shadow_loop, make_three_clients
from helpers.data import toy_sets
from helpers.fits import fit
from helpers.models import Plainest

PREDICTED = " The predictions of the models of all other groups are computed from these models' predictions."
ESTIMATED = (
    " The scores of the models of all other groups are estimated from these models' scores. Computing the models' "
    "predictions is more accurate. For this, choose a performance that is computed from outputs, and "
    'coalitions="singles", "both" or "halves".'
)
SINGLE_CLIENTS = BySize("singles")
UNFAIR = [[1, 1, 1], [1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 0]]


def metric_with(evidence):
    return SimpleNamespace(latest_values=SimpleNamespace(evidence=evidence))


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        (
            SINGLE_CLIENTS.in_words(few_coalitions(4, "singles")),
            "a model of each of 4 clients alone is",
        ),
        (
            SINGLE_CLIENTS.in_words(few_coalitions(4, "both")),
            "models of 8 groups of clients are",
        ),
        (
            Halves().in_words(few_coalitions(4, "both")),
            "models of each of 4 clients alone and of 4 complementary groups of unlike clients are",
        ),
        (
            Halves().in_words(few_coalitions(4, "singles")),
            "a model of each of 4 clients alone is",
        ),
        (plan.estimation_in_words(few_coalitions(3, "all"), False), ""),
        (plan.estimation_in_words(few_coalitions(3, "singles"), True), PREDICTED),
        (plan.estimation_in_words(few_coalitions(3, "singles"), False), ESTIMATED),
        (plan.estimation_in_words(torch.tensor(UNFAIR).bool(), True), ESTIMATED),
        (plan.witnesses_in_words([]), ""),
        (
            plan.witnesses_in_words([(2,), (0,), (2,)]),
            " Clients 0 and 2 also trained in fits of their own, with the same models but for rounding.",
        ),
        (
            plan.rounding_in_words(
                {"v": metric_with({"rounding": [0.01, 0.0234]}), "w": metric_with(None)}
            ),
            [
                "v: training enlarges rounding errors. If the models of groups train in 64 bits, values differ by up "
                "to 0.023. On another machine, they may differ by about as much. The intervals include this."
            ],
        ),
    ],
)
def test_sentence_on_coalitions(sentence, expected):
    assert sentence == expected


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


SINGLES = {"coalitions": "singles"}
FEW = {"coalitions": [[0], [1], [0, 2]]}
LOGGED = {"performance": "val_acc", "mode": "max"}
COST_OF_SINGLES = "as long as 1 more fit, and 3 validations)."
OF_SINGLES = (
    f"shadow: a model of each of 3 clients alone is trained after the run ({COST_OF_SINGLES}"
)
NO_COMMON_CLASS = (
    "shadow: no two clients have a class in common, so a client that trains alone learns nothing about the others' "
    "classes. In experiments with such clients, shares had a mean error of 24 %, and of 16 % if all coalitions were "
    "trained. To train all coalitions of all clients but one, too, set coalitions: both."
)
OF_GROUPS = (
    "shadow: models of {} groups of clients are trained after the run (as long as {} validations)."
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_classes", "options", "plan_of_run", "estimation", "advice"),
    [
        (None, {"max_fits": 1}, OF_SINGLES, PREDICTED, []),
        # A run of one round is shorter than the set-up of a fit that trains them at once.
        (None, {}, OF_GROUPS.format(6, "3 more fits, and 6"), "", []),
        (None, FEW, OF_GROUPS.format(3, "1.33 more fits, and 3"), ESTIMATED, []),
        (None, {**SINGLES, **LOGGED}, OF_SINGLES, ESTIMATED, []),
        (3, SINGLES, OF_SINGLES, PREDICTED, [NO_COMMON_CLASS]),
        # Of two clients, each alone is also the coalition of all but one.
        (2, SINGLES, OF_SINGLES.replace("3", "2"), "", []),
        (3, {"coalitions": "both"}, OF_GROUPS.format(6, "3 more fits, and 6"), "", []),
    ],
    ids=["singles", "by default", "few", "logged", "no common class", "two clients", "pairs, too"],
)
def test_run_says_what_coalitions_it_trains(
    num_classes, options, plan_of_run, estimation, advice, tmp_path, caplog
):
    data = make_one_client_per_class(num_classes) if num_classes else make_three_clients()
    with caplog.at_level("INFO", "lightning.pytorch"):
        fit(make_shadow_loop(ShadowShapley(**options)), tmp_path, Plainest(), data, rounds=1)

    assert f"flsv: {plan_of_run}{estimation}" in caplog.messages
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["coalitions"] == [plan_of_run, *advice]


@pytest.mark.slow
def test_run_says_what_it_trains_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(PriceList, "at_once", lambda prices, masks: 1.234)
    loop = make_shadow_loop(ShadowShapley(coalitions="all"))
    fit(loop, tmp_path, Plainest(), make_three_clients(), rounds=1)

    record = json.loads((tmp_path / "run.json").read_text())
    plan_of_run, *about_witnesses = record["coalitions"][0].partition(" Client")
    assert plan_of_run == (
        "shadow: 6 groups of clients are trained at once after the run (as long as about 1.2 more fits)."
    )
    assert about_witnesses


def fit_five_rounds(folder, **options):
    """Return the rounds after which a run of five rounds has values, and the last values."""
    metric = ShadowShapley(coalitions="singles", **options)
    loop = make_shadow_loop(metric)
    fit(loop, folder, Plainest(), make_three_clients(), rounds=5)
    rows = loop.history().query("metric == 'shadow'")
    return set(rows["round"]), loop.contributions["shadow"]


@pytest.mark.slow
def test_last_three_rounds_are_valued_by_default_with_the_same_last_values(tmp_path):
    valued_rounds, last_values = fit_five_rounds(tmp_path / "default")
    all_rounds, expected_last_values = fit_five_rounds(tmp_path / "every round", every=1)

    assert valued_rounds == {2, 3, 4}
    assert all_rounds == {0, 1, 2, 3, 4}
    assert torch.equal(last_values, expected_last_values)
