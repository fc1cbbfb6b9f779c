"""The server of the review page: on loopback, for the holder of the printed link and no other page."""

import hmac
import re
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flask import Flask, Response, jsonify, request
from werkzeug.exceptions import HTTPException
from werkzeug.serving import WSGIRequestHandler, make_server

from gradtrail.experiments.review.session import Review
from gradtrail.stages.common.params import validate
from gradtrail.support.errors import UserError, environment_error
from gradtrail.support.signals import stopping_on_signals

HOST = "127.0.0.1"
_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]+)?")  # names of this machine in a browser
_MAX_BODY_BYTES = 4096
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:; script-src 'self'; "
    "style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The body of a decision; see `Review.decide`."""

    index: int
    new: int | None
    reason: str


def make_app(review: Review, token: str) -> Flask:
    """Return the application. No part of a request becomes a path: its three files are read here.

    Args:
        review: Labels and decisions that the page displays and changes.
        token: Secret of the link. `/?token=…` sets a cookie with it, and requests without the cookie are refused.
    """
    cookie = f"review-{secrets.token_hex(4)}"  # a unique name: a browser sends the cookies of all ports
    app = Flask(__name__, static_folder=None, template_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = _MAX_BODY_BYTES
    for path, (name, kind) in _FILES.items():
        text = (Path(__file__).parent / name).read_text(encoding="utf-8")
        app.add_url_rule(path, name, lambda text=text, kind=kind: Response(text, mimetype=kind))

    @app.get("/api/state")
    def state() -> dict[str, Any]:
        return review.state()

    @app.get("/api/images/<int:index>")
    def images(index: int) -> dict[str, Any]:
        return review.images(index)

    @app.post("/api/decide")
    def decide() -> dict[str, Any]:
        decision = validate(request.get_json(), Decision, "decision")
        return review.decide(decision.index, decision.new, decision.reason)

    @app.post("/api/undo")
    def undo() -> dict[str, Any]:
        request.get_json()  # refuses a form of another page, which cannot send JSON
        return review.undo()

    def require_token() -> Response | tuple[Response, int] | None:
        if request.path == "/" and _are_equal(request.args.get("token", ""), token):
            answer = Response(status=303, headers={"Location": "/"})
            answer.set_cookie(cookie, token, httponly=True, samesite="Strict")
            return answer
        if not _are_equal(request.cookies.get(cookie, ""), token):
            return jsonify(error="open the link that `gradtrail review` printed"), 403
        return None

    app.before_request(_require_own_origin)
    app.before_request(require_token)
    app.after_request(_add_headers)
    app.register_error_handler(UserError, lambda error: (jsonify(error=str(error)), 400))
    app.register_error_handler(HTTPException, lambda error: (jsonify(error=error.name), error.code or 500))
    app.register_error_handler(OSError, _answer_disk_error)
    return app


def _require_own_origin() -> tuple[Response, int] | None:
    """Refuse requests of other pages: those of another origin, and of a host name that was rebound to this machine."""
    host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
    if not _OWN_HOST.fullmatch(host) or origin not in (None, f"http://{host}"):
        return jsonify(error="only the page of `gradtrail review` on this machine may send requests"), 403
    return None


def _are_equal(text: str, token: str) -> bool:
    return hmac.compare_digest(text.encode(), token.encode())


def _add_headers(response: Response) -> Response:
    response.headers.update(_HEADERS)
    return response


def _answer_disk_error(error: OSError) -> tuple[Response, int]:
    if not (message := environment_error(error)):
        raise error
    return jsonify(error=f"{message}; nothing was saved"), 500


class Quiet(WSGIRequestHandler):
    def log_request(self, *_: object) -> None:
        """Log no answered request."""


def open_port(port: int) -> socket.socket:
    """Return a socket that listens on loopback; raise UserError if the port is in use."""
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise UserError(f"--port {port}: cannot be opened on {HOST} ({error.strerror}); choose another one") from None


def serve(review: Review, listening: socket.socket) -> None:
    """Serve the page until Ctrl-C or SIGTERM."""
    port = listening.getsockname()[1]
    token = secrets.token_urlsafe()
    app = make_app(review, token)
    server = make_server(HOST, port, app, threaded=True, request_handler=Quiet, fd=listening.fileno())
    link = f"http://{HOST}:{port}/?token={token}"
    print(f"reviewing {len(review.suspects)} labels as {review.reviewer}: {link} (Ctrl-C stops)", flush=True)
    with stopping_on_signals("stopped"):
        server.serve_forever()  # returns on KeyboardInterrupt, which SIGTERM raises too
    print(f"\n{review.summary()}")
