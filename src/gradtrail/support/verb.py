"""The base class of the verbs of the command line, which changes to the project's folder."""

import os
from pathlib import Path
from typing import Any

import click

from gradtrail.support.paths import find_project


class Verb(click.Command):
    """A verb: runs in the project's folder, from whichever folder in it; `obj` is that folder, relative to it."""

    def invoke(self, ctx: click.Context) -> Any:
        start = Path.cwd()
        os.chdir(find_project(start))
        ctx.obj = Path(os.path.relpath(start))
        return super().invoke(ctx)
