"""SitePolicy: limits that a site's owner sets."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Lt

from flsv.configuration.questions import QUESTIONS
from flsv.engines.remote.messages import Refused
from flsv.ledgers import spend_privacy
from flsv.privacy import GaussianPrivacy
from flsv.utilities.declared import checked
from flsv.utilities.errors import listed


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
        flsv.utilities.errors.Refused: its policy does not let it answer 'os:system'
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
        if self.questions is not None:
            permitted = {_name_without_module(name) for name in self.questions}
            if _name_without_module(question) not in permitted:
                raise Refused(f"its policy does not let it answer {question!r:.120}")
        if question not in questions:
            raise Refused(f"{question!r:.120} is no question that this site's loop asks")

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
        multipliers = [noise.noise_multiplier for noise in self.noise(uploads)]
        spend_privacy(ledger, multipliers, self.delta, max_epsilon=self.max_epsilon)


def _name_without_module(question: str) -> str:
    """Shorten ``"flsv.module:function"`` to ``"flsv:function"``, since flsv's modules change between versions."""
    return re.sub(r"^flsv\.[\w.]*:", "flsv:", question)
