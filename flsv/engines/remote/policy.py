"""SitePolicy: limits that a site's owner sets."""

from __future__ import annotations

import importlib
import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge, Gt, Lt
from filelock import FileLock

from flsv.configuration.federation_config import FederationConfig
from flsv.core.answers import SCORE_RANGES, numbers_of_round
from flsv.core.round import started_from
from flsv.engines.remote.messages import (
    GARBLED_REPLY_ERRORS,
    TRAINING_LOSS,
    Refused,
    checked_int,
)
from flsv.games.judges import judge
from flsv.privacy import GaussianPrivacy, gaussian_epsilon
from flsv.scores import OWN_SCORES
from flsv.scores.class_scores import CLASS_SCORES
from flsv.scores.performance import ModelScore
from flsv.utilities.atomic_files import replacing
from flsv.utilities.declared import checked
from flsv.utilities.errors import listed


class ToldScore(NamedTuple):
    """The score that an answer tells, unless an argument ``performance`` names another, and on which split."""

    name: str
    split: str = "val"


#: Functions of flsv that a server may let sites compute on their data if the loop asks them, and the scores that they
#: tell, None if they tell none. A site may allow more.
QUESTIONS: Mapping[str, ToldScore | None] = {
    "flsv.personalization.pfedsv:collaborate": ToldScore("accuracy"),
    "flsv.personalization.fedfomo:mix_models": ToldScore("negative_loss"),
    "flsv.core.round:started_from": None,
    "flsv.sampling.power_of_choice:local_loss": ToldScore("negative_loss", "train"),
    "flsv.metrics.contribution_estimation:leave_self_out": ToldScore("accuracy"),
    "flsv.games.judges:judge": ToldScore("accuracy"),
    "flsv.games.judges:judge_coalitions": ToldScore("accuracy"),
}
#: Scores in which each class has a part of its own, however few its samples.
SCORES_OF_CLASSES = ("balanced_accuracy", *CLASS_SCORES)
#: The parts of a site's samples, of which it announces the numbers.
SPLITS = ("train", "val", "test")
#: Two names are like each other if this part of their letters is the same, in order.
MIN_LIKENESS = 0.7


