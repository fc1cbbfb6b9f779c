"""`gradtrail review`: the labels to look at, decisions that are in the file at once, and who may send them."""

import contextlib
import dataclasses
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import uvicorn
from browser import Browser, browser, needs_chromium
from factories import NUM_CLASSES, dataset_info, random_split, split_of
from stage_results import suspects_table

from gradtrail import cli
from gradtrail.core.data import Split
from gradtrail.experiments import review as reviewing
from gradtrail.experiments.review import SUSPECTS, choose_suspects, make_app, merge, review
from gradtrail.stages.data.data_files import write_processed
from gradtrail.stages.data.parquet import read_parquet
from gradtrail.stages.preprocess.corrections import PATH, Correction, read_corrections, write_corrections
from gradtrail.support.errors import UserError

ROW = Correction(split="train", example_id=7, old=1, new=2, reviewer="Ann", time="", reason="")


def write_project(folder: Path, num_classes: int = NUM_CLASSES) -> dict[str, Split]:
    """Write what `gradtrail review` reads; training and validation examples come from one file."""
    whole = random_split(36, num_classes=num_classes, shape=(4, 3))
    held_out = np.arange(36) % 6 == 0
    splits = {
        name: split_of(whole.images[rows], whole.labels[rows], whole.example_id[rows])
        for name, rows in (("train", ~held_out), ("validation", held_out))
    }
    splits["test"] = random_split(5, num_classes=num_classes, shape=(4, 3))
    for part in (".dvc", "src/gradtrail", "data", "results/audit", "pipeline"):
        (folder / part).mkdir(parents=True)
    (folder / "dvc.yaml").touch()
    write_processed(folder / "data/processed", splits, dataset_info())
    suspects_table(splits, num_classes=num_classes).to_parquet(folder / SUSPECTS, index=False)
    return splits


