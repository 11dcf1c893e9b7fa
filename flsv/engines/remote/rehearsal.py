"""All that can be known to be wrong with a server's settings before any site is asked for anything."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning as L

from flsv.engines.remote.data import RemoteData
from flsv.engines.remote.federation import RemoteFederation
from flsv.engines.remote.transport import Directory

#: What every site would have to say of its samples, where nothing is wrong with them.
PLENTY = {"train": 1000, "val": 1000, "test": 1000}


class _Rehearsed(Exception):
    """Nothing is wrong."""


class _Stop(L.Callback):
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        raise _Rehearsed


def rehearse(
    module: L.LightningModule, loop: Any, directory: Directory, data: RemoteData, trainer: Mapping[str, Any]
) -> None:
    """Begin the fit as it will begin, with sites that have enough of everything, up to the first round.

    Args:
        module: of its own: it is not the one to be trained.
        loop: likewise.
        directory: of the sites; none is asked.
        data: whose sites have :data:`PLENTY`.
        trainer: arguments of the Trainer.

    Raises:
        ConfigurationError: what is wrong.
    """
    acting = loop.replace(engine=partial(RemoteFederation, directory))
    acting.write_csv = False
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come again
        options = {**trainer, **quiet, "default_root_dir": folder, "callbacks": [acting, _Stop()]}
        try:
            L.Trainer(**options).fit(module, data)
        except _Rehearsed:
            return
    raise RuntimeError("the fit has ended before its first round.")
