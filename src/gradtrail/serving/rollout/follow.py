"""Follows an alias of the registry: when it names another version, that one is loaded and takes its place.

A registry that does not answer changes nothing: the server goes on with what it has, and says so once.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gradtrail.serving.monitoring.metrics import Role, ServerMetrics
from gradtrail.serving.registry import RegistryDown
from gradtrail.support.errors import UserError, one_line, printable

LOG = logging.getLogger("gradtrail.serve")
JITTER = 0.2  # of the interval: servers that were started together do not ask together
MAX_BACKOFF = 60.0  # seconds between tries to load a version that could not be loaded

VersionOf = Callable[[str, str], str | None]
Take = Callable[[str | None], Awaitable[None]]


@dataclass(kw_only=True)
class Follower:
    """Asks every few seconds which version an alias names.

    Attributes:
        name: of the model in the registry.
        alias: that is followed.
        role: that its versions serve in.
        known: version that serves; None for none.
        version_of: asks the registry, in a thread; raises RegistryDown.
        take: loads a version, warms it up and lets it serve, or ends the role where it is None; raises where it cannot.
        metrics: that are told.
        seconds: between questions.
    """

    name: str
    alias: str
    role: Role
    known: str | None
    version_of: VersionOf
    take: Take
    metrics: ServerMetrics
    seconds: float = 5.0
    _is_up: bool = True
    _said: str = ""
    _wait: float = 0.0

    async def run(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Follow until cancelled; whatever goes wrong is logged once, and tried again."""
        while True:
            spread = random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - no secret
            await sleep(max(self.seconds, self._wait) * spread)
            await self.step()

    async def step(self) -> None:
        """Ask once, and take the version that the alias names now if it is another one."""
        try:
            version = await asyncio.to_thread(self.version_of, self.name, self.alias)
        except UserError as error:  # RegistryDown, or what a person can mend
            self._down(error)
            return
        except Exception as error:
            self._failed(f"{self.name}@{self.alias} cannot be read", error)
            return
        if not self._is_up:
            LOG.warning("the registry answers again")
        self._is_up = True
        self.metrics.registry_up(True)
        if version == self.known:
            self._said, self._wait = "", 0.0
        elif version is None and self.role == "primary":
            self._say(f"{self.name} has no alias {self.alias} any longer; version {self.known} keeps serving")
        else:
            await self._take(version)

    async def _take(self, version: str | None) -> None:
        try:
            await self.take(version)
        except RegistryDown as error:
            self._down(error)
        except Exception as error:
            self._failed(f"{self.name}@{self.alias}: version {version} cannot be used", error)
        else:
            self.known, self._said, self._wait = version, "", 0.0

    def _failed(self, what: str, error: Exception) -> None:
        """Count a fault, say it once, and try again ever later."""
        self.metrics.follow_failed(self.role)
        self._wait = min(MAX_BACKOFF, 2 * max(self.seconds, self._wait))
        self._say(f"{what}, {self._goes_on()}: {one_line(error)}", error)

    def _goes_on(self) -> str:
        return f"version {self.known} keeps serving" if self.known else "none serves"

    def _down(self, error: Exception) -> None:
        """Say once that the registry does not answer."""
        self.metrics.registry_up(False)
        if self._is_up:
            self._is_up = False
            LOG.warning("%s@%s: %s; %s", self.name, self.alias, printable(one_line(error)), self._goes_on())

    def _say(self, told: str, error: Exception | None = None) -> None:
        """Log a line unless it is what was said last; with a traceback where the fault is our own."""
        if told != self._said:
            self._said = told
            LOG.warning("%s", printable(told), exc_info=error if error and not isinstance(error, UserError) else None)
