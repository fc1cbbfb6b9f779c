"""The verbs of a model that is to be used; each imports its package when it is called."""

import click

VERBS: list[click.Command] = []
