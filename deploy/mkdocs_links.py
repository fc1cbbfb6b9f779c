"""Hook of MkDocs: links to files outside `docs/`, which the site does not contain, become plain text."""

import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page without the links that leave `docs/`."""
    folders_up = page.file.src_uri.count("/") + 1
    return re.sub(rf"\[([^\]]+)\]\((?:\.\./){{{folders_up}}}[^)]+\)", r"\1", markdown)
