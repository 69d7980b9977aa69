"""Looks up the API keys that calls send, in a file that may change while the frontend serves."""

from __future__ import annotations

import functools
import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from triptych.config import FrontendConfig
from triptych.config.api_keys import hash_key, read_api_keys
from triptych.config.watched_files import WatchedFiles
from triptych.errors import PermissionDenied, Unauthenticated
from triptych_services.frontend.access.caller import Caller

AUTHORIZATION = "authorization"
X_API_KEY = "x-api-key"
MAX_TENANT_LABELS = 100
"""Tenants that metrics name, the first of the file of keys. All others are one."""
OTHER_TENANTS = "other"
_NO_KEY = f"no valid API key; send one as `{AUTHORIZATION}: Bearer KEY`"


class ApiKeys:
    """The callers that the file of keys admits, as it stands now."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            ConfigError: It cannot be used; names what is wrong.
        """
        self._content = WatchedFiles([path], functools.partial(_read, path), what=f"API keys {path}")

    def find(self, headers: Mapping[str, str]) -> Caller:
        """Return the caller whose key a call has sent.

        Args:
            headers: HTTP headers or gRPC metadata, with names in lower case.

        Raises:
            Unauthenticated: It has sent none, or one that the file does not have.
        """
        digest = hash_key(_sent_key(headers))
        found = self._content.get().digest_to_caller.get(digest)
        if found is None or not hmac.compare_digest(found[0], digest):
            raise Unauthenticated(_NO_KEY)
        return found[1]

    def is_labelled(self, tenant: str) -> bool:
        """Return whether metrics name a tenant."""
        return tenant in self._content.get().labelled

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


def label_of_tenant(tenant: str, keys: ApiKeys | None) -> str:
    """Return a tenant as metrics name it, which is not made up by a client: one that a key is of, or `other`."""
    if not tenant or (keys is not None and keys.is_labelled(tenant)):
        return tenant
    return OTHER_TENANTS


class _Content(NamedTuple):
    """The file of keys."""

    digest_to_caller: Mapping[str, tuple[str, Caller]]
    """SHA-256 of a key -> the same, and the caller."""
    labelled: frozenset[str]
    """The tenants that metrics name."""


def _read(path: Path) -> _Content:
    keys = read_api_keys(path)
    tenants = list(dict.fromkeys(key.tenant for key in keys))
    callers = {key.sha256: (key.sha256, Caller.of(key)) for key in keys}
    return _Content(callers, frozenset(tenants[:MAX_TENANT_LABELS]))


def _sent_key(headers: Mapping[str, str]) -> str:
    """Return the key that was sent, empty if none was."""
    scheme, _, key = headers.get(AUTHORIZATION, "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get(X_API_KEY, "")