@pytest.fixture
def splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Split]:
    """The splits of a project with an audit, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    return write_project(tmp_path)


@contextlib.contextmanager
def served(splits: dict[str, Split], suspects: list[dict[str, Any]], num_classes: int = NUM_CLASSES) -> Iterator[str]:
    """Serve a review and yield the link to it."""
    about = {"title": "digits", "classes": [str(label) for label in range(num_classes)]}
    app = make_app(PATH, "Ann", suspects, splits, about, "secret")
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/secret/"
        finally:
            server.should_exit = True
            thread.join()


def test_suspects_have_the_highest_scores_and_their_true_neighbours(splits: dict[str, Split]) -> None:
    table = read_parquet(SUSPECTS, ["split", "example_id"])[::-1].head(12)
    suspects = choose_suspects(splits, None, 12)
    assert [(one["split"], one["example_id"]) for one in suspects] == [*table.itertuples(index=False, name=None)]
    train = splits["train"].images.astype(np.float64)
    for one in suspects:
        image = splits[one["split"]].images[one["row"]]
        distances = np.sum((train - image) ** 2, axis=(1, 2))
        if one["split"] == "train":
            distances[one["row"]] = np.inf
        rows = [near["row"] for near in one["neighbours"]]
        np.testing.assert_allclose(distances[rows], np.sort(distances)[:10])
    assert {one["split"] for one in choose_suspects(splits, "validation", 4)} == {"validation"}


def test_decision_is_in_the_file_before_the_answer_and_can_be_replaced(splits: dict[str, Split]) -> None:
    suspects = choose_suspects(splits, None, 4)
    with served(splits, suspects) as link:
        for index, new, reason in ((0, 1, "a blot"), (1, None, ""), (0, 2, "")):
            decision = {"index": index, "new": new, "reason": reason}
            answer = requests.post(f"{link}decide", json=decision, timeout=60).json()
            (row,) = (row for row in read_corrections(PATH) if row.example_id == suspects[index]["example_id"])
            assert (row.old, row.new, row.reason, row.reviewer) == (suspects[index]["label"], new, reason, "Ann")
            assert (answer["decided"], answer["new"]) == (True, new)
        PATH.write_text("damaged by hand")
        answer = requests.post(f"{link}decide", json=decision, timeout=60)
        assert (answer.status_code, PATH.read_text()) == (400, "damaged by hand")
        assert "the first line is" in answer.json()["error"]


def test_only_the_holder_of_the_link_on_this_machine_is_answered(splits: dict[str, Split]) -> None:
    with served(splits, choose_suspects(splits, None, 4)) as link:
        root, session = link.removesuffix("secret/"), requests.Session()
        for address, host, status in (
            (link, "localhost:8123", 200),  # through a forwarded port
            (f"{link}images/train/0", "localhost", 200),
            (link, "evil.example", 400),
            (root, "localhost", 404),
            (f"{root}secre/state", "localhost", 404),
            (f"{root}docs", "localhost", 404),
        ):
            assert session.get(address, headers={"Host": host}, timeout=60).status_code == status


def test_mistakes_are_one_line(splits: dict[str, Split]) -> None:
    options: dict[str, Any] = {"reviewer": "Ann", "split": None, "limit": 4, "port": 0}
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"^--port {port}: Address already in use"):
            review(PATH, **options | {"port": port})
    table = read_parquet(SUSPECTS, reviewing._COLUMNS)
    for changed in ({"example_id": 10**6}, {"label": (table["label"] + 1) % NUM_CLASSES}):
        table.assign(**changed).to_parquet(SUSPECTS, index=False)
        with pytest.raises(UserError, match=r"made for other data than data/processed; run `make audit` again$"):
            review(PATH, **options)
    train = splits["train"]
    old = int(train.labels[0] + 1) % 3
    write_corrections(PATH, [dataclasses.replace(ROW, example_id=int(train.example_id[0]), old=old)])
    with pytest.raises(UserError, match=rf"^{PATH}: train {train.example_id[0]}: old is {old}, but the label"):
        review(PATH, **options)
    PATH.unlink()
    SUSPECTS.unlink()
    with pytest.raises(UserError, match=rf"^{SUSPECTS}.*`make audit`"):
        review(PATH, **options)


def test_merge_keeps_the_target_and_refuses_disagreements(
    splits: dict[str, Split], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    existing = dataclasses.replace(ROW, example_id=3, reviewer="Eve")
    write_corrections(PATH, [existing])
    write_corrections(Path("ann.csv"), [ROW, dataclasses.replace(ROW, example_id=8, new=None)])
    write_corrections(Path("ben.csv"), [dataclasses.replace(ROW, reviewer="Ben")])
    monkeypatch.setattr("sys.argv", ["gradtrail", "review", "--merge", "ann.csv", "ben.csv"])
    with pytest.raises(SystemExit):
        cli.main()
    assert [(row.example_id, row.reviewer) for row in read_corrections(PATH)] == [(3, "Eve"), (7, "Ann"), (8, "Ann")]
    assert capsys.readouterr().out == f"{PATH}: 3 decisions, 2 of them corrections\n"
    before = PATH.read_bytes()
    write_corrections(Path("ben.csv"), [dataclasses.replace(existing, reviewer="Ben", new=1)])
    with pytest.raises(UserError, match=f"1 examples are decided differently; {PATH} was not changed"):
        merge([Path("ben.csv")], PATH)
    assert capsys.readouterr().out == "train 3: Eve says 1 → 2, Ben says 1 is right\n"
    assert PATH.read_bytes() == before


# The page, in a real browser.


@contextlib.contextmanager
def opened(link: str, folder: Path, *, phone: bool = False) -> Iterator[Browser]:
    with browser(folder / "profile") as tab:
        tab.size(*((390, 844) if phone else (1440, 900)), touch=phone)
        tab.open(link)
        tab.wait("document.getElementById('near').children.length > 0")
        idle(tab)
        yield tab


def idle(tab: Browser) -> None:
    """Wait until the page has done all that was asked of it."""
    tab.run("new Promise(done => { queue = queue.then(() => done(true)); })")


def text(tab: Browser, name: str) -> str:
    return str(tab.run(f"document.getElementById('{name}').innerText"))


def decided(suspects: list[dict[str, Any]]) -> list[int | str | None]:
    rows = {row.example: row.new for row in read_corrections(PATH)} if PATH.exists() else {}
    return [rows.get((one["split"] == "test", one["example_id"]), "open") for one in suspects]


@needs_chromium
@pytest.mark.slow
def test_keys_typed_faster_than_the_page_responds_are_all_applied(splits: dict[str, Split], tmp_path: Path) -> None:
    suspects = choose_suspects(splits, None, 6)
    labels = [one["label"] for one in suspects]
    wrong = [(label + 1) % 3 for label in labels]
    with served(splits, suspects) as link, opened(link, tmp_path) as tab:
        tab.press(str(wrong[0]), " ", "u", str(labels[3]))
        tab.press("ArrowLeft", "ArrowLeft", str(wrong[2]))  # another decision about the third
        idle(tab)
        assert decided(suspects) == [wrong[0], labels[1], wrong[2], labels[3], "open", "open"]
        assert re.match("4 of 6 reviewed · 2 corrected", text(tab, "counts"))
        tab.press("n")
        idle(tab)
        tab.press(*"u 0", "Enter", "ArrowRight", "u")
        idle(tab)
        assert [row.reason for row in read_corrections(PATH) if row.reason] == []
        assert tab.errors == []


@needs_chromium
@pytest.mark.slow
def test_phone_without_a_keyboard_can_review_26_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    splits = write_project(tmp_path, 26)
    suspects = choose_suspects(splits, None, 4)
    with served(splits, suspects, 26) as link, opened(link, tmp_path, phone=True) as tab:
        assert tab.run("document.documentElement.scrollWidth <= innerWidth")
        sizes = tab.run("[...document.querySelectorAll('button')].map(b => b.getBoundingClientRect().height)")
        assert min(sizes) >= 44
        for button in ("#keys button[value='14']", "#keep", "#unclear"):
            tab.click(button)
            idle(tab)
        assert decided(suspects) == [14, suspects[1]["label"], None, "open"]
        tab.press("1")  # 1 or 10 to 19: more is to come
        idle(tab)
        assert decided(suspects)[3] == "open"
        tab.press("7")
        idle(tab)
        assert decided(suspects)[3] == 17


@needs_chromium
@pytest.mark.slow
def test_key_does_not_decide_about_an_image_that_did_not_load(splits: dict[str, Split], tmp_path: Path) -> None:
    suspects = choose_suspects(splits, None, 4)
    with contextlib.ExitStack() as stack:
        with served(splits, suspects) as link:
            tab = stack.enter_context(opened(link, tmp_path))
            tab.run("items[1].row = 1000")
            keys = "[' ', 'u', 'u'].forEach(key => document.dispatchEvent(new KeyboardEvent('keydown', {key})))"
            tab.run(keys)
            idle(tab)
            assert text(tab, "fault") == "The image cannot be loaded."
            assert decided(suspects) == [suspects[0]["label"], "open", "open", "open"]
        tab.press("u")
        idle(tab)
        assert "The server does not answer" in text(tab, "fault")
        assert decided(suspects) == [suspects[0]["label"], "open", "open", "open"]
