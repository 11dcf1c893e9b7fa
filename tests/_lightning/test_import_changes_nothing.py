"""Who imports flsv finds Lightning, jsonargparse, torch's modules and the warning filters as they were."""

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
                    found |= {(name, key, k): v for k, v in vars(value).items() if callable(v) or type(v) is property}
    return found


def logs():
    loggers = [log for log in logging.root.manager.loggerDict.values() if isinstance(log, logging.Logger)]
    return {log.name: (log.level, [*log.filters]) for log in loggers}


before, filters, loggers = there(), list(warnings.filters), logs()
import flsv

for each in pkgutil.walk_packages(flsv.__path__, "flsv."):
    networks = ("flsv.sites.flower", "flsv.sites.nvflare", "flsv.outside.flower")
    if not each.name.startswith((*networks, "flsv.__main__")):
        importlib.import_module(each.name)
after = there()
assert len(before) > 5000 and sum(name.startswith("flsv.") for name in sys.modules) > 150
assert not [key for key, value in before.items() if after.get(key) is not value]
assert not [each for each in warnings.filters if each not in filters]
assert all(logs()[name] == state for name, state in loggers.items())
"""


@pytest.mark.slow
def test_importing_flsv_leaves_lightning_torch_and_warning_filters_unchanged():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
