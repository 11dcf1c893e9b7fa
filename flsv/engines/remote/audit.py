"""AuditLog: what a site was asked and what it has answered, in a file to which lines are only added."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from flsv.engines.remote.messages import Packet
from flsv.errors import ConfigurationError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

#: What is copied of a message; all of it is in its hash.
FACTS = ("run", "round", "question", "visit")


class AuditLog:
    """A line in JSON for every message that a site has answered, chained: each holds the hash of the line before.

    So a line that is changed, taken out or moved is found by :func:`verify_audit`, where somebody signs, or has kept,
    the hash of a later one. Who can write the file, and has no key, can write all of it anew.

    Args:
        path: of the file; made where it is missing. It is only ever added to (``chattr +a`` keeps to that).
        key: of a private key in OpenSSH's format without a password, such as the SuperNode's, by which lines are
            signed; None: they are not.

    Raises:
        ConfigurationError: the key cannot be read, or the file cannot be written.

    Example:
        >>> import tempfile
        >>> log = AuditLog(Path(tempfile.mkdtemp()) / "audit.jsonl")
        >>> log.add("run 7", Packet("hello"), Packet("hello", {"name": "Boston"}))
        >>> verify_audit(log.path).entries
        1
    """

    def __init__(self, path: Path, key: Path | None = None) -> None:
        self.path, self._key = path, None if key is None else _private_key(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        except OSError as error:
            raise ConfigurationError(f"the site's audit log {path} cannot be written: {error}.") from error

    def add(self, who: str, asked: Packet, answered: Packet) -> None:
        """Write one line, to the disk.

        Args:
            who: has asked.
            asked: the message.
            answered: the reply, which must not leave before.

        Raises:
            OSError: the line could not be written.
        """
        entry = {
            "when": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "who": who,
            "asked": asked.kind,
            **{name: str(asked.plain[name])[:120] for name in FACTS if name in asked.plain},
            "asked_hash": packet_hash(asked),
            "answered": answered.kind,
            **({"error": answered.plain.get("error")} if answered.kind == "failed" else {}),
            "answered_hash": packet_hash(answered),
        }
        with self.path.open("ab+") as file, _alone(file.fileno()):
            entry["before"] = _hash(_last_line(file))
            if self._key is not None:
                entry["signature"] = base64.b64encode(_sign(self._key, _text(entry))).decode()
            file.write(_text(entry) + b"\n")
            file.flush()
            os.fsync(file.fileno())


@dataclass
class AuditFound:
    """What is in an audit log.

    Args:
        entries: how many lines there are.
        head: the hash of the last one. Keep it elsewhere: whoever has it can tell later that no line before it is gone.
        wrong: what is wrong, by line; empty where nothing is.
    """

    entries: int = 0
    head: str = ""
    wrong: list[str] = field(default_factory=list)


def verify_audit(path: Path, key: Path | None = None, kept: str | None = None) -> AuditFound:
    """Check a log's chain of hashes, and its signatures.

    Args:
        path: of the log.
        key: of the site's public key, in OpenSSH's format: every line must be signed by it.
        kept: a hash that was once its :attr:`AuditFound.head`: its line must still be there.

    Raises:
        ConfigurationError: the log or the key cannot be read.
    """
    public = None if key is None else _public_key(key)
    found, before = AuditFound(), ""
    heads = set[str]()
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigurationError(f"the audit log {path} cannot be read: {error}.") from error
    if lines.pop():
        found.wrong.append("the last line was cut short")
    for number, line in enumerate(lines, 1):
        found.entries += 1
        if why := _wrong(line, before, public):
            found.wrong.append(f"line {number} {why}")
        before = _hash(line)
        heads.add(before)
    found.head = before
    if kept is not None and kept not in heads:
        found.wrong.append(f"no line has the hash {kept:.80}: what was there has been written anew, or taken away")
    return found


def _wrong(line: bytes, before: str, public: Any) -> str:
    try:
        entry = json.loads(line)
        told, signature = entry["before"], entry.pop("signature", "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return "is no entry"
    if told != before:
        return "does not follow from the line before it: that was changed, moved, or others are missing"
    if public is None:
        return ""
    return "" if signature and _signed(public, signature, _text(entry)) else "is not signed by this key"


def packet_hash(packet: Packet) -> str:
    """SHA-256 of all that a packet holds, in hexadecimal digits.

    Example:
        >>> one, other = (Packet("train", {"round": i}, {"start": torch.zeros(2)}) for i in (1, 2))
        >>> packet_hash(one) == packet_hash(one), packet_hash(one) == packet_hash(other)
        (True, False)
    """
    digest = hashlib.sha256(json.dumps([packet.kind, packet.plain], sort_keys=True, default=repr).encode())
    for name, tensor in sorted(packet.tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _text(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry).encode()


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest() if line else ""


def _last_line(file: Any) -> bytes:
    """The file's last one; where a crash has cut it short, it is ended here, so that the chain goes over it."""
    size = file.seek(0, os.SEEK_END)
    if not size:
        return b""
    file.seek(size - 1)
    if file.read(1) != b"\n":
        file.write(b"\n")
        size += 1
    at, found = size - 1, b""
    while at and b"\n" not in found:
        step = min(at, 4096)
        at -= step
        file.seek(at)
        found = file.read(step) + found
    return found.rpartition(b"\n")[2]


@contextmanager
def _alone(number: int) -> Iterator[None]:
    """No other process of the site writes."""
    if fcntl is None:
        yield
        return
    fcntl.flock(number, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(number, fcntl.LOCK_UN)


def _private_key(path: Path) -> Any:
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    return _read_key(path, lambda data: load_ssh_private_key(data, None))


def _public_key(path: Path) -> Any:
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    return _read_key(path, load_ssh_public_key)


def _read_key(path: Path, load: Any) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    try:
        key = load(path.read_bytes())
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(f"the key {path} cannot be read: {error}.") from error
    if not isinstance(key, (EllipticCurvePrivateKey, EllipticCurvePublicKey, Ed25519PrivateKey, Ed25519PublicKey)):
        raise ConfigurationError(f"the key {path} is {type(key).__name__}: expected one of ECDSA or Ed25519.")
    return key


def _elliptic(key: Any) -> tuple[Any, ...]:
    """What ECDSA wants to know besides; Ed25519 wants nothing."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256

    curves = (ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey)
    return (ec.ECDSA(SHA256()),) if isinstance(key, curves) else ()


def _sign(key: Any, data: bytes) -> bytes:
    return key.sign(data, *_elliptic(key))


def _signed(key: Any, signature: str, data: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(base64.b64decode(signature), data, *_elliptic(key))
    except (InvalidSignature, ValueError):
        return False
    return True
