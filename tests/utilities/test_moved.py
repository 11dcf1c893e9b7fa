"""Modules that were documented under another name in 1.0."""

import sys
from importlib import import_module

import pytest

import flsv
from flsv.utilities.moved import MOVED


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_old_name_of_a_module_gives_the_module_itself(old: str, new: str) -> None:
    module = import_module(new)
    assert import_module(old) is module
    assert module.__name__ == module.__spec__.name == new


def test_module_below_an_old_package_is_not_loaded_twice() -> None:
    from flsv.clients.algorithms import ClientAlgorithm
    from flsv.clients.algorithms.base import ClientAlgorithm as also
    from flsv.training.algorithms import ClientAlgorithm as today

    assert ClientAlgorithm is today is also
    assert flsv.errors.ConfigurationError is flsv.ConfigurationError


def test_unknown_module_below_an_old_name_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module("flsv.loop.never_was")


def test_import_by_an_old_name_warns_at_the_line_that_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flsv.seeding", raising=False)
    with pytest.warns(
        DeprecationWarning, match=r"flsv\.seeding is called flsv\.utilities\.seeding.*ends in 2\.0"
    ) as said:
        import flsv.seeding  # noqa: F401
    assert said[0].filename == __file__


def test_moved_class_is_importable_from_its_old_module_with_a_warning() -> None:
    from flsv.retraining import RetrainedUtility

    with pytest.warns(DeprecationWarning, match=r"is called flsv\.retraining\.Retr.*ends in 2\.0") as said:
        assert flsv.games.RetrainedUtility is RetrainedUtility
    assert said[0].filename == __file__
    with pytest.raises(AttributeError, match="has no attribute 'NeverWas'"):
        _ = flsv.games.NeverWas
