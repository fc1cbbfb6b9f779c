"""The histories of the networks that one program trains: of one by itself, or of several at once, told as one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from gradtrail.core.common.pytrees import add_prefix, strip_prefix
from gradtrail.core.nn.models import HostParams
from gradtrail.core.train.at_once import chunks_of, member_of
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.history import History
from gradtrail.core.train.loop import Chunk


@dataclass(frozen=True, kw_only=True)
class Histories:
    """The history of each network.

    Attributes:
        each: in the order of the members.
        at_once: whether the arrays of the program have an axis of members; else there is one network.
    """

    each: Sequence[History]
    at_once: bool

    def check(self, chunk: Chunk, diverged: Callable[[Chunk], None]) -> None:
        """Call `diverged` and raise FloatingPointError if a loss or gradient of the epoch so far is not finite."""
        for history, own in zip(self.each, self._chunks_of(chunk), strict=True):
            try:
                history.check(own)
            except FloatingPointError:
                diverged(own)
                raise

    def add(self, chunk: Chunk, params: HostParams, validate: Callable[[HostParams], dict[str, float]]) -> None:
        """Add an epoch, see `History.add`; `params` are those of all networks."""
        own_params = params_of(params, len(self.each), at_once=self.at_once)
        for history, own, mine in zip(self.each, self._chunks_of(chunk), own_params, strict=True):
            history.add(own, mine, validate(mine))

    def have_stalled(self, patience: int | None) -> bool:
        """Whether no network has become better for `patience` epochs."""
        return all(history.has_stalled(patience) for history in self.each)

    def describe(self) -> str:
        """Describe the progress of the training in one line; several networks by their means."""
        if not self.at_once or not self.each[0].epochs:
            return self.each[0].describe()
        last = [history.epochs[-1] for history in self.each]
        loss, accuracy = (np.mean([getattr(one, name) for one in last]) for name in ("loss", "validation_accuracy"))
        return f"epoch {last[0].epoch} · mean loss {loss:.4f} · mean validation {accuracy:.2%}"

    def as_arrays(self) -> dict[str, np.ndarray]:
        """Return the histories as named arrays, for `restored`."""
        if not self.at_once:
            return self.each[0].as_arrays()
        arrays = (add_prefix(_prefix(number), history.as_arrays()) for number, history in enumerate(self.each))
        return {name: value for each in arrays for name, value in each.items()}

    def _chunks_of(self, chunk: Chunk) -> list[Chunk]:
        return chunks_of(chunk, len(self.each)) if self.at_once else [chunk]


def begun(
    config: TrainConfig,
    params: HostParams,
    num_followed: int,
    members: int | None,
    arrays: Mapping[str, np.ndarray] | None = None,
) -> Histories:
    """Return the histories of a training: empty ones at its start, or those of a checkpoint's arrays.

    Args:
        config: of the training.
        params: the initial weights of all networks, on the host.
        num_followed: examples of the training split whose learning dynamics are recorded.
        members: networks at once; None for one by itself.
        arrays: of `Histories.as_arrays`.
    """
    at_once = members is not None
    known: Any = {"precision": config.precision, "num_followed": num_followed}
    each = []
    for number, initial in enumerate(params_of(params, members or 1, at_once=at_once)):
        if arrays is None:
            each.append(History(config.keep_epochs, initial, **known))
        else:
            own = strip_prefix(_prefix(number), arrays) if at_once else arrays
            each.append(History.from_arrays(config.keep_epochs, initial, own, **known))
    return Histories(each=each, at_once=at_once)


def params_of(params: HostParams, members: int, *, at_once: bool) -> list[HostParams]:
    """Return the parameters of each network, copied: a part would keep the memory of the whole."""
    return [jax.tree.map(np.array, member_of(params, member)) for member in range(members)] if at_once else [params]


def _prefix(number: int) -> str:
    return f"member.{number:04d}"
