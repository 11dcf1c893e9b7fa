"""What people who fit from Python see: how a run ended, no warnings every round, and objects as small tables."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from toys import Plain, fit, network, toy_data

from flsv import read_run
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley


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
