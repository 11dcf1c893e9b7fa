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
from helpers.fits import state_vector
from helpers.forked import Forked
from helpers.hidden_state import KINDS, MEMBERS, fit_kind, serve_utilities
from helpers.recorded import Recorded

Alone = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def train_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
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
PICKLED = ("a closure", "a global", "an open file")


def fit_with_shadow(name: str, folder: Path) -> tuple[dict[Any, float], Any, Any]:
    """The utility of each coalition, the metric and the module after the fit."""
    loop, module = fit_kind(
        KINDS[name],
        folder,
        metrics={"shadow": Recorded(coalitions=MEMBERS, performance="negative_loss")},
    )
    metric: Any = loop.metrics["shadow"]
    utilities: dict[Any, float] = {}
    if "members" in vars(metric):  # there are none if there are no values
        utilities = dict(zip(metric.members, metric.game.flatten().tolist()))

    has_values = not loop.contributions["shadow"].isnan().any()
    assert bool(utilities) == has_values

    return utilities, metric, module


def largest_difference(game: dict[Any, float], utilities: list[float]) -> float:
    return max(abs(game[members] - utility) for members, utility in zip(MEMBERS, utilities))


@pytest.mark.parametrize("name", slow_except(FAST, KINDS))
def test_every_coalition_equals_a_fit_in_its_own_process(
    tmp_path: Path, name: str, train_alone: Alone
) -> None:
    expected = train_alone(name)
    game, _, module = fit_with_shadow(name, tmp_path)

    assert largest_difference(game, expected["utilities"]) <= 1e-6
    assert torch.equal(state_vector(module), torch.tensor(expected["model"])), (
        "the metric has changed the training"
    )


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", PICKLED)
def test_coalitions_trained_in_fresh_processes_equal_own_processes_or_give_no_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, train_alone: Alone
) -> None:
    """Where the process cannot be forked."""
    monkeypatch.setattr("helpers.hidden_state.CALLS", 0)  # other tests in this process count, too
    for module in ("after_the_run", "forked_fits"):
        monkeypatch.setattr(
            f"flsv.retraining.{module}.why_not_by_forks", lambda trainer: "it is a test"
        )

    expected = train_alone(name)
    try:
        game, _, module = fit_with_shadow(name, tmp_path)
    except ConfigurationError as error:
        assert "pickled" in str(error)  # noqa: PT017 - some kinds are refused, others not
        return

    if game:
        assert largest_difference(game, expected["utilities"]) <= 1e-6
