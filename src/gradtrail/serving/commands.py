"""The verbs of a model that is to be used; each imports its package when it is called."""

from pathlib import Path

import click

from gradtrail.support.errors import with_store
from gradtrail.support.verb import Verb

_PATH = click.Path(path_type=Path)


@click.command(cls=Verb, epilog="Example: gradtrail verdict workspace")
@click.argument("run", metavar="RUN")
@click.option("--slo", type=_PATH, metavar="FILE", help="With the limits.  [default: slo.yaml of the repository]")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.pass_obj
def verdict(place: Path, run: str, slo: Path | None, *, as_json: bool) -> int:
    """Judge the exported model of a run by the limits of slo.yaml.

    RUN is the id or name of a run, a state, a DVC experiment, a commit or `workspace`. Measures in fresh processes,
    which takes about a minute. Exit status 0 says that every limit is kept, 1 that one is not.
    """
    from gradtrail.serving.verdict.main import verdict

    return with_store(lambda: verdict(run, place / slo if slo else Path("slo.yaml"), as_json=as_json))


@click.command(cls=Verb, epilog="Example: gradtrail promote workspace --champion")
@click.argument("run", metavar="RUN")
@click.option("--champion", is_flag=True, help="Move the alias champion, if the verdict and the comparison allow it.")
@click.option("--force", is_flag=True, help="Move it even if they do not; the version says so.")
@click.option("--reason", default="", metavar="TEXT", help="Why; kept as a tag of the version.")
def promote(run: str, *, champion: bool, force: bool, reason: str) -> int:
    """Register the exported model of a run, and move the alias challenger, or champion, to it.

    RUN is what `gradtrail verdict` takes. Exit status 1 says that the promotion was refused, and why.
    """
    from gradtrail.serving.release.promote import promote

    return with_store(lambda: promote(run, as_champion=champion, is_forced=force, reason=reason))


@click.command(cls=Verb, epilog="Example: gradtrail rollback --reason slower")
@click.option("--reason", default="", metavar="TEXT", help="Why; kept as a tag of the version.")
def rollback(*, reason: str) -> int:
    """Move the alias champion back to the version that had it before."""
    from gradtrail.serving.release.rollback import rollback

    return with_store(lambda: rollback(reason))


VERBS: list[click.Command] = [verdict, promote, rollback]
