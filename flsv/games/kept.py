"""KeptUtility: keeps a game's utilities on disk, for coalitions that take minutes to train."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flsv._lightning.durable import append, replacing, whole_lines
from flsv.errors import ConfigurationError
from flsv.functional.shapley.game import Utility
from flsv.participants import ALONE, Ranks

Members = tuple[int, ...]


class KeptUtility:
    """``utility(masks: bool [K, n]) -> float64 [K]``: reads known utilities from a file and asks another utility for
    the rest.

    As many coalitions as there are ranks are asked for at a time, and what they came to is written before the next
    ones: a killed process loses no more than those.

    Args:
        utility: the game, such as a :class:`flsv.games.RetrainedUtility`.
        path: of the file, JSON lines, the first of which is ``settings``.
        settings: what the answers hang on. A file of other settings is refused.
        ranks: those of ``utility``: all of them ask alike, the first one writes.
        told: called with how many coalitions are known and how many were asked for, after every answer.

    Attributes:
        known: members to utility.

    Raises:
        ConfigurationError: the file is one of other settings, or none of this kind.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "game.jsonl"
        >>> masks = torch.tensor([[True, False], [True, True]])
        >>> KeptUtility(lambda masks: masks.sum(1).double(), path, {"metric": "size"})(masks)
        tensor([1., 2.], dtype=torch.float64)
        >>> KeptUtility(lambda masks: masks.sum(1) / 0, path, {"metric": "size"})(masks)
        tensor([1., 2.], dtype=torch.float64)
    """

    def __init__(
        self,
        utility: Utility,
        path: Path,
        settings: Mapping[str, Any],
        ranks: Ranks = ALONE,
        told: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        self._utility, self._path, self._ranks, self._told = utility, path, ranks, told
        self.known: dict[Members, float] = {}
        head = {"settings": dict(settings)}
        lines = _kept(path) if ranks.rank == 0 else []
        lines = ranks.from_rank(0, lines, "the trainings that are kept")
        if lines:
            found = lines[0].get("settings")
            if found != head["settings"]:
                differ = [k for k in {**head["settings"], **(found or {})} if (found or {}).get(k) != settings.get(k)]
                raise ConfigurationError(
                    f"{path} holds trainings of other settings ({', '.join(sorted(differ)) or 'none are told'}). Use "
                    "those, or move the file away."
                )
            self.known = {tuple(line["members"]): float(line["utility"]) for line in lines[1:]}
        if ranks.rank == 0:
            # Also cuts off a line that a kill has left unfinished.
            with replacing(path) as file:
                file.write(b"".join(_line(each) for each in (lines or [head])))

    def __call__(self, masks: Tensor) -> Tensor:
        """float64 ``[K]``. What is not finite is told and not kept.

        Raises:
            ConfigurationError: the file has trainings of players that there are not.
        """
        beyond = [members for members in self.known if members and members[-1] >= masks.shape[1]]
        if beyond:
            raise ConfigurationError(
                f"{self._path} has a training of {list(beyond[0])}, expected players 0 to {masks.shape[1] - 1}. {_AWAY}"
            )
        coalitions = [tuple(mask.nonzero().flatten().tolist()) for mask in masks]
        first = {members: i for i, members in reversed(list(enumerate(coalitions)))}
        missing = sorted(i for members, i in first.items() if members not in self.known)
        for start in range(0, len(missing), self._ranks.size):
            rows = missing[start : start + self._ranks.size]
            values = self._utility(masks[rows]).detach().double().tolist()
            new = dict(zip([coalitions[i] for i in rows], values))
            self.known |= new
            if self._ranks.rank == 0:
                kept = {members: value for members, value in new.items() if math.isfinite(value)}
                lines = [_line({"members": list(members), "utility": value}) for members, value in kept.items()]
                append(self._path, b"".join(lines))
            self._told(len(first) - len(missing) + start + len(rows), len(first))
        return torch.tensor([self.known[members] for members in coalitions], dtype=torch.float64)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _kept(path: Path) -> list[dict[str, Any]]:
    """The settings and the trainings, as they were written; a last line that a kill cut short is left out."""
    found: list[dict[str, Any]] = []
    for number, text in enumerate(whole_lines(path) if path.is_file() else (), 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{path}, line {number}: {error}. {_AWAY}") from error
        known = isinstance(line, dict) and (_is_training(line) if found else isinstance(line.get("settings"), dict))
        if not known:
            what = '{"members": [0, 2], "utility": 0.5}' if found else '{"settings": {...}}'
            raise ConfigurationError(f"{path}, line {number} is {text[:60]!r}, expected such as {what}. {_AWAY}")
        found.append(line)
    return found


def _is_training(line: Mapping[str, Any]) -> bool:
    members, utility = line.get("members"), line.get("utility")
    if not isinstance(members, list) or not isinstance(utility, int | float):
        return False
    players = all(type(member) is int and member >= 0 for member in members)
    return players and members == sorted(set(members)) and math.isfinite(utility)


_AWAY = "Move the file away: its trainings are then done again."
