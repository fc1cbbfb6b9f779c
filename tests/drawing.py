"""What tests of figures have in common."""

from collections.abc import Callable
from pathlib import Path


def assert_same_png_twice(draw: Callable[[Path], None], folder: Path) -> None:
    for name in ("left", "right"):
        draw(folder / f"{name}.png")
    data = (folder / "left.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert data == (folder / "right.png").read_bytes()
