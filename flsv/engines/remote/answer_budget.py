"""AnswerBudget: how many numbers about its samples a site has answered, over all servers and runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from flsv.engines.remote.messages import Refused
from flsv.utilities.atomic_files import locked_json

#: File in the site's folder.
BUDGET_FILE = "answers.json"
#: What a server says of its run in its messages.
_RUN_SIZE = ("clients", "rounds")


class AnswerBudget:
    """The numbers that a site has answered, in a file of its folder, and the most that it answers.

    Args:
        folder: the site's folder.
        default_limit: a function of the numbers of clients and rounds of the first run that has asked. It returns the
            most numbers if the site's policy does not limit them.

    Example:
        >>> import tempfile
        >>> budget = AnswerBudget(Path(tempfile.mkdtemp()), lambda run: 2 * run["rounds"])
        >>> budget.spend("first message", 4, {"clients": 3, "rounds": 2})
        >>> budget.spend("first message", 4, {"clients": 3, "rounds": 2})  # the same answer again
        >>> budget.spend("second message", 1, {"clients": 3, "rounds": 9})
        Traceback (most recent call last):
            ...
        flsv.engines.remote.messages.Refused: it has answered 4 numbers about its samples, and answers at most 4
    """

    def __init__(self, folder: Path, default_limit: Callable[[Mapping[str, int]], int]) -> None:
        self._path = folder / BUDGET_FILE
        self._default_limit = default_limit

    def spend(
        self,
        answer: str,
        numbers: int,
        plain: Mapping[str, Any],
        limit: int | None = None,
    ) -> None:
        """Count the numbers of an answer, once. Raise Refused, and warn the site's owner, if they exceed the limit.

        Args:
            answer: the answer's name. Equal answers have equal names.
            numbers: how many numbers the answer has.
            plain: the plain values of the server's message.
            limit: the policy's limit. None: the default one.
        """
        with locked_json(self._path, {"run": {}, "answers": {}}) as entries:
            answers = entries["answers"]
            for name in _RUN_SIZE:
                if name in plain:
                    entries["run"].setdefault(name, plain[name])
            if answer in answers or not numbers:
                return
            if limit is None:
                limit = self._default_limit(entries["run"])
            answered = sum(answers.values())
            if answered + numbers > limit:
                words = f"it has answered {answered} numbers about its samples, and answers at most {limit}"
                rank_zero_warn(
                    f"flsv: this site refuses {numbers} more, since {words}. max_answers in its policy allows more, "
                    f"for all runs together; {self._path} has the count."
                )
                raise Refused(words)
            answers[answer] = numbers
        rank_zero_info(
            f"flsv: this site has answered {answered + numbers} of at most {limit} numbers about its samples."
        )
