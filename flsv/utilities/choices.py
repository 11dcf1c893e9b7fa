"""Allowed words of arguments and of command-line options."""
# The module imports little, so that a command refuses others at once.

from typing import Literal

#: What happens to values below 0 when a budget is shared out, see :func:`flsv.allocate`.
Negatives = Literal["zero", "shift", "softmax", "refuse"]
#: On whose validation samples the models of coalitions are scored, see :mod:`flsv.games.client_evaluation`.
Evaluators = Literal["server", "clients"]
#: Which coalitions are trained, see :func:`flsv.functional.few_coalitions`.
Which = Literal[
    "auto",
    "singles",
    "pairs",
    "leave-one-out",
    "both",
    "pairs+leave-one-out",
    "pairs+leave-two-out",
    "all",
]
#: These, or halves of unlike clients, see :func:`flsv.functional.choose_halvings`.
Trainings = Literal[Which, "halves"]
