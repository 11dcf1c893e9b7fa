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


@pytest.mark.slow
def test_retrain_reuses_the_coalitions_that_the_run_has_trained(tmp_path, monkeypatch):
    """ShadowShapley's coalitions are trained when the run has ended, and are those of flsv retrain."""
    game = {"performance": "negative_loss", "coalitions": "all"}
    shadow = {"class_path": "ShadowShapley", "init_args": game}
    model = {"class_path": "zoo.configured.DigitsPlateau"}
    config = write_config_of_two_rounds(tmp_path / "fed.yaml", {"shadow": shadow}, model=model)
    run = fit_by_command(tmp_path, config)
    rows = read_rows(run / "contributions.csv")
    values = [float(row["value"]) for row in rows if row["metric"] == "shadow"]

    assert len(values) == 6

    expected = pytest.approx(values[-3:], abs=1e-6)

    # Killed in the last coalition.
    stored = run / "coalitions"
    remove_coalition(stored, Training(3, (1, 2)))
    trained = record_fits(monkeypatch)
    retrain(run, "all", seeds=1)

    assert retrained_values(run) == expected
    assert trained == {(1, 2), (0, 1, 2)}

    # Without what is stored, all are trained.
    trained.clear()
    shutil.rmtree(stored)
    shutil.rmtree(run / "retrained")
    retrain(run, "all", seeds=1)

    assert retrained_values(run) == expected
    assert len(trained) == 7


def test_retrain_measures_by_the_performance_of_the_runs_metrics():
    def performance_and_mode(*metrics):
        named_metrics = {f"metric_{number}": metric for number, metric in enumerate(metrics)}
        loop = FederatedLoop(metrics=named_metrics)
        return performance_by(loop)

    by_class = ClassSpecificShapley()
    by_loss = CumulativeShapley(performance="negative_loss")
    by_logged_loss = CumulativeShapley(performance="val_loss", mode="min")
    by_balanced_accuracy = PartialFederatedShapley(num_classes=3, per_class=True)
    assert performance_and_mode(by_class) == ("accuracy", None)
    assert performance_and_mode(by_class, by_loss) == ("negative_loss", None)
    assert performance_and_mode(by_logged_loss) == ("val_loss", "min")
    assert performance_and_mode(by_balanced_accuracy) == ("balanced_accuracy", None)
    by_gradients = performance_and_mode(GradientShapley(), GradientAgreement())
    assert by_gradients == ("negative_loss", None)

    with refused("value by negative_loss, accuracy: choose one with --metric"):
        performance_and_mode(by_loss, LeaveOneOut())


@pytest.mark.slow
def test_retrain_on_changed_data_is_refused_and_names_the_difference(tmp_path, monkeypatch, capsys):
    """An input of one clinic changes under an equal label, then there is a clinic that took no part."""
    table = [["clinic", "age", "dose", "ill"]]
    for number, clinic in enumerate("ABC"):
        for patient in range(30):
            age = 30 + patient * 7 % 23
            dose = patient % 5 + number
            is_ill = ["y", "n", "n"][patient % 3]
            table.append([clinic, str(age), str(dose), is_ill])

    *rows, (clinic, age_cell, _dose, ill_cell) = table
    other_dose = [*rows, [clinic, age_cell, "9", ill_cell]]
    with_d = [*table, ["D", "40", "2", "y"], ["D", "41", "2", "n"]]
    source = tmp_path / "clinics.csv"
    config = write_config_of_two_rounds(
        tmp_path / "federation.yaml",
        model={"class_path": "flsv.ClassifierClient", "init_args": {"network": "softmax"}},
        data=write_table(source, table),
    )
    run = fit_by_command(tmp_path, config)
    command = ["retrain", str(run), "--trainings", "singles", "--seeds", "1", "-q"]

    assert main(command) == 0

    file = run / "retrained" / "repeat.csv"
    values = file.read_bytes()

    for changed, message in (
        (other_dose, "other samples or labels for clients"),
        (with_d, "and these are A, B, C, D"),
    ):
        write_table(source, changed)
        capsys.readouterr()
        assert main(command) == 2
        error = capsys.readouterr().err
        assert f"the data are not those of {run}" in error
        assert message in error
        assert file.read_bytes() == values

    # The same data in another folder are the same, and nothing is trained again.
    (tmp_path / "moved").mkdir()
    write_table(tmp_path / "moved" / source.name, table)
    trained = record_fits(monkeypatch)

    assert main([*command, f"--data.source={tmp_path}/moved/{source.name}"]) == 0
    assert trained == set()
    assert file.read_bytes() == values


@pytest.mark.slow
def test_run_with_client_side_evaluation_is_retrained_with_it(tmp_path, capsys):
    metric = {"class_path": "flsv.metrics.ShadowShapley", "init_args": {"evaluators": "clients"}}
    data = {
        **yaml.safe_load(FEDERATION)["data"],
        "splits": {"server_val": 0.0, "client_val": 0.3, "seed": 0},
    }
    config = write_config_of_two_rounds(tmp_path / "fed.yaml", {"value": metric}, data=data)
    run = fit_by_command(tmp_path / "run", config)

    assert main(["report", str(run), "--budget", "100"]) == 0
    assert "who trust one another, by --evaluated-by-partners" in read_output(capsys)
    assert "amount" not in read_rows(run / "shares.csv")[0]

    accepted = ["--budget", "100", "--evaluated-by-partners"]
    assert main(["report", str(run), *accepted]) == 0

    retrain(run, "singles", seeds=1)
    assert basis_by_retraining(open_run(run)).by == "clients' balanced_accuracy"

    shown = flsv.read_run(run).query("metric == 'value' and round == 1")["value"].tolist()
    assert retrained_values(run) == pytest.approx(shown, abs=1e-6)

    retrain(run, seeds=1)
    assert main(["report", str(run), "--budget", "100"]) == 0
    assert "amount" not in read_rows(run / "shares.csv")[0]
    assert main(["report", str(run), *accepted]) == 0

    text = text_of_page(run / "report.html")
    assert "The partners scored the models themselves" in text
    assert "Source of the values: retraining, measured by the clients' balanced accuracy" in text

    shutil.rmtree(run / "retrained")
    with refused("no validation|empty|validation set"):
        retrain(run, seeds=1, evaluators="server")


@pytest.mark.slow
def test_retrain_of_a_module_with_state_in_its_class_has_a_warning_that_forbids_payment(tmp_path):
    """Each command in a process of its own, as from a shell."""
    model = {"class_path": "zoo.configured.DigitsCountsSteps"}
    config = write_config_of_two_rounds(tmp_path / "federation.yaml", model=model)
    retraining = ["retrain", "lightning_logs/version_0", "--trainings", "singles", "--seeds", "1"]
    for command in (["fit", "--config", str(config)], retraining):
        status, output = Forked(tmp_path, main, command).wait()
        assert status == 0, output

    printed = words_in(output)
    assert "Do not pay by these values: The models of groups may have been trained" in printed
    run = tmp_path / "lightning_logs" / "version_0"
    page = text_of_page(write_report(run))
    assert "Do not pay by these values" in page
    assert "such as in a global, a cache, a class attribute or a file" in page
