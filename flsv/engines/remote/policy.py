"""SitePolicy: what the owner of a site allows, in a file at the site, whatever the server's app asks for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flsv._lightning.durable import replacing
from flsv.arguments import check_number
from flsv.errors import ConfigurationError
from flsv.privacy import GaussianPrivacy
from flsv.privacy.accounting import gaussian_epsilon

try:
    import tomllib
except ModuleNotFoundError:  # before Python 3.11
    import tomli as tomllib


class Refused(PermissionError):
    """The site's policy forbids it. The server is told the reason, which holds nothing of the data."""


@dataclass(frozen=True)
class SitePolicy:
    """What a site lets a server do. A site without one does whatever the app that it was sent asks for.

    Args:
        questions: functions that the server may ask for, as ``"package.module:function"``, and no others. None: flsv's
            own and those that the app names.
        least_sites: a federation of fewer sites, this one counted, is refused, by what the server says of it: with two,
            the other's update follows from the average.
        max_epsilon: the privacy loss that this site's updates may come to, over all runs in which it takes part from
            the same folder. What leaves must then be noised by :class:`flsv.privacy.GaussianPrivacy`. It covers updates
            only: allow no questions where these are to be covered, too.
        delta: the chance that epsilon does not hold.
        secure: its update leaves in secure sums only, see :class:`flsv.engines.remote.secure.SecureSums`, and of so
            many sites at least, however many go away. Ask for all of them, and no difference of two sums is an update.
        peers: by name, the identities of all sites that it sums with, this one among them, which their owners tell each
            other (:func:`flsv.engines.remote.secure.identity`). None: it takes the server's word for who they are.
        audit: path of the file in which the site writes what it was asked and has answered
            (:class:`flsv.engines.remote.AuditLog`); a relative one is in the site's folder. None: it writes none.
        audit_key: path of the private key that signs it.

    Raises:
        ConfigurationError: an argument out of range.

    Example:
        >>> SitePolicy(questions=[], least_sites=3).check({"clients": 2})
        Traceback (most recent call last):
            ...
        flsv.engines.remote.policy.Refused: its policy wants 3 sites or more, and there are 2
    """

    questions: Sequence[str] | None = None
    least_sites: int = 1
    max_epsilon: float | None = None
    delta: float = 1e-5
    secure: bool = False
    peers: Mapping[str, str] | None = None
    audit: str | None = None
    audit_key: str | None = None

    def __post_init__(self) -> None:
        known = isinstance(self.questions, Sequence) and all(isinstance(each, str) for each in self.questions)
        if self.questions is not None and (isinstance(self.questions, str) or not known):
            raise ConfigurationError(
                f'SitePolicy(questions={self.questions!r}): expected a list of names such as "package.module:function".'
            )
        check_number(self, "least_sites", self.least_sites, least=1, whole=True)
        if not isinstance(self.secure, bool):
            raise ConfigurationError(f"SitePolicy(secure={self.secure!r}): expected true or false.")
        if self.secure and self.least_sites < 3:
            raise ConfigurationError(
                f"SitePolicy(secure=True, least_sites={self.least_sites}): of a sum of two, the other site and the "
                "server know what this one has sent. Set least_sites to 3 or more."
            )
        if self.peers is not None and not (
            isinstance(self.peers, Mapping)
            and all(isinstance(key, str) and len(key) == 64 for key in self.peers.values())
        ):
            raise ConfigurationError(
                f"SitePolicy(peers={self.peers!r:.200}): expected identities by site, of 64 hexadecimal digits each."
            )
        for name in ("audit", "audit_key"):
            if not isinstance(path := getattr(self, name), str | None):
                raise ConfigurationError(f"SitePolicy({name}={path!r:.80}): expected the path of a file.")
        if self.audit_key is not None and self.audit is None:
            raise ConfigurationError("SitePolicy(audit_key=...) signs an audit log: say where that is (audit).")
        check_number(self, "delta", self.delta, above=0, below=1)
        if self.max_epsilon is not None:
            check_number(self, "max_epsilon", self.max_epsilon, above=0)

    @classmethod
    def read(cls, path: Path) -> SitePolicy:
        """The policy in a TOML file, whose keys are the arguments.

        Raises:
            ConfigurationError: no such file, or another content.
        """
        names = [each.name for each in fields(cls)]
        try:
            given = tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"the site's policy {path} cannot be read: {error}.") from error
        if unknown := sorted(given.keys() - set(names)):
            raise ConfigurationError(f"the site's policy {path} has {unknown}. There are {names}.")
        return cls(**given)

    def check(self, told: Mapping[str, Any]) -> None:
        """Of whatever the server sends.

        Args:
            told: what it says of the federation: ``clients``, how many there are, or ``sites``, their names.

        Raises:
            Refused: the federation is too small.
        """
        sites = told.get("clients", len(told.get("sites", ())))
        if self.least_sites > 1 and not (isinstance(sites, int) and sites >= self.least_sites):
            raise Refused(f"its policy wants {self.least_sites} sites or more, and there are {sites!r:.20}")

    def check_secure(self, secure: bool) -> None:
        """Whatever the server asks for.

        Args:
            secure: whether the app sends updates in secure sums.

        Raises:
            Refused: it does not, and :attr:`secure` wants it.
        """
        if self.secure and not secure:
            raise Refused("its policy wants secure = true, and the app would send its update by itself")

    def check_question(self, question: str) -> None:
        """Before a question is answered.

        Raises:
            Refused: it is none of :attr:`questions`.
        """
        if self.questions is not None and question not in self.questions:
            raise Refused(f"its policy does not let it answer {question!r:.120}")

    def check_uploads(self, uploads: Sequence[Any]) -> None:
        """Before the first round.

        Raises:
            Refused: updates would leave without noise, and :attr:`max_epsilon` bounds what they tell.
        """
        if self.max_epsilon is not None and not _noise(uploads):
            raise Refused(f"its policy wants max_epsilon={self.max_epsilon:g}, and updates would leave without noise")

    def spend(self, uploads: Sequence[Any], ledger: Path) -> None:
        """Before each training: book one more update. What training is repeated, or fails, is booked all the same.

        Args:
            uploads: that its update goes through.
            ledger: the file in which the site keeps what it has spent.

        Raises:
            Refused: it would come to more than :attr:`max_epsilon`.
            ConfigurationError: the file is damaged.
        """
        if self.max_epsilon is None:
            return
        self.check_uploads(uploads)
        try:
            kept = json.loads(ledger.read_text()) if ledger.is_file() else {"updates": 0, "squares": 0.0}
            updates, squares = int(kept["updates"]), float(kept["squares"])
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigurationError(
                f"{ledger} does not say what this site has spent: {error}. Put it back from a backup; without it "
                "nobody knows what its updates have told."
            ) from error
        # Gaussian mechanisms compose to one of the noise multiplier (sum_i 1 / sigma_i^2)^(-1/2).
        squares += sum(each.noise_multiplier**-2 for each in _noise(uploads))
        epsilon = gaussian_epsilon(squares**-0.5, 1, self.delta)
        if not math.isfinite(epsilon) or epsilon > self.max_epsilon:
            raise Refused(
                f"its policy wants max_epsilon={self.max_epsilon:g}, and with one more update after {updates} it would "
                f"be {epsilon:.3g}"
            )
        with replacing(ledger) as file:
            file.write(json.dumps({"updates": updates + 1, "squares": squares, "epsilon": epsilon}).encode())


def _noise(uploads: Sequence[Any]) -> list[GaussianPrivacy]:
    return [each for each in uploads if isinstance(each, GaussianPrivacy) and each.noise_multiplier > 0]
