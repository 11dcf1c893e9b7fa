"""PrometheusFile: how a run stands, as a file that Prometheus' node exporter reads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import lightning as L

from flsv._lightning.durable import replacing
from flsv.participants import Channel
from flsv.round import FederationState

#: Name of each metric: what it is.
HELP = {
    "flsv_rounds": "Rounds that the run will have.",
    "flsv_rounds_done": "Rounds that are complete.",
    "flsv_round_seconds": "Duration of the last round, waiting for clients included.",
    "flsv_round_end_timestamp_seconds": "When the last round was complete.",
    "flsv_client_answered": "Whether a client's update came in the last round.",
    "flsv_client_incidents": "How often something went wrong at a client in this run.",
    "flsv_client_bytes": "What crossed between server and client in the last round.",
}


class Told(Protocol):
    """What is read: a :class:`flsv.FederatedLoop`."""

    @property
    def state(self) -> FederationState: ...

    @property
    def channel(self) -> Channel: ...


class PrometheusFile(L.Callback):
    """Writes how a run stands after every round, in Prometheus' text format.

    The node exporter serves it: ``--collector.textfile.directory=runs``. Alert on ``time() -
    flsv_round_end_timestamp_seconds``, on ``flsv_client_answered == 0``, on rising ``flsv_client_incidents``.

    Args:
        path: of the file, which ends with ``.prom``.
        loop: whose run it is.

    Example:
        >>> import tempfile
        >>> from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
        >>> path, loop = Path(tempfile.mkdtemp()) / "flsv.prom", FederatedLoop(reporting=Reporting(table=False))
        >>> loud = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        >>> callbacks = [loop, PrometheusFile(path, loop)]
        >>> trainer = L.Trainer(max_epochs=1, callbacks=callbacks, accelerator="cpu", **dict.fromkeys(loud, False))
        >>> module = ClassifierClient("mlp", num_classes=10, input_shape=(1, 8, 8))
        >>> trainer.fit(module, FederatedDataModule("digits"))
        >>> "flsv_rounds_done 1" in path.read_text()
        True
    """

    def __init__(self, path: Path, loop: Told) -> None:
        self._path, self._loop, self._began = path, loop, 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began = time.monotonic()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._path) as file:
                file.write("".join(self._lines(trainer)).encode())

    def _lines(self, trainer: L.Trainer) -> Iterator[str]:
        loop = self._loop
        names = trainer.datamodule.client_names  # type: ignore[attr-defined]
        clients, incidents = range(len(names)), [0] * len(names)
        for each in loop.state.incidents:
            incidents[each["client"]] += each["times"]
        up, down = loop.channel.bytes(clients, "up").tolist(), loop.channel.bytes(clients, "down").tolist()
        told: dict[str, dict[str, float]] = {
            "flsv_rounds": {"": trainer.max_epochs or -1},
            "flsv_rounds_done": {"": trainer.current_epoch + 1},
            "flsv_round_seconds": {"": round(time.monotonic() - self._began, 2)},
            "flsv_round_end_timestamp_seconds": {"": int(time.time())},
            "flsv_client_answered": {_label(names[i]): int(up[i] > 0) for i in clients},
            "flsv_client_incidents": {_label(names[i]): incidents[i] for i in clients},
            "flsv_client_bytes": {
                _label(names[i], way): of[i] for way, of in (("up", up), ("down", down)) for i in clients
            },
        }
        for name, values in told.items():
            yield f"# HELP {name} {HELP[name]}\n# TYPE {name} gauge\n"
            yield from (f"{name}{label} {value}\n" for label, value in values.items())


def _label(client: str, direction: str = "") -> str:
    """Example:

    >>> _label('Dr. "X"', "up")
    '{client="Dr. \\\\"X\\\\"",direction="up"}'
    """
    plain = client.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{client="{plain}"' + (f',direction="{direction}"' if direction else "") + "}"
