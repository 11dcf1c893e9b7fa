"""``flsv retrain`` of runs with data, metrics and evaluations of their own."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import flsv
from flsv import FederatedDataModule, FederatedLoop, Reporting
from flsv.cli import main
from flsv.cli.retrain import performance_by, retrain
from flsv.data import SizePartitioner, Splits
from flsv.functional import few_coalitions, predicted_shapley
from flsv.metrics import (
    ClassSpecificShapley,
    CumulativeShapley,
    GradientAgreement,
    GradientShapley,
    LeaveOneOut,
    PartialFederatedShapley,
)
from flsv.results.verdict import ONE_CLASS_FRACTION
from flsv.retraining.copied_fits import CopiedFits
from flsv.utilities.errors import ConfigurationError
from helpers.pages import text_of_page
from helpers.runs import (
    FEDERATION,
    fit_by_command,
    read_output,
    read_rows,
    write_config,
    write_table,
)

OF_A_TABLE: dict[str, Any] = {
    "seed_everything": 3,
    "model": {
        "class_path": "flsv.ClassifierClient",
        "init_args": {"network": "softmax"},
    },
    "federation": {"reporting": {"table": False, "figures": 0}},
}


def test_retrain_warns_if_one_class_dominates_the_validation_set(tmp_path, capsys):
    table = [["clinic", "age", "dose", "ill"]]
    for patient in range(100):
        clinic = ["A", "B"][patient % 2]
        is_ill = ["y", "n", "n", "n", "n"][patient % 5]
        table.append([clinic, str(patient % 7), str(patient % 3), is_ill])
    data = write_table(tmp_path / "clinics.csv", table)
    run = fit_by_command(
        tmp_path,
        write_config(
            tmp_path / "federation.yaml",
            **OF_A_TABLE,
            data=data,
        ),
    )

    for metric, message in (
        ("accuracy", True),
        ("negative_loss", False),
    ):
        capsys.readouterr()
        assert (
            main(
                [
                    "retrain",
                    str(run),
                    "--trainings",
                    "singles",
                    "--seeds",
                    "1",
                    "--metric",
                    metric,
                ]
            )
            == 0
        )
        majority = read_rows(run / "retrained.csv")[0].get("majority")
        assert (majority not in (None, "") and float(majority) >= ONE_CLASS_FRACTION) is message


@pytest.mark.slow
def test_retrain_reuses_the_coalitions_that_the_run_has_trained(tmp_path, monkeypatch):
    """ShadowShapley's coalitions are trained when the run has ended, and are those of flsv retrain."""
    game = {"performance": "negative_loss", "coalitions": "all"}
    shadow = {"class_path": "ShadowShapley", "init_args": game}
    options = {
        "model": {"class_path": "helpers.coalition_kinds.DigitsPlateau"},
        "federation": {
            "metrics": {"shadow": shadow},
            "reporting": {"table": False, "figures": 0},
        },
        "trainer": {"max_epochs": 2, "accelerator": "cpu"},
        "seed_everything": 3,
    }
    run = fit_by_command(tmp_path, write_config(tmp_path / "federation.yaml", **options))
    shadow_rows = [row for row in read_rows(run / "contributions.csv") if row["metric"] == "shadow"]

    assert len(shadow_rows) == 6

    expected = pytest.approx([float(row["value"]) for row in shadow_rows[-3:]], abs=1e-6)

    # Killed in the last coalition.
    stored = run / "coalitions.csv"
    lines = stored.read_text().splitlines(keepends=True)
    stored.write_text("".join(lines[:-3]))
    trained = record_fits(monkeypatch)
    table, _ = retrain(run, "all", seeds=1)

    assert table["value"].tolist() == expected
    assert len(trained) < 5

    # Without what is stored, all are trained.
    trained.clear()
    stored.unlink()
    (run / "retrained_scores.csv").unlink()
    table, _ = retrain(run, "all", seeds=1)

    assert table["value"].tolist() == expected
    assert len(trained) == 7


