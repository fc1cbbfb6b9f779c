"""Refs of a shared repository change all or none, and only from what they are expected to be."""

from pathlib import Path

import pytest
from cluster_repository import SharedRepository

from gradtrail.cluster.task.refs import NONE, SharedRefs
from gradtrail.cluster.task.shell import CommandError

A, B = "refs/gradtrail/a", "refs/gradtrail/b"


def test_a_ref_is_created_once(shared: SharedRepository) -> None:
    refs = SharedRefs(shared.url, shared.clone)
    first, second = refs.write_blob("first"), refs.write_blob("second")
    assert refs.read([A]) == {}
    assert refs.swap({A: (NONE, first)})
    assert not refs.swap({A: (NONE, second)})
    assert refs.read([A, B]) == {A: first}


def test_several_refs_change_together_or_not_at_all(shared: SharedRepository) -> None:
    refs = SharedRefs(shared.url, shared.clone)
    first, second, third = (refs.write_blob(word) for word in ("first", "second", "third"))
    assert refs.swap({A: (NONE, first)})
    assert not refs.swap({A: (second, third), B: (NONE, first)})
    assert refs.read([A, B]) == {A: first}
    assert refs.swap({A: (first, NONE), B: (NONE, second)})
    assert refs.read([A, B]) == {B: second}


def test_a_push_whose_answer_was_lost_counts_as_done(shared: SharedRepository) -> None:
    refs = SharedRefs(shared.url, shared.clone)
    first = refs.write_blob("first")
    assert refs.swap({A: (NONE, first)})
    assert refs.swap({A: (NONE, first)}), "the same swap again finds what it wanted"


def test_another_clone_reads_what_was_written(shared: SharedRepository, tmp_path: Path) -> None:
    refs = SharedRefs(shared.url, shared.clone)
    value = refs.write_blob("from here")
    assert refs.swap({A: (NONE, value)})
    other = SharedRefs(shared.url, shared.bare)
    assert other.read_blob(A, value) == "from here"


def test_a_remote_that_is_away_is_one_line(shared: SharedRepository, tmp_path: Path) -> None:
    refs = SharedRefs(str(tmp_path / "nothing.git"), shared.clone)
    with pytest.raises(CommandError, match=r"^`git ls-remote` failed: .*nothing\.git"):
        refs.read([A])
    with pytest.raises(CommandError, match=r"^`git ls-remote` failed: .*nothing\.git"):
        refs.swap({A: (NONE, refs.write_blob("x"))})
