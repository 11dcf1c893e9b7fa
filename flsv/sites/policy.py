"""SitePolicy: limits that a site's owner sets."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Lt

from flsv.privacy import GaussianPrivacy
from flsv.sites.ledgers import spend_privacy
from flsv.sites.requests import REQUESTED_FUNCTIONS
from flsv.utilities.declared import checked
from flsv.utilities.errors import Refused, listed


@checked
@dataclass(frozen=True)
class SitePolicy:
    """Limits that a site's owner sets on the server's requests.

    Without a policy a site does everything that the app requests. An app that does not use flsv's client does not read
    the policy, so let a SuperNode run signed apps only.

    Args:
        functions: the only functions that the server may run on the site's data, as ``"package.module:function"``. None
            for flsv's own functions and those that the app names. Training, and tests of own models, are no functions.
        max_epsilon: the largest total privacy loss (epsilon) of this site's updates over all runs from the same folder,
            also those before the limit was set. None for no limit. With a limit, the site refuses every message unless
            updates are noised by :class:`flsv.privacy.GaussianPrivacy`. Then it reports of its samples nothing else but
            their numbers, planned optimizer steps, and whether they can be read and fit the data dictionary, and runs
            no functions. If an update left without noise before, it refuses all training.
        delta: the probability that the bound ``max_epsilon`` does not hold.
        reports: the only losses and scores that the site reports, by name. These are ``"training_loss"``,
            ``"accuracy"``, ``"balanced_accuracy"`` and ``"auroc"`` of its own model, the argument ``performance`` of a
            function that the server runs (``"accuracy"`` for counts of correct predictions, ``"negative_loss"``,
            ``"val_loss"``), and what strategies declare as their reports, such as ``"in_run_values"``. The site always
            reports its numbers of samples and steps, and the size of its update. The app's own functions are limited by
            ``functions``. None for all. The server's log names what a site withholds. A run that needs it is refused.
        max_answers: the largest number of scores, losses, counts and sizes of splits that the site reports about its
            samples to all servers and runs from the same folder, whose file ``answers.json`` counts them. The first
            sizes are always reported, and trainings, with their losses, are not counted. None: twice as many as the
            app's loop can request in a run.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> SitePolicy(functions=[]).check_function("os:system")
        Traceback (most recent call last):
            ...
        flsv.utilities.errors.Refused: its policy does not allow the function 'os:system'
    """

    functions: (
        list[Annotated[str, 'Pass a list of names such as "package.module:function".']] | None
    ) = None
    max_epsilon: Annotated[float, Gt(0)] | None = None
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    reports: list[Annotated[str, 'Pass a list of names such as "accuracy".']] | None = None
    max_answers: Annotated[int, Ge(0)] | None = None

    @classmethod
    def read(cls, path: Path) -> SitePolicy:
        """Read a policy from a TOML file. Its keys are the arguments of this class."""
        try:
            return cls(**tomllib.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            error.add_note(f"in the policy {path}")  # in the site's own log
            reason = getattr(error, "strerror", None) or error  # without the path
            names = [option.name for option in fields(cls)]
            raise Refused(
                f"its policy cannot be read: {reason}. A policy may have the keys {names}"
            ) from error

    def check_names(self, scores: Collection[str], functions: Collection[str]) -> None:
        """Raise Refused if the policy names a score or a function that does not exist."""
        for name in self.functions or ():
            if name not in functions:
                raise Refused(
                    f"its policy allows the function {name!r:.120}: expected one of {sorted(functions)}"
                )
        for name in self.reports or ():
            if name not in scores:
                raise Refused(
                    f"its policy allows reports of {name!r:.120}: expected one of {sorted(scores)}"
                )

    def check_function(self, name: str, functions: Collection[str] = REQUESTED_FUNCTIONS) -> None:
        """Raise Refused unless the policy allows the function ``name``, and it is one of ``functions``."""
        if self.functions is not None and name not in self.functions:
            raise Refused(f"its policy does not allow the function {name!r:.120}")
        if name not in functions:
            raise Refused(f"{name!r:.120} is not a function that this site's loop requests")

    def withheld(self, names: Iterable[str]) -> list[str]:
        """Return the losses and scores among ``names`` that the site does not report."""
        if self.reports is None:
            return []
        return [name for name in names if name not in self.reports]

    def check_reported(self, names: Iterable[str]) -> None:
        """Raise Refused unless the site may report all losses and scores in ``names``."""
        withheld = self.withheld(names)
        if withheld:
            raise Refused(
                f"its policy does not allow reports of {listed(withheld, show=repr):.120}"
            )

    def noise(self, uploads: Sequence[Any]) -> list[GaussianPrivacy]:
        """Return the transformations in ``uploads`` that add noise. Raise Refused if required noise is missing."""
        noises = [
            upload
            for upload in uploads
            if isinstance(upload, GaussianPrivacy) and upload.noise_multiplier > 0
        ]
        if self.max_epsilon is not None and not noises:
            raise Refused(
                f"its policy sets max_epsilon={self.max_epsilon:g}, but the app's updates have no noise"
            )
        return noises

    def spend(self, uploads: Sequence[Any], ledger: Path) -> None:
        """Add the privacy loss of one more update to the total in the file ``ledger``."""
        # Called before each training, also if it fails later.
        multipliers = [noise.noise_multiplier for noise in self.noise(uploads)]
        spend_privacy(ledger, multipliers, self.delta, max_epsilon=self.max_epsilon)
