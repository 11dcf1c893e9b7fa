"""Runs of a Flower app to which something is done, and what they would be in one process; for chaos.py and tests."""

from __future__ import annotations

import csv
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from flower_deployment import SITES, Deployment, deployment

from flsv import FederatedDataModule, Reporting
from flsv.cli import main as flsv
from flsv.data import GroupPartitioner, Splits
from flsv.sampling import ClientSampler

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "flsv/engines/flower_template"))

from fedapp.federation import make_loop, make_module  # noqa: E402

APP = """
from fedapp.plan import PLAN
from fedapp.trouble import Diary, trouble

client = client_app(make_module, SiteData, make_loop, mods=[trouble])
server = server_app(
    make_module, make_loop, SITES, rounds=PLAN["rounds"], num_classes=10, folder=PLAN["folder"],
    timeout=PLAN["timeout"], trainer={"callbacks": [Diary()]},
)
"""
#: What sites do wrong, by site and round.
Wrong = Mapping[tuple[str, int], str]


class Absences(ClientSampler):
    """All clients but those who are missing in a round.

    Args:
        present: clients by round.
    """

    def __init__(self, present: Sequence[Sequence[int]]) -> None:
        self.present = present

    def sample(self, num_clients: int, contributions: Any, generator: Any, round_index: int = 0) -> torch.Tensor:
        return torch.tensor(self.present[round_index])

    def inclusion_probabilities(self, num_clients: int, contributions: Any, round_index: int = 0) -> torch.Tensor:
        return torch.ones(num_clients)


@dataclass
class Trial:
    """One run of the app.

    Args:
        name: its own in this deployment.
        deployed: the processes.
        rounds: how many.
        timeout: of a reply, in seconds.
        wrong: what sites do wrong, by site and round.
    """

    name: str
    deployed: Deployment
    rounds: int
    timeout: float
    wrong: Wrong = field(default_factory=dict)

    @property
    def process(self) -> str:
        """Its supervisor's name among the processes."""
        return f"run {self.name}"

    @property
    def folder(self) -> Path:
        """The server's."""
        return self.deployed.folder / "trials" / self.name

    def start(self) -> None:
        """Its server, under a supervisor (``deploy/run.py``)."""
        self.folder.mkdir(parents=True)
        wrong = {f"{site} {index}": what for (site, index), what in self.wrong.items()}
        plan = {"rounds": self.rounds, "timeout": self.timeout, "folder": str(self.folder), "wrong": wrong}
        for part in ("deploy", "fedapp"):  # a copy, for it is sent again where the run is started again
            shutil.copytree(self.deployed.folder / part, self.folder / "app" / part)
        shutil.copyfile(self.deployed.folder / "pyproject.toml", self.folder / "app" / "pyproject.toml")
        (self.folder / "app" / "fedapp" / "plan.py").write_text(f"PLAN = {plan!r}\n")
        self.deployed.supervise(self.process, self.folder / "app", self.folder / "status.json")

    def wait_until_busy(self, site: str, index: int) -> None:
        """Until this site is at work in a round, in which the plan lets it wait for :meth:`go_on`."""
        wait_until((self.folder / f"{site} {index}").exists, f"{site} in round {index} of {self.name}", self.log)

    def go_on(self, index: int = 1) -> None:
        """Let whoever waits in this round."""
        (self.folder / f"go on {index}").touch()

    def wait_for_sites(self) -> None:
        """Until all have said who they are."""
        book = self.folder / "sites.json"
        wait_until(lambda: book.is_file() and len(json.loads(book.read_text())) == 3, f"sites of {self.name}", self.log)

    def log(self) -> str:
        return (self.deployed.folder / f"{self.process}.log").read_text()

    @property
    def server(self) -> int:
        """The number of the process that serves."""
        return int((self.folder / "diary.txt").read_text().split()[-2])

    def wait(self) -> None:
        """Until its supervisor says how it has ended."""
        process = self.deployed.processes[self.process]
        wait_until(lambda: process.poll() is not None, f"the end of {self.name}", self.log, 900)
        assert process.returncode == 0, self.log()

    def table(self) -> list[dict[str, str]]:
        return _table(self.folder)

    def present(self) -> list[list[int]]:
        """Clients that took part, by round."""
        rows = [row for row in self.table() if row["metric"] == "weight"]
        return [[int(row["client"]) for row in rows if row["round"] == str(i)] for i in range(self.rounds)]

    def lost(self) -> list[tuple[str, int]]:
        """Sites and rounds that are missing."""
        present = self.present()
        return [(site, i) for i in range(self.rounds) for k, site in enumerate(SITES) if k not in present[i]]

    def incidents(self, site: str, index: int | None = None) -> str:
        """What ``run.json`` says of a site, or of it in one round."""
        found = json.loads((self.folder / "run.json").read_text())["incidents"]
        own = [each for each in found if each["client"] == SITES.index(site)]
        return "; ".join(each["what"] for each in own if index is None or each["first"] <= index <= each["last"])

    def said(self, words: str) -> str:
        """What the log has in the first line with these words, without the place in the code."""
        found = (line.strip() for line in self.log().splitlines() if words in line)
        return next(found, "").rpartition("Warning: ")[2]

    def differences(self) -> list[str]:
        """From a run in one process in which the same sites were missing in the same rounds."""
        with tempfile.TemporaryDirectory() as scratch:
            in_one_process(Path(scratch), self.rounds, self.present())
            one, other = (torch.load(f / "checkpoints" / "last.ckpt") for f in (self.folder, Path(scratch)))
            mine, theirs = _rows(self.folder), _rows(Path(scratch))
        model = one["state_dict"]
        found = [name for name, value in other["state_dict"].items() if not torch.equal(model[name], value)]
        return [*found, *(mine - theirs), *(theirs - mine)]


def in_one_process(folder: Path, rounds: int, present: Sequence[Sequence[int]]) -> None:
    """The template's federation, as a simulation."""
    groups = [i % len(SITES) for i in range(1437)]
    data = FederatedDataModule(
        "digits", GroupPartitioner(), groups=groups, batch_size=16, splits=Splits(server_val=0.0)
    )
    saving = L.pytorch.callbacks.ModelCheckpoint(folder / "checkpoints", save_last=True)
    callbacks = [make_loop().replace(sampler=Absences(present), reporting=Reporting(table=False)), saving]
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    L.Trainer(max_epochs=rounds, callbacks=callbacks, default_root_dir=folder, **quiet).fit(make_module(), data)


def _table(folder: Path) -> list[dict[str, str]]:
    with (folder / "contributions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _rows(folder: Path) -> Counter[str]:
    """Each row of a table of contributions, without names, and how often it is there."""
    columns = ("round", "metric", "client", "class", "value", "low", "high")
    return Counter(" ".join(row[name] for name in columns) for row in _table(folder))


def wait_until(seen: Callable[[], bool], what: str, log: Callable[[], str], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not seen():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not after {seconds:g} s.\n{log()}")
        time.sleep(0.2)


@contextmanager
def project(folder: Path) -> Iterator[Deployment]:
    """A deployment of the template, with what goes wrong in it."""
    flsv(["init", "--flower", str(folder), "--quiet"])
    federation = folder / "fedapp" / "federation.py"
    federation.write_text(federation.read_text().split("client = client_app")[0] + APP)
    shutil.copyfile(ROOT / "tools" / "chaos_app.py", folder / "fedapp" / "trouble.py")
    with deployment(folder, others=("Thief",)) as deployed:
        yield deployed
