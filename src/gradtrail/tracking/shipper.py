"""Ships the records of a clone to MLflow: in a process beside the stages, `__main__.py`, or for `gradtrail sync`.

One process serves all stages of a clone that log to one store: it imports MLflow once, and ends some seconds after the
last record. A record is shipped while its stage works, and removed once its run is complete. What cannot be shipped
stays, and `gradtrail sync` ships it; a record that cannot be read is set aside.
"""

import sys
import time
from pathlib import Path

from filelock import FileLock, Timeout
from mlflow import MlflowClient

from gradtrail.tracking.live import fault_text
from gradtrail.tracking.record import (
    RUN,
    BadRecordError,
    Record,
    all_records,
    own_store,
    shipping_lock,
    store_identity,
)
from gradtrail.tracking.ship import Shipment, is_at_work
from gradtrail.tracking.store import open_store

_POLL_SECONDS = 0.2
_IDLE_SECONDS = 10.0  # longer than DVC takes from the end of a stage to the work of the next one
_LOCK_SECONDS = 60.0  # longest that `gradtrail sync` waits for a process that ships the same record
_REFUSED = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")  # codes of errors that a second try does not change


def ship_records() -> list[str]:
    """Ship the records of stages that have ended; return the names of the stages.

    A record that cannot be read, or that MLflow refuses, is set aside with a warning, and stops nothing.

    Raises:
        Exception: MLflow failed, or there is a bug.
    """
    client, shipped = open_store(), list[str]()
    for record in all_records():
        try:
            if not (record.folder / RUN).exists() or is_at_work(info := record.read()):
                continue
            with shipping_lock(info.state).acquire(timeout=_LOCK_SECONDS):
                if record.folder.exists():  # else another process has just shipped it
                    Shipment(client, record).advance()
                    record.remove()
                    shipped.append(info.stage)
        except Timeout:
            continue
        except Exception as error:
            if not (isinstance(error, BadRecordError) or getattr(error, "error_code", "") in _REFUSED):
                raise
            print(f"warning: {record.set_aside()}: set aside, as it cannot be logged: {error}", file=sys.stderr)
    return shipped


class Shipper:
    """Ships the records for one store as stages write them."""

    def __init__(self, client: MlflowClient):
        self._client = client
        self._store, self._database = own_store(), store_identity()
        self._shipments: dict[Path, Shipment] = {}  # folder of a record → its way into the store
        self._locks: dict[Path, FileLock] = {}
        self._given_up = set[Path]()  # records that `gradtrail sync` ships

    def serve(self) -> None:
        """Ship until there has been nothing to do for some seconds, or another database is in the place of the store.

        MLflow keeps the file open that was there, so that only another process can ship to the new one.
        """
        last = time.monotonic()
        while time.monotonic() - last < _IDLE_SECONDS and store_identity() == self._database:
            if self.turn():
                last = time.monotonic()
            time.sleep(_POLL_SECONDS)

    def turn(self) -> bool:
        """Ship what is new, and leave a record to `gradtrail sync` after a fault, which the next command tells.

        Returns whether anything is being shipped, or a stage has just begun.
        """
        for record in self.waiting():
            try:
                is_over = self._advance(record)
            except Exception as error:  # bugs too: they stop no other record
                is_over = True
                self._given_up.add(record.folder)
                if not isinstance(error, BadRecordError):  # which `gradtrail sync` sets aside
                    record.tell(fault_text(error))
            if is_over and (lock := self._locks.pop(record.folder, None)):
                self._shipments.pop(record.folder, None)
                lock.release()
        return bool(self._shipments) or not all((record.folder / RUN).exists() for record in self.waiting())

    def waiting(self) -> list[Record]:
        """Return the records, but for those that are left to `gradtrail sync`."""
        return [record for record in all_records() if record.folder not in self._given_up]

    def _advance(self, record: Record) -> bool:
        """Ship what is new of a record; return True once it is removed, as its run is whole."""
        if record.folder not in self._shipments:
            if not (record.folder / RUN).exists():
                return False
            info = record.read()
            if info.store != self._store:
                self._given_up.add(record.folder)
                return False
            lock = shipping_lock(info.state)
            try:
                lock.acquire(timeout=0)
            except Timeout:  # another record of the state is shipped, here or by `gradtrail sync`
                return False
            self._locks[record.folder] = lock
            self._shipments[record.folder] = Shipment(self._client, record)
        is_whole = self._shipments[record.folder].advance()
        if is_whole:
            record.remove()
        return is_whole