def record_fits(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, ...]]:
    """The coalitions whose fits are begun from now on."""
    trained: set[tuple[int, ...]] = set()
    train = CopiedFits.train

    def counted(fits: CopiedFits, orders: Any) -> Any:
        trained.update(order.members for order in orders)
        return train(fits, orders)

    monkeypatch.setattr(CopiedFits, "train", counted)
    return trained


def test_retrain_measures_by_the_performance_of_the_runs_metrics():
    def performance_and_mode(*metrics: Any) -> tuple[str, str | None]:
        named_metrics = {f"metric_{number}": metric for number, metric in enumerate(metrics)}
        loop = FederatedLoop(metrics=named_metrics, reporting=Reporting(table=False))
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

    with pytest.raises(
        ConfigurationError, match="value by negative_loss, accuracy: choose one with --metric"
    ):
        performance_and_mode(by_loss, LeaveOneOut())


def test_retrain_on_changed_data_is_refused_and_names_the_difference(tmp_path, capsys):
    """The inputs of one clinic change under equal labels, then there is a clinic that took no part, then none."""
    table = [["clinic", "age", "dose", "ill"]]
    for number, clinic in enumerate("ABC"):
        for patient in range(30):
            age = 30 + patient * 7 % 23
            dose = patient % 5 + number
            is_ill = ["y", "n", "n"][patient % 3]
            table.append([clinic, str(age), str(dose), is_ill])

    other_doses_in_b = []
    for row in table:
        clinic, age_cell, _, ill_cell = row
        if clinic == "B":
            other_doses_in_b.append([clinic, age_cell, "9", ill_cell])
        else:
            other_doses_in_b.append(row)
    with_d = [*table, ["D", "40", "2", "y"], ["D", "41", "2", "n"]]
    without_c = [row for row in table if row[0] != "C"]
    file = tmp_path / "clinics.csv"
    config = write_config(
        tmp_path / "federation.yaml",
        **OF_A_TABLE,
        data=write_table(file, table),
    )
    run = fit_by_command(tmp_path, config)
    command = ["retrain", str(run), "--trainings", "singles", "--seeds", "1", "-q"]

    assert main(command) == 0

    values = (run / "retrained.csv").read_bytes()

    for changed, message in (
        (other_doses_in_b, "other samples or labels for clients"),
        (with_d, "its clients are A, B, C, and these are A, B, C, D"),
        (without_c, "its clients are A, B, C, and these are A, B"),
    ):
        write_table(file, changed)
        capsys.readouterr()
        assert main(command) == 2
        error = capsys.readouterr().err
        assert f"the data are not those of {run}" in error
        assert message in error
        assert (run / "retrained.csv").read_bytes() == values

    # The same data in another folder are the same, and none of the trainings is done again.
    scores = (run / "retrained_scores.csv").read_bytes()
    (tmp_path / "moved").mkdir()
    write_table(tmp_path / "moved" / file.name, table)

    assert main([*command, f"--data.source={tmp_path}/moved/{file.name}"]) == 0
    assert (run / "retrained_scores.csv").read_bytes() == scores


