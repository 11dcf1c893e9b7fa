"""State that a site keeps between rounds, in a folder per run."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flsv._lightning.durable import replacing
from flsv.engines.remote.messages import Packet
from flsv.errors import ConfigurationError
from flsv.report.folder import FolderLock

Kept = dict[str, Any]
#: A run that has sent nothing for so long has its state deleted when another one begins.
DAYS = 90


class StillBusy(RuntimeError):
    """The site still works on an earlier message of the same run."""


def own_secret(folder: Path) -> str:
    """Drawn once and kept in the site's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "secret"
    if not path.is_file():
        with replacing(path) as file:
            file.write(secrets.token_hex(32).encode())
        path.chmod(0o600)
    return path.read_text()


def site_key(secret: str) -> str:
    """By which a server knows this site again; it does not tell the secret."""
    return hashlib.sha256(f"{secret} key".encode()).hexdigest()


def noise_seed(secret: str, packet: Packet) -> int:
    """The seed of a round's uploads: 63 bits that only the site knows.

    A round that is asked for again has the same noise, or its mean would tell; whatever else is asked, in this run or
    in another, has other noise, or the difference would.
    """
    told = [packet.plain[name] for name in ("run", "round", "client", "seed", "counted")]
    digest = hashlib.sha256(repr([secret, told]).encode())
    for name, tensor in sorted(packet.tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "little") >> 1


class SiteMemory:
    """A site's state of one run, by the visit after which it was saved.

    The server names every visit, and says after which one the site goes on: the last that has counted. So a server that
    was killed and asks for a round again, one that has not taken in what the site sent, and two that go on from one
    checkpoint are given what fits them, or are told that it is no longer there.

    Args:
        folder: the site's own; made where it is missing.
        run: the run's name, 16 hexadecimal digits.

    Raises:
        ConfigurationError: this is no run's name.

    Example:
        >>> import tempfile
        >>> memory = SiteMemory(Path(tempfile.mkdtemp()), "0123456789abcdef")
        >>> memory.keep("first", {"visits": 1}, None)
        >>> memory.keep("second", {"visits": 2}, "first")
        >>> memory.after(None), memory.after("first"), memory.after("second"), memory.after("third")
        ({}, {'visits': 1}, {'visits': 2}, None)
    """

    def __init__(self, folder: Path, run: str) -> None:
        if not isinstance(run, str) or not re.fullmatch(r"[0-9a-f]{16}", run):
            raise ConfigurationError(f"{run!r:.80} names no run: expected 16 hexadecimal digits.")
        self._folder = folder / "runs" / run
        if not self._folder.is_dir():
            _forget_silent_runs(self._folder.parent)
            self._folder.mkdir(parents=True)
        os.utime(self._folder)

    @contextmanager
    def busy(self, round_index: int) -> Iterator[None]:
        """While the site works for this run, in this round, nobody else does.

        Raises:
            StillBusy: another process does.
        """
        note = self._folder / "round"
        try:
            lock = FolderLock(self._folder)
        except ConfigurationError as error:
            raise StillBusy(note.read_text()) from error
        try:
            note.write_text(str(round_index))
            yield
        finally:
            lock.release()

    def after(self, visit: str | None) -> Kept | None:
        """The state that was saved after a visit; empty before the first one, None if it is gone."""
        return {} if visit is None else self._read().get(visit)

    def keep(self, visit: str, kept: Kept, *before: str | None) -> None:
        """Keep this under the visit's name, and of all that was kept so far what came of the visits ``before``."""
        earlier = {name: value for name, value in self._read().items() if name in before}
        with replacing(self._folder / "state.pt") as file:
            torch.save({**earlier, visit: kept}, file)

    def keep_too(self, visit: str, kept: Kept) -> None:
        """Keep this beside all that was kept so far."""
        self.keep(visit, kept, *self._read())

    def _read(self) -> dict[str, Kept]:
        path = self._folder / "state.pt"
        return torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else {}


def _forget_silent_runs(folder: Path) -> None:
    """Delete what is kept of runs that nothing was heard of for :data:`DAYS`, and that nobody is at."""
    for run in folder.iterdir() if folder.is_dir() else ():
        if time.time() - run.stat().st_mtime < DAYS * 24 * 3600:
            continue
        try:
            lock = FolderLock(run)
        except ConfigurationError:
            continue
        shutil.rmtree(run)
        lock.release()
