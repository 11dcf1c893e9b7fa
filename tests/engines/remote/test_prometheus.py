"""What Prometheus is told of a run whose sites fail."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from remote_federation import Remotely, shapfed

from flsv.engines.remote import Packet
from flsv.engines.remote.prometheus import HELP, PrometheusFile

LINE = re.compile(r'(\w+)(\{client="(?:[^"\\]|\\.)*"(?:,direction="(?:up|down)")?\})? (-?\d+(?:\.\d+)?)')


class Reading(L.Callback):
    """Keeps the file's numbers after each round, as Prometheus would read them."""

    def __init__(self, path: Path) -> None:
        self.path, self.told = path, list[dict[str, float]]()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.path.is_file():
            lines = [line for line in self.path.read_text().splitlines() if not line.startswith("#")]
            found = [LINE.fullmatch(line) for line in lines]
            assert all(found), lines
            self.told.append({f"{m[1]}{m[2] or ''}": float(m[3]) for m in found if m})


def test_rounds_sites_bytes_and_what_went_wrong(tmp_path: Path) -> None:
    path = tmp_path / "metrics.prom"
    remote = Remotely(tmp_path / "b", shapfed)

    def lose(address: int, packet: Packet, reply: Packet) -> Packet:
        lost = packet.plain.get("round") == 1 and address == 101
        return Packet("failed", {"error": "OSError"}) if lost else reply

    remote.transport.spoil = lose
    reading = Reading(path)

    class Late(PrometheusFile):
        """The loop is made with the fit."""

        def __init__(self) -> None:
            super().__init__(path, None)  # type: ignore[arg-type]

        def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            self._loop = remote.loop

    begin = time.time()
    with pytest.warns(UserWarning, match="'Lyon'.*left out"):
        remote.fit(3, callbacks=[Late(), reading])
    first, second = reading.told
    assert (first["flsv_rounds"], first["flsv_rounds_done"], second["flsv_rounds_done"]) == (3, 1, 2)
    assert [first[f'flsv_client_answered{{client="{name}"}}'] for name in ("Boston", "Lyon", "Osaka")] == [1, 1, 1]
    assert [second[f'flsv_client_answered{{client="{name}"}}'] for name in ("Boston", "Lyon", "Osaka")] == [1, 0, 1]
    assert [second[f'flsv_client_incidents{{client="{name}"}}'] for name in ("Boston", "Lyon", "Osaka")] == [0, 1, 0]
    size = 4 * sum(each.numel() for each in remote.module.parameters())
    assert first['flsv_client_bytes{client="Lyon",direction="up"}'] == size
    assert second['flsv_client_bytes{client="Lyon",direction="up"}'] == 0
    assert 0 < second["flsv_round_seconds"] < time.time() - begin
    assert begin - 1 <= second["flsv_round_end_timestamp_seconds"] <= time.time()
    text = path.read_text()
    assert all(f"# TYPE {name} gauge\n" in text and f"# HELP {name} " in text for name in HELP)
