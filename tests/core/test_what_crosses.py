"""Each configuration's entry names all that crosses: the page of what crosses is made of them."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import docs_site
import lightning as L
import pytest

from flsv import FederatedLoop
from flsv._lightning.patches import find_loop
from flsv.cli.parser import make_cli

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
QUICK = [
    "--trainer.max_epochs=3", "--trainer.limit_train_batches=1", "--trainer.limit_val_batches=1",
    "--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false", "--federation.reporting={table: false, figures: 0}",
]  # fmt: skip

Crossed = set[tuple[str, str]]


class Listening(L.Callback):
    def __init__(self, loop: FederatedLoop) -> None:
        self.loop = loop
        self.heard = set[tuple[str, str]]()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.heard |= self.loop.channel.names()


def documented_traffic() -> dict[str, Crossed]:
    """What crosses in either direction, by configuration."""
    crossed_by_config = {}
    for (down, up), configs in docs_site.crossings().items():
        for config in configs:
            crossed_by_config[config] = {("down", name) for name in down}
            crossed_by_config[config] |= {("up", name) for name in up}
    return crossed_by_config


DOCUMENTED = documented_traffic()
ALGORITHMS = sorted(DOCUMENTED)


@pytest.fixture
def measured_traffic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Three rounds of an algorithm on the quick start's digits, with these options before its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flsv"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # to be restored: seed_everything sets it

    def fit_and_measure(algorithm: str, *overrides: str) -> Crossed:
        options = ["--config", str(CONFIGS / "digits.yaml"), *overrides]
        options += ["--config", str(CONFIGS / f"{algorithm}.yaml"), *QUICK]
        cli = make_cli(options, run=False)
        loop = find_loop(cli.trainer.callbacks)
        listening = Listening(loop)
        cli.trainer.callbacks.append(listening)
        cli.trainer.fit(cli.model, cli.datamodule)

        assert loop.round_index == 3

        return listening.heard

    return fit_and_measure


def test_the_page_of_what_crosses_has_a_row_for_each_set_of_messages() -> None:
    page = docs_site.generated_pages()["reference/what_crosses.md"]
    assert "| `fedce` | `start`, `leave_self_out` | `update`, `leave_self_out` |" in page
    assert "| `separate` | `start` | nothing |" in page
    assert {"fedavg", "fedadam", "pfedsv"} < DOCUMENTED.keys()
    assert "value" not in DOCUMENTED


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
    measured_traffic, algorithm: str
) -> None:
    plain = ("--federation.metrics=null", "--federation.aggregator=FedAvg")
    messages = measured_traffic(algorithm, *plain)
    names: dict[str, list[str]] = {"down": [], "up": []}
    for direction, name in sorted(messages):
        names[direction].append(name)

    lines = f"# down: {names['down']}\n# up: {names['up']}"
    assert messages == DOCUMENTED[algorithm], f"configs/{algorithm}.yaml: its entry needs\n{lines}"


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedfomo", "pfedsv"])
def test_metric_that_needs_initial_models_adds_their_upload_to_the_messages(
    measured_traffic, algorithm: str
) -> None:
    # The quick start's own metric stays.
    assert measured_traffic(algorithm) == DOCUMENTED[algorithm] | {("up", "started_from")}
