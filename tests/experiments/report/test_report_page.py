"""report.html: every claim of every machine, loaded from nowhere, and what a browser makes of it."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from experiments.measure.records import write_rows
from experiments.report.machines import Machine, machine_of
from experiments.report.page import TONES, write_page
from experiments.report.results import write_results
from tests.experiments.report.report_rows import PAPER, decode_rows, folders_in, operator_rows, write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--virtual-time-budget=5000",
]  # fmt: skip
WIDTHS = (1280, 390)
WATCH = """<script>
const fail = (words) => { document.documentElement.dataset.error = words; };
addEventListener("error", (event) => fail(event.message || event.target.outerHTML), true);
["error", "warn"].forEach((name) => { console[name] = (...words) => fail(words.join(" ")); });
</script>"""
"""Writes what goes wrong into the page, where `--dump-dom` shows it."""
USE = """<script>
const result = (name, value) => { document.documentElement.dataset[name] = value; };
const shown = () => document.getElementById("shown").textContent;
const first = () => document.querySelector("#table tbody tr:not([hidden])").id;
const choose = (id, value) => {
  const one = document.getElementById(id);
  one.value = value;
  one.dispatchEvent(new Event("input"));
};
choose("verdict", "holds by arithmetic"); result("verdict", shown());
choose("verdict", ""); choose("figure", "8"); result("figure", shown());
choose("figure", ""); choose("words", "c12"); result("words", shown());
choose("words", ""); document.querySelector("[data-sort=id]").click(); result("sorted", first());
document.querySelector("[data-sort='1']").click(); result("byverdict", first());
document.querySelector("input[name=side]").click();
result("sides", document.querySelectorAll("#table thead th[data-side]:not([hidden])").length);
document.querySelector(".zoom").click(); result("large", document.querySelectorAll("figure.large").length);
</script>"""
"""Does what a reader does."""


class Links(HTMLParser):
    """Anchors and addresses of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids += filter(None, [found.get("id")])
        self.addresses += filter(None, [found.get("href"), found.get("src")])
        self.images += [found] if tag == "img" else []


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Machine]]:
    """A page of this machine, with a claim that holds HTML, and a recorded H200 with two clocks; each has a figure."""
    places = folders_in(tmp_path_factory.mktemp("page"))
    write_rows(places.fresh_rows / "fig01_batching.csv", decode_rows())
    gpu = places.recorded_rows.parent / "h200"
    write_rows(gpu / "fig08.csv", operator_rows("cuda_graph", 20.0) + operator_rows("host_clock", 160.0))
    figures = places.recorded_figures.parent / "h200"
    for folder, colour in ((places.fresh_figures, "red"), (figures, "blue")):
        folder.mkdir(parents=True)
        Image.new("RGB", (40, 30), colour).save(folder / "fig08_lora_operator.png")
    here, _ = write_report(places)
    machines = [here, machine_of(gpu, figures, PAPER, "h200")]
    pages = [places.fresh_rows.parent / "claims.md", gpu / "page.md"]
    write_results(machines[1], pages[1], gpu)
    return write_page(machines, pages, places.fresh_rows.parent / "report.html"), machines


@pytest.fixture
def page(written: tuple[Path, list[Machine]]) -> Path:
    return written[0]


def test_every_claim_has_a_cell_per_machine(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count('<th scope="row"><a href="#C') == 52
    for name in ("this machine", "h200"):
        assert text.count(f'data-label="{name}"') == 52
    row = text[text.index('id="C01"') : text.index('id="C02"')]
    assert "1.20 (llama-small, len 128: 10 -&gt; 12 ms)" in row  # escaped
    assert 'data-verdict="reproduced"' in row


def test_it_loads_nothing_and_its_links_resolve(page: Path) -> None:
    links = Links(page)
    assert len(links.ids) == len(set(links.ids))
    for address in links.addresses:
        parts = urlsplit(address)
        assert parts.scheme in ("", "data"), address
        if parts.fragment:
            assert parts.fragment in links.ids, address
        elif not parts.scheme:
            assert (page.parent / parts.path).is_file(), address
    assert not re.search(r"@import|url\(|https?://", page.read_text(encoding="utf-8"))
    assert [bool(image["alt"]) for image in links.images] == [True, True]


def test_the_same_rows_make_the_same_bytes(written: tuple[Path, list[Machine]]) -> None:
    page, machines = written
    before = page.read_bytes()
    pages = [page.with_name("claims.md"), machines[1].folder / "page.md"]
    assert write_page(machines, pages, page).read_bytes() == before


def test_badges_tell_what_is_measured_from_what_is_not() -> None:
    told = {"reproduced": "good", "shape holds": "half", "within noise": "plain", "differs": "bad"}
    told |= {"reproduced in simulation": "aside", "holds by arithmetic": "aside", "not measured here": "plain"}
    assert told.items() <= TONES.items()


def chromium(page: Path, home: Path, *flags: str) -> str:
    """Open ``page`` with a new profile in ``home``; return what it prints."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={home}", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.slow
@in_a_browser
def test_a_browser_filters_and_sorts_without_an_error(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    text = text.replace("<head>", f"<head>{WATCH}", 1).replace("</body>", f"{USE}</body>")
    used = tmp_path / "used.html"
    used.write_text(text, encoding="utf-8")
    root = re.search(r"<html[^>]*>", chromium(used, tmp_path / "profile", "--dump-dom"))
    assert root is not None
    said = dict(re.findall(r'data-(\w+)="([^"]*)"', root[0]))
    assert "error" not in said, said
    assert int(said["verdict"].split()[0]) == text.count('data-verdict="holds by arithmetic" data-order') // 2
    assert said["figure"].endswith(" of 52 claims")
    assert said["words"] == "1 of 52 claims"
    assert (said["sorted"], said["sides"], said["large"]) == ("C52", "1", "1")
    cell = r'<td data-side="1" data-label="h200" data-verdict="(.*?)"'
    reproduced = re.findall(cell, text).index("reproduced")
    assert said["byverdict"] == f"C{reproduced + 1:02d}"


@pytest.mark.slow
@in_a_browser
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_draws_it_within_its_width(page: Path, tmp_path: Path, width: int, dark: bool) -> None:
    """In a frame, as a window cannot be as narrow as a phone."""
    frame, picture = tmp_path / "frame.html", tmp_path / "page.png"
    measure = "document.body.dataset.wide = this.contentDocument.documentElement.scrollWidth"
    frame.write_text(
        f"<body style='margin:0'><iframe src='{page.as_uri()}' width={width} height=900 style='border:0' "
        f'onload="{measure}"></iframe>',
        encoding="utf-8",
    )
    scheme = [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--allow-file-access-from-files"]
    dom = chromium(frame, tmp_path / "profile", *scheme, "--dump-dom")
    assert re.search(r'data-wide="(\d+)"', dom)[1] == str(width)  # type: ignore[index]
    chromium(frame, tmp_path / "profile", *scheme, f"--window-size={max(width, 500)},900", f"--screenshot={picture}")
    pixels = np.asarray(Image.open(picture).convert("L"))[:, :width]
    assert (np.median(pixels) < 80) == dark
    assert len(np.unique(pixels)) > 20
