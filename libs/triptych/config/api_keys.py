"""The file of API keys: one entry per key, which holds the SHA-256 of the key and never the key itself.

- {name: search, sha256: 9f86d0…, tenant: acme, requests_per_minute: 600}
- {name: gateway, sha256: 60303a…, tenant: "*"}
- {name: alerts, sha256: 1f3870…, min_priority: -10}
- {name: operator, sha256: fd61a0…, admin: true}
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from triptych.errors import ConfigError

ANY_TENANT = "*"
"""The `tenant` of a key that may name any tenant in its requests: that of a gateway."""
_MOST_URGENT = -(1 << 31)  # the least value of a request's priority, which is an int32
_PREFIX = "tk-"  # makes a key that leaked recognizable
_KEY_BYTES = 32  # of randomness: too many keys to try, so a fast hash is enough
_MAX_TENANT_BYTES = 256  # as in requests
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One entry of the file."""

    name: str
    """Names the key's holder in logs."""
    sha256: str
    """SHA-256 of the key, 64 lower-case hexadecimal digits."""
    tenant: str
    """The tenant that pays for the key's requests; `*`: the one that each request names. By default `name`."""
    admin: bool = False
    """Whether the key opens the admin port."""
    requests_per_minute: int = 0
    """Requests to generate within a minute. 0: any number."""
    tokens_per_minute: int = 0
    """Tokens of prompts and outputs within a minute. 0: any number."""
    min_priority: int | None = None
    """The most urgent priority that its requests may have; less is more urgent. None: 0, or any for the tenant `*`."""


def hash_key(key: str) -> str:
    """Return the SHA-256 of a key in hexadecimal digits, as the file has it."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def draw_key() -> str:
    """Return a new random key."""
    return _PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def entry_line(name: str, key: str, **options: str | int | bool) -> str:
    """Return the line of the file for a key, checked as the file will be.

    Args:
        options: Other fields of the entry.

    Raises:
        ConfigError: A field is invalid; names it.
    """
    entry = {"name": name, "sha256": hash_key(key), **options}
    _to_key(entry, "the entry")
    return "- {" + ", ".join(f"{field}: {json.dumps(value)}" for field, value in entry.items()) + "}"


def read_api_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read the file.

    Raises:
        ConfigError: It cannot be read, or an entry is invalid; names the file, the entry and the field.
    """
    import yaml  # a bare GPU machine, which reads no keys, may lack it

    where = f"API keys {path}"
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{where}: {error.strerror or error}; `triptych keys new NAME` writes an entry"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} is not yaml: {error}") from None
    if not isinstance(document, list) or not document:
        raise ConfigError(f"{where}: expected a list of entries; `triptych keys new NAME` writes one")
    keys = tuple(_to_key(entry, f"{where}, entry {number}") for number, entry in enumerate(document, 1))
    for field in ("name", "sha256"):
        values = [getattr(key, field) for key in keys]
        if twice := sorted({value for value in values if values.count(value) > 1}):
            raise ConfigError(f"{where}: two entries have the {field} {twice[0]!r}")
    return keys


def _to_key(entry: Any, where: str) -> ApiKey:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: expected a mapping with name and sha256, found {entry!r}")
    known = [field.name for field in fields(ApiKey)]
    for field in entry:
        if field not in known:
            raise ConfigError(f"{where}: no such field {field!r}; there are {', '.join(known)}")
    name = _text(entry, "name", where, _NAME, "1 to 64 letters, digits, or any of . _ @ -")
    sha256 = _text(entry, "sha256", where, _SHA256, "64 lower-case hexadecimal digits")
    tenant, admin = entry.get("tenant", name), entry.get("admin", False)
    if not isinstance(tenant, str) or not tenant or len(tenant.encode()) > _MAX_TENANT_BYTES:
        raise ConfigError(
            f"{where}: tenant: expected a text of 1 to {_MAX_TENANT_BYTES} bytes, found {tenant!r}"
        )
    if not isinstance(admin, bool):
        raise ConfigError(f"{where}: admin: expected true or false, found {admin!r}")
    requests = _count(entry, "requests_per_minute", where)
    tokens = _count(entry, "tokens_per_minute", where)
    return ApiKey(name, sha256, tenant, admin, requests, tokens, _min_priority(entry, where))


def _min_priority(entry: Mapping[str, Any], where: str) -> int | None:
    value = entry.get("min_priority")
    if "min_priority" in entry and (type(value) is not int or not _MOST_URGENT <= value <= 0):
        raise ConfigError(f"{where}: min_priority: expected an integer of {_MOST_URGENT}..0, found {value!r}")
    return value


def _count(entry: Mapping[str, Any], field: str, where: str) -> int:
    value = entry.get(field, 0)
    if type(value) is not int or value < 0 or (field in entry and value == 0):
        raise ConfigError(f"{where}: {field}: expected a number from 1, or no such field; found {value!r}")
    return value


def _text(entry: Mapping[str, Any], field: str, where: str, pattern: re.Pattern[str], expected: str) -> str:
    value = entry.get(field)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ConfigError(f"{where}: {field}: expected {expected}, found {value!r}")
    return value
