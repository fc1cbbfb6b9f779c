"""The page at `/docs`: all endpoints, from the application's OpenAPI description, without outside scripts."""

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from gradtrail.serving.server.router import Router

_FOLDER = Path(__file__).parent / "page"


def docs_page(description: dict[str, Any], router: Router) -> str:
    """Return the page as HTML.

    Args:
        description: OpenAPI description of the application.
        router: Router with the model for the examples.
    """
    folder = FileSystemLoader(_FOLDER)
    pages = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    endpoints = [
        {
            "method": method.upper(),
            "path": path,
            "description": _with_code(" ".join(about.get("description", "").split())),
        }
        for path, methods in description["paths"].items()
        for method, about in methods.items()
    ]
    model = router.current.about if router.is_ready else None
    return pages.get_template("docs.html.j2").render(
        endpoints=endpoints, model=model, version=description["info"]["version"]
    )


def _with_code(description: str) -> Markup:
    """Return a description in Markdown as HTML; its only markup is code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(description))))  # noqa: S704 - escaped
