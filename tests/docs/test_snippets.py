"""What the pages show, runs."""

import functools
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import docs_site
import lightning as L
import pytest

from flsv import FederatedLoop
from flsv.cli.parser import make_cli
from flsv.retraining.coalition_fit import CoalitionScoring
from helpers import pages

ROOT = Path(__file__).parents[2]
#: Pages of results show what tools and `flsv bench` print; they have tests of their own.
WRITTEN = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "results")
WRITTEN = [path for path in WRITTEN if path.name not in docs_site.MEASURED]
#: Pages whose commands start servers. What their first blocks do, test_deployment.py of each network runs.
SERVERS = [ROOT / "docs" / "deployment.md", ROOT / "docs" / "nvflare.md"]
#: Pages that test_walkthroughs.py and test_ends.py run with nothing shortened.
WALKED = {
    ROOT / "docs" / "tutorials" / "hospitals.md",
    ROOT / "docs" / "howto" / "hugging_face.md",
}
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for path in WRITTEN if path not in WALKED),
]


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own, whose modules can be imported, and fits of two rounds of one batch a client."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["flsv"])
    monkeypatch.setattr(
        sys, "meta_path", list(sys.meta_path)
    )  # a page tells libraries to import something else
    monkeypatch.setattr(L.Trainer, "fit", short(L.Trainer.fit))
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")


def short(fit: Any) -> Any:
    @functools.wraps(fit)  # the command line reads fit's signature
    def first_rounds(self: L.Trainer, *args: Any, **kwargs: Any) -> Any:
        module = args[0] if args else kwargs["model"]  # the command line gives it by name
        trains_coalitions = any(
            isinstance(callback, CoalitionScoring) for callback in self.callbacks
        )
        # These have the rounds of their order, or are tiny and as long as their checks need.
        if trains_coalitions or type(module).__module__.startswith("flsv.testing"):
            return fit(self, *args, **kwargs)

        most_rounds = 2 if kwargs.get("ckpt_path") is None else 3
        self.fit_loop.max_epochs = min(self.max_epochs or 2, most_rounds)
        self.limit_train_batches = 1
        for loop in self.callbacks:
            if isinstance(loop, FederatedLoop):
                # Figures are most of the time of so short a run; the page may use this very loop.
                reporting = replace(loop.reporting, figures=0)
                object.__setattr__(loop.config, "reporting", reporting)

        return fit(self, *args, **kwargs)

    return first_rounds


def fit_only(command: list[str]) -> None:
    """``flsv fit`` without the other subcommands' parsers and without the table."""
    if command[1] != "fit":
        pages.run_command(command)
        return

    quiet = [
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_checkpointing=false",
        "--federation.reporting.table=false",
    ]
    cli = make_cli([*command[2:], *quiet], run=False)
    cli.trainer.fit(cli.model, cli.datamodule)

    (loop,) = [
        callback for callback in cli.trainer.callbacks if isinstance(callback, FederatedLoop)
    ]
    assert loop.round_index == 2


#: Pages that train for half a minute.
LONG = ("docs/reference/federations.md", "docs/howto/look.md")


def parameters() -> list[Any]:
    """Each page, with its marks."""
    pages_with_marks = []
    for path in PAGES:
        name = path.relative_to(ROOT).as_posix()
        marks = [pytest.mark.long] if name in LONG else []
        pages_with_marks.append(pytest.param(path, id=name, marks=marks))
    return pages_with_marks


@pytest.mark.slow
@pytest.mark.parametrize("page", parameters())
def test_every_code_block_of_a_page_runs(page: Path) -> None:
    text = page.read_text()
    if "from peft" in text:
        pytest.importorskip("peft")

    assert (
        pages.run_page(text, (lambda command: None) if page in SERVERS else None)
        == text.count("```") // 2
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(algorithm, id=algorithm.configs[0]) for algorithm in docs_site.algorithms()],
)
def test_the_command_of_every_algorithm_runs(algorithm: docs_site.Algorithm) -> None:
    if "lora" in algorithm.configs:
        pytest.importorskip("peft")
    page = docs_site.algorithm_page(algorithm)
    assert pages.run_page(page, fit_only) == 2 * len(algorithm.configs)
