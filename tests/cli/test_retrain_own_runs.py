"""``flsv retrain`` of runs with data, metrics and evaluations of their own."""

import shutil

import pytest
import yaml

import flsv
from flsv import FederatedLoop
from flsv.cli import main
from flsv.cli.retrain_saved_run import performance_by, retrain
from flsv.metrics import (
    ClassSpecificShapley,
    CumulativeShapley,
    GradientAgreement,
    GradientShapley,
    LeaveOneOut,
    PartialFederatedShapley,
    ShadowShapley,
)
from flsv.payment import write_report
from flsv.results import open_run
from flsv.results.basis import basis_by_retraining
from flsv.values.coalition_files import Training, remove_coalition
from helpers import refused
from helpers.forked import Forked
from helpers.pages import text_of_page, words_in
from helpers.retrained import record_fits, retrained_values
from helpers.runs import (
    FEDERATION,
    fit_by_command,
    read_output,
    read_rows,
    write_config_of_two_rounds,
    write_table,
)

QUICKLY = ["--trainings", "singles", "--seeds", "1"]


def fit_with_single_clients(folder):
    """Fit a run that trains each client alone for its metric, ``shadow``."""
    arguments = {"performance": "negative_loss", "coalitions": "singles"}
    shadow = {"class_path": "ShadowShapley", "init_args": arguments}
    model = {"class_path": "zoo.configured.DigitsPlateau"}
    config = write_config_of_two_rounds(folder / "fed.yaml", {"shadow": shadow}, model=model)
    return fit_by_command(folder, config)


def last_values(run, metric):
    rows = flsv.read_run(run).query(f"metric == '{metric}'")
    return rows[rows["round"] == rows["round"].max()]["value"].tolist()


@pytest.mark.slow
def test_retrain_trains_only_coalitions_that_the_run_has_not(tmp_path, monkeypatch):
    run = fit_with_single_clients(tmp_path)
    remove_coalition(run / "coalitions", Training(3, (1,)))
    trained = record_fits(monkeypatch)

    retrain(run, "singles", seeds=1)

    assert retrained_values(run) == pytest.approx(last_values(run, "shadow"), abs=1e-6)
    assert trained == {(1,), (0, 1, 2)}


BY_CLASS = ClassSpecificShapley()
BY_LOSS = CumulativeShapley(performance="negative_loss")
BY_LOGGED_LOSS = CumulativeShapley(performance="val_loss", mode="min")
BY_BALANCED_ACCURACY = PartialFederatedShapley(num_classes=3, per_class=True)


def performance_of_metrics(metrics):
    metric_by_name = {f"metric_{number}": metric for number, metric in enumerate(metrics)}
    return performance_by(FederatedLoop(metrics=metric_by_name))


@pytest.mark.parametrize(
    ("metrics", "expected_performance"),
    [
        ([BY_CLASS], ("accuracy", None)),
        ([BY_CLASS, BY_LOSS], ("negative_loss", None)),
        ([BY_LOGGED_LOSS], ("val_loss", "min")),
        ([BY_BALANCED_ACCURACY], ("balanced_accuracy", None)),
        ([GradientShapley(), GradientAgreement()], ("negative_loss", None)),
        ([BY_LOSS, ShadowShapley()], ("accuracy", None)),
    ],
)
def test_retrain_measures_by_the_performance_of_the_runs_metrics(metrics, expected_performance):
    assert performance_of_metrics(metrics) == expected_performance


def test_retrain_asks_for_a_metric_if_the_runs_metrics_value_by_several():
    with refused("value by negative_loss, accuracy: choose one with --metric"):
        performance_of_metrics([BY_LOSS, LeaveOneOut()])


def make_clinics_table():
    table = [["clinic", "age", "dose", "ill"]]
    for number, clinic in enumerate("ABC"):
        for patient in range(30):
            age = 30 + patient * 7 % 23
            dose = patient % 5 + number
            is_ill = ["y", "n", "n"][patient % 3]
            table.append([clinic, str(age), str(dose), is_ill])
    return table


def with_another_dose(table):
    *rows, (clinic, age, _dose, ill) = table
    return [*rows, [clinic, age, "9", ill]]


def with_another_clinic(table):
    return [*table, ["D", "40", "2", "y"], ["D", "41", "2", "n"]]


