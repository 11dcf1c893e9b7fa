"""``flsv stress`` from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from flsv.benchmark.federation import FOLDER
from flsv.cli import main


def test_one_metric_and_a_cheat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = yaml.safe_load((FOLDER / "digits_sizes.yaml").read_text())
    partitioner = {"class_path": "flsv.data.SizePartitioner", "init_args": {"proportions": [3, 5, 2], "seed": 1}}
    said["data"]["partitioner"] = partitioner
    said["data"]["splits"]["max_samples"] = 160
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**said, "rounds": 2}))
    out = tmp_path / "out"
    asked = ["stress", "--metric", "cgsv", "--attacks", "sybils", "--federations", str(path)]
    asked += ["--seeds", "1", "--clients", "1", "--out", str(out)]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "What the best cheat gains" in shown
    page = (out / "stress.md").read_text()
    assert "## Gains without a safeguard" in page
    assert "## Gains under the safeguard copies" in page
    assert "comes as two clients" in page


def test_a_wrong_federation_and_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stress", "--federations", "nowhere"]) == 2
    assert "there is no federation 'nowhere'" in capsys.readouterr().err
    assert main(["stress", "--list"]) == 0
    assert "duplication" in capsys.readouterr().out