@pytest.mark.slow
def test_retrain_of_four_clients_predicts_the_outputs_of_coalitions_that_were_not_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values are those of the stored outputs. The run's metric has trained each client alone."""
    singles = {"class_path": "ShadowShapley", "init_args": {"coalitions": "singles"}}
    four = {
        "class_path": "flsv.data.SizePartitioner",
        "init_args": {"proportions": [1, 2, 3, 4], "seed": 0},
    }
    splits = {"server_val": 0.2, "seed": 0}
    options: dict[str, Any] = {
        "data": {"source": "digits", "partitioner": four, "splits": splits, "batch_size": 64},
        "trainer": {"max_epochs": 2, "accelerator": "cpu"},
        "federation": {"metrics": {"shadow": singles}, "reporting": {"table": False, "figures": 0}},
    }
    run = fit_by_command(
        tmp_path, write_config(tmp_path / "federation.yaml", **{**OF_A_TABLE, **options})
    )
    trained = record_fits(monkeypatch)
    outcome, _ = retrain(run, seeds=1)

    assert sorted(map(len, trained)) == [3, 3, 3, 3, 4]

    data = FederatedDataModule(
        "digits", SizePartitioner([1, 2, 3, 4], seed=0), batch_size=64, splits=Splits(**splits)
    )
    data.setup("fit")
    y = torch.cat([y for _, y in data.val_dataloader()])
    masks = few_coalitions(4, "both")

    def accuracy(outputs: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(-1) == y).double().mean(1)

    table = (run / "retrained_scores.csv").read_text().splitlines()[1:]
    stored = {}
    for row in csv.DictReader(table):
        stored[row["coalition"].lstrip("'")] = float(row["accuracy"])

    names = ["+".join(map(str, mask.nonzero()[:, 0].tolist())) for mask in masks[1:]]
    outputs = [torch.zeros(len(y), 10)]
    for name in names:
        file = torch.load(run / "retrained_scores" / f"3_{name}.pt")
        (output, *_) = file.values()
        outputs.append(output[0])

    scores = torch.tensor([stored["-"], *(stored[name] for name in names)])
    trained_scores = accuracy(torch.stack(outputs[1:]))

    torch.testing.assert_close(trained_scores, scores[1:].double(), rtol=0, atol=1e-6)

    expected = predicted_shapley(
        masks,
        scores,
        torch.stack(outputs),
        data.num_samples,
        accuracy,
        logits=True,
    )

    assert outcome["value"].tolist() == pytest.approx(expected.values.tolist(), abs=1e-6)
    assert set(outcome["trainings"]) == {"both"}
    assert sum(outcome["share"]) == pytest.approx(1)

    trained.clear()
    assert retrain(run, seeds=1)[0]["value"].tolist() == outcome["value"].tolist()
    assert trained == set()  # only the outputs were scored

    capsys.readouterr()
    assert (
        main(
            [
                "retrain",
                str(run),
                "--seeds",
                "1",
                "--metric",
                "val_loss",
                "--mode",
                "min",
                "--rounds",
                "1",
            ]
        )
        == 0
    )
    assert "the scores of coalitions that were not trained are estimated" in read_output(capsys)


@pytest.mark.slow
def test_run_with_client_side_evaluation_is_retrained_with_it(tmp_path, capsys):
    metric = {
        "class_path": "flsv.metrics.ShadowShapley",
        "init_args": {"judges": "clients"},
    }
    data = {
        **yaml.safe_load(FEDERATION)["data"],
        "splits": {
            "server_val": 0.0,
            "client_val": 0.3,
            "seed": 0,
        },
    }
    config = write_config(
        tmp_path / "federation.yaml",
        seed_everything=3,
        trainer={"max_epochs": 2, "accelerator": "cpu"},
        data=data,
        federation={
            "metrics": {"value": metric},
            "reporting": {"table": False, "figures": 0},
        },
    )
    run = fit_by_command(tmp_path / "run", config)

    assert main(["report", str(run), "--budget", "100"]) == 0
    assert "who trust one another, by --judged-by-partners" in read_output(capsys)
    assert "amount" not in read_rows(run / "shares.csv")[0]

    accepted = ["--budget", "100", "--judged-by-partners"]
    assert main(["report", str(run), *accepted]) == 0

    outcome, _ = retrain(run, "singles", seeds=1)
    assert set(outcome["by"]) == {"clients' balanced_accuracy"}

    shown = flsv.read_run(run).query("metric == 'value' and round == 1")["value"].tolist()
    assert outcome["value"].tolist() == pytest.approx(shown, abs=1e-6)

    retrain(run, seeds=1)
    assert main(["report", str(run), "--budget", "100"]) == 0
    assert "amount" not in read_rows(run / "shares.csv")[0]
    assert (
        main(
            [
                "report",
                str(run),
                "--budget",
                "100",
                "--judged-by-partners",
            ]
        )
        == 0
    )

    text = text_of_page(run / "report.html")
    assert "The partners themselves scored the models" in text
    assert "Source of the values: retraining, measured by the clients' balanced accuracy" in text

    with pytest.raises(
        ConfigurationError,
        match="no validation|empty|validation set",
    ):
        retrain(run, seeds=1, judges="server")
