"""`gradtrail review`: review suspected label errors in a browser, and merge the decisions of several people.

The file of corrections is the only state: it is read and written for every decision, before the page goes on. The page
is served on loopback, below a path with a random token, so that only the holder of the printed link can open it.
"""

import contextlib
import getpass
import io
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from PIL import Image
from pydantic import BaseModel
from starlette.middleware.trustedhost import TrustedHostMiddleware

from gradtrail.core.data import Split
from gradtrail.stages.data.data_files import read_info, read_splits, sample_rows
from gradtrail.stages.data.parquet import read_parquet
from gradtrail.stages.preprocess.corrections import (
    Correction,
    disagreements,
    read_corrections,
    require_fit,
    write_corrections,
)
from gradtrail.support.errors import UserError, environment_error
from gradtrail.support.git import git
from gradtrail.support.signals import stop_request

SUSPECTS, _DATA = Path("results/audit/suspects.parquet"), Path("data/processed")
_COLUMNS = ["split", "example_id", "label", "score", "proposed_label", "proposed_probability", "probability_wrong"]
_HOST, _NUM_NEIGHBOURS = "127.0.0.1", 10
Decisions = dict[tuple[bool, int], Correction]


class Decision(BaseModel):
    """A decision as the page sends it."""

    index: int  # position among the suspects
    new: int | None  # the correct class; None if it cannot be told
    reason: str


