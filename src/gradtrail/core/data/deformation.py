"""Many deformed versions of every training image, as MNIST8M has of digits (Loosli, Canu and Bottou, 2007)."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from gradtrail.core.common.split import Split
from gradtrail.core.data.config import AugmentationConfig

_PART = 4096  # examples per call
_STREAM = 3  # stream of random numbers of a seed; `preprocessing` uses 0 to 2, a training 0


def versions_of(
    split: Split,
    count: int,
    config: AugmentationConfig,
    *,
    seed: int,
    num_ids: int,
    advance: Callable[[int], object] = lambda _: None,
) -> Iterator[Split]:
    """Yield all versions of a split in parts, version by version; the first version is the split itself.

    Version v of example i has the `example_id` v · num_ids + i: ids stay unique, and example_id % num_ids is the
    source example. All labels are the source's, and the pixels are a function of its image, `config`, `seed`, v and i
    alone.

    Args:
        split: the examples.
        count: number of versions.
        num_ids: a number larger than any `example_id` of the split.
        advance: called with the number of examples of each part.
    """
    stream = np.array([_STREAM, seed], np.uint32)
    for version in range(count):
        for start in range(0, len(split), _PART):
            part = Split(
                **{field.name: getattr(split, field.name)[start : start + _PART] for field in dataclasses.fields(Split)}
            )
            if version:
                from gradtrail.core.data.augmentation import deform  # imports JAX, which a single version does not need

                filling = _PART - len(part)
                images = np.pad(part.images, ((0, filling), (0, 0), (0, 0)))
                ids = np.pad(part.example_id, (0, filling))
                deformed = np.asarray(deform(images, ids, np.int32(version), stream, config=config))
                new_ids = part.example_id + np.int32(version * num_ids)
                part = dataclasses.replace(part, images=deformed[: len(part)], example_id=new_ids)
            advance(len(part))
            yield part
