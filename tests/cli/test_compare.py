"""``flsv compare``: one partition, several algorithms, and the table that comes of it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from pandas import DataFrame
from sklearn.metrics import roc_auc_score
from toys import Plain, fit, toy_data

import flsv
from flsv import ClientEvaluation
from flsv.aggregation import FedAvg
from flsv.cli import compare as compare_module
from flsv.cli import main
from flsv.cli.compare import Outcome, table
from flsv.cli.own_models import MEASURES, OwnModels
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.personalization import Standalone
from flsv.sampling import UniformSampler

CONFIGS = Path(__file__).parents[2] / "configs"
QUICK = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # to be restored: seed_everything sets it


def configs(*names: str) -> list[str]:
    return [option for name in names for option in ("--config", str(CONFIGS / f"{name}.yaml"))]


def compare(folder: Path, *arguments: str) -> int:
    base = ["--base", str(CONFIGS / "digits.yaml"), "--out", str(folder)]
    return main(["compare", *base, *arguments, *QUICK])


def read(folder: Path) -> dict[tuple[str, str], list[dict[str, str]]]:
    table: dict[tuple[str, str], list[dict[str, str]]] = {}
    with (folder / "compare.csv").open() as file:
        for row in csv.DictReader(file):
            table.setdefault((row["algorithm"], row["models"]), []).append(row)
    return table


@pytest.mark.slow
def test_the_papers_five_algorithms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = configs("fedavg", "cgsv", "shapfed_wa", "shapfed")
    assert compare(tmp_path, *given, "--trainer.max_epochs", "2") == 0
    found = read(tmp_path)
    names = ["standalone", "fedavg", "cgsv", "shapfed_wa", "shapfed"]
    assert sorted(found) == sorted((name, models) for name in names for models in ("received", "trained", "global"))
    for name in names:
        assert [row["client"] for row in found[name, "received"]] == list("01234")
        for row in found[name, "received"] + found[name, "trained"]:
            assert 0 <= float(row["accuracy"]) <= 1
    accuracy = {key: [row["accuracy"] for row in value] for key, value in found.items()}
    assert accuracy["standalone", "received"] == accuracy["standalone", "trained"]
    assert accuracy["fedavg", "received"] == accuracy["fedavg", "global"] * 5
    assert len(set(accuracy["fedavg", "trained"])) > 1
    assert len(set(accuracy["shapfed", "received"])) > 1
    out = capsys.readouterr().out
    assert "fairness" in out
    assert "Balanced accuracy" in out
    assert "args parameter" not in out
    for name in names:
        assert list((tmp_path / name).rglob("contributions.csv")) or name == "standalone"


def test_everybody_starts_from_the_same_weights_and_runs_repeat(tmp_path: Path) -> None:
    given = [*configs("fedavg"), "--config", str(CONFIGS / "fedavg.yaml"), "--trainer.max_epochs", "1"]
    assert compare(tmp_path, *given) == 0
    found = read(tmp_path)
    first, second = (
        [{k: v for k, v in row.items() if k in ("client", *MEASURES)} for row in found[name, "trained"]]
        for name in ("fedavg", "fedavg_2")
    )
    assert first == second
    # After one round nobody has received anything before training: standalone clients trained the same.
    alone = [{k: v for k, v in row.items() if k in ("client", *MEASURES)} for row in found["standalone", "trained"]]
    assert alone == first


def test_coalitions_are_counted(tmp_path: Path) -> None:
    assert compare(tmp_path, *configs("fedsv"), "--trainer.max_epochs", "1", "--federation.sampler", "null") == 0
    (row, *_) = read(tmp_path)["fedsv", "received"]
    assert int(row["evaluations"]) == 32  # two metrics ask for all coalitions of five clients, and share them


def test_other_partitions_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("data: {partitioner: {class_path: IIDPartitioner, init_args: {num_clients: 3}}}\n")
    given = [*configs("fedavg"), "--config", str(other), "--trainer.max_epochs", "1"]
    assert compare(tmp_path, *given) == 2
    assert "deals the data out to the clients otherwise" in capsys.readouterr().err


def test_own_models_are_those_of_the_loop(tmp_path: Path) -> None:
    loop = FederatedLoop(
        FedAvg(),
        personalizer=Standalone(),
        sampler=UniformSampler(1),
        evaluation=ClientEvaluation(keep_trained=True),
        seed=1,
    )
    own, data, module = OwnModels(loop), toy_data(), Plain()
    initial = flsv.ParameterSpace(module).read(module)
    fit(loop, tmp_path, module, data, rounds=2, callbacks=[own])
    x, y = (torch.cat(parts) for parts in zip(*data.test_dataloader()))
    module.eval()
    assert 1 <= len(loop.trained) <= 2  # somebody was never drawn
    received = loop.received()
    for client in range(3):
        assert torch.equal(received[client], loop.trained.get(client, initial))
        loop.space.write(module, received[client])
        with torch.no_grad():
            logits = module(x)
        right = logits.argmax(1) == y
        area = roc_auc_score(y, logits.double().softmax(1), multi_class="ovr")
        balanced = torch.stack([right[y == label].double().mean() for label in range(3)]).mean()
        for models in ("received", "trained"):
            assert own.scores[models]["accuracy"][client].item() == pytest.approx(right.double().mean().item())
            assert own.scores[models]["balanced_accuracy"][client].item() == pytest.approx(balanced.item())
            assert own.scores[models]["auroc"][client].item() == pytest.approx(area, abs=1e-6)


def outcome(name: str, accuracy: list[float], evaluations: int = 0) -> Outcome:
    clients = [*accuracy, *accuracy, sum(accuracy) / len(accuracy)]
    kinds = ["received"] * len(accuracy) + ["trained"] * len(accuracy) + ["global"]
    table = DataFrame({"models": kinds, **dict.fromkeys(MEASURES, clients)})
    return Outcome(name, table.assign(seconds=1.5, evaluations=evaluations), names=("0", "1"))


def test_tables() -> None:
    outcomes = [
        outcome("standalone", [0.75, 0.5]),
        outcome("fedavg", [0.625, 0.625]),
        outcome("fair", [0.875, 0.625], evaluations=4),
    ]
    cells = table(outcomes, "accuracy")
    assert [*cells] == ["standalone", "fedavg", "fair"]
    assert cells.loc["client 0"].tolist() == ["75.0", "62.5 (-12.5)", "87.5 (+12.5)"]
    assert cells.loc["fairness"].tolist() == ["-", "-", "1.00"]
    assert cells.loc["global"].tolist() == ["-", "62.5", "75.0"]
    assert cells.loc["coalitions"].tolist() == ["0", "0", "4"]


@pytest.mark.slow
def test_what_is_done_is_kept_for_the_same_experiment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, file = np.random.default_rng(0), tmp_path / "data.npz"
    labels = {"train_labels": np.arange(90) % 3, "test_labels": np.arange(30) % 3}
    pixels = {"train_images": rng.random((90, 6, 6)), "test_images": rng.random((30, 6, 6))}
    np.savez(file, **labels, **pixels)
    config = tmp_path / "data.yaml"
    config.write_text(yaml.safe_dump({"data": {"source": str(file), "partitioner": {"class_path": "IIDPartitioner"}}}))
    base = [
        "compare",
        "--base",
        str(CONFIGS / "digits.yaml"),
        "--base",
        str(config),
        "--out",
        str(tmp_path / "out"),
    ]
    command = [*base, *configs("fedavg", "cgsv"), *QUICK, "--trainer.max_epochs", "1"]
    ran: list[str] = []
    dying = ["cgsv"]
    before = compare_module.run

    def dies(name: str, *rest: Any) -> Outcome:
        ran.append(name)
        if name in dying:
            raise KeyboardInterrupt(dying.pop())
        return before(name, *rest)

    monkeypatch.setattr(compare_module, "run", dies)
    assert main(command) == 130
    assert main(command) == 0
    assert ran == ["standalone", "fedavg", "cgsv", "cgsv"]
    assert "Run 2 of 3: fedavg, done before" in capsys.readouterr().out
    tables = {path: path.read_bytes() for path in (tmp_path / "out").glob("compare.*")}
    assert main(command) == 0
    assert len(ran) == 4
    assert tables == {path: path.read_bytes() for path in tables}
    # Another option, other inputs: all of it is run anew.
    assert main([*command, "--federation.optimizer_state", "persist"]) == 0
    assert len(ran) == 7
    pixels["test_images"][0, 0, 0] += 0.1
    np.savez(file, **labels, **pixels)
    ran.clear()
    assert main(command) == 0
    assert ran == ["standalone", "fedavg", "cgsv"]


def test_own_tests_are_each_clients_own(tmp_path: Path) -> None:
    """The received models' scores are those that the loop finds, and so does the mean of their accuracies."""
    loop = FederatedLoop(
        FedAvg(), personalizer=Standalone(), evaluation=ClientEvaluation(every=2, keep_trained=True), seed=1
    )
    own, data, module = OwnModels(loop, tests="own"), toy_data(), Plain()
    fit(loop, tmp_path, module, data, rounds=2, callbacks=[own])
    assert loop.client_accuracy is not None
    for measure in MEASURES:
        torch.testing.assert_close(own.scores["received"][measure].float(), loop.client_scores[measure])
    server, right = loop.space.read(module), []
    module.eval()
    for client in range(3):
        x, y = (torch.cat(parts) for parts in zip(*data.client_loader(client, "test")))
        right.append((module(x).argmax(-1) == y).double().mean().item())
    assert torch.equal(server, loop.space.read(module))
    assert own.scores["global"]["accuracy"].item() == pytest.approx(sum(right) / 3)


def test_own_tests_need_test_samples(tmp_path: Path) -> None:
    loop = FederatedLoop(evaluation=ClientEvaluation(keep_trained=True), seed=1)
    with pytest.raises(ConfigurationError, match=r'tests="own" .* clients \[0, 1, 2\] have none'):
        fit(loop, tmp_path, data=toy_data(client_test=0.0), callbacks=[OwnModels(loop, tests="own")])
