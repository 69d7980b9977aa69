"""Looks up the API keys that calls send, in a file that may change while the frontend serves."""

from __future__ import annotations

import functools
import hmac
from collections.abc import Mapping
from pathlib import Path

from services.frontend.access.caller import Caller
from triptych.config import FrontendConfig
from triptych.config.api_keys import hash_key, read_api_keys
from triptych.config.watched_files import WatchedFiles
from triptych.errors import PermissionDenied, Unauthenticated

AUTHORIZATION = "authorization"
X_API_KEY = "x-api-key"
_NO_KEY = f"no valid API key; send one as `{AUTHORIZATION}: Bearer KEY`"


class ApiKeys:
    """The callers that the file of keys admits, as it stands now."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            ConfigError: It cannot be used; names what is wrong.
        """
        self._callers = WatchedFiles([path], functools.partial(_read, path), what=f"API keys {path}")

    def find(self, headers: Mapping[str, str]) -> Caller:
        """Return the caller whose key a call has sent.

        Args:
            headers: HTTP headers or gRPC metadata, with names in lower case.

        Raises:
            Unauthenticated: It has sent none, or one that the file does not have.
        """
        digest = hash_key(_sent_key(headers))
        found = self._callers.get().get(digest)
        if found is None or not hmac.compare_digest(found[0], digest):
            raise Unauthenticated(_NO_KEY)
        return found[1]

    def find_admin(self, headers: Mapping[str, str]) -> Caller:
        """Return the administrator whose key a call has sent.

        Raises:
            Unauthenticated: As `find`.
            PermissionDenied: The key is not one of an administrator.
        """
        caller = self.find(headers)
        if not caller.is_admin:
            raise PermissionDenied(f"API key {caller.name!r} is not one of an administrator")
        return caller


def create_api_keys(config: FrontendConfig) -> ApiKeys | None:
    """Return the keys that the config asks for, or None if it asks for none."""
    return ApiKeys(Path(config.api_keys_file)) if config.api_keys_file else None


def _read(path: Path) -> Mapping[str, tuple[str, Caller]]:
    return {key.sha256: (key.sha256, Caller.of(key)) for key in read_api_keys(path)}


def _sent_key(headers: Mapping[str, str]) -> str:
    """Return the key that was sent, empty if none was."""
    scheme, _, key = headers.get(AUTHORIZATION, "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get(X_API_KEY, "")
