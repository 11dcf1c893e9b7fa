"""Fresh processes have what the program has set: globals, class options, replaced functions, environment variables."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flsv import FederatedLoop, Reporting
from flsv.metrics import ShadowShapley
from helpers import settings_imported_late, settings_of_a_program as settings
from helpers.coalitions_by_hand import forbid_forks
from helpers.fits import trainer_for
from helpers.hidden_state import SEED, make_data

Patch = pytest.MonkeyPatch


def set_a_global(patch: Patch) -> None:
    patch.setattr(settings, "FACTOR", 3.0)


def set_an_entry(patch: Patch) -> None:
    patch.setitem(settings.OPTIONS, "factor", 3.0)


def set_a_class_option(patch: Patch) -> None:
    patch.setattr(settings.Options, "factor", 3.0)


def replace_a_method(patch: Patch) -> None:
    patch.setattr(settings.Options, "scale", staticmethod(lambda: 3.0))


def replace_a_function(patch: Patch) -> None:
    patch.setattr(settings, "scale", lambda: 3.0)


def replace_a_library_function(patch: Patch) -> None:
    original = nn.functional.relu6

    def three_times(values: Tensor) -> Tensor:
        return 3 * original(values)

    patch.setattr(nn.functional, "relu6", three_times)


def set_a_global_of_a_late_import(patch: Patch) -> None:
    patch.setattr(settings_imported_late, "FACTOR", 3.0)


def set_an_environment_variable(patch: Patch) -> None:
    patch.setenv(settings.ENVIRONMENT, "3")


def set_all(patch: Patch) -> None:
    for change in KINDS.values():
        change(patch)


KINDS: dict[str, Callable[[Patch], None]] = {
    "a global": set_a_global,
    "an entry of a dictionary": set_an_entry,
    "a class option": set_a_class_option,
    "a replaced method": replace_a_method,
    "a replaced function": replace_a_function,
    "a replaced function of a library": replace_a_library_function,
    "a global of a late import": set_a_global_of_a_late_import,
    "an environment variable": set_an_environment_variable,
}


def values_of_program(folder: Path) -> Tensor:
    loop = FederatedLoop(
        metrics={"shadow": ShadowShapley(coalitions="singles", performance="negative_loss")},
        seed=SEED,
        reporting=Reporting(table=False, files=False),
    )
    trainer_for(loop, folder, 3).fit(settings.DependsOnSettings(), make_data())

    return loop.contributions["shadow"]


@pytest.fixture(scope="module")
def plain_values(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    return values_of_program(tmp_path_factory.mktemp("plain"))


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_each_change_of_the_program_changes_the_values(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_values: Tensor
) -> None:
    """Else the next test would compare nothing."""
    KINDS[kind](monkeypatch)
    assert not torch.equal(values_of_program(tmp_path), plain_values)


@pytest.mark.slow
@pytest.mark.filterwarnings("error::FutureWarning")
def test_fresh_processes_give_the_values_of_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch)
    values_of_forks = values_of_program(tmp_path / "forks")
    forbid_forks(monkeypatch)
    values_of_fresh_processes = values_of_program(tmp_path / "fresh")
    assert torch.equal(values_of_fresh_processes, values_of_forks)
