"""Converts uploaded images of any size into the form of the training images, one at a time."""

import asyncio
from io import BytesIO

import numpy as np
from jaxtyping import UInt8

from gradtrail.serving.server.protocol import to_json
from gradtrail.serving.server.refusal import Refusal
from gradtrail.serving.server.router import Answer
from gradtrail.stages.artifacts.exported import Manifest
from gradtrail.support.errors import UserError

Image = UInt8[np.ndarray, "height width"]
_SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")  # PNG and JPEG


class Uploads:
    """Reads uploaded images in a thread, one after the other: a large one takes up to 134 MB of memory."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def read(self, body: bytes, about: Manifest) -> Image:
        """Return an uploaded image in the form of the model's images, as `gradtrail predict` does.

        Args:
            body: A PNG or JPEG.
            about: Manifest of the model.

        Raises:
            Refusal: The body is no such image, too large, or blank (400, 415).
        """
        if not body.startswith(_SIGNATURES):
            raise Refusal(415, "the image must be a PNG or a JPEG")
        async with self._lock:
            return await asyncio.to_thread(_decode, body, about)

    def answer(self, image: Image, answer: Answer) -> bytes:
        """Return the page's content as JSON: classes with probabilities, and the image as the model sees it."""
        classes = answer.model.about.classes
        (probabilities,) = answer.probabilities
        content = {
            "classes": classes,
            "probabilities": probabilities,
            "label": int(probabilities.argmax()),
            "image": image,
            "model_name": answer.model.about.name,
            "model_version": answer.model.version,
        }
        return to_json(content)


def _decode(body: bytes, about: Manifest) -> Image:
    from gradtrail.serving.images import decode_image, framing_of

    try:
        return decode_image(BytesIO(body), about.image_shape, framing_of(about.dataset))
    except UserError as error:
        raise Refusal(400, str(error)) from None
