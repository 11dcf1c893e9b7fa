"""What people who fit from Python see: how a run ended, no warnings every round, and objects as small tables."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from toys import Plain, fit, network, toy_data

from flsv import read_run
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CumulativeShapley
from flsv.report.folder import where_results_are


def test_a_fit_from_python_ends_as_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(loop, tmp_path, Plain(network(batch_norm=False)), toy_data(), rounds=3)
    said = capsys.readouterr().out
    assert "Results: " in said
    assert "Report:  flsv report " in said
    texts = [str(each.message) for each in caught]
    assert not [text for text in texts if "LeafSpec" in text or "smaller than the logging interval" in text]
    history = loop.history()
    assert sorted(history["round"].unique()) == [0, 1, 2]
    assert history.equals(read_run(loop.saver.csv))
    assert set(loop.to_frame()["round"]) == {2}
    assert "cosine" in loop.metrics["cssv"]._repr_html_()


def test_before_a_fit_there_is_something_to_show_too() -> None:
    loop = FederatedLoop(metrics={"cssv": ClassSpecificShapley()})
    with pytest.raises(ConfigurationError, match="has written no contributions"):
        loop.history()
    assert "0 rounds" in ClassSpecificShapley(3, 2)._repr_html_()


def test_a_notebook_shows_a_plot_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """``metric.plot();`` gives a notebook nothing to show."""
    interactive = pytest.importorskip("IPython")
    import torch

    shell = type("Shell", (), {"kernel": object()})()
    shown: list[object] = []
    monkeypatch.setattr(interactive, "get_ipython", lambda: shell)
    monkeypatch.setattr("IPython.display.display", shown.append)
    drawn = ClassSpecificShapley(3, 2).plot(torch.rand(3, 2))
    assert shown[0].data[:4] == b"\x89PNG"  # type: ignore[attr-defined]
    assert drawn._repr_png_() is None  # not twice
    _, axis = drawn
    ClassSpecificShapley(3, 2).plot(torch.rand(3, 2), ax=axis)
    assert len(shown) == 1


def test_without_tensorboard_no_charts_are_announced(tmp_path: Path) -> None:
    loggers = CSVLogger(tmp_path), TensorBoardLogger(tmp_path)
    told = ["\n".join(where_results_are(L.Trainer(accelerator="cpu", logger=logger))) for logger in loggers]
    assert ["Charts:" in each for each in told] == [False, True]


@pytest.mark.parametrize("metric", [ClassSpecificShapley, CumulativeShapley])
def test_what_is_shared_out_starts_at_the_model_before_the_first_round(metric: Any, tmp_path: Path) -> None:
    """A metric without a game shares nothing out, and the model is judged by its balanced accuracy."""
    module, data = Plain(network(batch_norm=False)), toy_data(server_val=0.3)
    before = copy.deepcopy(module)
    loop = FederatedLoop(metrics={"mine": metric()}, seed=1)
    fit(loop, tmp_path, module, data, rounds=2)
    x, y = (torch.cat(parts) for parts in zip(*data.val_dataloader()))
    hits = (before(x).argmax(1) == y).double()
    recalls = torch.stack([hits[y == c].mean() for c in y.unique()])
    expected = recalls.mean() if metric is ClassSpecificShapley else hits.mean()
    (start,) = loop.state.start.values()
    assert start == pytest.approx(expected.item())
