"""A real HTTP server on the loopback interface that misbehaves in every way a mirror may."""

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator

Route = Callable[["Handler"], None]


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers each request as the server's route for its path, or for the first folder in it, says."""

    server: "MirrorServer"

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        routes = self.server.routes
        route = routes.get(self.path) or routes.get(self.path.strip("/").split("/")[0]) or status(404)
        with contextlib.suppress(ConnectionError):  # the client gives up in some tests, as it should
            route(self)

    def log_message(self, *_: object) -> None:
        """Be silent."""

    def head(self, code: int, **headers: object) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()


class MirrorServer(http.server.ThreadingHTTPServer):
    """A server with a base URL for each of its routes; `requests` lists the path of each request."""

    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.routes: dict[str, Route] = {}
        self.requests: list[str] = []
        self.closing = threading.Event()

    def base(self, route: str = "", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.server_port}/{route}".rstrip("/")


@contextlib.contextmanager
def mirror_server() -> Iterator[MirrorServer]:
    server = MirrorServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


def status(code: int, **headers: object) -> Route:
    return lambda handler: handler.head(code, Content_Length=0, **headers)


def whole(body: bytes, **headers: object) -> Route:
    def answer(handler: Handler) -> None:
        handler.head(200, Content_Length=len(body), **headers)
        handler.wfile.write(body)

    return answer


def endless(pieces: Callable[[], Iterator[bytes]], code: int = 200, *, pause_seconds: float = 0.0) -> Route:
    """Send a body without length that never ends by itself."""

    def answer(handler: Handler) -> None:
        handler.head(code, Location=handler.path)
        for piece in pieces():
            handler.wfile.write(piece)
            if handler.server.closing.wait(pause_seconds):
                return

    return answer
