"""What a server sends as a run's lineage is what a run writes, or one line."""

import json
from types import SimpleNamespace

import pytest
from untrusted import refusal

from gradtrail.experiments.show.main import _lineage

STAGE = {"state": "ab", "cmd": "python", "deps": {"data/raw": "12"}, "params": {"params.yaml": {"train": {"seed": 0}}}}
RUN = SimpleNamespace(info=SimpleNamespace(run_id="12ab"), data=SimpleNamespace(tags={"stage": "train"}))


def lineage(text: str) -> object:
    return _lineage(RUN, text)  # type: ignore[arg-type]


def test_what_a_run_writes_is_read() -> None:
    assert lineage(json.dumps({"train": STAGE})) == {"train": {key: STAGE[key] for key in ("cmd", "deps", "params")}}


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "5", "[]", "null", "{", "[" * 100_000, '{"fetch": 1}', '{"train": 1}', '{"train": {}}'),
        *(json.dumps({"train": STAGE | {key: value}}) for key in ("cmd", "deps", "params") for value in (None, 5, [1])),
        json.dumps({"train": STAGE | {"deps": {"data": 5}}}),
        json.dumps({"train": STAGE | {"params": {"params.yaml": 5}}}),
        json.dumps({"fetch": STAGE}),
    ],
)
def test_anything_else_is_one_line(text: str) -> None:
    assert refusal(lambda: lineage(text)) == "12ab: its artifact lineage.json is missing or damaged"
