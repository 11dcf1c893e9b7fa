"""Who imports flsv finds Lightning, jsonargparse, torch's modules and the warning filters as they were."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import importlib, logging, pkgutil, sys, warnings
import jsonargparse, lightning as L, lightning.pytorch.cli, torch, torchmetrics

PACKAGES = ("jsonargparse", "lightning", "torchmetrics", "torch.nn", "torch.optim", "torch.utils.data")


def there():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGES):
            for key, value in list(vars(module).items()):
                if callable(value) and str(getattr(value, "__module__", "")).startswith(PACKAGES):
                    found[name, key] = value
                if isinstance(value, type) and value.__module__ == name:
                    known = {k: v for k, v in vars(value).items() if callable(v) or isinstance(v, property)}
                    found |= {(name, key, k): v for k, v in known.items()}
    return found


before, filters = there(), list(warnings.filters)
known = [name for name, log in logging.root.manager.loggerDict.items() if isinstance(log, logging.Logger)]
logs = {name: (logging.getLogger(name).level, [*logging.getLogger(name).filters]) for name in known}
import flsv

modules = [each.name for each in pkgutil.walk_packages(flsv.__path__, "flsv.")]
for name in modules:
    if not name.startswith(("flsv.engines.flower", "flsv.__main__")):
        importlib.import_module(name)
after = there()
changed = [key for key, value in before.items() if after.get(key) is not value]
assert not changed, changed
ours = [each for each in warnings.filters if each not in filters]
assert not ours, ours
for name, (level, known) in logs.items():
    assert (logging.getLogger(name).level, logging.getLogger(name).filters) == (level, known), name
print(len(modules), len(before))
"""


@pytest.mark.slow
def test_importing_flsv_changes_nothing_of_others() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    modules, attributes = map(int, done.stdout.split())
    assert modules > 150
    assert attributes > 5000
