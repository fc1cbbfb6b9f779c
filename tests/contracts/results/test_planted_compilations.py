"""The stage reports what a call compiles in a training.

Four are planted: a jitted lambda each epoch, `static_argnums` on the epoch, a shape that grows with the epoch, and an
eager operation in each chunk.
"""

import re
from pathlib import Path

import pytest
from projects import finished_project

_EACH_EPOCH = """
            jax.jit(lambda values: values * 2)(np.ones(3, np.float32))
            jax.jit(by_epoch, static_argnums=1)(np.ones(3, np.float32), epoch)
            grown(np.ones(epoch + 1, np.float32))
"""
_FUNCTIONS = """

def by_epoch(values, epoch):
    return values * epoch


@jax.jit
def grown(values):
    return values * 2
"""


@pytest.mark.nightly
def test_project_warns_of_all_four_with_cold_and_warm_cache(tmp_path: Path) -> None:
    """Planted in the code of the training loop; the second execution finds all programs in the persistent cache."""
    project = finished_project().copy(tmp_path / "project")
    path = project.folder / "src/gradtrail/core/train/loop.py"
    source = path.read_text()
    for original, planted in {
        "if records is None else records\n": "if records is None else records" + _EACH_EPOCH,
        "    done = epoch * self": "    state.step + 1\n                    done = epoch * self",
    }.items():
        assert source.count(original) == 1
        source = source.replace(original, planted)
    path.write_text(source + _FUNCTIONS)
    place = r"by a call at src/gradtrail/core/train/loop\.py:\d+"
    expected = [
        *(rf"{name} was compiled {place}" for name in ("<lambda>", "by_epoch", "grown", "add")),
        rf"<lambda> was compiled again {place}: its arguments are as before: .*",  # each reason is told once
        rf"by_epoch was compiled again {place}: argument 2 \(`epoch`\) has static value 1, was 0",
        rf"grown was compiled again {place}: argument 1 \(`values`\) has shape \(2,\), was \(1,\)",
        rf"by_epoch was compiled again {place}: argument 2 \(`epoch`\) has static value 2, was 1",
        rf"grown was compiled again {place}: argument 1 \(`values`\) has shape \(3,\), was \(2,\)",
    ]
    for _ in range(2):
        warnings = [line for line in project.run_stage("train").splitlines() if "warning" in line]
        assert len(warnings) == len(expected), warnings
        for words, line in zip(expected, warnings, strict=True):
            assert re.fullmatch(rf"train: warning: {words} \(train at \d+ of 36\)", line), warnings
