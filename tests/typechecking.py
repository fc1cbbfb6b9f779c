"""The checker that the import hook puts around every function of `gradtrail.core` while tests run."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as type checkers see it
