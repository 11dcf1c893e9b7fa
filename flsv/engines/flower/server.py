"""server_app: a federation's rounds on Flower, run by the same loop as anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

from flsv.engines.flower.records import GridTransport
from flsv.engines.remote import Directory, RemoteData, RemoteFederation, agreement
from flsv.engines.remote.federation import PLENTY, rehearse
from flsv.engines.remote.status import told_status


def server_app(
    make_module: Callable[[], L.LightningModule],
    make_loop: Callable[[], Any],
    sites: Sequence[str],
    *,
    rounds: int,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    datamodule: Callable[[], L.LightningDataModule] | None = None,
    folder: str | Path = "flsv-runs",
    trainer: Mapping[str, Any] | None = None,
    timeout: float = 600.0,
    wait: float = 600.0,
) -> ServerApp:
    """A Flower ServerApp that runs a :class:`flsv.FederatedLoop`'s rounds on sites.

    Metrics, aggregation, personalisation, TensorBoard, ``contributions.csv`` and checkpoints are the loop's, in
    ``folder``. Where that holds a checkpoint, the run goes on from it: start a killed server again.

    A site that is away, late, or sends garbage or a model that is not finite is named and left out of the round. Its
    contributions stay what they were.

    How a run stands is in ``status.json`` of the folder: ``flwr run`` ends with status 0 whatever becomes of the run.

    Args:
        make_module: makes the LightningModule.
        make_loop: makes the loop.
        sites: the names of all sites; the first is client 0.
        rounds: how many.
        num_classes: M, for metrics per class; the server does not see labels.
        class_names: their names.
        datamodule: makes the server's own data: its validation loader is what coalition games are played on.
        folder: where the run writes.
        trainer: arguments of the server's Trainer, such as ``{"callbacks": [...]}``.
        timeout: seconds that a site has for a reply.
        wait: seconds to wait for all sites before the first round.

    Raises:
        ConfigurationError: before any site is asked, a metric or strategy that needs what a deployment does not give;
            before the first round, a site with another version, module or settings.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        where = Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        with told_status(where):
            serve(GridTransport(grid), where)

    def serve(transport: GridTransport, where: Path) -> None:
        module, loop = make_module(), make_loop()
        book, last = where / "sites.json", where / "checkpoints" / "last.ckpt"
        if not last.is_file():
            book.unlink(missing_ok=True)  # of another run
        directory = Directory(transport, sites, agreement(module, loop), book, timeout, wait)
        own = None if datamodule is None else datamodule()
        options = {"max_epochs": rounds, "num_sanity_val_steps": 0, **(trainer or {})}
        willing = RemoteData(sites, [PLENTY] * len(sites), num_classes, class_names, own)
        rehearse(make_module(), make_loop(), directory, willing, options)
        directory.gather()
        data = RemoteData(sites, [directory.sizes[i] for i in range(len(sites))], num_classes, class_names, own)
        saving = ModelCheckpoint(where / "checkpoints", save_last=True)
        callbacks = [*options.pop("callbacks", []), saving, loop.replace(engine=partial(RemoteFederation, directory))]
        # One folder for all starts of a run, so that its logs go on, too.
        logger = options.pop("logger", TensorBoardLogger(where, name="", version=""))
        L.Trainer(**{**options, "logger": logger, "callbacks": callbacks}).fit(
            module, data, ckpt_path=last if last.is_file() else None
        )

    return app
