"""``flsv retrain``: a run's coalitions, trained after the fact."""

import csv
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy
import pytest
import torch
import yaml

import flsv
from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.aggregation import ShapFedWA
from flsv.cli import main
from flsv.cli.retrain import retrain
from flsv.cli.retrained_run import performance_by
from flsv.data import SizePartitioner, Splits
from flsv.functional import exact_shapley, few_coalitions, predicted_shapley
from flsv.games.performance import CLASSIFICATION
from flsv.metrics import (
    ClassSpecificShapley,
    CumulativeShapley,
    GradientAgreement,
    GradientShapley,
    LeaveOneOut,
    PartialFederatedShapley,
)
from flsv.results.verdict import MOSTLY
from flsv.retraining.fits_in_processes import FitsInProcesses
from flsv.retraining.retrained_utility import RetrainedUtility
from flsv.utilities.errors import ConfigurationError
from helpers.fits import trainer_for
from helpers.pages import text_of
from helpers.runs import FEDERATION, fitted, rows, write_table, written

OF_A_TABLE: dict[str, Any] = {
    "seed_everything": 3,
    "model": {
        "class_path": "flsv.ClassifierClient",
        "init_args": {"network": "softmax"},
    },
    "federation": {"reporting": {"table": False, "figures": 0}},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two rounds."""
    folder = tmp_path_factory.mktemp("retrained")
    federation = {
        "aggregator": {
            "class_path": "ShapFedWA",
            "init_args": {"metric": "cssv"},
        },
        "metrics": {"cssv": "ClassSpecificShapley"},
        "reporting": {"table": False, "figures": 0},
    }
    trainer = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    config = written(
        folder / "federation.yaml",
        seed_everything=3,
        trainer=trainer,
        federation=federation,
    )
    return fitted(folder, config)


@pytest.fixture
def run(trained):
    yield trained
    for file in trained.glob("retrained*"):
        shutil.rmtree(file) if file.is_dir() else file.unlink()


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_all_coalitions_give_the_exact_values_of_the_game_by_hand(run):
    table, path = retrain(run, "all", metric="negative_loss", seeds=1)
    data = FederatedDataModule(
        "digits",
        SizePartitioner([1, 2, 4], seed=0),
        batch_size=64,
        splits=Splits(server_val=0.2, seed=0),
    )

    def trainer(cohort: Any) -> L.Trainer:
        loop = FederatedLoop(
            ShapFedWA("cssv"),
            {"cssv": ClassSpecificShapley()},
            sampler=cohort,
            seed=3,
            reporting=Reporting(table=False, figures=0),
        )
        return trainer_for(loop, run, 2, limit_val_batches=0)

    L.seed_everything(3, verbose=False)
    sgd = partial(torch.optim.SGD, lr=0.1)
    module = ClassifierClient("softmax", num_classes=10, input_shape=(1, 8, 8), optimizer=sgd)
    utility = RetrainedUtility(trainer, module, data, "negative_loss")

    expected = exact_shapley(utility, 3).values
    torch.testing.assert_close(torch.tensor(table["value"]), expected, rtol=0, atol=1e-7)
    stored = rows(path)
    assert [row["client"] for row in stored] == ["0", "1", "2"]
    assert float(stored[2]["value"]) == table["value"][2]


def test_retrain_without_a_client_saves_the_module_of_a_run_of_the_others(run, tmp_path, capsys):
    assert main(["retrain", str(run), "--without", "1"]) == 0
    output = printed(capsys)
    assert "without_1.ckpt" in output
    assert "without 1: accuracy 0." in output

    config = yaml.safe_load((run / "config.yaml").read_text())
    config["federation"]["sampler"] = {
        "class_path": "FixedCohort",
        "init_args": {"clients": [0, 2]},
    }
    (tmp_path / "others.yaml").write_text(yaml.safe_dump(config))
    run_of_others = fitted(tmp_path, tmp_path / "others.yaml")
    checkpoint = run_of_others / "checkpoints" / "last.ckpt"
    expected = torch.load(checkpoint, weights_only=False)["state_dict"]
    state = ClassifierClient.load_from_checkpoint(run / "without_1.ckpt").state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value)
    assert not (run / "retrained.csv").exists()

    for names in (["Lyon"], ["0", "1", "2"]):
        assert main(["retrain", str(run), "--without", *names]) == 2
        assert (
            f"--without {' '.join(names)}: expected some of 0, 1, 2, not all"
            in capsys.readouterr().err
        )


def test_retrain_warns_if_one_class_dominates_the_validation_set(tmp_path, capsys):
    table = [
        [
            *"AB"[i % 2],
            str(i % 7),
            str(i % 3),
            "ny"[i % 5 == 0],
        ]
        for i in range(100)
    ]
    data = write_table(
        tmp_path / "clinics.csv",
        [["clinic", "age", "dose", "ill"], *table],
    )
    run = fitted(
        tmp_path,
        written(
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
        majority = rows(run / "retrained.csv")[0].get("majority")
        assert (majority not in (None, "") and float(majority) >= MOSTLY) is message


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
    run = fitted(tmp_path, written(tmp_path / "federation.yaml", **options))
    shadow_rows = [row for row in rows(run / "contributions.csv") if row["metric"] == "shadow"]
    assert len(shadow_rows) == 6
    expected = pytest.approx([float(row["value"]) for row in shadow_rows[-3:]], abs=1e-6)

    # Killed in the last coalition.
    stored = run / "coalitions.csv"
    lines = stored.read_text().splitlines(keepends=True)
    stored.write_text("".join(lines[:-3]))
    trained = fits_of(monkeypatch)
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


def fits_of(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, ...]]:
    """The coalitions whose fits are begun from now on."""
    trained: set[tuple[int, ...]] = set()
    train = FitsInProcesses.train

    def counted(processes: FitsInProcesses, orders: Any) -> Any:
        trained.update(order.members for order in orders)
        return train(processes, orders)

    monkeypatch.setattr(FitsInProcesses, "train", counted)
    return trained


def test_retrain_measures_by_the_performance_of_the_runs_metrics():
    def of(**metrics: Any) -> tuple[str, str | None]:
        return performance_by(FederatedLoop(metrics=metrics, reporting=Reporting(table=False)))

    loss = CumulativeShapley(performance="negative_loss")
    assert of(cssv=ClassSpecificShapley()) == ("accuracy", None)
    assert of(cssv=ClassSpecificShapley(), sv=loss) == ("negative_loss", None)
    assert of(sv=CumulativeShapley(performance="val_loss", mode="min")) == ("val_loss", "min")
    assert of(sv=PartialFederatedShapley(num_classes=3, per_class=True)) == (
        "balanced_accuracy",
        None,
    )
    assert of(sv=GradientShapley(), own=GradientAgreement()) == ("negative_loss", None)
    with pytest.raises(
        ConfigurationError, match="value by negative_loss, accuracy: choose one with --metric"
    ):
        of(sv=loss, loo=LeaveOneOut())


def test_retrain_on_changed_data_is_refused_and_names_the_difference(tmp_path, capsys):
    """The inputs of one clinic change under equal labels, then there is a clinic that took no part, then none."""
    table = [["clinic", "age", "dose", "ill"]]
    for number, clinic in enumerate("ABC"):
        for i in range(30):
            row = [clinic, str(30 + i * 7 % 23), str(i % 5 + number), "ny"[i % 3 == 0]]
            table.append(row)
    other_doses_in_b = [[*row[:2], "9", row[3]] if row[0] == "B" else row for row in table]
    with_d = [*table, ["D", "40", "2", "y"], ["D", "41", "2", "n"]]
    without_c = [row for row in table if row[0] != "C"]
    file = tmp_path / "clinics.csv"
    config = written(
        tmp_path / "federation.yaml",
        **OF_A_TABLE,
        data=write_table(file, table),
    )
    run = fitted(tmp_path, config)
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


def test_retrain_refuses_scores_that_give_no_single_value(
    tmp_path,
):
    with pytest.raises(ConfigurationError, match="use balanced_accuracy"):
        retrain(tmp_path, metric="per_class_accuracy")


def test_retrain_trains_all_coalitions_with_three_seeds_and_none_again(run, capsys):
    """By another score and without one of the seeds, too: these shares stand beside the first."""
    assert main(["retrain", str(run), "--rounds", "1"]) == 0
    message, outcome = (
        printed(capsys),
        rows(run / "retrained.csv"),
    )
    # Of three clients each alone and all but one are all.
    assert {(row["trainings"], row["seeds"], row["rounds"]) for row in outcome} == {
        ("all", "3 4 5", "1")
    }
    assert (
        len((stored_text := (run / "retrained_scores.csv").read_text()).splitlines()) == 2 + 8 * 3
    )
    assert (
        len({row["value"] for row in outcome}) == 3
    )  # each coalition was trained by its own clients
    assert "1 of 2 rounds" in message
    assert [name for name in outcome[0] if name.startswith("share ")] == [
        *(f"share by {score}" for score in CLASSIFICATION),
        *(f"share without seed {seed}" for seed in (3, 4, 5)),
    ]
    assert [row["share by accuracy"] for row in outcome] == [row["share"] for row in outcome]
    assert (
        main(
            [
                "report",
                str(run),
                "--out",
                str(run / "all.html"),
                "--budget",
                "100",
            ]
        )
        == 0
    )
    page = text_of(run / "all.html")
    assert "Brackets are for other cases, other seeds." in page
    for kind in ("seeds", "cases"):
        cells = [row[f"covariance of {kind}"].lstrip("'") for row in outcome]
        covariance = numpy.array([cell.split() for cell in cells], float)
        assert covariance == pytest.approx(covariance.T)
        assert numpy.linalg.eigvalsh(covariance).min() > -1e-9
        assert covariance.diagonal().min() > 0
    assert all(
        f" % {values_name}" in page
        for values_name in (
            "with other seeds",
            "by balanced accuracy",
            "by loss",
        )
    )
    whole, _ = retrain(run, rounds=1)
    by_loss, _ = retrain(run, metric="negative_loss", rounds=1)
    assert by_loss["share"].tolist() == whole["share by negative_loss"].tolist()
    two_seeds, _ = retrain(run, rounds=1, seeds=2)
    assert (
        two_seeds["share"].tolist()
        == whole["share without seed 5"].tolist()
        != whole["share"].tolist()
    )
    assert (run / "retrained_scores.csv").read_text() == stored_text


def test_retrain_tells_the_trainings_seeds_and_settings_that_were_asked_for(run, capsys):
    command = ["retrain", str(run), "--rounds", "1", "--trainings", "singles", "--seeds", "2"]
    changed = "federation.optimizer_state 'persist' instead of 'reset'"

    assert main([*command, "--federation.optimizer_state=persist"]) == 0

    for row in rows(run / "retrained.csv"):
        assert row["trainings"] == "singles"
        assert row["seeds"] == "3 4"
        assert row["changed"] == changed
    assert len((run / "retrained_scores.csv").read_text().splitlines()) == 2 + 5 * 2
    assert changed in printed(capsys)


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
    run = fitted(tmp_path, written(tmp_path / "federation.yaml", **{**OF_A_TABLE, **options}))
    trained = fits_of(monkeypatch)
    outcome, _ = retrain(run, seeds=1)
    assert sorted(map(len, trained)) == [3, 3, 3, 3, 4]
    data = FederatedDataModule(
        "digits", SizePartitioner([1, 2, 3, 4], seed=0), batch_size=64, splits=Splits(**splits)
    )
    data.setup("fit")
    y, masks = torch.cat([y for _, y in data.val_dataloader()]), few_coalitions(4, "both")

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
    assert "the scores of coalitions that were not trained are estimated" in printed(capsys)


def test_retrain_of_single_clients_says_so_and_its_trainings_are_reused(run, capsys):
    command = [
        "retrain",
        str(run),
        "--rounds",
        "1",
        "--seeds",
        "1",
        "--trainings",
    ]
    assert main([*command, "singles"]) == 0
    assert "Only each partner alone and all together were trained." in printed(capsys)
    page = run / "shares.html"
    assert (
        main(
            [
                "report",
                str(run),
                "--out",
                str(page),
                "--budget",
                "100",
            ]
        )
        == 0
    )
    assert "Only each partner alone and all together were trained." in text_of(page)
    assert {row["source"] for row in rows(run / "retrained.csv")} == {"outputs"}
    assert sum(float(row["amount"]) for row in rows(run / "shares_shares.csv")) == 100
    assert (
        main(
            [
                "report",
                str(run),
                "--out",
                str(page),
                "--budget",
                "100",
                "--by",
                "cssv",
            ]
        )
        == 0
    )
    assert "| client | cssv | retrained |" in text_of(page)
    assert "amount" not in rows(run / "shares_shares.csv")[0]
    # Trainings of other settings are not mixed; of more of the same game what is known is not trained again.
    assert (
        main(
            [
                *command,
                "both",
                "--federation.local_epochs",
                "2",
            ]
        )
        == 2
    )
    earlier_lines = (run / "retrained_scores.csv").read_text().splitlines()
    capsys.readouterr()
    assert main([*command, "both"]) == 0
    assert "A single seed was used, and another gives other amounts" in printed(capsys)
    assert {*earlier_lines} < {*(run / "retrained_scores.csv").read_text().splitlines()}
    outcome = rows(run / "retrained.csv")
    assert sum(float(row["share"]) for row in outcome) == pytest.approx(1)
    assert all(float(row["low"]) < float(row["value"]) < float(row["high"]) for row in outcome)
    capsys.readouterr()
    # Trainings from which outputs are not predicted only rank.
    assert main([*command, "leave-one-out"]) == 0
    assert "so these values only rank" in printed(capsys)
    assert {row["share"] for row in rows(run / "retrained.csv")} == {""}


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
    config = written(
        tmp_path / "federation.yaml",
        seed_everything=3,
        trainer={"max_epochs": 2, "accelerator": "cpu"},
        data=data,
        federation={
            "metrics": {"value": metric},
            "reporting": {"table": False, "figures": 0},
        },
    )
    run = fitted(tmp_path / "run", config)
    assert main(["report", str(run), "--budget", "100"]) == 0
    assert "who trust one another, by --judged-by-partners" in printed(capsys)
    assert "amount" not in rows(run / "shares.csv")[0]
    accepted = ["--budget", "100", "--judged-by-partners"]
    assert main(["report", str(run), *accepted]) == 0
    outcome, _ = retrain(run, "singles", seeds=1)
    assert set(outcome["by"]) == {"clients' balanced_accuracy"}
    shown = flsv.read_run(run).query("metric == 'value' and round == 1")["value"].tolist()
    assert outcome["value"].tolist() == pytest.approx(shown, abs=1e-6)
    retrain(run, seeds=1)
    assert main(["report", str(run), "--budget", "100"]) == 0
    assert "amount" not in rows(run / "shares.csv")[0]
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
    text = text_of(run / "report.html")
    assert "The partners themselves scored the models" in text
    assert "Source of the values: retraining, measured by the clients' balanced accuracy" in text
    with pytest.raises(
        ConfigurationError,
        match="no validation|empty|validation set",
    ):
        retrain(run, seeds=1, judges="server")


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("hostile",)


def test_nothing_in_a_runs_checkpoint_is_executed(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, "run")
    path = Path("run/checkpoints/last.ckpt")
    torch.save({**torch.load(path, weights_only=True), "hyper_parameters": Hostile()}, path)
    assert main(["retrain", "run", "--seeds", "1", "--trainings", "singles"]) == 0
    assert "last.ckpt holds objects that may run code" in printed(capsys)
    assert not Path("hostile").exists()


def test_retrain_refuses_if_the_full_coalition_differs_from_the_checkpoint(run, tmp_path, capsys):
    changed = tmp_path / "run"
    shutil.copytree(run, changed)
    path = changed / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    name, weight = next(iter(checkpoint["state_dict"].items()))
    checkpoint["state_dict"][name] = weight + 0.01
    torch.save(checkpoint, path)
    command = ["retrain", str(changed), "--trainings", "singles", "--seeds", "1"]

    assert main(command) == 2
    output = " ".join("".join(capsys.readouterr()).split())
    assert (
        "there are no values: the coalition of all clients, trained again from the run's configuration"
        in output
    )
    assert not list(changed.glob("retrained*"))

    # Other settings are not compared; without the checkpoint, that is said.
    assert main([*command, "--rounds", "1"]) == 0
    shutil.rmtree(changed / "checkpoints")
    (changed / "retrained_scores.csv").unlink()
    capsys.readouterr()
    assert main(command) == 0
    assert "not compared with the run's own weights" in printed(capsys)


def test_jobs_option_with_the_dask_backend_is_refused(tmp_path, capsys):
    assert main(["retrain", str(tmp_path), "--jobs", "2", "--backend", "dask"]) == 2
    assert "--jobs" in capsys.readouterr().err
