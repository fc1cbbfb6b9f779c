"""Connections by which the processes of a stage learn at once that one of them has ended, and which.

The system closes those of a killed process; of a host that is gone, TCP's keep-alive tells after 20 s. A collective may
not notice for 30 s, in a call that no signal interrupts; so a thread watches.
"""

import contextlib
import hmac
import ipaddress
import json
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Iterator

_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, seconds, times
_PATIENCE_SECONDS = 2.0  # in which the process may notice a loss by itself, and end as it does of any fault
_TOKEN_BYTES = 16


class Lifeline:
    """The connections of one process: of process 0 to all others, of another to process 0.

    Args:
        connections: index of a process → connection to it.
        hosts: index of a process → its host.
    """

    def __init__(self, connections: dict[int, socket.socket], hosts: dict[int, str]):
        self._connections, self._hosts = connections, hosts
        self._lost: int | None = None  # the first that ended
        self._changed, self._closed = threading.Event(), threading.Event()
        self._armed: Callable[[], object] | None = None
        self.thread = threading.Thread(target=self._watch, daemon=True, name="lifeline")
        self.thread.start()

    def first_lost(self) -> str:
        """Return which process was the first that ended, waiting for a moment; empty where none is known to have."""
        self._changed.wait(_PATIENCE_SECONDS / 2)
        return "" if self._lost is None else f"process {self._lost} on {self._hosts[self._lost]}"

    @contextlib.contextmanager
    def watched(self, end: Callable[[], object]) -> Iterator[None]:
        """Call `end`, in a thread, where another process ends, or has ended before, and the block still goes on.

        Of blocks one in the other the inner one replaces `end`, and its end is that of the watch.
        """
        self._armed = end
        try:
            yield
        finally:
            self.disarm()

    def disarm(self) -> None:
        """Call nothing from here on."""
        self._armed = None

    def close(self) -> None:
        """End the watch."""
        self.disarm()
        self._closed.set()
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            for index, connection in self._connections.items():
                selector.register(stack.enter_context(connection), selectors.EVENT_READ, index)
            key, _ = selector.select()[0]
            if self._closed.is_set():
                return
            self._lost = key.data
            self._changed.set()
            while not self._closed.wait(_PATIENCE_SECONDS):
                if (end := self._armed) is not None:
                    end()
                    return


def listen(address: str, count: int, seconds: float, tell: Callable[[str], object]) -> Lifeline:
    """Return the lifeline of process 0, once all others have come.

    Args:
        address: to listen at; empty for all of this host.
        count: of all processes.
        seconds: to wait for each of the others.
        tell: lets the others know what `connect` takes.

    Raises:
        TimeoutError: one did not come.
    """
    token = secrets.token_hex(_TOKEN_BYTES)
    both = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
    connections: dict[int, socket.socket] = {}
    hosts: dict[int, str] = {}
    with socket.create_server((address, 0), family=family, backlog=count, dualstack_ipv6=both) as server:
        server.settimeout(seconds)
        tell(json.dumps([server.getsockname()[1], token]))
        while len(connections) < count - 1:
            connection, _ = server.accept()
            if (told := _introduction(connection, token)) is None:
                connection.close()
            else:
                index, hosts[told[0]] = told
                connections[index] = _kept_alive(connection)
    return Lifeline(connections, hosts)


def connect(host: str, told: str, index: int) -> Lifeline:
    """Return the lifeline of another process, with what process 0 has told, to process 0 on a host.

    Raises:
        OSError: process 0 cannot be reached.
    """
    port, token = json.loads(told)
    connection = socket.create_connection((host, port))
    connection.sendall(json.dumps([token, index, socket.gethostname()]).encode() + b"\n")
    return Lifeline({0: _kept_alive(connection)}, {0: host})


def is_loopback(address: str) -> bool:
    """Whether an address with a port is one of this host alone."""
    host = address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _introduction(connection: socket.socket, token: str) -> tuple[int, str] | None:
    """Return index and host of who has connected; None for one who does not know the token."""
    connection.settimeout(_PATIENCE_SECONDS)
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError), connection.makefile() as lines:
        given, index, host = json.loads(lines.readline(1000))
        if hmac.compare_digest(str(given), token):
            return int(index), str(host)
    return None


def _kept_alive(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
