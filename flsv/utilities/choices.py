"""Words that arguments of functions and options of commands allow. The module imports little, so that a command refuses
others at once."""

from typing import Literal

#: How values below 0 are treated in shares, see :func:`flsv.allocate`.
Negatives = Literal["zero", "shift", "softmax", "refuse"]
#: Whose samples coalitions' models are judged on, see :mod:`flsv.games.judges`.
Judges = Literal["server", "clients"]
#: Which coalitions are trained, see :func:`flsv.functional.few_coalitions`.
Which = Literal[
    "auto",
    "singles",
    "pairs",
    "leave-one-out",
    "both",
    "pairs+leave-one-out",
    "pairs+leave-two-out",
    "complements",
    "all",
]
#: Which samples ``flsv compare`` tests models on, see :class:`flsv.cli.compare.OwnModels`.
Tests = Literal["shared", "own"]
#: Who trains in a round of a coalition if the run draws cohorts: as many members as the run draws, or all members.
Participation = Literal["drawn", "all"]