@pytest.fixture(scope="module")
def retrained_clinics(tmp_path_factory):
    """The folder with the table of clinics, and a run that has been retrained."""
    folder = tmp_path_factory.mktemp("clinics")
    config = write_config_of_two_rounds(
        folder / "federation.yaml",
        model={"class_path": "flsv.ClassifierClient", "init_args": {"network": "softmax"}},
        data=write_table(folder / "clinics.csv", make_clinics_table()),
    )
    run = fit_by_command(folder, config)
    assert main(["retrain", str(run), *QUICKLY, "-q"]) == 0
    return folder, run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change_table", "message"),
    [
        (with_another_dose, "other samples or labels for clients"),
        (with_another_clinic, "and these are A, B, C, D"),
    ],
)
def test_retrain_on_changed_data_is_refused_and_names_the_difference(
    retrained_clinics, change_table, message, capsys
):
    folder, run = retrained_clinics
    summary = (run / "retrained" / "repeat.csv").read_bytes()
    write_table(folder / "clinics.csv", change_table(make_clinics_table()))

    assert main(["retrain", str(run), *QUICKLY, "-q"]) == 2

    error = capsys.readouterr().err
    assert f"the data are not those of {run}" in error
    assert message in error
    assert (run / "retrained" / "repeat.csv").read_bytes() == summary


@pytest.mark.slow
def test_retrain_on_the_same_data_in_another_folder_trains_nothing_again(
    retrained_clinics, tmp_path, monkeypatch
):
    _, run = retrained_clinics
    write_table(tmp_path / "clinics.csv", make_clinics_table())
    trained = record_fits(monkeypatch)

    command = ["retrain", str(run), *QUICKLY, "-q", f"--data.source={tmp_path}/clinics.csv"]
    assert main(command) == 0

    assert trained == set()


@pytest.fixture(scope="module")
def run_evaluated_by_clients(tmp_path_factory):
    """A run whose clients evaluate the coalitions' models."""
    folder = tmp_path_factory.mktemp("evaluated")
    options = {"coalitions": "singles", "evaluators": "clients"}
    metric = {"class_path": "flsv.metrics.ShadowShapley", "init_args": options}
    splits = {"server_val": 0.0, "client_val": 0.3, "seed": 0}
    data = {**yaml.safe_load(FEDERATION)["data"], "splits": splits}
    config = write_config_of_two_rounds(folder / "fed.yaml", {"value": metric}, data=data)
    return fit_by_command(folder / "run", config)


@pytest.fixture(scope="module")
def run_retrained_by_clients(run_evaluated_by_clients, tmp_path_factory):
    folder = tmp_path_factory.mktemp("retrained")
    run = shutil.copytree(run_evaluated_by_clients, folder / "run")
    retrain(run, "singles", seeds=1)
    return run


def report_budget(run, *options):
    """Write the report of a run with a budget, and return the rows of its shares."""
    assert main(["report", str(run), "--budget", "100", *options]) == 0
    return read_rows(run / "shares.csv")


@pytest.mark.slow
def test_values_evaluated_by_clients_are_paid_by_only_if_the_user_accepts_them(
    run_evaluated_by_clients, capsys
):
    rows = report_budget(run_evaluated_by_clients)
    assert "who trust one another, by --evaluated-by-partners" in read_output(capsys)
    assert "amount" not in rows[0]

    accepted_rows = report_budget(run_evaluated_by_clients, "--evaluated-by-partners")
    assert "amount" in accepted_rows[0]


@pytest.mark.slow
def test_run_evaluated_by_clients_is_retrained_with_their_evaluation(run_retrained_by_clients):
    run = run_retrained_by_clients
    assert basis_by_retraining(open_run(run)).by == "clients' balanced_accuracy"
    assert retrained_values(run) == pytest.approx(last_values(run, "value"), abs=1e-6)


@pytest.mark.slow
def test_retraining_evaluated_by_clients_is_paid_by_only_if_the_user_accepts_it(
    run_retrained_by_clients,
):
    run = run_retrained_by_clients
    assert "amount" not in report_budget(run)[0]

    assert "amount" in report_budget(run, "--evaluated-by-partners")[0]
    page = text_of_page(run / "report.html")
    assert "The partners scored the models themselves" in page
    assert "Source of the values: retraining, measured by the clients' balanced accuracy" in page


@pytest.mark.slow
def test_retrain_by_the_server_is_refused_if_only_clients_have_validation_samples(
    run_evaluated_by_clients,
):
    with refused("no validation|empty|validation set"):
        retrain(run_evaluated_by_clients, seeds=1, evaluators="server")


@pytest.mark.slow
def test_retrain_of_a_module_with_class_state_warns_against_payment(tmp_path):
    model = {"class_path": "zoo.configured.DigitsCountsSteps"}
    config = write_config_of_two_rounds(tmp_path / "federation.yaml", model=model)
    fit = ["fit", "--config", str(config)]
    retrain_run = ["retrain", "lightning_logs/version_0", *QUICKLY]
    # Each command has a process of its own, as from a shell, so that the class begins anew.
    for command in (fit, retrain_run):
        status, output = Forked(tmp_path, main, command).wait()
        assert status == 0, output

    assert "Do not pay by these values: The models of groups may have been trained" in words_in(
        output
    )
    page = text_of_page(write_report(tmp_path / "lightning_logs" / "version_0"))
    assert "Do not pay by these values" in page
    assert "such as in a global, a cache, a class attribute or a file" in page
