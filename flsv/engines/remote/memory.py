"""What a site keeps between rounds, in a file of its own."""

from __future__ import annotations

import secrets
import warnings
from pathlib import Path
from typing import Any

import torch

from flsv._lightning.durable import replacing

Kept = dict[str, Any]


def own_seed(folder: Path) -> int:
    """A secret of the site's, drawn once and kept in its folder: a round that is asked for again has the same noise, or
    its mean would tell."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "seed"
    if not path.is_file():
        with replacing(path) as file:
            file.write(str(secrets.randbits(63)).encode())
        path.chmod(0o600)
    return int(path.read_text())


class SiteMemory:
    """The states of the last two rounds that a site took part in.

    Two, because a server that was killed goes on from its last checkpoint and asks for a round again: the site then
    begins where it stood before that round. Likewise where the server has not taken in what the site sent, because it
    came late or was left out: what a site keeps and what the server knows of it stay in step.

    Args:
        folder: the site's own; made where it is missing.
        federation: which run the state belongs to. Another run's is not read.

    Example:
        >>> import tempfile
        >>> memory = SiteMemory(Path(tempfile.mkdtemp()), "run")
        >>> memory.write(3, {"visits": torch.tensor(1)})
        >>> memory.before(4), memory.before(3)
        ({'visits': tensor(1)}, {})
        >>> memory.before(4, counted=2)
        {}
    """

    def __init__(self, folder: Path, federation: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._federation = folder / "state.pt", federation

    def before(self, round_index: int, counted: int | None = None) -> Kept:
        """What was kept of the last round before this one; empty if there was none.

        Args:
            round_index: this round.
            counted: the last one that the server has taken in: later ones are as if they had not been. None: all are.

        Warns:
            UserWarning: what was kept of ``counted`` is not there any more.
        """
        rounds = self._before(round_index, counted)
        if counted is not None and 0 <= counted < round_index and counted not in rounds:
            had = f"that of round {max(rounds)}" if rounds else "nothing"
            warnings.warn(
                f"{self._path} no longer holds what was kept of round {counted}, the last that the server has counted: "
                f"this site goes on from {had}. What it keeps (control variates, a model of its own) may not fit the "
                "server's any more.",
                stacklevel=2,
            )
        return rounds[max(rounds)] if rounds else {}

    def write(self, round_index: int, kept: Kept, counted: int | None = None) -> None:
        """Keep it as this round's. What was kept of this round or later ones, or did not count, is forgotten."""
        rounds = self._before(round_index, counted)
        last: dict[int, Kept] = {index: rounds[index] for index in sorted(rounds)[-1:]}
        with replacing(self._path) as file:
            torch.save({"federation": self._federation, "rounds": last | {round_index: kept}}, file)

    def _before(self, round_index: int, counted: int | None) -> dict[int, Kept]:
        limit = round_index - 1 if counted is None else min(round_index - 1, counted)
        return {index: value for index, value in self._read().items() if index <= limit}

    def _read(self) -> dict[int, Kept]:
        if not self._path.is_file():
            return {}
        saved = torch.load(self._path, map_location="cpu", weights_only=True)
        return saved["rounds"] if saved["federation"] == self._federation else {}
