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

#: Columns of the file besides the utilities, with the functions that parse their cells.
COALITION: Mapping[str, Cell] = {"seed": parse_int, "coalition": read_members}
COLUMNS: Mapping[str, Cell] = {**COALITION, "utility": parse_float}


class StoredUtility:
    """Utility ``utility(masks: bool [K, n]) -> float64 [K]`` (or ``[K, C]``) that reads known values from a file and
    asks another utility for the rest.

    The other utility is asked for ``at_once`` coalitions at a time, and their values are written before it is asked
    again: a killed process loses at most the values of ``at_once`` coalitions.

    Args:
        utility: the game, such as a :class:`flsv.retraining.RetrainedUtility`.
        path: path of the file, see :class:`flsv.utilities.result_file.ResultFile`.
        settings: everything that the values depend on, except the seed. A file with other settings is refused.
        ranks: the processes of ``utility``: all of them call this utility with the same masks, and the first process
            writes the file.
        told: a function that is called after every answer with two numbers: of the coalitions in ``masks`` whose values
            are known, and of all coalitions in ``masks``.
        at_once: the number of coalitions that are asked for at a time. Default: the number of ranks.
        seed: seed of the trainings; a file may hold the values of several seeds.
        names: names of the utility's C columns.
        known: ``{members: values}``, values by column that are known from another source.

    Attributes:
        known: ``{members: values}``, the values by column of all coalitions that are known.

    Raises:
        ConfigurationError: the file has other settings or players, or is not a file of stored utilities.

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
        """Return the utilities of coalitions, float64 ``[K]``, or ``[K, C]`` for C columns. Values that are not finite
        are returned but not stored.

        Raises:
            ConfigurationError: the file has coalitions of other players.
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
