"""``python tools/bench.py``, as a user types it."""

import importlib
import sys

import pandas
import pytest
import yaml
from bench import main

from benchmark.federation import FOLDER
from helpers.runs import read_rows


@pytest.fixture
def federation_file(tmp_path):
    """Three clients of the digits, one of whom has the wrong labels; two rounds."""
    sections = yaml.safe_load((FOLDER / "digits_sizes.yaml").read_text())
    partitioner = {
        "class_path": "flsv.data.SizePartitioner",
        "init_args": {"proportions": [3, 5, 2], "seed": 1},
    }
    noise = {"class_path": "flsv.data.ClosedSetLabelNoise", "init_args": {"clients": [1]}}
    sections["data"] |= {"partitioner": partitioner, "corruptions": [noise]}
    sections["data"]["splits"]["max_samples"] = 160
    sections["rounds"] = 2
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(sections))

    return str(path)


METRIC = """
import torch
from flsv.metrics import ContributionMetric

class Mine(ContributionMetric):
    is_differentiable, higher_is_better, full_state_update = False, True, False

    def init_states(self, num_clients, num_classes):
        pass

    def update(self, client_ids):
        self.rounds += 1
        {statement}

    def compute(self):
        return {scale} * torch.arange(3.0)
"""


@pytest.mark.slow
@pytest.mark.long
def test_bench_stores_values_of_a_users_metric_and_prints_its_errors(
    federation_file, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    values_file = out / "values.csv"
    monkeypatch.syspath_prepend(tmp_path)
    command = ["--federations", federation_file, "--seeds", "1", "--truth-seeds", "2"]
    command += ["--out", str(out), "-q", "--metric", "edited_metric.Mine"]

    def run_with_edited_metric(statement="", scale=1):
        """The status, and what is printed as an error."""
        source = METRIC.format(statement=statement, scale=scale)
        (tmp_path / "edited_metric.py").write_text(source)
        sys.modules.pop("edited_metric", None)
        importlib.invalidate_caches()
        status = main(command)

        return status, capsys.readouterr().err

    def stored_values():
        if not values_file.is_file():
            return []
        values = []
        for row in read_rows(values_file):
            if row["metric"] == "Mine":
                numbers = row["values"].lstrip("'")  # as a spreadsheet must not compute
                values += map(float, numbers.split())
        return values

    status, printed = run_with_edited_metric("torch.ones(2) + torch.ones(3)")
    assert status == 1
    assert "Mine has no value in mine, seed 0: Traceback" in printed
    assert "RuntimeError: The size of tensor a (2) must match" in printed
    assert stored_values() == []

    # Corrected, edited, with the same code again.
    success = (0, "")
    assert run_with_edited_metric() == success
    assert stored_values() == [0, 1, 2]
    assert run_with_edited_metric(scale=-2) == success
    assert stored_values()[3:] == [0, -2, -4]

    content = values_file.read_bytes()
    assert run_with_edited_metric(scale=-2) == success
    assert values_file.read_bytes() == content

    # Baselines stand beside it.
    scores = pandas.read_csv(out / "scores.csv")
    assert set(scores["metric"]) == {"Mine", "size", "training_loss", "cgsv", "fedsv_samples"}


def test_two_classes_of_one_name_are_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("first_lab", "second_lab"):
        code = METRIC.format(statement="pass", scale=1)
        (tmp_path / f"{module}.py").write_text(code)

    names = ["--metric", "first_lab.Mine", "--metric", "second_lab.Mine"]
    status = main([*names, "--out", str(tmp_path / "out")])

    assert status == 2
    assert "second_lab.Mine would both be called Mine" in capsys.readouterr().err


def test_bench_leaves_out_federations_without_data(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("FLSV_DATA_ROOT", raising=False)
    command = ["--metric", "size", "--federations", "mnist_sizes", "--out", str(tmp_path)]

    status = main(command)

    assert status == 2  # a usage error
    captured = capsys.readouterr()
    assert "mnist_sizes is left out: MNIST/raw is not there" in captured.out
    assert "there is no federation to run" in captured.err
