"""Requests of rewards to a service: in parallel, repeated after failures, within a deadline, and not to a dead one.

A request that fails by the connection, by time, or with 408, 429 or 5xx is repeated after a random delay, which doubles
(AWS, "Exponential Backoff and Jitter": full jitter). Any other answer that is not the expected one is an error at once.
After five requests in a row without an answer, in all of their attempts, the circuit is open: requests fail at once,
for 1 s; then one request tries again, and doubles the time if it fails, to at most 60 s. Requests that were under way
when the circuit opened do not lengthen it, and one that was never sent is no failure.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import random
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import httpx

from pipeline.config.advice import without_password
from pipeline.config.rewards import ServiceReward
from pipeline.errors import ConfigError, RewardError

T = TypeVar("T")
ATTEMPTS: Final = 4
"""Attempts of a request."""
_REPEATED: Final = frozenset((408, 429, 500, 502, 503, 504))
_FIRST_DELAY_S: Final = 0.2
_MOST_BYTES: Final = 1 << 20
_FAILURES: Final = 5
_OPEN_S: Final = 1.0
_MOST_OPEN_S: Final = 60.0


class Breaker:
    """The circuit to a service.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._open_until_s = 0.0
        self._open_s = _OPEN_S
        self._is_trial = False

    def admit(self) -> None:
        """Admit a request, of an open circuit the first one after its time.

        Raises:
            RewardError: If the circuit is open.
        """
        left_s = self._open_until_s - self._clock()
        if self._failures >= _FAILURES:
            if left_s > 0:
                raise RewardError(f"the service is not asked: {self._failures} requests in a row had no answer")
            # The others wait for the outcome of this one.
            self._is_trial = True
            self._open_until_s = self._clock() + self._open_s

    def answered(self) -> None:
        """Close the circuit."""
        self._failures, self._open_s, self._is_trial = 0, _OPEN_S, False

    def failed(self) -> None:
        """Count a request without an answer."""
        self._failures += 1
        # A burst of requests at the same time opens the circuit once.
        if self._failures == _FAILURES or self._is_trial:
            self._is_trial = False
            self._open_until_s = self._clock() + self._open_s
            self._open_s = min(_MOST_OPEN_S, 2 * self._open_s)


def _is_local(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _proxy_of(url: httpx.URL) -> str:
    """Return the proxy of the environment through which a URL is asked, for messages; empty if there is none."""
    proxies = urllib.request.getproxies()
    for scheme in (url.scheme, "all"):
        if scheme in proxies and not urllib.request.proxy_bypass(url.host):
            proxy = without_password(proxies[scheme])
            return f", through the proxy {proxy} of {scheme}_proxy: NO_PROXY={url.host} passes it by"
    return ""


class Service:
    """An HTTP service that is sent JSON and answers with JSON.

    Args:
        url: Address to which each request is posted.
        settings: Limits of the requests, and the variable with the key.
        attempts: Attempts of a request.
    """

    def __init__(self, url: str, settings: ServiceReward, attempts: int = ATTEMPTS) -> None:
        self._url = url
        self._settings = settings
        self._attempts = attempts
        self._breaker = Breaker()
        self._headers = {"accept-encoding": "identity", "content-type": "application/json"}
        # No proxy reaches a service of this machine.
        host = httpx.URL(url).host
        self._mounts = {f"all://[{host}]" if ":" in host else f"all://{host}": None} if _is_local(host) else {}
        self._way = "" if self._mounts else _proxy_of(httpx.URL(url))
        if (variable := settings.api_key_variable) is not None:
            if not (key := os.environ.get(variable)):
                raise ConfigError(f"rewards.{settings.name}.api_key_variable: {variable} is not set in the environment")
            self._headers["authorization"] = f"Bearer {key}"

    async def ask(self, requests: Sequence[Mapping[str, Any]], read: Callable[[Any, int], T]) -> list[T | RewardError]:
        """Send requests, some at the same time.

        Args:
            requests: The bodies.
            read: Returns what an answer and the number of its request mean; raises LookupError, TypeError or ValueError
                for an answer of another form.

        Returns:
            The result of each request, or its error; those without an answer at the deadline have one.
        """
        settings = self._settings
        deadline_s = time.monotonic() + settings.deadline_s
        room = asyncio.Semaphore(settings.concurrency)
        async with httpx.AsyncClient(
            headers=self._headers, timeout=settings.request_timeout_s, mounts=self._mounts
        ) as client:

            async def one(number: int) -> T | RewardError:
                was_sent = False
                try:
                    body = _encoded(requests[number])
                    async with asyncio.timeout(deadline_s - time.monotonic()), room:
                        self._breaker.admit()
                        was_sent = True
                        return read(await self._answer(client, body), number)
                except RewardError as error:
                    return error
                except TimeoutError as error:
                    if was_sent:
                        self._breaker.failed()
                    late = RewardError(f"no answer of the service within {settings.deadline_s:g} s")
                    late.__cause__ = error
                    return late
                except (LookupError, RecursionError, TypeError, ValueError, httpx.DecodingError) as error:
                    said = "the service answered in another form"
                    return RewardError(f"{said}: {error!r:.200}", bare=f"{said}: {type(error).__name__}")

            return await asyncio.gather(*map(one, range(len(requests))))

    async def _answer(self, client: httpx.AsyncClient, body: bytes) -> Any:
        """Return the decoded answer to one request, after as many attempts as it takes and may take."""
        delay_s = _FIRST_DELAY_S
        for attempt in range(1, self._attempts + 1):
            try:
                # The limit of httpx is for each read: a service that sends a byte now and then would never reach it.
                async with asyncio.timeout(self._settings.request_timeout_s):
                    status, content = await self._post(client, body)
            except (httpx.TransportError, TimeoutError) as error:
                problem = f"{type(error).__name__}"
            except httpx.DecodingError:
                # Its content is not encoded as it says.
                self._breaker.answered()
                raise
            else:
                if status == 200:
                    self._breaker.answered()
                    return json.loads(content)
                if status not in _REPEATED:
                    self._breaker.answered()
                    raise RewardError(f"the service answered with HTTP {status}{self._way}")
                problem = f"HTTP {status}"
            if attempt < self._attempts:
                await asyncio.sleep(random.uniform(0, delay_s))
                delay_s *= 2
        self._breaker.failed()
        raise RewardError(f"the service failed {self._attempts} times, the last time with {problem}{self._way}")

    async def _post(self, client: httpx.AsyncClient, body: bytes) -> tuple[int, bytes]:
        read = bytearray()
        async with client.stream("POST", self._url, content=body) as response:
            async for chunk in response.aiter_bytes():
                read += chunk
                if len(read) > _MOST_BYTES:
                    self._breaker.answered()
                    raise RewardError(f"the service answered with more than {_MOST_BYTES:,} B")
            return response.status_code, bytes(read)


def _encoded(request: Mapping[str, Any]) -> bytes:
    """Return a request as JSON; half of a surrogate pair, which a column may hold, as JSON escapes it.

    Raises:
        RewardError: If it has a number that JSON lacks.
    """
    try:
        text = json.dumps(request, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise RewardError("the service is not asked: the prompt's row has a number that JSON lacks") from error
    return text.encode("utf-8", "backslashreplace")
