"""Follows an alias of the registry: a new version is loaded and replaces the current one.

While the registry does not respond, the server keeps its model, and logs that once.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gradtrail.serving.metrics import Role, ServerMetrics
from gradtrail.serving.registry import RegistryUnavailable
from gradtrail.support.errors import UserError, one_line, printable

LOG = logging.getLogger("gradtrail.serve")
JITTER = 0.2  # share of the interval, so that servers started together do not ask together
MAX_BACKOFF = 60.0  # seconds between attempts to load a version that could not be loaded


@dataclass(kw_only=True)
class Follower:
    """Asks periodically which version an alias refers to.

    Attributes:
        name: Name of the model in the registry.
        alias: Alias to follow.
        role: Role of its versions in the server.
        version: Version that serves; None for none.
        version_of: Function that asks the registry; called in a thread, raises RegistryUnavailable.
        load: Function that loads a version, warms it up and lets it serve, or ends the role if it is None.
        metrics: Metrics of the server.
        seconds: Time between two questions.
    """

    name: str
    alias: str
    role: Role
    version: str | None
    version_of: Callable[[str, str], str | None]
    load: Callable[[str | None], Awaitable[None]]
    metrics: ServerMetrics
    seconds: float = 5.0
    _is_up: bool = True
    _last_message: str = ""
    _wait: float = 0.0

    async def run(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Follow until cancelled; a failure is logged once, and tried again."""
        while True:
            spread = random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - no secret
            await sleep(max(self.seconds, self._wait) * spread)
            await self.step()

    async def step(self) -> None:
        """Ask once, and load the version of the alias if it is a new one."""
        try:
            version = await asyncio.to_thread(self.version_of, self.name, self.alias)
        except UserError as error:  # RegistryUnavailable, or a mistake that a person can correct
            self._report_unavailable(error)
            return
        except Exception as error:
            self._report_failure(f"{self.name}@{self.alias} cannot be read", error)
            return
        if not self._is_up:
            LOG.warning("the registry responds again")
        self._is_up = True
        self.metrics.registry_up.set(1)
        if version == self.version:
            self._last_message, self._wait = "", 0.0
        elif version is None and self.role == "primary":
            self._log(f"{self.name} no longer has the alias {self.alias}; version {self.version} keeps serving")
        else:
            await self._load(version)

    async def _load(self, version: str | None) -> None:
        try:
            await self.load(version)
        except RegistryUnavailable as error:
            self._report_unavailable(error)
        except Exception as error:
            self._report_failure(f"{self.name}@{self.alias}: version {version} cannot be used", error)
        else:
            self.version, self._last_message, self._wait = version, "", 0.0

    def _report_failure(self, message: str, error: Exception) -> None:
        """Count a failure, log it once, and wait longer before the next attempt."""
        self.metrics.follow_failures.labels(self.role).inc()
        self._wait = min(MAX_BACKOFF, 2 * max(self.seconds, self._wait))
        self._log(f"{message}, {self._consequence()}: {one_line(error)}", error)

    def _consequence(self) -> str:
        return f"version {self.version} keeps serving" if self.version else "none serves"

    def _report_unavailable(self, error: Exception) -> None:
        """Log once that the registry does not respond."""
        self.metrics.registry_up.set(0)
        if self._is_up:
            self._is_up = False
            LOG.warning("%s@%s: %s; %s", self.name, self.alias, printable(one_line(error)), self._consequence())

    def _log(self, message: str, error: Exception | None = None) -> None:
        """Log a line unless it repeats the last one; with a traceback if the error is a bug."""
        if message != self._last_message:
            self._last_message = message
            is_bug = error is not None and not isinstance(error, UserError)
            LOG.warning("%s", printable(message), exc_info=error if is_bug else None)
