"""From the command line: what an emulated accelerator gives, beside what the CPU gives where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flsv.cli import main

pytestmark = [
    pytest.mark.skipif(not os.environ.get("FLSV_EMULATED"), reason="CUDA rounds differently"),
    pytest.mark.filterwarnings("ignore"),
]
#: The configurations of ``flsv fit``, and what else it is told.
CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "fits, and flsv retrain": ("quickstart", "--data.partitioner.num_clients=3"),
    "fits with kept momentum": ("quickstart", "--federation.optimizer_state=persist"),
    "fits judged by clients": (
        "quickstart",
        "--federation.metrics.value.init_args.judges=clients",
        "--data.splits.client_val=0.2",
    ),
    "shapfed": ("digits", "--config=shapfed"),
    "scaffold, coalitions by fits": ("digits", "--config=shadow", "--config=scaffold"),
    "pfedsv": ("digits", "--config=pfedsv"),
    "cgsv": ("digits", "--config=cgsv"),
    "games, samples at random": ("digits", "--config=fedsv"),
    "in-run": ("digits", "--config=in_run_shapley"),
    "top-k, trimmed mean": ("digits", "--config=topk", "--config=trimmed_mean"),
}
SHORT = (
    "enable_progress_bar=false",
    "enable_model_summary=false",
    "limit_train_batches=2",
    "max_epochs=2",
)


def commands_of_scenario(name: str, folder: Path) -> list[list[str]]:
    """``flsv fit`` into this folder, and what follows it."""
    run = folder / "lightning_logs" / "version_0"
    configuration, *overrides = CONFIGURATIONS[name]
    options = [f"--trainer.{option}" for option in (*SHORT, f"default_root_dir={folder}")]
    retrain = ["retrain", str(run), "--trainings", "singles", "--rounds", "1"]
    fit = ["fit", f"--config={configuration}", *overrides, *options]

    return [fit, retrain] if "retrain" in name else [fit]


def read_tables(folder: Path) -> dict[str, str]:
    return {
        path.name: path.read_text()
        for path in sorted(folder.rglob("*.csv"))
        if path.name != "metrics.csv"
    }


#: Runs commands of ``flsv`` one after the other. Its argument is their words.
RUN_COMMANDS = """
import json, sys

from flsv.cli import main

statuses = [main(command) for command in json.loads(sys.argv[1])]
sys.exit(any(statuses))
"""


@pytest.fixture(scope="module")
def runs_on_cpu(tmp_path_factory):
    """All of it in a process that knows of no accelerator."""
    folder = tmp_path_factory.mktemp("cpu")
    commands = []
    for name in CONFIGURATIONS:
        commands += commands_of_scenario(name, folder / name)
    environment = {key: value for key, value in os.environ.items() if key != "FLSV_EMULATED"}
    process = subprocess.run(
        [sys.executable, "-c", RUN_COMMANDS, json.dumps(commands)],
        env=environment,
        capture_output=True,
        text=True,
    )

    assert process.returncode == 0, process.stderr
    return folder


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_commands_on_an_emulated_device_write_files_bitwise_equal_to_the_cpu(
    tmp_path,
    monkeypatch,
    runs_on_cpu,
    name,
):
    from device.emulated import counts, put_every_trainer_on_the_device

    put_every_trainer_on_the_device(monkeypatch.setattr)
    operators = counts()["operators"]

    for command in commands_of_scenario(name, tmp_path / "run"):
        assert main(command) == 0

    assert counts()["operators"] > operators

    files = read_tables(tmp_path / "run")
    assert files == read_tables(runs_on_cpu / name)
    assert "contributions.csv" in files
    assert ("retrained.csv" in files) is ("retrain" in name)
    assert ("coalitions.csv" in files) is ("fits" in name)
