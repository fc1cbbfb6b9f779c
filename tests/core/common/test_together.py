"""Work shared by processes: ranges that leave nothing out, and rows that come whole, in order, with their types."""

import numpy as np
import pytest
from together import One, in_processes

from gradtrail.core.common.together import ALONE, shares


@pytest.mark.parametrize("total", [0, 1, 5, 12])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_are_consecutive_and_alike(total: int, count: int) -> None:
    found = shares(total, count)
    assert [index for each in found for index in each] == list(range(total))
    assert len(found) == count
    assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize("lengths", [(3, 2), (0, 4, 1), (0, 0), (1, 0, 0, 0)])
def test_rows_of_all_come_to_each_bit_by_bit(lengths: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    total = sum(lengths)
    rows = {
        "float": rng.standard_normal((total, 2, 3)).astype(np.float32),
        "nan": np.full(total, np.nan, np.float64),
        "int": rng.integers(0, 2**31, total, np.int32),
        "bool": rng.integers(0, 2, total).astype(bool),
        "column": rng.standard_normal((3, total)).T,
        "nothing": np.zeros((total, 0), np.float32),
    }
    starts = np.cumsum([0, *lengths])

    def gather(one: One) -> dict[str, np.ndarray]:
        own = slice(starts[one.index], starts[one.index + 1])
        return one.gather({name: values[own] for name, values in rows.items()}, lengths)

    for found in in_processes(len(lengths), gather):
        assert list(found) == list(rows)
        for name, values in rows.items():
            assert found[name].dtype == values.dtype
            np.testing.assert_array_equal(found[name], values)


def test_one_process_keeps_its_rows() -> None:
    rows = {"a": np.arange(3)}
    assert ALONE.gather(rows, [3]) == rows
