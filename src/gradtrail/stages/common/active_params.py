"""Which params of a training have an effect: the block of an optimizer that is not chosen, for example, has none."""

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")

SHARED_BLOCKS = {"augmentation"}  # the blocks of `train` that every training reads
_NO_BLOCK = "linear"  # the model of this name has no params: the block is the schedule's


def active_params(params: Mapping[str, Value]) -> dict[str, Value]:
    """Return the flat params that have an effect, in their order.

    Args:
        params: dotted key → value, as in `params.yaml` or as text; all are returned if no model is chosen.
    """
    if "train.model" not in params:
        return dict(params)
    unused = {"train.vary"} if str(params.get("train.members", 1)) == "1" else set()
    unused |= {"train.reduction"} if str(params.get("train.shards", 1)) == "1" else set()
    chosen = {params.get("train.optimizer"), params.get("train.schedule"), *SHARED_BLOCKS}
    chosen |= {params["train.model"]} - {_NO_BLOCK}
    chosen |= {"loss_scaling"} if params.get("train.precision") == "float16" else set()
    chosen |= {"privacy"} if str(params.get("train.privacy.enabled")).lower() == "true" else set()
    if str(params.get("preprocess.deformations", 1)) == "1":
        unused |= {key for key in params if key.startswith("preprocess.deformation.")}
    used = (key for key in params if key not in unused)
    return {key: params[key] for key in used if (block := _block(key)) is None or block in chosen}


def _block(key: str) -> str | None:
    section, *rest = key.split(".")
    return rest[0] if section == "train" and len(rest) > 1 else None
