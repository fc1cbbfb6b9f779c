"""`python -m gradtrail.launch -n 2 pipeline.train`: run the training in several processes of this machine."""

import sys

import click

from gradtrail.cluster.launch import launch
from gradtrail.support.errors import UserError


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-n", "count", type=int, help="Number of processes.  [default: one of those that a scheduler starts]")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def main(count: int | None, command: tuple[str, ...]) -> None:
    """Run COMMAND in several processes of this machine, such as `-n 2 pipeline.train`."""
    try:
        sys.exit(launch(count, command))
    except UserError as error:
        print(f"launch: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
