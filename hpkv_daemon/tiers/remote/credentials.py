"""Where the credentials of a store are: the environment, the usual files, or systemd's credentials. Never a flag."""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from pathlib import Path

from hpkv_daemon.tiers.remote.backend import BackendError

SYSTEMD_NAMES = {"s3": "hpkv-aws", "gs": "hpkv-google", "az": "hpkv-azure-key"}
"""Names for ``LoadCredential=``: a file like ~/.aws/credentials, a service account's JSON file, an account's key."""

_AWS_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}


def credentials_for(scheme: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Options for obstore; empty where it finds what it needs by itself (variables, roles, metadata services).

    Raises ``BackendError`` for a file that is there and cannot be used.
    """
    handed = _handed_by_systemd(scheme, environ)
    if scheme == "s3":
        if environ.get("AWS_ACCESS_KEY_ID") and handed is None:
            return {}
        file = handed or Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials")
        return _from_aws_file(file, environ.get("AWS_PROFILE") or "default") if handed or file.is_file() else {}
    if handed is None:
        return {}
    return {"service_account": str(handed)} if scheme == "gs" else {"access_key": _text(handed).strip()}


def _handed_by_systemd(scheme: str, environ: Mapping[str, str]) -> Path | None:
    directory = environ.get("CREDENTIALS_DIRECTORY")
    name = SYSTEMD_NAMES.get(scheme)
    if not directory or name is None:
        return None
    file = Path(directory) / name
    return file if file.is_file() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError as problem:
        raise BackendError(f"credentials in {file}: {problem.strerror}") from None


def _from_aws_file(file: Path, profile: str) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(_text(file))
        found = dict(parser.items(profile))
    except configparser.NoSectionError:
        raise BackendError(f"credentials in {file}: no profile {profile!r}") from None
    except configparser.Error:
        # Its text may quote a secret.
        raise BackendError(f"credentials in {file} are malformed") from None
    return {option: found[key] for key, option in _AWS_KEYS.items() if key in found}
