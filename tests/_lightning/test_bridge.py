"""Libraries that import pytorch_lightning run under lightning, once they are told to."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import lightning as L
import pytest
from lightning.pytorch.callbacks import early_stopping

from flsv import ConfigurationError, bridge_pytorch_lightning
from flsv._lightning import bridge

SCRIPT = Path(__file__).with_name("bridged.py")
NAMES = """
import flsv
flsv.bridge_pytorch_lightning()
flsv.bridge_pytorch_lightning()
import lightning.pytorch
from lightning.pytorch.callbacks import early_stopping
before = early_stopping.__spec__
import pytorch_lightning as pl
from pytorch_lightning.callbacks.early_stopping import EarlyStopping
from pytorch_lightning.utilities.rank_zero import rank_zero_only
import pytorch_lightning.callbacks.early_stopping as theirs
assert pl is lightning.pytorch and pl.__spec__.name == "lightning.pytorch"
assert theirs is early_stopping and theirs.__spec__ is before
assert EarlyStopping is early_stopping.EarlyStopping
import lightning_fabric
assert lightning_fabric is lightning.fabric
try:
    import pytorch_lightning.nobody_has_this
except ModuleNotFoundError as error:
    assert "pytorch_lightning.nobody_has_this" in str(error)
else:
    raise AssertionError
"""


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_one_module_under_two_names() -> None:
    run("-c", NAMES)


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in bridge.COPIES]:
        del sys.modules[name]


@pytest.fixture
def not_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another test may have put the bridge there, and none finds it."""
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, bridge._Alias)])
    forget()
    yield
    forget()


def test_what_they_import_is_what_lightning_has(not_yet: None) -> None:
    bridge_pytorch_lightning()
    bridge_pytorch_lightning()
    assert len([finder for finder in sys.meta_path if isinstance(finder, bridge._Alias)]) == 1
    spec = early_stopping.__spec__
    assert importlib.import_module("pytorch_lightning") is L.pytorch
    assert importlib.import_module("pytorch_lightning.callbacks.early_stopping") is early_stopping
    assert early_stopping.__spec__ is spec
    assert L.pytorch.__spec__.name == "lightning.pytorch"
    assert importlib.import_module("lightning_fabric") is L.fabric
    with pytest.raises(ModuleNotFoundError, match=r"pytorch_lightning\.nobody_has_this"):
        importlib.import_module("pytorch_lightning.nobody_has_this")


def test_too_late(not_yet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_lightning", ModuleType("pytorch_lightning"))
    with pytest.raises(ConfigurationError, match="pytorch_lightning is imported already"):
        bridge_pytorch_lightning()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own", "neuralforecast", "pytorch_tabular"])
def test_a_federation_is_the_loop_by_hand(name: str, tmp_path: Path) -> None:
    if name != "own" and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install {name.replace('_', '-')}")
    assert "equal to the loop by hand" in run(str(SCRIPT), name, str(tmp_path))


def test_another_version_is_refused(not_yet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "version", lambda name: "1.9.5")
    monkeypatch.setattr(bridge, "COPIES", {})
    with pytest.raises(ConfigurationError, match=rf"in version 1.9.5 and lightning in {L.__version__}"):
        bridge_pytorch_lightning()
    assert not any(isinstance(finder, bridge._Alias) for finder in sys.meta_path)
