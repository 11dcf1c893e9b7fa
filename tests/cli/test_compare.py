"""``flsv compare``: one partition, several algorithms, and the table that comes of it."""

import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from pandas import DataFrame
from sklearn.metrics import roc_auc_score

import flsv
from flsv import ClientEvaluation
from flsv.aggregation import FedAvg
from flsv.cli import compare as compare_module
from flsv.cli import main
from flsv.cli.compare import MEASURES, Outcome, OwnModels, score_table
from flsv.federation import FederatedLoop
from flsv.personalization import Standalone
from flsv.sampling import UniformSampler
from flsv.utilities.errors import ConfigurationError
from helpers.data import CONFIGS, toy_data
from helpers.fits import fit
from helpers.models import Plain
from helpers.runs import QUIET, rows


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # to be restored: seed_everything sets it


def compare(folder: Path, *arguments: str) -> int:
    given = ["--base", "digits", "--out", str(folder), "--trainer.max_epochs=1"]
    return main(["compare", *given, *arguments, *QUIET])


def test_compared_algorithms_start_from_equal_weights_and_repeated_runs_are_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = shutil.copy(CONFIGS / "fedsv.yaml", tmp_path / "again.yaml")
    assert compare(tmp_path, "--config", "fedsv", "--config", str(again), "--federation.sampler=null") == 0
    found: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for row in rows(tmp_path / "compare.csv"):
        found[row["algorithm"], row["models"]].append({name: row[name] for name in ("client", *MEASURES)})
        # Two metrics ask for all coalitions of five clients, and share them.
        assert row["evaluations"] == ("0" if row["algorithm"] == "standalone" else "32")
    assert [row["client"] for row in found["fedsv", "trained"]] == list("01234")
    assert found["fedsv", "trained"] == found["again", "trained"]
    # After one round nobody has received anything before training: standalone clients trained the same.
    assert found["standalone", "received"] == found["standalone", "trained"] == found["fedsv", "trained"]
    accuracy = {key: [float(row["accuracy"]) for row in each] for key, each in found.items()}
    assert accuracy["fedsv", "received"] == pytest.approx(accuracy["fedsv", "global"] * 5)
    assert len(set(accuracy["fedsv", "trained"])) > 1
    out = capsys.readouterr().out
    assert "fairness" in out
    assert "Balanced accuracy" in out
    assert "args parameter" not in out


def test_compare_of_different_partitions_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("data: {partitioner: {class_path: IIDPartitioner, init_args: {num_clients: 3}}}\n")
    assert compare(tmp_path, "--config", "fedavg", "--config", str(other)) == 2
    assert "gives the clients other data than" in capsys.readouterr().err


def by_hand(module: Plain, batches: Any) -> list[float]:
    """The measures of a module on some samples."""
    module.eval()
    x, y = (torch.cat(parts) for parts in zip(*batches))
    with torch.no_grad():
        logits = module(x)
    right = (logits.argmax(1) == y).double()
    balanced = torch.stack([right[y == label].mean() for label in y.unique()]).mean()
    area = roc_auc_score(y, logits.double().softmax(1), multi_class="ovr")
    return [right.mean().item(), balanced.item(), area]


def test_compare_refuses_an_impossible_algorithm_before_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    algorithms = ["--config", "fedavg", "--config", "shapfed"]
    assert main(["compare", "--base", "quickstart", *algorithms, "--out", str(tmp_path), *QUIET]) == 2
    assert "leave ShadowShapley out (--config digits is quickstart without it)" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_compare_scores_the_own_models_that_the_loop_holds(tmp_path: Path) -> None:
    evaluation = ClientEvaluation(keep_trained=True)
    loop = FederatedLoop(FedAvg(), personalizer=Standalone(), sampler=UniformSampler(1), evaluation=evaluation, seed=1)
    own, data, module = OwnModels(loop), toy_data(), Plain()
    initial = flsv.ParameterSpace(module).read(module)
    fit(loop, tmp_path, module, data, rounds=2, callbacks=[own])
    assert 1 <= len(loop.trained) <= 2  # somebody was never drawn
    received = loop.received()
    assert MEASURES == ("accuracy", "balanced_accuracy", "auroc")
    for client in range(3):
        assert torch.equal(received[client], loop.trained.get(client, initial))
        loop.space.write(module, received[client])
        expected = by_hand(module, data.test_dataloader())
        for models in ("received", "trained"):
            assert [own.scores[models][m][client].item() for m in MEASURES] == pytest.approx(expected, abs=1e-6)


