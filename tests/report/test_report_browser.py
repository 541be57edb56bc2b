"""The report in a real browser: nothing is complained of, tables sort, the axis switches, nothing overflows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from browser import Browser
from report_folders import bench_folder, run_folder

from finetune.report.write import write

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(browser.find() is None, reason="Debian's chromium is not installed"),
]
LAST_COLUMN = "[...document.querySelector('table.sortable').tBodies[0].rows].map(row => row.cells[COLUMN].textContent)"


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    one = Browser(str(browser.find()), tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = bench_folder(tmp_path_factory.mktemp("bench"))
    write([folder], html=folder / "report.html", command="finetune report bench")
    return folder / "report.html"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    above = tmp_path_factory.mktemp("runs")
    folders = [
        run_folder(above / name, seed=seed) for seed, name in enumerate(("one", "a-run-of-a-very-long-name" * 4))
    ]
    write(folders, html=above / "report.html")
    return above / "report.html"


def column(page: Browser, name: str) -> list[str]:
    heads = page.ask("[...document.querySelector('table.sortable').tHead.rows[0].cells].map(h => h.textContent)")
    return list(page.ask(LAST_COLUMN.replace("COLUMN", str(heads.index(name)))))


def in_order(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: name.replace("_", " "))  # for people, "_" comes before "-"


def press(page: Browser, name: str) -> str:
    """Click the head of a column; what it then says of its order."""
    find = f"[...document.querySelector('table.sortable').tHead.rows[0].cells].find(h => h.textContent === '{name}')"
    page.ask(f"{find}.querySelector('button').click()")
    return str(page.ask(f"{find}.getAttribute('aria-sort')"))


@pytest.mark.parametrize("dark", [False, True], ids=["day", "night"])
@pytest.mark.parametrize("width", [1280, 375])
@pytest.mark.parametrize("page", ["bench", "runs"])
def test_nothing_overflows_and_nothing_is_complained_of(
    opened: Browser, page: str, width: int, dark: bool, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(page)
    opened.open(path, width, dark=dark)
    opened.ask("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert opened.ask("document.documentElement.scrollWidth") <= width
    beyond = f"!e.closest('.scroll, pre') && e.getBoundingClientRect().right > {width + 1}"
    wide = f"[...document.querySelectorAll('main *')].filter(e => {beyond})"
    assert opened.ask(f"{wide}.map(e => e.tagName + ' ' + e.textContent.slice(0, 40))") == []
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith(("file:", "data:"))] == []
    ground = opened.ask("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(21, 25, 30)" if dark else "rgb(255, 255, 255)")


def test_a_click_on_a_head_sorts_by_number_and_what_is_missing_stays_last(opened: Browser, bench: Path) -> None:
    opened.open(bench)
    before = column(opened, "samples/s")
    assert press(opened, "samples/s") == "descending"
    shown = column(opened, "samples/s")
    known = [float(text.replace(",", "")) for text in shown if text]
    assert known == sorted(known, reverse=True)
    assert len(set(known)) > 10
    assert shown[len(known) :] == [""] * 2  # those that failed
    assert sorted(before) == sorted(shown)
    assert press(opened, "samples/s") == "ascending"
    assert [float(text.replace(",", "")) for text in column(opened, "samples/s") if text] == sorted(known)


def test_texts_sort_by_letters_and_only_one_head_says_so(opened: Browser, bench: Path) -> None:
    opened.open(bench)
    press(opened, "samples/s")
    assert press(opened, "cell") == "ascending"
    assert column(opened, "cell")[0] == "gptlite-ddp-2x8"
    assert column(opened, "cell") == in_order(column(opened, "cell"))
    states = opened.ask("[...document.querySelector('table.sortable').tHead.rows[0].cells].map(h => h.ariaSort)")
    assert sorted(states, key=str)[0] == "ascending"
    assert states.count("none") == len(states) - 1


def test_heads_are_reached_and_pressed_by_the_keyboard(opened: Browser, bench: Path) -> None:
    opened.open(bench)
    opened.ask("document.querySelector('table.sortable th button').focus()")
    assert opened.ask("document.activeElement.tagName") == "BUTTON"
    for kind in ("keyDown", "keyUp"):
        opened.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    assert column(opened, "cell")[0] == "gptlite-ddp-2x8"
    assert column(opened, "cell") == in_order(column(opened, "cell"))


def test_the_axis_switches_between_steps_tokens_and_time(opened: Browser, runs: Path) -> None:
    opened.open(runs)
    shown = "[...document.querySelectorAll('.curves .by')].filter(e => getComputedStyle(e).display !== 'none')"
    names = f"[...new Set({shown}.map(e => e.className))]"
    count = opened.ask(f"{shown}.length")
    assert opened.ask(names) == ["by by-step"]
    for axis in ("tokens", "time", "step"):
        opened.ask(f"document.querySelector('input[id$=\"-{axis}\"]').click()")
        assert opened.ask(names) == [f"by by-{axis}"]
        assert opened.ask(f"{shown}.length") == count > 4
    assert opened.complaints == []


def test_without_its_script_the_page_shows_the_same(opened: Browser, bench: Path) -> None:
    opened.open(bench)
    with_script = opened.ask("document.querySelector('main').innerText")
    opened.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        opened.open(bench)
        assert opened.ask("document.querySelectorAll('th button').length") == 0
        assert opened.ask("document.querySelector('main').innerText") == with_script
    finally:
        opened.call("Emulation.setScriptExecutionDisabled", value=False)


def test_the_page_lets_no_request_out_and_no_script_in(opened: Browser, runs: Path, tmp_path: Path) -> None:
    """The policy holds even where somebody has put a script and a picture into the page."""
    bad = '<img src="https://example.org/x.png"><script>document.title = "taken"</script></main>'
    (tmp_path / "page.html").write_text(runs.read_text().replace("</main>", bad))
    opened.open(tmp_path / "page.html")
    assert opened.ask("document.title") != "taken"
    said = " ".join(opened.complaints)
    assert "script-src" in said
    assert "img-src" in said
