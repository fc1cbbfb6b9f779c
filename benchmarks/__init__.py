"""Measurements of speed, each beside its peers in one run; `make bench`."""
