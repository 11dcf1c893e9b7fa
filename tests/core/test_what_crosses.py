"""docs/reference/what_crosses.md names all that crosses with every algorithm in configs/."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from flsv import FederatedLoop
from flsv.cli.parser import make_cli

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
NO_ALGORITHM = {"cifar10_resnet34", "digits", "fashion_mnist", "quickstart", "value"}
ALGORITHMS = sorted({path.stem for path in CONFIGS.glob("*.yaml")} - NO_ALGORITHM)
QUICK = [
    "--trainer.max_epochs=3", "--trainer.limit_train_batches=1", "--trainer.limit_val_batches=1",
    "--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false", "--federation.reporting={table: false, figures: 0}",
]  # fmt: skip

Crossed = set[tuple[str, str]]


class Listening(L.Callback):
    def __init__(self, loop: FederatedLoop) -> None:
        self.loop, self.heard = loop, set[tuple[str, str]]()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.heard |= self.loop.channel.names()


def documented() -> list[tuple[str, Crossed]]:
    """The configurations in the table's rows, and what crosses in either direction."""
    section = (ROOT / "docs" / "reference" / "what_crosses.md").read_text()
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return [
        (
            config,
            {(way, name) for way, cell in (("down", down), ("up", up)) for name in names(cell)},
        )
        for configs, down, up in rows
        for config in names(configs)
    ]


def names(cell: str) -> list[str]:
    found = re.findall(r"`(\w+)`", cell)
    assert ", ".join(f"`{name}`" for name in found) == cell.strip() or cell.strip() == "nothing"
    return found


@pytest.fixture
def crossed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Three rounds of an algorithm on the quick start's digits, with these options before its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flsv"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # to be restored: seed_everything sets it

    def run(algorithm: str, *before: str) -> Crossed:
        options = ["--config", str(CONFIGS / "digits.yaml"), *before]
        cli = make_cli(
            [*options, "--config", str(CONFIGS / f"{algorithm}.yaml"), *QUICK], run=False
        )
        (loop,) = (each for each in cli.trainer.callbacks if isinstance(each, FederatedLoop))
        listening = Listening(loop)
        cli.trainer.callbacks.append(listening)
        cli.trainer.fit(cli.model, cli.datamodule)
        assert loop.round_index == 3
        return listening.heard

    return run


def test_documented_table_of_messages_lists_every_algorithm_once() -> None:
    assert sorted(config for config, _ in documented()) == ALGORITHMS


def installed(algorithm: str) -> Any:
    missing = algorithm == "lora" and importlib.util.find_spec("peft") is None
    return pytest.param(
        algorithm, marks=pytest.mark.skipif(missing, reason="peft is not installed")
    )


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "error:.*there are no values"
)  # a callback holds the loop, in coalitions' fits, too
@pytest.mark.parametrize("algorithm", list(map(installed, ALGORITHMS)))
def test_messages_of_each_algorithm_are_those_of_the_documented_table(
    crossed, algorithm: str
) -> None:
    plain = ("--federation.metrics=null", "--federation.aggregator=FedAvg")
    assert crossed(algorithm, *plain) == dict(documented())[algorithm]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedfomo", "pfedsv"])
def test_metric_that_needs_initial_models_adds_their_upload_to_the_messages(
    crossed, algorithm: str
) -> None:
    # The quick start's own metric stays.
    assert crossed(algorithm) == dict(documented())[algorithm] | {("up", "started_from")}
