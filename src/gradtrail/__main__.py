"""`python -m gradtrail` is the command `gradtrail`."""

from gradtrail.cli import main

main()
