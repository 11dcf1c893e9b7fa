"""What an algorithm came to in ``flsv compare``, kept from one call to the next."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from flsv._lightning.durable import replacing
from flsv.cli.own_models import Tests
from flsv.functional import collaborative_fairness
from flsv.server.identity import Identity

Models = Literal["received", "trained"]


@dataclass(frozen=True)
class Outcome:
    """What one algorithm came to.

    Args:
        name: of the algorithm.
        scores: as :attr:`OwnModels.scores`.
        seconds: of the whole fit, without the evaluation of the models.
        evaluations: coalitions that were evaluated for the algorithm's metrics; one that two of them asked for is one.
        tests: what the models were tested on, see :class:`OwnModels`.
        folder: of the run; None where there is none.
        client_names: None: their numbers.
    """

    name: str
    scores: Mapping[str, Mapping[str, Tensor]]
    seconds: float
    evaluations: int
    tests: Tests = "shared"
    folder: Path | None = None
    client_names: tuple[str, ...] | None = None

    def gains(self, alone: Outcome, measure: str, models: Models = "received") -> Tensor:
        """``[n]``: each client's score minus what it has alone."""
        return self.scores[models][measure] - alone.scores[models][measure]

    def fairness(self, alone: Outcome, measure: str, models: Models = "received") -> float:
        """Collaborative fairness; NaN where all clients end up with equally good models."""
        return float(collaborative_fairness(alone.scores[models][measure], self.scores[models][measure]))

    def keep(self, path: Path, identity: Identity) -> None:
        """Write it into a file, with what it is of."""
        scores = {models: {name: t.tolist() for name, t in each.items()} for models, each in self.scores.items()}
        folder = None if self.folder is None else os.path.relpath(self.folder, path.parent)
        kept = {**vars(self), "scores": scores, "folder": folder}
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps({**identity.plain(), "outcome": kept}, indent=1).encode())

    @classmethod
    def kept(cls, path: Path, identity: Identity) -> Outcome | None:
        """What :meth:`keep` wrote; None where there is no such file, or it is of another experiment."""
        if Identity.read(path) != identity:
            return None
        kept = json.loads(path.read_text(encoding="utf-8"))["outcome"]
        kept["folder"] = None if kept["folder"] is None else path.parent / kept["folder"]
        kept["client_names"] = None if kept["client_names"] is None else tuple(kept["client_names"])
        scores = {models: {n: torch.tensor(v).double() for n, v in of.items()} for models, of in kept["scores"].items()}
        return cls(**{**kept, "scores": scores})
