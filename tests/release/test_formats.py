"""Run folders that an earlier version of flsv has written, each read by this one."""
# format_1 is what 2.0.0.dev0 left of these commands, without TensorBoard's files and the best checkpoint:
#   flsv fit --config quickstart --data.partitioner.init_args.num_clients 3 --data.splits.max_samples 300 \
#     --model.init_args.network_args '{hidden: [4]}' --trainer.max_epochs 2 --trainer.default_root_dir runs
#   flsv retrain runs/lightning_logs/version_0 --seeds 1 --trainings singles
# A later format gets a folder beside it. None is ever written anew.

import re
import shutil
from importlib import metadata
from pathlib import Path

import pytest

import flsv
from flsv.cli import main
from flsv.utilities import formats
from flsv.utilities.errors import VersionWarning
from flsv.utilities.formats import package_versions
from helpers.pages import text_of_page
from helpers.retrained import retrained_values
from helpers.runs import read_rows

FOLDERS = sorted(Path(__file__).parent.glob("format_*"))
RETRAIN = ["retrain", "--seeds=1", "--trainings=singles"]


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def stored_run(request, tmp_path):
    return Path(shutil.copytree(request.param, tmp_path / "run"))


def read_contributions(run: Path, before_round: int) -> list[tuple[str, ...]]:
    """Return the cells of a round-wise metric in a run's table."""
    table = []
    for row in read_rows(run / "contributions.csv"):
        metric = row.pop("metric")
        is_earlier = int(row["round"]) < before_round
        if metric == "cssv" and is_earlier:
            table.append(tuple(row.values()))

    return table


def test_stored_version_is_that_of_the_code():
    """Not that of the metadata, which a checkout keeps from when it was installed."""
    assert package_versions()["flsv"] == flsv.__version__


def test_checkout_that_is_not_installed_has_a_version(monkeypatch):
    installed = metadata.version

    def version_of_others(name: str) -> str:
        if name == "flsv":
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(formats, "version", version_of_others)

    assert package_versions()["flsv"] == flsv.__version__


@pytest.mark.slow
def test_run_of_an_earlier_version_goes_on_from_its_checkpoint(stored_run, tmp_path):
    config = stored_run / "config.yaml"
    checkpoint = stored_run / "checkpoints" / "last.ckpt"
    command = [
        "fit",
        f"--config={config}",
        f"--ckpt_path={checkpoint}",
        f"--trainer.default_root_dir={tmp_path / 'resumed'}",
        "--trainer.max_epochs=3",
        "--quiet",
    ]

    assert main(command) == 0

    resumed = tmp_path / "resumed" / "lightning_logs" / "version_0"
    stored = read_contributions(stored_run, before_round=2)

    assert stored
    assert read_contributions(resumed, before_round=2) == stored
    assert len(read_contributions(resumed, before_round=3)) == len(stored) * 3 / 2


@pytest.mark.slow
def test_values_by_retraining_of_an_earlier_version_are_computed_again_and_kept(stored_run, capsys):
    assert main(["report", str(stored_run)]) == 2

    message = " ".join(capsys.readouterr().err.split())
    assert "has values of flsv 2.1 or earlier" in message
    assert f"flsv retrain {stored_run}" in message

    assert main([*RETRAIN, str(stored_run)]) == 0
    assert main(["report", str(stored_run)]) == 0
    assert "client 2" in text_of_page(stored_run / "report.html")

    earlier_values = [float(row["value"]) for row in read_rows(stored_run / "retrained.csv")]
    assert retrained_values(stored_run) == pytest.approx(earlier_values, abs=1e-6)

    # With another version of a package they are used, and that is told.
    runs = stored_run / "retrained" / "runs.csv"
    text = runs.read_text().replace('"version of torch": "', '"version of torch": "1.')
    runs.write_text(text)

    with pytest.warns(VersionWarning, match=r"\(.*torch is .* and was"):
        assert main([*RETRAIN, str(stored_run)]) == 0
    assert runs.read_text() == text

    assert main([*RETRAIN, str(stored_run), "--strict"]) == 2
    assert re.search(r"error: .*runs\.csv .*torch is .* and was 1\.", capsys.readouterr().err)
    assert runs.read_text() == text
