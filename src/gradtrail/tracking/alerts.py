"""Alerts of a training that diverged, stalled or became slow: when to raise one, and how it is sent.

An alert stops nothing and changes no result; `train.patience` stops a training. Out of scope: the tag of the run.
"""

import json
import math
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple

from gradtrail.core.train.history import EpochRecord

_SEND_SECONDS = 10.0  # longest time of a request or a command
_DIVERGED_FACTOR = 4.0  # fastai's LRFinder stops at this multiple of the best loss
_STALLED_EPOCHS = 3  # the patience of Lightning's EarlyStopping
_LEAST_DECREASE = 0.001  # share of the loss that Amazon SageMaker's LossNotDecreasing requires
_SLOW_FACTOR, _SLOW_SECONDS = 1.5, 60.0  # multiple of the planned time, and the shortest delay until the end
_SILENT_FACTOR, _SILENT_SECONDS = 5.0, 60.0  # multiple of the longest epoch, and the shortest silence


class Alert(NamedTuple):
    """What a person should know about a training."""

    kind: str  # diverged | stalled | slow
    message: str  # observation and advice, in one line


_ADVICE = "try a lower learning rate, or train.clip_norm"
NOT_FINITE = Alert("diverged", f"a loss, gradient or weight is not finite; {_ADVICE}")


class Watch:
    """Decides after each epoch of a network whether it needs attention; returns each kind of alert once.

    A training diverged if the loss of an epoch exceeds four times the best one before it, that of guessing included,
    and half the loss of guessing, so that a spike of a nearly perfect network is none. It stalled if for three epochs
    neither the loss decreased by 0.1 % nor the validation accuracy increased, and at least as many epochs are left.
    It is slow if its epochs took 1.5 times as long as the first one, and it will end a minute later because of that.

    Args:
        epochs: Planned number of epochs.
        num_classes: Number of classes; guessing has a loss of ln(num_classes) nats.
    """

    def __init__(self, epochs: int, num_classes: int):
        self._epochs, self._loss_of_guessing = epochs, math.log(num_classes)
        self._best_loss, self._best_accuracy = math.inf, -math.inf
        self._last_improved = 0
        self._ends: list[tuple[int, float]] = []  # epochs and the time at which they ended
        self._raised = set[str]()

    def after_epoch(self, record: EpochRecord, elapsed: float) -> list[Alert]:
        """Return the new alerts.

        Args:
            record: Metrics of the epoch; the loss is NaN if it must not be published, and does not count then.
            elapsed: Seconds since the training began.
        """
        if record.epoch == 1:
            self._ends.append((0, 0.0))
        self._ends.append((record.epoch, elapsed))
        alerts = [*self._diverged(record), *self._stalled(record), *self._slow()]
        new = [alert for alert in alerts if alert.kind not in self._raised]
        self._raised |= {alert.kind for alert in new}
        return new

    @property
    def longest_silence(self) -> float:
        """Seconds without the end of an epoch after which the training is reported; infinite before the first one."""
        seconds = [end - begin for (_, begin), (_, end) in zip(self._ends, self._ends[1:], strict=False)]
        return max(_SILENT_SECONDS, _SILENT_FACTOR * max(seconds)) if seconds else math.inf

    def _diverged(self, record: EpochRecord) -> list[Alert]:
        best = min(self._best_loss, self._loss_of_guessing)
        if not record.cross_entropy > max(_DIVERGED_FACTOR * best, self._loss_of_guessing / 2):
            return []
        observed = f"the loss of epoch {record.epoch} exceeds {_DIVERGED_FACTOR:g} times the best loss before it"
        return [Alert("diverged", f"{observed}; {_ADVICE}")]

    def _stalled(self, record: EpochRecord) -> list[Alert]:
        has_lower_loss = record.cross_entropy < (1 - _LEAST_DECREASE) * self._best_loss
        if has_lower_loss or record.validation_accuracy > self._best_accuracy:
            self._last_improved = record.epoch
        self._best_loss = min(self._best_loss, record.cross_entropy)
        self._best_accuracy = max(self._best_accuracy, record.validation_accuracy)
        left = self._epochs - record.epoch
        if min(record.epoch - self._last_improved, left) < _STALLED_EPOCHS:
            return []
        observed = f"neither loss nor validation accuracy has improved since epoch {self._last_improved}"
        return [
            Alert("stalled", f"{observed}, and {left} epochs are left; try another learning rate, or train.patience")
        ]

    def _slow(self) -> list[Alert]:
        if len(self._ends) < 3:
            return []
        (first, begin), (second, end), (last, now) = self._ends[0], self._ends[1], self._ends[-1]
        planned, actual = (end - begin) / (second - first), (now - begin) / (last - first)
        if actual <= _SLOW_FACTOR * planned or (actual - planned) * (self._epochs - first) < _SLOW_SECONDS:
            return []
        observed = f"an epoch takes {actual:.3g} s on average, the first one took {planned:.3g} s"
        return [Alert("slow", f"{observed}; look for other programs on this machine")]


def silent(seconds: float) -> Alert:
    """Return the alert of a training in which no epoch ended for some time."""
    return Alert("stalled", f"no epoch has ended for {seconds:.0f} s; see whether the process still uses the processor")


class Sender:
    """Sends alerts in threads of their own, so that a slow or dead receiver neither slows nor stops the training.

    Args:
        target: `runtime.alert`: an address that gets a POST, a shell command that gets the message on standard input,
            or empty. An address may contain variables, such as `$ALERT_URL`, and is never printed.
    """

    def __init__(self, target: str):
        self._target = target
        self._has_warned = False

    def send(self, payload: Mapping[str, Any]) -> threading.Thread:
        """Send an alert; the process ends after the thread, which takes ten seconds at most."""
        thread = threading.Thread(target=self._send, args=(payload,))
        thread.start()
        return thread

    def _send(self, payload: Mapping[str, Any]) -> None:
        address = os.path.expandvars(self._target)
        try:
            if address.startswith(("http://", "https://")):
                headers = {"Content-Type": "application/json"}
                request = urllib.request.Request(address, json.dumps(payload).encode(), headers)  # noqa: S310 - above
                urllib.request.urlopen(request, timeout=_SEND_SECONDS).close()  # noqa: S310
            elif address:
                line = f"{payload['stage']}: {payload['alert']}: {payload['message']}\n"
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                command = ["sh", "-c", self._target]
                subprocess.run(command, input=line.encode(), check=True, timeout=_SEND_SECONDS, **quiet)  # type: ignore[call-overload]
        except Exception as error:  # none costs the training
            if not self._has_warned:
                # Not the error's text, which may contain the address
                status = getattr(error, "code", None) or getattr(error, "returncode", None)
                reason = f"{type(error).__name__}{f', status {status}' if status else ''}"
                print(f"warning: runtime.alert: an alert could not be sent ({reason})", file=sys.stderr)
            self._has_warned = True
