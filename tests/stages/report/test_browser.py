"""The report in a real browser: mouse, keyboard, on paper, and without JavaScript."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, browser, needs_chromium
from report_folder import make_report_folder, render_page, write_model

from gradtrail.experiments.what_if import report_style
from gradtrail.stages.common.files import digest

pytestmark = [pytest.mark.slow, needs_chromium]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_report_folder(tmp_path_factory.mktemp("page"))
    path = folder / "results/report.html"
    path.write_text(render_page(folder))
    (path.parent / "comparisons").mkdir()
    (path.parent / "comparisons/what_if.css").write_text(report_style("another evaluation", []))
    return path


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def opened(chromium: Browser, file: Path) -> Iterator[Browser]:
    """The report, just opened; at the end it has asked for nothing but itself and thrown no error."""
    chromium.ask("Emulation.setScriptExecutionDisabled", value=False)
    chromium.size(1440, 900)
    chromium.open(file)
    yield chromium
    styles = ("evaluate/model.css", "comparisons/what_if.css")
    assert {*chromium.requests} <= {file.as_uri(), *((file.parent / style).as_uri() for style in styles)}
    assert chromium.errors == []


def visible(browser: Browser) -> list[str]:
    """Return the ids of the examples that the filters leave, in order."""
    return list(browser.run("[...document.querySelectorAll('#gallery li:not([hidden])')].map((item) => item.id)"))


def focus(browser: Browser) -> str:
    return str(browser.run("document.activeElement.id || document.activeElement.getAttribute('aria-label')"))


def choose(browser: Browser, name: str, value: str) -> None:
    browser.run(f"{name}.value = {value!r}; {name}.dispatchEvent(new Event(least === {name} ? 'input' : 'change'))")


def test_cell_of_the_matrix_shows_its_images_and_escape_leads_back(opened: Browser) -> None:
    assert visible(opened) == ["test-2654", "test-1226", "test-720"], "mistakes, the most confident first"
    opened.click(".matrix a[data-label='5'][data-predicted='3']")
    assert visible(opened) == ["test-1226", "test-720"]
    assert opened.run("document.getElementById('status').textContent") == "2 of 6 examples"
    assert focus(opened) == "examples-title"
    opened.press("Escape")
    assert focus(opened) == "2 with label 5, predicted 3"
    opened.click(".matrix a[data-label='1'][data-predicted='1']")
    assert visible(opened) == ["test-3"], "of correct predictions, the least confident ones"


def test_matrix_is_one_stop_of_the_keyboard_with_arrows_within(opened: Browser) -> None:
    assert opened.run("document.querySelectorAll('.matrix a[tabindex=\"0\"]').length") == 1
    opened.run("document.querySelector('.matrix a[data-predicted=\"9\"]').focus()")
    opened.press("ArrowLeft")
    assert focus(opened) == "1 with label 4, predicted 9", "there is no other cell in this row"
    opened.press("ArrowUp", "Enter")
    assert visible(opened) == ["test-2654"]


def test_gallery_is_filtered_by_group_split_label_prediction_and_score(opened: Browser) -> None:
    choose(opened, "group", "")
    everything = visible(opened)
    assert set(everything) == {"test-720", "test-1226", "test-2654", "train-42566", "test-0", "test-3"}
    for name, value, examples in (
        ("split", "train", {"train-42566"}),
        ("label", "5", {"test-720", "test-1226"}),
        ("predicted", "9", {"test-2654"}),
    ):
        choose(opened, name, value)
        assert set(visible(opened)) == examples
        opened.click("#reset")
    choose(opened, "score", "suspicion")
    by_suspicion = visible(opened)
    values = opened.run("Object.fromEntries([...gallery.children].map((item) => [item.id, +item.dataset.suspicion]))")
    assert by_suspicion == sorted(everything, key=lambda key: -values[key])
    choose(opened, "least", "50")
    assert visible(opened) == by_suspicion[:3]


def test_link_of_the_contents_opens_its_section_and_paper_opens_all(opened: Browser) -> None:
    opened.click("nav a[href='#costs']")
    opened.run("new Promise((done) => setTimeout(done, 50))")
    assert opened.run("[...document.querySelectorAll('.fold')].map((each) => each.open)") == [False, False, True]
    opened.run("dispatchEvent(new Event('beforeprint'))")
    assert opened.run("document.querySelectorAll('.fold:not([open])').length") == 0
    opened.run("dispatchEvent(new Event('afterprint'))")
    assert opened.run("document.querySelectorAll('.fold[open]').length") == 1


def test_contents_mark_the_section_on_screen_also_after_a_click(opened: Browser) -> None:
    marked = "[...document.querySelectorAll('nav [aria-current]')].map((link) => link.hash.slice(1))"
    names = opened.run("[...document.querySelectorAll('nav a')].map((link) => link.hash.slice(1))")
    for name in names:
        opened.click(f"nav a[href='#{name}']")
        opened.run("new Promise((done) => setTimeout(done, 600))")
        assert opened.run(marked) == [name]
    for place in ("0", "document.body.scrollHeight"):
        opened.run(f"scrollTo({{top: {place}, behavior: 'instant'}})")
        opened.wait(f"{marked}.join() === {names[-1 if int(place != '0') else 0]!r}")


def test_report_of_an_earlier_model_says_so(opened: Browser, file: Path) -> None:
    is_shown = "document.getElementById('earlier').checkVisibility()"
    assert not opened.run(is_shown)
    write_model(file.parents[1], "bbbb")
    opened.open(file)
    assert opened.run(is_shown)
    write_model(file.parents[1], "aaaa")
    opened.open(file)
    assert not opened.run(is_shown)
    opened.requests = opened.requests[-2:]


def test_without_javascript_a_cell_leads_to_its_first_image(chromium: Browser, file: Path) -> None:
    chromium.ask("Emulation.setScriptExecutionDisabled", value=True)
    chromium.size(390, 844)
    chromium.open(file)
    chromium.ask("Emulation.setScriptExecutionDisabled", value=False)
    chromium.click(".matrix a[data-label='5'][data-predicted='3']")
    assert chromium.run("document.querySelector(':target').id") == "test-1226"


def test_report_shows_what_if_of_the_same_evaluation_alone(opened: Browser, file: Path) -> None:
    is_shown = "document.getElementById('what-if').checkVisibility()"
    assert not opened.run(is_shown)
    sentences = ['label "a\\b", answered c\n}', "* { display: none } </style>"]
    style = report_style(digest(file.parent / "evaluate/calibration.json"), sentences)
    (file.parent / "comparisons/what_if.css").write_text(style)
    opened.open(file)
    assert opened.run(is_shown)
    content = opened.run("getComputedStyle(document.getElementById('what-if'), '::after').content")
    assert content == '"label \\"a\\\\b\\", answered c\\a }\\a * { display: none } </style>"'


def test_figures_follow_a_dark_colour_scheme_except_on_paper(opened: Browser) -> None:
    style = "getComputedStyle(document.querySelector('figure img')).filter"
    card = "getComputedStyle(document.querySelector('figure .scroll')).backgroundColor"
    for media, scheme, inverts, colour in (
        ("screen", "dark", True, "rgb(28, 31, 35)"),
        ("screen", "light", False, "rgb(255, 255, 255)"),
        ("print", "dark", False, "rgb(255, 255, 255)"),
    ):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        opened.ask("Emulation.setEmulatedMedia", media=media, features=features)
        assert (opened.run(style).startswith("invert(1)"), opened.run(card)) == (inverts, colour)
    opened.ask("Emulation.setEmulatedMedia", media="", features=[])
