"""StoredUtility: a game whose utilities are stored on disk, for coalitions that take minutes to train."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flsv.core import ALONE, Ranks
from flsv.functional.shapley.game import Utility, first_positions
from flsv.games.members import Members, members_of
from flsv.utilities.csv_files import Cell, parse_float, parse_int
from flsv.utilities.result_file import ResultFile, members_text, read_members

#: Columns of a game's file beside the utilities, and their parsers.
COALITION: Mapping[str, Cell] = {"seed": parse_int, "coalition": read_members}
COLUMNS: Mapping[str, Cell] = {**COALITION, "utility": parse_float}


class StoredUtility:
    """Utility ``utility(masks: bool [K, n]) -> float64 [K]`` (or ``[K, C]``) that reads known values from a file and
    asks another utility for the rest.

    ``at_once`` coalitions are asked for at a time, and their values are written before the next ones: a killed process
    loses no more than those.

    Args:
        utility: the game, such as a :class:`flsv.games.RetrainedUtility`.
        path: of the file, see :class:`flsv.utilities.result_file.ResultFile`.
        settings: everything that the values depend on, except the seed. A file of other settings is refused.
        ranks: those of ``utility``: all of them ask alike, the first one writes.
        told: called with how many coalitions are known and how many were asked for, after every answer.
        at_once: coalitions that are asked for at a time. Default: as many as there are ranks.
        seed: of the trainings; a file may hold those of several.
        names: of the utility's C columns.
        known: values by column that are known from elsewhere, by members.

    Attributes:
        known: members to the values by column.

    Raises:
        ConfigurationError: the file is one of other settings or players, or none of this kind.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "game.csv"
        >>> masks = torch.tensor([[True, False], [True, True]])
        >>> StoredUtility(lambda masks: masks.sum(1).double(), path, {"metric": "size"})(masks)
        tensor([1., 2.], dtype=torch.float64)
        >>> StoredUtility(lambda masks: masks.sum(1) / 0, path, {"metric": "size"})(masks)
        tensor([1., 2.], dtype=torch.float64)
    """

    def __init__(
        self,
        utility: Utility,
        path: Path,
        settings: Mapping[str, Any],
        ranks: Ranks = ALONE,
        told: Callable[[int, int], None] = lambda done, of: None,
        at_once: int | None = None,
        seed: int = 0,
        names: Sequence[str] = ("utility",),
        known: Mapping[Members, list[float]] | None = None,
    ) -> None:
        self._at_once, self._seed, self._width = at_once or ranks.size, seed, len(names)
        self._utility, self._ranks, self._progress = utility, ranks, told
        columns = {**COALITION, **dict.fromkeys(names, parse_float)}
        self._file = ResultFile(path, columns, settings) if ranks.rank == 0 else None
        rows = [] if self._file is None else self._file.rows
        stored = {row["coalition"]: [row[name] for name in names] for row in rows if row["seed"] == seed}
        self.known: dict[Members, list[float]] = ranks.broadcast(
            0, dict(known or {}) | stored, "the trainings that are kept"
        )

    def __call__(self, masks: Tensor) -> Tensor:
        """Return the utilities of coalitions, float64 ``[K]``, or ``[K, C]`` of several columns. Values that are not
        finite are returned and not stored.

        Raises:
            ConfigurationError: the file has trainings of other players.
        """
        coalitions = members_of(masks)
        count, missing = len(set(coalitions)), list(first_positions(coalitions, self.known).values())
        for start in range(0, len(missing), self._at_once):
            rows = missing[start : start + self._at_once]
            values = self._utility(masks[rows]).detach().double().view(len(rows), self._width).tolist()
            new = dict(zip([coalitions[i] for i in rows], values))
            self.known |= new
            if self._file is not None:
                finite = {members: of for members, of in new.items() if all(map(math.isfinite, of))}
                self._file.add([self._seed, members_text(members), *of] for members, of in finite.items())
            self._progress(count - len(missing) + start + len(rows), count)
        utilities = torch.tensor([self.known[members] for members in coalitions], dtype=torch.float64)
        return utilities if self._width > 1 else utilities[:, 0]
