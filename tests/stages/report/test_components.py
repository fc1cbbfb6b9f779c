"""Numbers have units, and tables say how they are shown."""

import pytest

from gradtrail.stages.report.components import flops, size


@pytest.mark.parametrize(
    ("number", "bytes_said", "flops_said"),
    [
        (0, "0 B", "0 FLOP"),
        (999, "999 B", "999 FLOP"),
        (1000, "1000 B", "1.00 kFLOP"),
        (1024, "1.00 KiB", "1.02 kFLOP"),
        (999_900, "976 KiB", "1.00 MFLOP"),
        (134_147_512, "128 MiB", "134 MFLOP"),
    ],
)
def test_numbers_have_units(number: int, bytes_said: str, flops_said: str) -> None:
    assert (size(number), flops(number)) == (bytes_said, flops_said)
