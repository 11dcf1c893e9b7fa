"""A stranger's trial: a metric that is written from the how-to alone is checked, and shown wherever values are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import snippets
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flsv import FederatedLoop, read_run
from flsv.report import write_report
from flsv.testing import check_metric, fits

HOWTO = Path(__file__).parents[2] / "docs/howto"


def block(page: str, holds: str) -> str:
    """The first Python block of a how-to in which this stands."""
    found = [each.text for each in snippets.blocks((HOWTO / page).read_text()) if each.language == "python"]
    return next(text for text in found if holds in text)


@pytest.fixture
def metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "my_package.py").write_text(block("own_metric.md", "class UpdateNorm"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_package", raising=False)
    import my_package  # type: ignore[import-not-found]

    return my_package.UpdateNorm


def test_it_passes_the_checks(metric: Any) -> None:
    check_metric(metric())


def test_its_values_are_shown_wherever_values_are(
    metric: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = FederatedLoop(metrics={"norm": metric()}, sampler=fits.Turns(fits.COHORTS), seed=1)
    logger = TensorBoardLogger(tmp_path, name="run", version=0)
    trainer = L.Trainer(
        max_epochs=3,
        callbacks=[loop],
        logger=logger,
        default_root_dir=tmp_path,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(fits.TinyClassifier(), fits.tiny_data())
    values = loop.contributions["norm"].tolist()
    assert values[3] != values[3]
    assert min(values[:3]) > 0
    # the terminal's table
    header = next(line for line in capsys.readouterr().out.splitlines() if "client" in line and "norm" in line)
    assert "samples" in header
    # the run's table and its file
    folder = Path(logger.log_dir)
    for frame in (loop.to_frame(), read_run(folder)):
        last = frame[frame["metric"] == "norm"].groupby("client")["value"].last()
        assert last.to_dict() == pytest.approx({i: values[i] for i in range(3)}, rel=1e-5)
    # TensorBoard
    tags: dict[str, float] = {}
    for events in folder.rglob("events*"):
        seen = EventAccumulator(str(events.parent)).Reload()
        for tag in seen.Tags()["scalars"]:
            tags[f"{events.parent.name} {tag}"] = seen.Scalars(tag)[-1].value
    shown = [value for tag, value in tags.items() if "norm" in tag]
    assert any(value == pytest.approx(values[0], rel=1e-5) for value in shown), tags
    # the report
    assert "norm" in write_report(folder).read_text()


@pytest.mark.slow
def test_the_page_of_the_checks_runs_with_pytest(tmp_path: Path) -> None:
    for each in snippets.blocks((HOWTO / "check_parts.md").read_text()):
        if each.title is not None:
            (tmp_path / each.title).write_text(each.text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_parts.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
