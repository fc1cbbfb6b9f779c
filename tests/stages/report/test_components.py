"""Numbers have units, and tables say how they are shown."""

import pytest

from gradtrail.stages.report.components import Table, flops, size


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


def test_long_tables_are_folded_and_numbers_are_right_aligned() -> None:
    table = Table(caption="", header=("a", "b", "c"), rows=[("x", "−1.5%", "unbounded"), ("y", "", "7")])
    assert table.is_numeric == (False, True, True)
    assert not table.is_folded
    assert Table(caption="", header=("a",), rows=[("x",)] * 17).is_folded
    assert Table(caption="", header=("a", "b"), rows=[]).is_numeric == (False, False)
