"""The report in a real browser: mouse, keyboard, narrow, dark, on paper, and without JavaScript."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, browser, needs_chromium
from report_folder import make_report_folder, render_page

pytestmark = [pytest.mark.slow, needs_chromium]
SHOWN = "[...document.querySelectorAll('#gallery li')].filter((item) => !item.hidden).map((item) => item.id)"
NARROW, DESK = (390, 844), (1440, 900)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report whose figures are images that a browser can show."""
    from PIL import Image

    folder = make_report_folder(tmp_path_factory.mktemp("report"))
    for path in folder.glob("results/*/*.png"):
        Image.new("L", (1000, 300), 200).save(path)
    path = folder / "report.html"
    path.write_text(render_page(folder))
    return path


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def opened(chromium: Browser, page: Path) -> Iterator[Browser]:
    """The report on a desk, just opened; at the end it has asked for nothing but itself and thrown no error."""
    chromium.ask("Emulation.setScriptExecutionDisabled", value=False)
    chromium.media()
    chromium.size(*DESK)
    chromium.open(page)
    yield chromium
    assert chromium.requests == [page.as_uri()]
    assert chromium.errors == []


def shown(browser: Browser) -> list[str]:
    return list(browser.run(SHOWN))


def focus(browser: Browser) -> str:
    return str(browser.run("document.activeElement.id || document.activeElement.getAttribute('aria-label')"))


def choose(browser: Browser, name: str, value: str) -> None:
    chosen = f"Object.assign(document.getElementById({name!r}), {{value: {value!r}}})"
    browser.run(f"{chosen}.dispatchEvent(new Event('change'))")


def test_cell_of_the_matrix_shows_its_images_and_escape_leads_back(opened: Browser) -> None:
    assert shown(opened) == ["test-2654", "test-1226", "test-720"], "mistakes, the most confident first"
    opened.click(".matrix a[data-label='5'][data-predicted='3']")
    assert shown(opened) == ["test-1226", "test-720"]
    assert opened.run("document.getElementById('status').textContent") == "2 of 6 examples"
    assert focus(opened) == "examples-title"
    opened.press("Escape")
    assert focus(opened) == "2 with label 5, predicted 3"
    opened.click(".matrix a[data-label='1'][data-predicted='1']")
    assert shown(opened) == ["test-3"], "of correct predictions, the least confident ones"


def test_matrix_is_one_stop_of_the_keyboard_with_arrows_within(opened: Browser) -> None:
    assert opened.run("[...document.querySelectorAll('.matrix a')].filter((each) => each.tabIndex === 0).length") == 1
    opened.run("document.querySelector('.matrix a[tabindex=\"0\"]').focus()")
    assert focus(opened) == "1 with label 0, predicted 0"
    opened.press("ArrowRight")
    assert focus(opened) == "1 with label 0, predicted 0", "there is no other cell in this row"
    opened.run("document.querySelector('.matrix a[data-predicted=\"9\"]').focus()")
    opened.press("ArrowLeft")
    assert focus(opened) == "1 with label 4, predicted 9"
    opened.press("Enter")
    assert shown(opened) == ["test-2654"]


def test_gallery_is_filtered_by_group_split_label_prediction_and_score(opened: Browser) -> None:
    choose(opened, "group", "")
    assert set(shown(opened)) == {"test-720", "test-1226", "test-2654", "train-42566", "test-0", "test-3"}
    choose(opened, "split", "train")
    assert shown(opened) == ["train-42566"]
    choose(opened, "split", "")
    choose(opened, "label", "5")
    assert set(shown(opened)) == {"test-720", "test-1226"}
    choose(opened, "label", "")
    choose(opened, "predicted", "9")
    assert shown(opened) == ["test-2654"]
    opened.click("#reset")
    choose(opened, "score", "suspicion")
    everything = shown(opened)
    suspicion = opened.run(
        "Object.fromEntries([...gallery.children].map((item) => [item.id, +item.dataset.suspicion]))"
    )
    assert everything == sorted(everything, key=lambda key: -suspicion[key])
    opened.run("least.value = 50; least.dispatchEvent(new Event('input'))")
    assert shown(opened) == everything[:3]
    choose(opened, "group", "suspects")
    assert opened.run("score.value") == "suspicion"


def test_charts_say_their_values_under_the_pointer_and_by_keyboard(opened: Browser) -> None:
    tip = "document.querySelector('#loss .tip').textContent"
    opened.run("document.querySelector('#loss svg').focus()")
    opened.press("End")
    expected = "epoch 3\ntraining (cross-entropy): 0.1000\ntraining (with label smoothing): 0.5000\nvalidation: 0.2000"
    assert opened.run(tip) == expected
    opened.press("ArrowLeft")
    assert opened.run(tip).startswith("epoch 1\n")
    opened.press("Escape")
    assert opened.run("document.querySelector('#loss .tip').hidden")
    opened.click("#loss svg .stop:last-of-type rect")
    assert opened.run(tip) == expected


def test_link_of_the_contents_opens_its_section_and_paper_opens_all(opened: Browser) -> None:
    opened.click("nav a[href='#costs']")
    opened.run("new Promise((done) => setTimeout(done, 50))")
    assert opened.run("[...document.querySelectorAll('.fold')].map((each) => each.open)") == [False, False, True, False]
    opened.run("dispatchEvent(new Event('beforeprint'))")
    assert opened.run("[...document.querySelectorAll('.fold')].every((each) => each.open)")
    opened.run("dispatchEvent(new Event('afterprint'))")
    assert opened.run("document.querySelectorAll('.fold[open]').length") == 1


def test_without_javascript_a_cell_leads_to_its_first_image(chromium: Browser, page: Path) -> None:
    chromium.ask("Emulation.setScriptExecutionDisabled", value=True)
    chromium.media()
    chromium.size(*NARROW)
    chromium.open(page)
    chromium.ask("Emulation.setScriptExecutionDisabled", value=False)
    chromium.click(".matrix a[data-label='5'][data-predicted='3']")
    assert chromium.run("location.hash") == "#test-1226"
    assert chromium.run("document.querySelector(':target').id") == "test-1226"
