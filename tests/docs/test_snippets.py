"""What the pages show, runs."""

import functools
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import docs_site
import lightning as L
import pytest

from flsv import FederatedLoop
from flsv._lightning.patches import find_loop
from flsv.cli.parser import make_cli
from flsv.retraining.fit_scoring import CoalitionScoring
from helpers import pages

ROOT = Path(__file__).parents[2]
#: Pages of results show what tools print; they have tests of their own.
WRITTEN = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "results")
WRITTEN.remove(ROOT / "docs" / "benchmark.md")
#: Pages whose commands start servers. What their first blocks do, test_deployment.py of each network runs.
SERVERS = [ROOT / "docs" / "deployment.md", ROOT / "docs" / "nvflare.md"]
#: Pages that test_walkthroughs.py, test_ends.py and Flower's test_hospitals.py run with nothing shortened.
WALKED = {
    ROOT / "docs" / "tutorials" / "hospitals.md",
    ROOT / "docs" / "howto" / "hugging_face.md",
    ROOT / "docs" / "howto" / "own_algorithm.md",
    ROOT / "docs" / "howto" / "own_metric.md",
    ROOT / "docs" / "reference" / "tables_at_sites.md",
}
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for path in WRITTEN if path not in WALKED),
]


@pytest.fixture(autouse=True)
def short_fits_in_a_folder(tmp_path, monkeypatch):
    """A folder of its own, whose modules can be imported, and fits of two rounds of one batch a client."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["flsv"])
    # A copy: a page tells libraries to import something else.
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(L.Trainer, "fit", make_short_fit(L.Trainer.fit))
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")


#: Rounds of a shortened fit, and until which one goes on that resumes it.
ROUNDS = 2
ROUNDS_OF_RESUMED_FIT = 3


def make_short_fit(fit):
    """A ``Trainer.fit`` of few rounds of one batch a client."""

    @functools.wraps(fit)  # the command line reads fit's signature
    def short_fit(self, *args, **kwargs):
        module = args[0] if args else kwargs["model"]  # the command line gives it by name
        trains_coalitions = any(
            isinstance(callback, CoalitionScoring) for callback in self.callbacks
        )
        # Coalitions have the rounds of their training job. The fits of checks are tiny, and as long as checks need.
        if trains_coalitions or type(module).__module__.startswith("flsv.testing"):
            return fit(self, *args, **kwargs)

        if kwargs.get("ckpt_path") is None:
            most_rounds = ROUNDS
        else:
            most_rounds = ROUNDS_OF_RESUMED_FIT
        self.fit_loop.max_epochs = min(self.max_epochs or ROUNDS, most_rounds)
        self.limit_train_batches = 1
        for callback in self.callbacks:
            if isinstance(callback, FederatedLoop):
                draw_no_figures(callback)
        return fit(self, *args, **kwargs)

    return short_fit


def draw_no_figures(loop):
    """Change a loop's settings in place: drawing takes most of the time of a short fit."""
    reporting = replace(loop.reporting, figures=0)
    object.__setattr__(loop.config, "reporting", reporting)  # the settings are frozen


def documented_traffic():
    """Return what crosses in either direction, by configuration."""
    crossed_by_config = {}
    for (down, up), configs in docs_site.crossings().items():
        for config in configs:
            crossed_by_config[config] = {("down", name) for name in down}
            crossed_by_config[config] |= {("up", name) for name in up}
    return crossed_by_config


DOCUMENTED = documented_traffic()
#: Those whose initial models the base's metric asks for, besides.
WITH_OWN_STARTS = ("fedfomo", "pfedsv")


class Listening(L.Callback):
    def __init__(self, loop):
        self.loop = loop
        self.heard = set()

    def on_train_epoch_end(self, trainer, pl_module):
        self.heard |= self.loop.channel.names()


def run_and_listen(command):
    """``flsv fit`` without other parsers and without the table: what crosses is what the entry says."""
    if command[1] != "fit":
        pages.run_command(command)
        return

    quiet = [
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_checkpointing=false",
        "--federation.reporting.table=false",
    ]
    cli = make_cli([*command[2:], *quiet], run=False)
    listening = Listening(find_loop(cli.trainer.callbacks))
    cli.trainer.callbacks.append(listening)
    cli.trainer.fit(cli.model, cli.datamodule)

    assert listening.loop.round_index == ROUNDS
    config = command[-1]
    expected = set(DOCUMENTED[config])
    if config in WITH_OWN_STARTS:
        expected.add(("up", "started_from"))
    assert listening.heard == expected, f"configs/{config}.yaml: its entry needs another down or up"


def skip_command(command):
    pass


#: Pages that train for twenty seconds and more.
LONG = (
    "docs/reference/federations.md",
    "docs/reference/command_line.md",
    "docs/howto/look.md",
    "docs/tutorials/lightning.md",
)


def parameters():
    """Each page, with its marks."""
    pages_with_marks = []
    for path in PAGES:
        name = path.relative_to(ROOT).as_posix()
        marks = [pytest.mark.long] if name in LONG else []
        pages_with_marks.append(pytest.param(path, id=name, marks=marks))
    return pages_with_marks


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize("page", parameters())
def test_every_code_block_of_a_page_runs(page):
    text = page.read_text()
    if "from peft" in text:
        pytest.importorskip("peft")

    if page in SERVERS:
        num_blocks = pages.run_page(text, run=skip_command)
    else:
        num_blocks = pages.run_page(text)

    assert num_blocks == text.count("```") // 2


@pytest.mark.by_turn
@pytest.mark.slow
# A callback holds the loop, in coalitions' fits, too.
@pytest.mark.filterwarnings("error:.*there are no values")
@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(algorithm, id=algorithm.configs[0]) for algorithm in docs_site.algorithms()],
)
def test_the_command_of_every_algorithm_runs_and_sends_what_its_entry_says(algorithm):
    if "lora" in algorithm.configs:
        pytest.importorskip("peft")
    page = docs_site.algorithm_page(algorithm)
    num_blocks = pages.run_page(page, run=run_and_listen)
    assert num_blocks == 2 * len(algorithm.configs)
