"""SiteMemory: a site's saved states and last update of a run, and the site's secret."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from flsv.sites.messages import Packet, load_packet, save_packet
from flsv.utilities.atomic_files import replacing
from flsv.utilities.errors import ConfigurationError, Refused
from flsv.utilities.plain_values import digest

SiteState = dict[str, Any]
#: Largest number of runs whose states a site keeps. Each coalition's training is a run for the site.
MAX_STORED_RUNS = 1000


class SiteMemory:
    """A site's saved states of one run, by name, and its last update.

    Example:
        >>> import tempfile
        >>> memory = SiteMemory(Path(tempfile.mkdtemp()), "0123456789abcdef", client=0)
        >>> memory.save("first", {"rounds": 1}, [])
        >>> memory.save("second", {"rounds": 2}, ["first"])
        >>> memory.load(None), memory.load("first"), memory.load("second"), memory.load("third")
        ({}, {'rounds': 1}, {'rounds': 2}, None)
    """

    # A state's name is the hash of the server's message that led to it. So a server that repeats a round, and two
    # servers that resume one checkpoint, get the right state, and no message can overwrite another message's state.

    def __init__(
        self,
        folder: Path,
        run: str,
        client: int,
    ) -> None:
        if not isinstance(run, str) or not re.fullmatch(r"[0-9a-f]{16}", run):
            raise ConfigurationError(
                f"the run's name is {run!r:.80}, expected 16 hexadecimal digits."
            )
        # Each client has its own subfolder, since two sites may use one folder.
        run_folder = folder / "runs" / run
        folder_of_client = run_folder / f"{client:d}"
        if not folder_of_client.exists():
            _count_new_run(folder / "runs")
            folder_of_client.mkdir(parents=True, exist_ok=True)
        self._folder = folder_of_client
        self._path = folder_of_client / "state.pt"

    def load(self, name: str | None) -> SiteState | None:
        """Return a saved state. It is empty if ``name`` is None, and None if the site has no state of this name."""
        if name is None:
            return {}
        return self.load_all().get(name)

    def save(
        self, name: str, state: SiteState, names_to_keep: Collection[str | None] | None = None
    ) -> None:
        """Save a state. Delete all others but those of ``names_to_keep``, if it is not None.

        Saving a state again, as after a kill, deletes none: those of the requests that followed it stay.
        """
        with FileLock(f"{self._path}.lock"):  # another process may save one at the same time
            states = self.load_all()
            if names_to_keep is not None and name not in states:
                states = {kept: states[kept] for kept in states if kept in names_to_keep}
            states[name] = state
            with replacing(self._path, private=True) as file:
                torch.save(states, file)

    @contextmanager
    def one_training(self) -> Iterator[None]:
        """Let no other process train this client within this context, so that nobody trains for a message twice."""
        with FileLock(self._folder / "training.lock"):
            yield

    def load_update(self, name: str) -> Packet | None:
        """Return the update with which the last training was answered, None if it has another name."""
        return load_packet(self._path_of_update(name))

    def save_update(self, name: str, update: Packet) -> None:
        """Store the update that answers a training, in place of that of the training before."""
        path = self._path_of_update(name)
        save_packet(path, update)
        for stored_path in self._folder.glob(path.with_stem("update-*").name):
            if stored_path != path:
                stored_path.unlink()

    def _path_of_update(self, name: str) -> Path:
        return self._folder / f"update-{name}.pt"

    def load_all(self) -> dict[str, SiteState]:
        """Return all saved states, ``{name: state}``."""
        if not self._path.is_file():
            return {}
        states: dict[str, SiteState] = torch.load(
            self._path,
            map_location="cpu",
            weights_only=True,
        )
        return states


def _count_new_run(folder: Path) -> None:
    """Tell the site's owner how many runs there are with one more. Raise Refused if these are too many."""
    # A server can name as many runs as it likes, and each training leaves a state of a model's size.
    num_runs = len([*folder.glob("*/*")])
    if num_runs >= MAX_STORED_RUNS:
        reason = f"it keeps the states of {num_runs} runs, and keeps at most {MAX_STORED_RUNS}"
        rank_zero_warn(
            f"flsv: this site refuses a new run, since {reason}. Delete the folders of finished runs in {folder}."
        )
        raise Refused(reason)
    rank_zero_info(
        f"flsv: this site keeps the states of {num_runs + 1} of at most {MAX_STORED_RUNS} runs and trainings of "
        f"coalitions in {folder}."
    )


def own_secret(folder: Path) -> str:
    """Return the site's secret text, drawn at the first call and stored in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "secret"
    with FileLock(f"{path}.lock"):  # another process may draw one at the same time
        if not path.exists():
            with replacing(path, private=True) as file:
                file.write(secrets.token_hex(32).encode())
        secret = path.read_text()
    if not re.fullmatch(r"[0-9a-f]{64}", secret):
        problem = "does not contain a secret of 64 hexadecimal digits. Delete it, and the site draws a new one"
        raise ConfigurationError(
            f"{path} {problem}.", without_data=f"its file {path.name!r} {problem}"
        )
    return secret


def keyed_hash(secret: str, text: str) -> str:
    """Return a hash of ``text`` that is keyed by the site's secret, as 16 hexadecimal digits."""
    return hmac.digest(secret.encode(), text.encode(), "sha256").hex()[:16]


def noise_key(secret: str, packet: Packet, state: SiteState | None) -> bytes:
    """Derive the secret key (32 bytes) for the noise of the site's update in a round."""
    # The same message and state give the same key, so that averaging replies reveals nothing. Any difference gives
    # another key, so that subtracting two replies reveals nothing. GaussianPrivacy adds the update itself to the key.
    return hmac.digest(secret.encode(), digest([packet.digest, state]), "sha256")
