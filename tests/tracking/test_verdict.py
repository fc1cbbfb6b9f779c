"""One sentence about two evaluations of the same test examples."""

import pandas as pd
import pytest
from scipy import stats

from gradtrail.tracking.verdict import verdict


def answers(wrong: set[int], count: int = 1000, label: str = "a") -> pd.DataFrame:
    return pd.DataFrame({"label": label, "predicted": ["b" if row in wrong else label for row in range(count)]})


@pytest.mark.parametrize(
    ("wrong", "was_wrong", "words"),
    [
        ({*range(10)}, {*range(12)}, "99.00%, workspace 98.80%: not distinguishable, 95 % "),
        ({*range(10)}, {*range(60)}, "99.00%, workspace 94.00%: better, 95 % "),
        ({*range(60)}, {*range(10)}, "94.00%, workspace 99.00%: worse, 95 % "),
        ({*range(50)}, {*range(30, 80)}, "95.00%, workspace 95.00%: not distinguishable, 95 % "),
        ({3}, {3}, "99.90%, workspace 99.90%: right and wrong on the same examples"),
    ],
)
def test_verdict_is_that_of_the_exact_test(wrong: set[int], was_wrong: set[int], words: str) -> None:
    sentence = verdict(answers(wrong), answers(was_wrong), "workspace")
    assert sentence.startswith(f"test accuracy {words}")
    if gained_or_lost := wrong ^ was_wrong:
        p_value = stats.binomtest(len(was_wrong - wrong), len(gained_or_lost)).pvalue
        assert ("not distinguishable" in sentence) == (p_value >= 0.05)
        low, high = sentence.partition("95 % ")[2].removesuffix(" points").replace("−", "-").split(" to ")
        assert float(low) <= (len(was_wrong) - len(wrong)) / 10 <= float(high)


def test_without_an_evaluation_of_the_same_examples_there_is_none() -> None:
    assert verdict(answers({1}), None, "HEAD").endswith("99.90%; HEAD has no evaluation to compare with")
    assert verdict(answers({1}), answers({1}, label="c"), "HEAD").endswith("with other test data: not comparable")
