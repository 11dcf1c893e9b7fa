"""Lightning's private names that flsv uses: a new version of Lightning may change them."""

import ast
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

import flsv

PACKAGE = Path(flsv.__file__).parent
#: Where a private name is read outside of flsv/_lightning, and why.
ELSEWHERE = {
    # Utilities import no other package of flsv.
    ("utilities/classifier_head.py", "_trainer"),
    # A patch: Lightning's setter would also replace the Trainer of the module's layers.
    ("vmap/row_step.py", "_trainer"),
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def parts_of_a_trainer():
    trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    return [trainer, trainer.strategy, trainer.fit_loop, trainer.fit_loop.epoch_loop, BoringModel()]


@pytest.fixture(scope="module")
def attributes():
    """What a Trainer, its loops and a module hold: code may also name these in texts."""
    names = {name for part in parts_of_a_trainer() for name in vars(part)}
    return {name for name in names - vars(nn.Module()).keys() if is_private(name)}


@pytest.fixture(scope="module")
def names(attributes):
    """The attributes, and methods and properties."""
    inherited = {*dir(nn.Module)}
    of_classes = {name for part in parts_of_a_trainer() for name in dir(type(part))}
    return attributes | {name for name in of_classes - inherited if is_private(name)}


def private_names_in(source, names, attributes):
    """Names that are read of another object than ``self``, and attributes that a text names.

    Example:
        >>> private_names_in("vars(trainer)['_default_root_dir'] = fit._loop._run", {"_run"}, {"_default_root_dir"})
        ['_default_root_dir', '_run']
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in names:
            owner = getattr(node.value, "id", "")
            if owner not in ("self", "cls"):
                found.add(node.attr)
        if isinstance(node, ast.Constant) and node.value in attributes:
            found.add(node.value)
    return sorted(found)


@pytest.mark.slow
def test_private_names_of_lightning_are_read_in_one_package(names, attributes):
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "_lightning":
            file = path.relative_to(PACKAGE).as_posix()
            for name in private_names_in(path.read_text(encoding="utf-8"), names, attributes):
                found.add((file, name))

    assert found == ELSEWHERE, "move these to flsv/_lightning, with the reason"
