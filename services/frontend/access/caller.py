"""The caller of a request: the holder of its API key, and what that key permits."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace

from triptych.config.api_keys import ANY_TENANT, ApiKey
from triptych.errors import PermissionDenied
from triptych_services.frontend.requests.raw import RawRequest


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of the call that runs now."""

    name: str = ""
    """Name of the key. Empty: no keys are asked for."""
    tenant: str | None = None
    """The only tenant that it may speak for. None: any."""
    is_admin: bool = False
    requests_per_minute: int = 0
    """Requests that may be admitted within a minute. 0: any number."""
    tokens_per_minute: int = 0
    """Tokens, of prompts and of output, within a minute. 0: any number."""
    min_priority: int | None = None
    """The most urgent priority that its requests may have. None: any."""

    @classmethod
    def of(cls, key: ApiKey) -> Caller:
        """Return the caller that a key stands for."""
        tenant = None if key.tenant == ANY_TENANT else key.tenant
        min_priority = 0 if key.min_priority is None and tenant is not None else key.min_priority
        return cls(key.name, tenant, key.admin, key.requests_per_minute, key.tokens_per_minute, min_priority)

    @property
    def has_limits(self) -> bool:
        """Whether its requests or tokens within a minute are limited."""
        return bool(self.requests_per_minute or self.tokens_per_minute)

    def may_speak_for(self, tenant: str) -> bool:
        """Return whether requests of a tenant are this caller's own."""
        return self.tenant is None or self.tenant == tenant

    def own(self, raw: RawRequest) -> RawRequest:
        """Return the request with the tenant that pays for it.

        OpenAI's `user` names an end user. A key of one tenant does not need it: it is ignored then, not refused.

        Raises:
            PermissionDenied: The request names a tenant that this caller does not speak for, or is more urgent than
                its requests may be.
        """
        if self.min_priority is not None and raw.head.priority < self.min_priority:
            raise PermissionDenied(
                f"{raw.path('priority')}: {raw.head.priority} is more urgent than {self.min_priority}, the most "
                f"urgent that API key {self.name!r} may ask for"
            )
        if self.tenant is None:
            return raw
        if raw.head.tenant and raw.head.tenant != self.tenant and raw.path("tenant") == "tenant":
            raise PermissionDenied(f"tenant: this API key is of tenant {self.tenant!r}; leave the field out")
        return replace(raw, head=replace(raw.head, tenant=self.tenant))


ANYONE = Caller()
"""The caller where no keys are asked for."""

_caller: ContextVar[Caller] = ContextVar("caller", default=ANYONE)
_tenant: ContextVar[str] = ContextVar("tenant", default="")


def set_caller(caller: Caller) -> None:
    """Name the caller of the call that runs now; each call runs in a task of its own, and so in its own context."""
    _caller.set(caller)


def current_caller() -> Caller:
    """Return the caller of the call that runs now."""
    return _caller.get()


def set_tenant(tenant: str) -> None:
    """Name the tenant that the call that runs now is for, when its request has been read. Empty: it has named none."""
    _tenant.set(tenant)


def current_payer() -> str:
    """Return the name under which the work of the call that runs now is charged, before an engine knows of it.

    It is the tenant of the request. Until that is known, or if it names none, it is the tenant of the key, and for a
    key that speaks for all tenants the key itself.
    """
    caller = current_caller()
    if caller.tenant is not None:
        return caller.tenant
    return _tenant.get() or f"key {caller.name}"
