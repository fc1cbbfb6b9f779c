"""PostgreSQL for a test: Debian's package and a driver, where they are here."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from servers import free_port

_SECONDS = 120  # that one of its programs may take


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Run PostgreSQL with an empty database; yield its address."""
    folder = Path(tempfile.mkdtemp(prefix="postgres"))  # not below pytest's own, where no other user may go
    as_user = []
    if os.getuid() == 0:  # as whom PostgreSQL refuses to run
        shutil.chown(folder, "postgres", "postgres")
        as_user = ["runuser", "-u", "postgres", "--"]
    port, data = free_port(), folder / "data"

    def run(program: str, *arguments: str) -> None:
        command = [*as_user, str(_postgres_folder() / program), *arguments]
        with (folder.parent / f"{folder.name}.log").open("ab") as log:  # a pipe would be kept open by the database
            subprocess.run(command, check=True, cwd="/", stdout=log, stderr=log, timeout=_SECONDS)

    try:
        run("initdb", "-D", str(data), "-U", "gradtrail", "--auth", "trust")
        options = f"-h 127.0.0.1 -p {port} -k {folder}"
        run("pg_ctl", "-D", str(data), "-w", "-o", options, "start")
        try:
            yield f"{_postgres_dialect()}://gradtrail@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "-D", str(data), "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        (folder.parent / f"{folder.name}.log").unlink(missing_ok=True)


def why_no_postgres() -> str:
    """Return what is missing for `postgres`, in one line; nothing where all is there."""
    missing = [] if _postgres_folder() else ["its programs (Debian's package `postgresql`)"]
    missing += [] if _postgres_dialect() else ["a driver (`pip install psycopg2-binary`)"]
    missing += ["`runuser`"] if os.getuid() == 0 and not shutil.which("runuser") else []
    return f"PostgreSQL is not here: install {' and '.join(missing)}" if missing else ""


def _postgres_folder() -> Path | None:
    if found := shutil.which("pg_ctl"):
        return Path(found).parent
    return next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)


def _postgres_dialect() -> str:
    drivers = {"psycopg2": "postgresql+psycopg2", "psycopg": "postgresql+psycopg"}
    return next((dialect for module, dialect in drivers.items() if importlib.util.find_spec(module)), "")
