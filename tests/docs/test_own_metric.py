"""The metric of the guide reaches all outputs. That pages' snippets run is tested in test_snippets.py."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import flsv
from flsv.federation import FederatedLoop
from flsv.report import write_report
from flsv.testing import check_metric
from helpers.fits import fit

GUIDE = Path(__file__).parents[2] / "docs" / "howto" / "own_metric.md"


def test_metric_written_from_the_guide_passes_checks_and_reaches_all_outputs(
    tmp_path, monkeypatch, capsys
):
    """What a stranger writes passes the checks of flsv's own, and its values reach all that tells of a run."""
    blocks = re.findall(
        r"```python\n(.*?)```",
        GUIDE.read_text(),
        flags=re.DOTALL,
    )
    source = next(block for block in blocks if "class UpdateNorm" in block)
    # Another test installs a package with an UpdateNorm, whose short name must have one meaning.
    (tmp_path / "of_a_stranger.py").write_text(source.replace("UpdateNorm", "StrangersNorm"))
    monkeypatch.syspath_prepend(str(tmp_path))
    kind = importlib.import_module("of_a_stranger").StrangersNorm
    check_metric(kind())

    loop = FederatedLoop(
        metrics={"norm": kind()},
        seed=1,
    )
    run = tmp_path / "run"
    logger = TensorBoardLogger(tmp_path, name="", version="run")

    fit(loop, tmp_path, logger=logger)

    values = loop.contributions["norm"]
    assert (values > 0).all()
    assert "norm" in capsys.readouterr().out

    table = flsv.read_run(run).query("metric == 'norm'")
    last_values = table.groupby("client")["value"].last()
    expected = dict(enumerate(values.tolist()))

    assert last_values.to_dict() == pytest.approx(expected)

    for client, value in enumerate(values.tolist()):
        events = EventAccumulator(str(run / f"client {client}")).Reload()
        last_event = events.Scalars("Contributions/norm")[-1]
        assert last_event.value == pytest.approx(value)

    assert "How far each client moved in its last round" in write_report(run).read_text()

    earlier = kind(num_clients=4)
    later = kind(num_clients=4)
    earlier.update(torch.tensor([0, 1]), torch.eye(2))
    later.update(torch.tensor([1, 2]), 2 * torch.eye(2))
    later.merge_state(earlier)

    assert later.compute().nan_to_num(-1).tolist() == [1, 2, 2, -1]
