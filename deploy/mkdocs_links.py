"""Hook of MkDocs: links to files outside `docs/`, which the site does not contain, become plain text."""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page without the links that leave `docs/`."""
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)
