"""SiteMemory: what a site keeps of a run between two messages."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch

from flsv.engines.remote.messages import Packet
from flsv.utilities.atomic_files import replacing
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.plain_values import digest

SiteState = dict[str, Any]


class SiteMemory:
    """A site's saved states of one run, named after the trainings (visits) that left them.

    Example:
        >>> import tempfile
        >>> memory = SiteMemory(Path(tempfile.mkdtemp()), "0123456789abcdef", client=0)
        >>> memory.keep("first", {"visits": 1}, [])
        >>> memory.keep("second", {"visits": 2}, ["first"])
        >>> memory.after(None), memory.after("first"), memory.after("second"), memory.after("third")
        ({}, {'visits': 1}, {'visits': 2}, None)
    """

    # A visit's name is the hash of the server's message, so a server that repeats a round, and two servers that
    # continue from one checkpoint, get the right state, and no message can overwrite the state after another.

    def __init__(
        self,
        folder: Path,
        run: str,
        client: int,
    ) -> None:
        is_text = isinstance(run, str)
        if not is_text or not re.fullmatch(r"[0-9a-f]{16}", run):
            raise ConfigurationError(f"{run!r:.80} names no run: expected 16 hexadecimal digits.")
        # By client, too: two sites may have been given one folder.
        run_folder = folder / "runs" / run
        folder_of_client = run_folder / f"{client:d}"
        folder_of_client.mkdir(parents=True, exist_ok=True)
        self._path = folder_of_client / "state.pt"

    def after(self, visit: str | None) -> SiteState | None:
        """Return the state after the training ``visit``. Empty if ``visit`` is None, None if it was deleted."""
        if visit is None:
            return {}
        return self.load_all().get(visit)

    def keep(
        self,
        visit: str,
        state: SiteState,
        visits_to_keep: Container[str | None],
    ) -> None:
        """Save the ``state`` after a training. Delete all others but those of ``visits_to_keep``."""
        states = {}
        for stored_visit, stored_state in self.load_all().items():
            if stored_visit in visits_to_keep:
                states[stored_visit] = stored_state
        states[visit] = state
        with replacing(self._path, private=True) as file:
            torch.save(states, file)

    def load_all(self) -> dict[str, SiteState]:
        """Return all saved states, ``{visit: state}``."""
        if not self._path.is_file():
            return {}
        states: dict[str, SiteState] = torch.load(
            self._path,
            map_location="cpu",
            weights_only=True,
        )
        return states


def own_secret(folder: Path) -> str:
    """Return the site's secret text, drawn at the first call and stored in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "secret"
    if not path.is_file():
        with replacing(path, private=True) as file:
            file.write(secrets.token_hex(32).encode())
    secret = path.read_text()
    if not re.fullmatch(r"[0-9a-f]{64}", secret):
        raise ConfigurationError(
            f"{path} is no secret of 64 hexadecimal digits. Delete it: the site draws another."
        )
    return secret


def keyed_hash(secret: str, text: str) -> str:
    """Return a hash of ``text``, 16 hexadecimal digits, that nobody can compute without the site's secret."""
    return hmac.digest(secret.encode(), text.encode(), "sha256").hex()[:16]


def visit_secret(secret: str, packet: Packet, state: SiteState | None) -> bytes:
    """Derive the secret key (32 bytes) for the noise of the site's update in a round."""
    # The same message and state give the same key, so that averaging answers reveals nothing. Any difference gives
    # another key, so that subtracting two answers reveals nothing. GaussianPrivacy adds the update itself to the key.
    return hmac.digest(secret.encode(), digest([packet.digest, state]), "sha256")
