"""Client-side encryption: AES-256-GCM with a key that never leaves the nodes."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path

from hpkv_client.errors import ConfigError, NotPermitted
from hpkv_daemon.tiers.remote.format import KEY_ID_BYTES, NONCE_BYTES, Buffer, Sealing, bound

SECRET_BYTES = 32
_HINT = "make one with 'head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE', the same on every node"


def read_secret(path: Path) -> bytes:
    """The key in a file: 32 bytes in base64. Raises ``ConfigError`` or ``NotPermitted``, never with a part of it."""
    try:
        mode = path.stat().st_mode
        text = path.read_bytes()
    except PermissionError:
        raise NotPermitted(f"no access to {path}", "run as its owner") from None
    except OSError as problem:
        raise ConfigError(f"key file {path}: {problem.strerror}", _HINT) from None
    if mode & 0o077:
        raise ConfigError(f"others may read the key in {path}", f"run 'chmod 600 {path}'")
    try:
        secret = base64.b64decode(text.strip(), validate=True)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{path} holds no key of {SECRET_BYTES} bytes in base64", _HINT)
    return secret


class Seal:
    """Encrypts and decrypts payloads. Threads may share it. Raises ``ConfigError`` without the package for it."""

    def __init__(self, secret: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise ConfigError("encryption needs the package cryptography", "run 'pip install hpkv[crypto]'") from None
        self._invalid = InvalidTag
        self._cipher = AESGCM(secret)
        self.key_id = hashlib.sha256(b"hpkv-remote-key-v1" + secret).digest()[:KEY_ID_BYTES]
        """Names the key; tells nothing about it."""

    def encrypt(self, fingerprint: bytes, key: bytes, payload: Buffer) -> tuple[Sealing, bytes]:
        """How, and what comes of it.

        Nonces are random: with one key, 2^32 blocks may be written before two of them are equal with a chance of
        2^-33 (NIST SP 800-38D).
        """
        sealing = Sealing(self.key_id, os.urandom(NONCE_BYTES))
        return sealing, self._cipher.encrypt(sealing.nonce, payload, bound(fingerprint, key, len(payload), sealing))

    def decrypt(self, fingerprint: bytes, key: bytes, length: int, sealing: Sealing, stored: Buffer) -> bytes | None:
        """The payload; None if it is not what was encrypted for this block with this key."""
        try:
            return self._cipher.decrypt(sealing.nonce, stored, bound(fingerprint, key, length, sealing))
        except self._invalid:
            return None