def test_compare_with_own_tests_scores_each_client_on_its_test_split(tmp_path: Path) -> None:
    evaluation = ClientEvaluation(every=2, keep_trained=True)
    loop = FederatedLoop(FedAvg(), personalizer=Standalone(), evaluation=evaluation, seed=1)
    own, data, module = OwnModels(loop, tests="own"), toy_data(), Plain()
    fit(loop, tmp_path, module, data, rounds=2, callbacks=[own])
    for measure in MEASURES:
        torch.testing.assert_close(own.scores["received"][measure].float(), loop.client_scores[measure])
    module.eval()
    parts = [[torch.cat(each) for each in zip(*data.client_loader(client, "test"))] for client in range(3)]
    right = [(module(x).argmax(1) == y).double().mean().item() for x, y in parts]
    assert own.scores["global"]["accuracy"].item() == pytest.approx(sum(right) / 3)


def test_compare_with_own_tests_and_no_test_samples_is_refused(tmp_path: Path) -> None:
    loop = FederatedLoop(evaluation=ClientEvaluation(keep_trained=True), seed=1)
    with pytest.raises(ConfigurationError, match=r'tests="own" .* clients \[0, 1, 2\] have none'):
        fit(loop, tmp_path, data=toy_data(client_test=0.0), callbacks=[OwnModels(loop, tests="own")])


def outcome(name: str, accuracy: list[float], evaluations: int = 0) -> Outcome:
    clients = [*accuracy, *accuracy, sum(accuracy) / len(accuracy)]
    kinds = ["received"] * len(accuracy) + ["trained"] * len(accuracy) + ["global"]
    table = DataFrame({"models": kinds, **dict.fromkeys(MEASURES, clients)})
    return Outcome(name, table.assign(seconds=1.5, evaluations=evaluations), names=("0", "1"))


def test_compare_tables_show_accuracies_fairness_and_costs() -> None:
    fair = outcome("fair", [0.875, 0.625], evaluations=4)
    cells = score_table([outcome("standalone", [0.75, 0.5]), outcome("fedavg", [0.625, 0.625]), fair], "accuracy")
    assert [*cells] == ["standalone", "fedavg", "fair"]
    assert cells.loc["client 0"].tolist() == ["75.0", "62.5 (-12.5)", "87.5 (+12.5)"]
    assert cells.loc["fairness"].tolist() == ["-", "-", "1.00"]
    assert cells.loc["global"].tolist() == ["-", "62.5", "75.0"]
    assert cells.loc["coalitions"].tolist() == ["0", "0", "4"]


@pytest.mark.slow
def test_compare_reuses_finished_runs_of_the_same_experiment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, given = tmp_path / "out", ["--config", "fedavg", "--config", "cgsv", "--trainer.limit_train_batches=1"]
    ran: list[str] = []
    dying = ["cgsv"]
    before = compare_module.run_algorithm

    def dies(name: str, *rest: Any) -> Outcome:
        ran.append(name)
        if name in dying:
            raise KeyboardInterrupt(dying.pop())
        return before(name, *rest)

    monkeypatch.setattr(compare_module, "run_algorithm", dies)
    assert compare(out, *given) == 130
    assert compare(out, *given) == 0
    assert ran == ["standalone", "fedavg", "cgsv", "cgsv"]
    assert "Run 2 of 3: fedavg, done before" in capsys.readouterr().out
    found = (out / "compare.csv").read_bytes()
    assert compare(out, *given) == 0
    assert len(ran) == 4
    assert (out / "compare.csv").read_bytes() == found
    # Another option, other inputs: all of it is run anew.
    assert compare(out, *given, "--federation.optimizer_state", "persist") == 0
    assert len(ran) == 7
    monkeypatch.setattr(compare_module, "loader_hash", lambda _: "of another test set")
    ran.clear()
    assert compare(out, *given) == 0
    assert ran == ["standalone", "fedavg", "cgsv"]
