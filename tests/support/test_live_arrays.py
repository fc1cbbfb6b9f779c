"""Arrays that outlive a stage are a warning with their shapes; small ones are not."""

import jax.numpy as jnp
import pytest

from gradtrail.support.live_arrays import warn_of_live_arrays


def test_only_large_arrays_are_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    arrays = [jnp.zeros((100,))]
    warn_of_live_arrays("train")
    before = capsys.readouterr().err
    arrays += [jnp.zeros((1024, 1024, 5), jnp.uint8) for _ in range(2)]
    warn_of_live_arrays("train")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train: warning: ")
    assert "2 of uint8[1024,1024,5]" in line
    assert line not in before