class _Server(uvicorn.Server):
    """Ends at a request to stop; uvicorn's own handlers would take a signal that was ignored at the start."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with stop_request(when_asked=lambda: setattr(self, "should_exit", True)):
            yield


def review(path: Path, *, reviewer: str | None, split: str | None, limit: int, port: int) -> None:
    """Serve the page for reviewing labels until Ctrl-C or SIGTERM; the first decision creates the file of corrections.

    Without a reviewer, decisions have the name of git's user, or else of the system's. Port 0 is a free one.
    """
    reviewer = reviewer or git("config", "user.name") or getpass.getuser()
    splits, info = read_splits(_DATA), read_info(_DATA)
    require_fit([*_read(path).values()], splits, info.num_classes, path)
    suspects = choose_suspects(splits, split, limit)
    numbered = enumerate(info.classes)
    classes = [name if name == str(label) else f"{label} {name}" for label, name in numbered]
    token = secrets.token_urlsafe()
    app = make_app(path, reviewer, suspects, splits, {"title": info.label, "classes": classes}, token)
    try:
        listener = socket.create_server((_HOST, port))
    except OSError as error:
        raise UserError(f"--port {port}: {error.strerror}; choose another one") from None
    with listener:
        link = f"http://{_HOST}:{listener.getsockname()[1]}/{token}/"
        print(f"reviewing {len(suspects)} labels as {reviewer}: {link} (Ctrl-C stops)", flush=True)
        _Server(uvicorn.Config(app, log_level="warning", lifespan="off")).run(sockets=[listener])
    rows = _read(path)
    decided = [rows[key] for suspect in suspects if (key := _key(suspect)) in rows]
    corrected, unclear = sum(row.changes for row in decided), sum(row.new is None for row in decided)
    print(f"\n{len(decided)} of {len(suspects)} labels reviewed, {corrected} corrected, {unclear} unclear: see {path}")


def make_app(
    path: Path,
    reviewer: str,
    suspects: Sequence[dict[str, Any]],
    splits: Mapping[str, Split],
    about: Mapping[str, Any],
    token: str,
) -> FastAPI:
    """Return the application, whose paths begin with the token; host names other than this machine's are refused.

    `suspects` are those of `choose_suspects`; `about` has the title and the names of the classes, for the page.
    """
    app = FastAPI(openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[_HOST, "localhost"])  # a name may be rebound to this host

    @app.get(f"/{token}/")
    async def page() -> FileResponse:
        return FileResponse(Path(__file__).with_suffix(".html"))

    @app.get(f"/{token}/state")
    async def state() -> dict[str, Any]:
        rows = _read(path)
        return {**about, "reviewer": reviewer, "items": [_item(suspect, rows) for suspect in suspects]}

    @app.get(f"/{token}/images/{{split}}/{{row}}")
    async def image(split: str, row: int) -> Response:
        stream = io.BytesIO()
        Image.fromarray(np.asarray(splits[split].images[row])).save(stream, "PNG")
        return Response(stream.getvalue(), media_type="image/png")

    @app.post(f"/{token}/decide")
    async def decide(decision: Decision) -> dict[str, Any]:
        suspect = suspects[decision.index]
        correction = Correction(
            split=suspect["split"],
            example_id=suspect["example_id"],
            old=suspect["label"],
            new=decision.new,
            reviewer=reviewer,
            time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            reason=decision.reason.strip(),
        )
        rows = _read(path) | {correction.example: correction}
        write_corrections(path, rows.values())
        return _item(suspect, rows)

    @app.exception_handler(UserError)
    async def answer_mistake(_: Request, error: UserError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 400)

    @app.exception_handler(OSError)
    async def answer_disk_error(_: Request, error: OSError) -> JSONResponse:
        return JSONResponse({"error": f"{environment_error(error) or error}; nothing was saved"}, 500)

    return app


def _read(path: Path) -> Decisions:
    return {row.example: row for row in read_corrections(path)} if path.exists() else {}


def _key(suspect: Mapping[str, Any]) -> tuple[bool, int]:
    return suspect["split"] == "test", suspect["example_id"]


def _item(suspect: Mapping[str, Any], rows: Decisions) -> dict[str, Any]:
    """Return a suspect with the decision about it, if there is one."""
    row = rows.get(_key(suspect))
    decision = {"new": row.new, "reason": row.reason} if row else {"new": None, "reason": ""}
    return {**suspect, **decision, "decided": row is not None}


def choose_suspects(splits: Mapping[str, Split], split: str | None, limit: int) -> list[dict[str, Any]]:
    """Return the examples that the audit suspects most, with the most similar training images, as plain data.

    Raises UserError if there is no audit, it was made for other data, or the split has no example.
    """
    table = read_parquet(SUSPECTS, _COLUMNS, made_by="make audit").sort_values("score", ascending=False, kind="stable")
    suspects: list[dict[Any, Any]] = []
    for row in (table[table["split"] == split] if split else table).head(limit).to_dict("records"):
        data = splits[row["split"]]
        place = int(np.searchsorted(data.example_id, row["example_id"]))
        is_known = place < len(data) and data.example_id[place] == row["example_id"]
        columns = (data.labels, data.given_labels, data.corrected_labels)
        if not is_known or row["label"] not in {int(column[place]) for column in columns}:
            raise UserError(f"{SUSPECTS}: made for other data than {_DATA}; run `make audit` again")
        file = "" if data.files is None else str(data.files[place])
        suspects.append(row | {"row": place, "label": int(data.given_labels[place]), "file": file})
    if not suspects:
        raise UserError(f"{SUSPECTS}: no example to review; another --split may have some")
    for suspect, rows in zip(suspects, _nearest(suspects, splits), strict=True):
        train = splits["train"]
        suspect["neighbours"] = [
            {"row": int(row), "id": int(train.example_id[row]), "label": int(train.labels[row])} for row in rows
        ]
    return suspects


def _nearest(suspects: Sequence[Mapping[str, Any]], splits: Mapping[str, Split]) -> list[list[int]]:
    """Return the rows of the training images that differ least in their pixels, for each suspect, without itself."""
    from sklearn.neighbors import NearestNeighbors  # late: the import takes a second

    among = sample_rows(len(splits["train"]))  # all, unless there are too many for the memory
    train = splits["train"].images[among]
    images = np.stack([splits[suspect["split"]].images[suspect["row"]] for suspect in suspects])
    count = min(_NUM_NEIGHBOURS + 1, len(train))
    search = NearestNeighbors(n_neighbors=count, algorithm="brute").fit(train.reshape(len(train), -1) / np.float32(255))
    near = search.kneighbors(images.reshape(len(images), -1) / np.float32(255), return_distance=False)
    rows = [suspect["row"] if suspect["split"] == "train" else -1 for suspect in suspects]
    return [[row for row in among[near[i]] if row != rows[i]][:_NUM_NEIGHBOURS] for i in range(len(suspects))]


def merge(paths: Sequence[Path], into: Path) -> None:
    """Add files of corrections to one file, which keeps its decisions; equal decisions are written once.

    If two files disagree, each such example is printed, nothing is written, and UserError is raised.
    """
    files = [into, *paths] if into.exists() else paths
    rows = [*dict.fromkeys(row for path in files for row in read_corrections(path))]
    if differing := disagreements(rows):
        print("\n".join(differing))
        raise UserError(f"{len(differing)} examples are decided differently; {into} was not changed")
    merged = {row.example: row for row in reversed(rows)}
    write_corrections(into, merged.values())
    print(f"{into}: {len(merged)} decisions, {sum(row.changes for row in merged.values())} of them corrections")
