"""Modules, callbacks and data of which a copy is wrong: each coalition against a process of its own."""

import functools
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flsv.utilities.errors import ConfigurationError
from helpers import slow_except
from helpers.coalitions_by_hand import forbid_forks
from helpers.fits import state_vector
from helpers.forked import Forked
from helpers.hidden_state import KINDS, MEMBERS, fit_kind, serve_utilities
from helpers.recorded import Recorded

TrainAlone = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def train_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainAlone]:
    """Asks a process that has trained no kind for each coalition's utility, and for the model of a run without
    metrics."""
    connection, process_end = multiprocessing.Pipe()
    process = Forked(tmp_path_factory.mktemp("alone"), serve_utilities, process_end, connection)
    process_end.close()

    @functools.cache  # two tests ask for each kind
    def ask(name: str) -> dict[str, Any]:
        connection.send(name)
        return connection.recv()  # type: ignore[no-any-return]

    yield ask
    connection.send(None)

    assert process.wait()[0] == 0


#: State that the module shares, and weights that a callback swaps in.
FAST = ("a closure", "EMAWeightAveraging")


def fit_with_shadow(name: str, folder: Path) -> tuple[dict[Any, float], Any]:
    """The utility of each coalition, empty if there are no values, and the module after the fit."""
    loop, module = fit_kind(
        KINDS[name],
        folder,
        metrics={"shadow": Recorded(coalitions=MEMBERS, performance="negative_loss")},
    )
    metric: Any = loop.metrics["shadow"]
    has_values = not loop.contributions["shadow"].isnan().any()
    assert ("members" in vars(metric)) == has_values
    if not has_values:
        return {}, module
    return dict(zip(metric.members, metric.game.flatten().tolist())), module


def largest_difference(game: dict[Any, float], utilities: list[float]) -> float:
    return max(abs(game[members] - utility) for members, utility in zip(MEMBERS, utilities))


@pytest.mark.parametrize("name", slow_except(FAST, KINDS))
def test_every_coalition_equals_a_fit_in_its_own_process(
    tmp_path: Path, name: str, train_alone: TrainAlone
) -> None:
    expected = train_alone(name)
    game, module = fit_with_shadow(name, tmp_path)

    assert largest_difference(game, expected["utilities"]) <= 1e-6
    assert torch.equal(state_vector(module), torch.tensor(expected["model"])), (
        "the metric has changed the training"
    )


@pytest.mark.slow
@pytest.mark.long
def test_module_that_cannot_be_pickled_is_refused_where_the_process_cannot_be_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_forks(monkeypatch)
    with pytest.raises(ConfigurationError, match="pickled"):
        fit_with_shadow("an open file", tmp_path)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["a closure", "a global"])
def test_coalitions_trained_in_fresh_processes_equal_own_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, train_alone: TrainAlone
) -> None:
    forbid_forks(monkeypatch)
    monkeypatch.setattr("helpers.hidden_state.CALLS", 0)  # other tests in this process count, too
    expected = train_alone(name)

    game, _ = fit_with_shadow(name, tmp_path)

    assert largest_difference(game, expected["utilities"]) <= 1e-6
