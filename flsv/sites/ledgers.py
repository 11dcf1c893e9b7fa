"""Ledgers of a site: the answers that it has given about its samples, and the privacy loss of its updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from flsv.privacy.accounting import gaussian_epsilon
from flsv.sites.messages import MAX_COUNT, Packet, load_packet, save_packet
from flsv.utilities.atomic_files import locked_json
from flsv.utilities.errors import Refused

#: File in the site's folder.
ANSWERS_FILE = "answers.json"
#: What a server says of its run in its messages.
_RUN_SIZE = ("clients", "rounds")


class SiteAnswers:
    """The answers that a site has given about its samples, in its folder: their contents, and the most numbers in all.

    Args:
        folder: the site's folder.
        default_limit: a function of the numbers of clients and rounds of the first run that has sent a request. It
            returns the most numbers if the site's policy does not limit them.

    Example:
        >>> import tempfile
        >>> answers = SiteAnswers(Path(tempfile.mkdtemp()), lambda run: 2 * run["rounds"])
        >>> answers.count("first message", 4, {"clients": 3, "rounds": 2})
        >>> answers.count("first message", 4, {"clients": 3, "rounds": 2})  # the same answer again
        >>> answers.count("second message", 1, {"clients": 3, "rounds": 9})
        Traceback (most recent call last):
            ...
        flsv.utilities.errors.Refused: it has answered 4 numbers about its samples, and answers at most 4
        >>> answers.save("first message", Packet("result", {"result": 0.5}))
        >>> answers.load("first message").plain
        {'result': 0.5}
    """

    def __init__(self, folder: Path, default_limit: Callable[[Mapping[str, int]], int]) -> None:
        self._path = folder / ANSWERS_FILE
        self._contents_folder = folder / "answers"
        self._default_limit = default_limit

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let no other process answer a message within this context. So nobody makes the same answer a second time
        between its count and :meth:`save`.
        """
        with FileLock(f"{self._contents_folder}.lock"):
            yield

    def load(self, name: str) -> Packet | None:
        """Return a stored answer, None if there is none of this name."""
        return load_packet(self._path_of(name))

    def save(self, name: str, answer: Packet) -> None:
        """Store an answer."""
        self._contents_folder.mkdir(exist_ok=True)
        save_packet(self._path_of(name), answer)

    def _path_of(self, name: str) -> Path:
        return self._contents_folder / f"{name}.pt"

    def count(
        self,
        name: str,
        numbers: int,
        plain: Mapping[str, Any],
        limit: int | None = None,
        first_of: str | None = None,
    ) -> None:
        """Count the numbers of an answer, once. Raise Refused, and warn the site's owner, if they exceed the limit.

        Args:
            name: the answer's name. Equal answers have equal names.
            numbers: how many numbers the answer has.
            plain: the plain values of the server's message.
            limit: the policy's limit. None: the default one.
            first_of: the beginning of names of which the first is counted, but never refused.
        """
        ledger = locked_json(
            self._path,
            empty={"run": {}, "answers": {}},
            is_valid=_are_answers,
            how_to_write=(
                'with the count in the site\'s log, as {"run": {}, "answers": {"earlier": count}}'
            ),
        )
        with ledger as entries:
            numbers_by_answer = entries["answers"]
            _store_size(entries["run"], plain)
            if name in numbers_by_answer or not numbers:
                return
            if limit is None:
                limit = self._default_limit(entries["run"])
            numbers_before = sum(numbers_by_answer.values())
            total = numbers_before + numbers
            if total > limit and not _is_first(first_of, numbers_by_answer):
                raise self._refusal(numbers, numbers_before, limit)
            numbers_by_answer[name] = numbers
        rank_zero_info(
            f"flsv: this site has answered {total} of at most {limit} numbers about its samples."
        )

    def _refusal(self, numbers: int, numbers_before: int, limit: int) -> Refused:
        """Warn the site's owner, and return the error for the server."""
        reason = f"it has answered {numbers_before} numbers about its samples, and answers at most {limit}"
        rank_zero_warn(
            f"flsv: this site refuses {numbers} more, since {reason}. max_answers in its policy allows more, "
            f"for all runs together; {self._path} has the count."
        )
        return Refused(reason)


def _store_size(run: dict[str, int], plain: Mapping[str, Any]) -> None:
    for name in _RUN_SIZE:
        if name in plain:
            run.setdefault(name, plain[name])


def _are_answers(content: Any) -> bool:
    """Return whether the content of a file is that of :data:`ANSWERS_FILE`."""
    if not isinstance(content, dict):
        return False
    run = content.get("run")
    numbers_by_answer = content.get("answers")
    if not isinstance(run, dict) or not isinstance(numbers_by_answer, dict):
        return False
    has_valid_run = run.keys() <= {*_RUN_SIZE} and all(
        _is_count(number, MAX_COUNT) for number in run.values()
    )
    return has_valid_run and all(_is_count(number) for number in numbers_by_answer.values())


def _is_count(number: Any, maximum: float = math.inf) -> bool:
    return type(number) is int and 1 <= number <= maximum


def _is_first(beginning: str | None, answers: Iterable[str]) -> bool:
    """Return whether no name of an answer starts with ``beginning``. Without a beginning, no answer is the first."""
    if beginning is None:
        return False
    return not any(name.startswith(beginning) for name in answers)


def spend_privacy(
    ledger: Path,
    noise_multipliers: Sequence[float],
    delta: float,
    max_epsilon: float | None = None,
) -> None:
    """Add the privacy loss of one more update to the total in a file. Raise Refused if it exceeds the largest epsilon.

    Args:
        ledger: the file.
        noise_multipliers: those of the Gaussian mechanisms that the update passes, none if it has no noise.
        delta: the probability that epsilon does not hold.
        max_epsilon: the largest epsilon of all updates. None: no limit.
    """
    # Gaussian mechanisms with noise multipliers sigma_i compose to one with (sum_i 1 / sigma_i^2)^(-1/2).
    inverse_square = sum(multiplier**-2 for multiplier in noise_multipliers)
    if inverse_square == 0:
        inverse_square = math.inf  # there is no noise
    locked_ledger = locked_json(
        ledger,
        empty={"updates": 0, "squares": 0.0},
        is_valid=_are_losses,
        how_to_write=(
            "from the trainings in the site's log, as "
            '{"updates": number, "squares": sum of 1 / noise_multiplier^2}'
        ),
    )
    with locked_ledger as entries:
        entries["squares"] += inverse_square
        composed_multiplier = entries["squares"] ** -0.5
        epsilon = gaussian_epsilon(composed_multiplier, rounds=1, delta=delta)
        if max_epsilon is not None and epsilon > max_epsilon:
            raise Refused(
                f"its policy sets max_epsilon={max_epsilon:g}, but one more update after {entries['updates']} would "
                f"make epsilon {epsilon:.3g}"
            )
        entries["updates"] += 1
        entries["epsilon"] = epsilon


def _are_losses(content: Any) -> bool:
    """Return whether the content of a file is that of a ledger of privacy losses."""
    if not isinstance(content, dict):
        return False
    updates = content.get("updates")
    squares = content.get("squares")
    is_sum = isinstance(squares, int | float) and squares >= 0  # not NaN
    return type(updates) is int and updates >= 0 and is_sum