@checked
@dataclass(frozen=True)
class SitePolicy:
    """Limits that a site's owner sets on the server's requests.

    Without a policy a site does everything that the app asks for. An app that does not use flsv's client does not read
    it, so let a SuperNode run signed apps only.

    Args:
        questions: the only functions that the server may let the site compute on its data, as
            ``"package.module:function"``. None for flsv's own functions and those that the app names.
        max_epsilon: the largest total privacy loss (epsilon) of this site's updates over all runs from the same folder,
            also those before the limit was set. None for no limit. With a limit, updates must be noised by
            :class:`flsv.privacy.GaussianPrivacy`. Then the site tells nothing else but its numbers of samples and the
            numbers of steps that they take, and answers no question. An update that left without noise before the limit
            was set exceeds any limit.
        delta: the probability that the bound ``max_epsilon`` does not hold.
        tells: the only losses and scores that the site tells, by name. These are ``"training_loss"``, ``"accuracy"``,
            ``"balanced_accuracy"`` and ``"auroc"`` of its own model, the ``performance`` that a question asks for
            (``"accuracy"`` for counts of right answers, ``"negative_loss"``, ``"val_loss"``), and what the strategies
            let it report, such as ``"in_run_values"``. It always tells its numbers of samples and steps. None for
            all. The server's log says what a site withholds. A run that cannot do without it is refused at the start.
        max_answers: the most numbers about its samples (scores, losses, counts, sizes of its splits) that the site
            answers over all servers and runs from the same folder, whose file ``answers.json`` has their count. None:
            twice what the app's loop asks in a run.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> SitePolicy(questions=[]).check_question("os:system")
        Traceback (most recent call last):
            ...
        flsv.engines.remote.messages.Refused: its policy does not let it answer 'os:system'
    """

    questions: (
        list[Annotated[str, 'Say a list of names such as "package.module:function".']] | None
    ) = None
    max_epsilon: Annotated[float, Gt(0)] | None = None
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    tells: list[Annotated[str, 'Say a list of names such as "accuracy".']] | None = None
    max_answers: Annotated[int, Ge(0)] | None = None

    @classmethod
    def read(cls, path: Path) -> SitePolicy:
        """Read a policy from a TOML file. Its keys are the arguments of this class."""
        try:
            return cls(**tomllib.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            names = [option.name for option in fields(cls)]
            raise Refused(
                f"its policy {path} cannot be read: {error}. It may have {names}"
            ) from error

    def check_names(self, scores: Collection[str], questions: Collection[str]) -> None:
        """Raise Refused if the policy names a score or a question that does not exist."""
        known_questions = [*map(_name_without_module, questions)]
        for name in self.questions or ():
            if _name_without_module(name) not in known_questions:
                raise Refused(
                    f"its policy names the question {name!r:.120}: expected one of {known_questions}"
                )
        for name in self.tells or ():
            if name not in scores:
                raise Refused(f"its policy tells {name!r:.120}: expected one of {sorted(scores)}")

    def check_question(self, question: str, questions: Collection[str] = QUESTIONS) -> None:
        """Raise Refused unless the policy allows ``question``, and it is one of ``questions``."""
        self.check_listed(question)
        if question not in questions:
            raise Refused(f"{question!r:.120} is no question that this site's loop asks")

    def check_listed(self, question: str) -> None:
        """Raise Refused if the policy lists questions, and not this one."""
        if self.questions is None:
            return
        permitted = {_name_without_module(name) for name in self.questions}
        if _name_without_module(question) not in permitted:
            raise Refused(f"its policy does not let it answer {question!r:.120}")

    def withheld(self, names: Iterable[str]) -> list[str]:
        """Return the losses and scores among ``names`` that the site does not report."""
        if self.tells is None:
            return []
        return [name for name in names if name not in self.tells]

    def check_told(self, names: Iterable[str]) -> None:
        """Raise Refused unless the site may report all losses and scores in ``names``."""
        withheld = self.withheld(names)
        if withheld:
            raise Refused(f"its policy does not let it tell {listed(withheld, show=repr):.120}")

    def noise(self, uploads: Sequence[Any]) -> list[GaussianPrivacy]:
        """Return the transformations in ``uploads`` that add noise. Raise Refused if required noise is missing."""
        noises = [
            upload
            for upload in uploads
            if isinstance(upload, GaussianPrivacy) and upload.noise_multiplier > 0
        ]
        if self.max_epsilon is not None and not noises:
            raise Refused(
                f"its policy wants max_epsilon={self.max_epsilon:g}, and updates would leave without noise"
            )
        return noises

    def spend(self, uploads: Sequence[Any], ledger: Path) -> None:
        """Add the privacy loss of one more update to the total in the file ``ledger``."""
        # Called before each training, also if it repeats an earlier one or fails later.
        # Gaussian mechanisms with noise multipliers sigma_i compose to one with (sum_i 1 / sigma_i^2)^(-1/2).
        inverse_square = sum(noise.noise_multiplier**-2 for noise in self.noise(uploads))
        if inverse_square == 0:  # there is no noise
            inverse_square = math.inf
        with FileLock(f"{ledger}.lock"):  # other processes of the site count in the ledger, too
            updates, sum_of_inverse_squares = _read_ledger(ledger)
            sum_of_inverse_squares += inverse_square
            composed_multiplier = sum_of_inverse_squares**-0.5
            epsilon = gaussian_epsilon(composed_multiplier, rounds=1, delta=self.delta)
            if self.max_epsilon is not None and epsilon > self.max_epsilon:
                raise Refused(
                    f"its policy wants max_epsilon={self.max_epsilon:g}, and with one more update after {updates} it "
                    f"would be {epsilon:.3g}"
                )
            with replacing(ledger) as file:
                entries = {
                    "updates": updates + 1,
                    "squares": sum_of_inverse_squares,
                    "epsilon": epsilon,
                }
                file.write(json.dumps(entries).encode())


def is_like(name: str, expected: str) -> bool:
    """Return whether ``name`` was probably meant to be ``expected``.

    Example:
        >>> is_like("FLSV_site.tml", "flsv-site.toml"), is_like("resources.json", "flsv-site.toml")
        (True, False)
    """
    letters, expected_letters = [re.sub("[^a-z]", "", text.lower()) for text in (name, expected)]
    return SequenceMatcher(None, letters, expected_letters).ratio() >= MIN_LIKENESS


def questions_of(config: FederationConfig) -> Counter[str]:
    """Return the questions of flsv that a federation of this configuration asks its clients, and how many parts do.

    A question belongs to the strategy or metric in whose module it is.
    """
    questions: Counter[str] = Counter()
    for part in _parts_of(config):
        modules = {base.__module__ for base in type(part).__mro__}
        if getattr(part, "judges", None) == "clients":
            modules.add(judge.__module__)
        questions.update(name for name in QUESTIONS if name.partition(":")[0] in modules)
    if config.strategies.get("personalizer") is not None:
        questions[f"{started_from.__module__}:{started_from.__name__}"] += 1
    return questions


def scores_asked(config: FederationConfig) -> set[str | None]:
    """Return the values of the argument ``performance`` with which a federation asks, None for counts by class."""
    scores: set[str | None] = set()
    for part in _parts_of(config):
        if not getattr(part, "evaluates", False):
            continue
        measure = getattr(part, "measured_by", getattr(part, "performance", None))
        if isinstance(measure, ModelScore):
            scores.add(None if measure.by_class else measure.called or measure.name)
        elif measure is not None:
            scores.add(measure)
    return scores


def scores_told(config: FederationConfig) -> set[str]:
    """Return the names of all losses, scores and reports of flsv and of a federation of this configuration."""
    names = {TRAINING_LOSS, *OWN_SCORES, *SCORE_RANGES, *CLASS_SCORES}
    names.update(name for name in scores_asked(config) if name is not None)
    for strategy in config.strategies.values():
        names.update(strategy.reports)
    return names


def numbers_of_run(
    config: FederationConfig,
    questions: Mapping[str, int],
    num_clients: int,
    num_rounds: int,
    num_classes: int,
) -> int:
    """Return how many numbers a run asks of a site at most: its splits' sizes, scores of its own model, and answers.

    Args:
        config: the run's configuration.
        questions: the functions that the run asks, ``"module:function"``, and how many of its parts do.
        num_clients: the number of sites.
        num_rounds: the number of rounds. Before the first one it is tried whether sites answer.
        num_classes: the number of classes.
    """
    total = len(SPLITS)
    if config.evaluation.every:
        total += len(OWN_SCORES) * (num_rounds // config.evaluation.every + 1)
    for name, num_parts in questions.items():
        numbers = numbers_of_round(function_of(name), num_clients, num_classes)
        total += (num_rounds + 1) * num_parts * numbers
    return total


def function_of(question: str) -> Any:
    """Import a question by its name, ``"module:function"``."""
    module_name, _, function_name = question.partition(":")
    return getattr(importlib.import_module(module_name), function_name)


def _parts_of(config: FederationConfig) -> list[Any]:
    return [*config.strategies.values(), *config.metrics.values()]


def _read_ledger(ledger: Path) -> tuple[int, float]:
    # The number of updates so far, and their sum of 1 / noise_multiplier^2.
    if not ledger.is_file():
        return 0, 0.0
    try:
        entries = json.loads(ledger.read_text())
        updates = checked_int(entries, "updates", math.inf)
        squares = float(entries["squares"])
        is_valid = squares >= 0  # not NaN
    except GARBLED_REPLY_ERRORS:
        is_valid = False
    if not is_valid:
        raise Refused(
            f"its ledger {ledger} cannot be read. Write it anew from the trainings in the site's log, as "
            '{"updates": number, "squares": sum of 1 / noise_multiplier^2}; a backup forgets what came after it'
        )
    return updates, squares


def _name_without_module(question: str) -> str:
    """Shorten ``"flsv.module:function"`` to ``"flsv:function"``, since flsv's modules change between versions."""
    return re.sub(r"^flsv\.[\w.]*:", "flsv:", question)
