"""Access to the HTTP server: token, TLS, host names."""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import hmac
import ipaddress
import ssl
from typing import Final

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.config.sections import MetricsConfig
from pipeline.errors import ConfigError
from pipeline.supervisor.preflight import read_secret

_MOST_TOKEN_BYTES: Final = 4096
_OPEN_PATHS: Final = ("/healthz", "/readyz")


@dataclasses.dataclass(frozen=True)
class Access:
    """Access rules: every client is admitted unless there is a token; plain HTTP unless there is TLS."""

    tls: ssl.SSLContext | None = None
    token: bytes = dataclasses.field(default=b"", repr=False)

    @classmethod
    def of(cls, config: MetricsConfig) -> Access:
        """Return the access rules of a configuration, with the content of its token, certificate and key files.

        Raises:
            ConfigError: If a file cannot be read or used, or other users may read the token or the key.
        """
        token = b""
        if config.token_file is not None:
            token = read_secret("metrics.token_file", config.token_file).strip()
            if not token or len(token) > _MOST_TOKEN_BYTES:
                raise ConfigError(f"metrics.token_file: {config.token_file} holds no token of 1 to 4,096 bytes")
        if config.tls_cert is None or config.tls_key is None:
            return cls(None, token)
        read_secret("metrics.tls_key", config.tls_key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        load_certificate(context, config)
        return cls(context, token)

    def admits(self, scope: Scope) -> bool:
        """Return whether a request may be answered."""
        if not self.token or scope["path"] in _OPEN_PATHS:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(_token_of(given[0]), self.token)


def _token_of(authorization: bytes) -> bytes:
    """Return the token of a request: the bearer token, or the password of basic authentication (a browser's prompt)."""
    scheme, _, credentials = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return credentials
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def load_certificate(context: ssl.SSLContext, config: MetricsConfig) -> None:
    """Load the server's certificate and key.

    Raises:
        ConfigError: If one cannot be read, or they do not belong together.
    """
    assert config.tls_cert is not None
    try:
        # Without a password argument, OpenSSL would prompt on the terminal.
        context.load_cert_chain(config.tls_cert, config.tls_key, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"metrics.tls_cert: cannot use {config.tls_cert} and its key: {error}") from error


class AccessCheck:
    """ASGI middleware: passes requests that `Access` admits; on the loopback address, /api/ only under the own name.

    DNS rebinding: a foreign page, whose owner points its host name to 127.0.0.1, would otherwise have the same origin.
    """

    def __init__(self, application: ASGIApp, access: Access, *, names_are_refused: bool) -> None:
        self._application = application
        self.access = access
        self._names_are_refused = names_are_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with 401 or 421, or pass it on."""
        if not self.access.admits(scope):
            refused = PlainTextResponse("a bearer token is needed\n", 401, headers={"WWW-Authenticate": "Bearer"})
            # A browser then prompts for a password; any user name will do. It reads one scheme a header line.
            refused.headers.append("WWW-Authenticate", 'Basic realm="rlhfd: the password is the token"')
            await refused(scope, receive, send)
        elif self._names_are_refused and scope["path"].startswith("/api/") and not _is_own_name(scope):
            await PlainTextResponse("ask for localhost or an address\n", 421)(scope, receive, send)
        else:
            await self._application(scope, receive, send)


def _is_own_name(scope: Scope) -> bool:
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    host = hosts[0].rpartition("]")[0].lstrip("[") or hosts[0].partition(":")[0] if len(hosts) == 1 else ""
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return host.lower() == "localhost"
