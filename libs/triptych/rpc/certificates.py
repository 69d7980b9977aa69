"""Checks of PEM files; errors name the option, the file and what is wrong with it."""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from triptych.errors import ConfigError

log = logging.getLogger(__name__)

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_UTC_TIME, _EXPLICIT_0 = 0x17, 0xA0  # DER tags


def read_pem(option: str, path: str) -> bytes:
    """Read a file.

    Raises:
        ConfigError: It cannot be read, or is not PEM.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{option}: {path}: {error.strerror or error}") from None
    if b"-----BEGIN " not in content:
        raise ConfigError(f"{option}: {path} is not PEM: it has no line -----BEGIN …-----")
    return content


def check_certificates(option: str, path: str, content: bytes, *, now_unix_s: float) -> None:
    """Check that a PEM file has certificates, and warn if the first has expired.

    Raises:
        ConfigError: It has none, or one that is damaged.
    """
    found = _CERTIFICATE.findall(content.decode("ascii", errors="replace"))
    if not found:
        raise ConfigError(f"{option}: {path} has no certificate")
    try:
        ends = [find_end(ssl.PEM_cert_to_DER_cert(pem)) for pem in found]
    except (ValueError, IndexError):
        raise ConfigError(f"{option}: {path} has a certificate that is damaged") from None
    if ends[0].timestamp() < now_unix_s:
        log.warning("%s: the certificate in %s expired at %s", option, path, ends[0].isoformat())


def find_first_end(content: bytes) -> datetime:
    """Return when the first certificate of a PEM file expires, which `check_certificates` has passed."""
    pem = _CERTIFICATE.search(content.decode("ascii", errors="replace"))
    assert pem is not None, "it was checked"
    return find_end(ssl.PEM_cert_to_DER_cert(pem[0]))


def check_key(option: str, path: str, content: bytes) -> None:
    """Check that a PEM file has a private key without a passphrase.

    Raises:
        ConfigError: It has none, or an encrypted one.
    """
    if b"PRIVATE KEY-----" not in content:
        raise ConfigError(f"{option}: {path} has no private key")
    if b"ENCRYPTED" in content:
        raise ConfigError(f"{option}: {path} is encrypted; give the key without a passphrase")


def check_pair(certificate: str, key: str) -> None:
    """Check that a private key belongs to a certificate; both are paths.

    Raises:
        ConfigError: It does not, or one of them is damaged.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"tls.key: {key} is not the key of the certificate in {certificate}") from None
        raise ConfigError(
            f"tls.certificate, tls.key: {certificate} and {key} cannot be used ({error.reason or error})"
        ) from None
    except OSError as error:
        raise ConfigError(f"tls.certificate, tls.key: {error}") from None


def find_end(der: bytes) -> datetime:
    """Return when a certificate expires (RFC 5280, section 4.1). The standard library has no function for it.

    Raises:
        ValueError, IndexError: It is no certificate.
    """
    ((_, certificate),) = _elements(der)
    to_be_signed = next(_elements(certificate))[1]
    fields = [element for element in _elements(to_be_signed) if element[0] != _EXPLICIT_0]
    validity = fields[3][1]  # after serialNumber, signature, issuer; [0] is the version
    tag, text = list(_elements(validity))[1]
    # The years of a UTCTime are 1950 to 2049, which is how OpenSSL and RFC 5280 read two digits.
    if tag == _UTC_TIME:
        text = (b"19" if text[:2] >= b"50" else b"20") + text
    return datetime.strptime(text.decode("ascii"), "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of each DER element of a sequence's content."""
    position = 0
    while position < len(der):
        tag, length = der[position], der[position + 1]
        position += 2
        if length & 0x80:
            num_bytes = length & 0x7F
            length = int.from_bytes(der[position : position + num_bytes], "big")
            position += num_bytes
        if position + length > len(der):
            raise ValueError("the element is cut short")
        yield tag, der[position : position + length]
        position += length
