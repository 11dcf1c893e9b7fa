"""Signatures of files by ``ssh-keygen``, which every OpenSSH brings, and whose keys many people have."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from flsv.utilities.errors import ConfigurationError

#: The purpose in a signature. One that was made for something else is refused.
NAMESPACE = "flsv-report"
MESSAGE_WITHOUT_SSH_KEYGEN = (
    "there is no ssh-keygen here, which signs and verifies pages: install OpenSSH."
)


def signature_file(path: Path) -> Path:
    """Return the path of the signature beside a file."""
    return path.with_name(f"{path.name}.sig")


def sign(path: Path, key: Path) -> Path:
    """Sign a file with an SSH key, and return the path of the signature, which replaces an older one.

    Args:
        path: the file.
        key: the private key, or a public key whose private key the SSH agent holds.

    Raises:
        ConfigurationError: there is no such key, or ``ssh-keygen`` cannot sign with it.
    """
    key = key.expanduser()
    if not key.is_file():
        raise ConfigurationError(
            f"--sign {key}: there is no such file. ssh-keygen -t ed25519 makes a key."
        )
    signature = signature_file(path)
    signature.unlink(missing_ok=True)
    process = _ssh_keygen(["sign", "-f", str(key), "-n", NAMESPACE, str(path)])
    if process.returncode:
        raise ConfigurationError(f"--sign {key}: ssh-keygen cannot sign: {_last_line(process)}")
    return signature


def verify(path: Path, signers: Path | None = None) -> str:
    """Verify that a file is what was signed, and return who signed it.

    Args:
        path: the file, with its signature beside it.
        signers: a file of OpenSSH's format ALLOWED SIGNERS: on each line a name and a public key. None: only the key's
            fingerprint is known then.

    Returns:
        The signer's name with ``signers``, else the fingerprint of the key.

    Raises:
        ConfigurationError: the file or its signature is missing, the file has changed, or no signer has this key.
    """
    signature = signature_file(path)
    required_files = [path, signature]
    if signers is not None:
        required_files.append(signers)
    for file in required_files:
        if not file.is_file():
            raise ConfigurationError(f"--verify {path}: there is no {file}.")
    arguments = ["-n", NAMESPACE, "-s", str(signature)]
    if signers is None:
        process = _ssh_keygen(["check-novalidate", *arguments], path)
        _check_signature(process, path)
        return process.stdout.split()[-1]  # the key's fingerprint

    signers_file = ["-f", str(signers)]
    principals = _ssh_keygen(["find-principals", *signers_file, "-s", str(signature)])
    if principals.returncode:
        raise ConfigurationError(f"--verify {path}: no signer in {signers} has the key of it.")
    name = principals.stdout.splitlines()[0]
    process = _ssh_keygen(["verify", *signers_file, "-I", name, *arguments], path)
    _check_signature(process, path)
    return name


def _check_signature(process: subprocess.CompletedProcess[str], path: Path) -> None:
    if process.returncode:
        raise ConfigurationError(
            f"--verify {path}: it is not the file that was signed, or the signature is of another purpose "
            f"({_last_line(process)}). Do not rely on it."
        )


def _ssh_keygen(
    arguments: Sequence[str], content: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``ssh-keygen -Y`` with the content of a file as its input."""
    text = None
    if content is not None:
        text = content.read_bytes().decode()
    try:
        return subprocess.run(
            ["ssh-keygen", "-Y", *arguments],
            input=text,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        raise ConfigurationError(MESSAGE_WITHOUT_SSH_KEYGEN) from None


def _last_line(process: subprocess.CompletedProcess[str]) -> str:
    lines = f"{process.stdout}\n{process.stderr}".strip().splitlines()
    return lines[-1] if lines else "no message"
