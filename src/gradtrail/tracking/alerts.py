"""Alerts of a training that diverged or stalled: when to raise one, and how it is sent.

An alert stops nothing and changes no result; `train.patience` stops a training. Out of scope: the tag of the run.
"""

import json
import math
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple

from gradtrail.core.train.history import EpochMetrics

_SEND_SECONDS = 10.0  # longest time of a request or a command
_DIVERGED_FACTOR = 4.0  # fastai's LRFinder stops at this multiple of the best loss
_STALLED_EPOCHS = 3  # the patience of Lightning's EarlyStopping
_NO_TARGET = re.compile(r"\s*(\$\w+)?\s*")  # what is left of a target whose variable is empty or not set


class Alert(NamedTuple):
    """What a person should know about a training."""

    kind: str  # diverged | stalled
    message: str  # observation and advice, in one line


_ADVICE = "try a lower learning rate, or train.clip_norm"
NOT_FINITE = Alert("diverged", f"a loss, gradient or weight is not finite; {_ADVICE}")


class Watch:
    """Decides after each epoch of a network whether it needs attention.

    A training diverged if the loss of an epoch exceeds four times the best one before it, that of guessing included,
    and half the loss of guessing, so that a spike of a nearly perfect network is none. It stalled if for three epochs
    neither the loss decreased by 0.1 % nor the validation accuracy increased, at least as many epochs are left, and
    the learning rate is at least half of its peak: a network that converges at the end of a schedule did not stall.

    Args:
        epochs: Planned number of epochs.
        num_classes: Number of classes; guessing has a loss of ln(num_classes) nats.
    """

    def __init__(self, epochs: int, num_classes: int):
        self._epochs, self._loss_of_guessing = epochs, math.log(num_classes)
        self._best_loss, self._best_accuracy = math.inf, -math.inf
        self._last_improved = 0

    def after_epoch(self, metrics: EpochMetrics, rate: float) -> list[Alert]:
        """Return alerts.

        Args:
            record: Metrics of the epoch; the loss is NaN if it must not be published, and does not count then.
            rate: Learning rate at the end of the epoch, as a share of its peak.
        """
        return [*self._diverged(metrics), *self._stalled(metrics, rate)]

    def _diverged(self, metrics: EpochMetrics) -> list[Alert]:
        best = min(self._best_loss, self._loss_of_guessing)
        if not metrics["cross_entropy"] > max(_DIVERGED_FACTOR * best, self._loss_of_guessing / 2):
            return []
        observed = f"the loss of epoch {metrics['epoch']} exceeds {_DIVERGED_FACTOR:g} times the best loss before it"
        return [Alert("diverged", f"{observed}; {_ADVICE}")]

    def _stalled(self, metrics: EpochMetrics, rate: float) -> list[Alert]:
        # A decrease that Amazon SageMaker's LossNotDecreasing requires too
        has_lower_loss = metrics["cross_entropy"] < 0.999 * self._best_loss
        if has_lower_loss or metrics["validation_accuracy"] > self._best_accuracy:
            self._last_improved = int(metrics["epoch"])
        self._best_loss = min(self._best_loss, metrics["cross_entropy"])
        self._best_accuracy = max(self._best_accuracy, metrics["validation_accuracy"])
        left = self._epochs - metrics["epoch"]
        if min(metrics["epoch"] - self._last_improved, left) < _STALLED_EPOCHS or rate < 0.5:
            return []
        observed = f"neither loss nor validation accuracy has improved since epoch {self._last_improved}"
        advice = "try another learning rate, or train.patience"
        return [Alert("stalled", f"{observed}, and {left} epochs are left; {advice}")]


class Sender:
    """Sends alerts in threads of their own, so that a slow or dead receiver neither slows nor stops the training.

    Args:
        target: `runtime.alert`: an address that gets a POST, a shell command that gets the message on standard input,
            or empty. An address may contain variables, such as `$ALERT_URL`, and is never printed.
    """

    def __init__(self, target: str):
        self._target = target
        self._has_warned = False
        if target and _NO_TARGET.fullmatch(os.path.expandvars(target)):
            self._target, words = "", "is empty or not set; no alert will be sent"
            print(f"warning: runtime.alert: {target.strip()!r} {words}", file=sys.stderr)

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
