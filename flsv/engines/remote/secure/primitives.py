"""Keys, masks and seals, of the library ``cryptography`` (``pip install flsv[secure]``).

X25519 (RFC 7748) agrees on keys, HKDF with SHA-256 (RFC 5869) makes one for each purpose, AES-256 in counter mode makes
masks, AES-256-GCM seals shares, Ed25519 (RFC 8032) signs.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ModuleNotFoundError:  # SecureSums says it
    pass

_NONCE = 12


def new_secret() -> str:
    """32 bytes of the system's generator, in hexadecimal, as all keys here: an X25519 private key, or a seed."""
    return secrets.token_hex(32)


def public_of(private: str) -> str:
    """An X25519 key's public half."""
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(private)).public_key().public_bytes_raw().hex()


def agreed(private: str, public: str, *purpose: Any) -> bytes:
    """The 32 bytes that two sites have in common, for a purpose, and nobody else.

    Raises:
        ValueError: no public key.
    """
    theirs = X25519PublicKey.from_public_bytes(bytes.fromhex(public))
    return derived(X25519PrivateKey.from_private_bytes(bytes.fromhex(private)).exchange(theirs), *purpose)


def derived(secret: bytes, *purpose: Any) -> bytes:
    """32 bytes for a purpose."""
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=digest("flsv secure sums", *purpose)).derive(secret)


def digest(*parts: Any) -> bytes:
    """SHA-256 of plain values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def mask(key: bytes, count: int, ring: int) -> NDArray[Any]:
    """``[count]`` numbers modulo 2^ring, which nobody without the key tells from random ones.

    The counter starts at 0: a key makes one mask.
    """
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(count * ring // 8)), dtype=f"<u{ring // 8}")


def seal(key: bytes, text: str, *about: Any) -> str:
    """A text that who has the key can read, and check that it is about this."""
    nonce = secrets.token_bytes(_NONCE)
    return (nonce + AESGCM(key).encrypt(nonce, text.encode(), digest(*about))).hex()


def unseal(key: bytes, sealed: str, *about: Any) -> str:
    """The inverse of :func:`seal`.

    Raises:
        ValueError: another key, or about something else, or changed on the way.
    """
    raw = bytes.fromhex(sealed)
    try:
        return AESGCM(key).decrypt(raw[:_NONCE], raw[_NONCE:], digest(*about)).decode()
    except InvalidTag as error:
        raise ValueError("what was sealed does not fit its key, or what it is about") from error


def identity_of(private: bytes) -> str:
    """The public half of a site's Ed25519 key, by which other sites know it."""
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw().hex()


def sign(private: bytes, *about: Any) -> str:
    """A site's word for this."""
    return Ed25519PrivateKey.from_private_bytes(private).sign(digest(*about)).hex()


def is_signed(identity: str, signature: str, *about: Any) -> bool:
    """Whether it is the word of this identity."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(identity)).verify(bytes.fromhex(signature), digest(*about))
    except (InvalidSignature, ValueError):
        return False
    return True
