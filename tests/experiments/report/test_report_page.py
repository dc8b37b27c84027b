"""report.html: every claim of every machine, loaded from nowhere, and what a browser makes of it."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from urllib.parse import urlsplit

import pytest
from fakes import PAPER
from PIL import Image

from experiments.measure.records import write_rows
from experiments.report.machines import machine_of
from experiments.report.page import write_page
from experiments.report.results import write_results
from tests.experiments.report.report_rows import decode_rows, folders_in, operator_rows, write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--virtual-time-budget=5000", "--allow-file-access-from-files", "--dump-dom",
]  # fmt: skip
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

    def __init__(self, page):
        super().__init__()
        self.ids, self.addresses, self.images = [], [], []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids += filter(None, [found.get("id")])
        self.addresses += filter(None, [found.get("href"), found.get("src")])
        self.images += [found] if tag == "img" else []


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of this machine, with a claim that holds HTML, and a recorded H200 with two clocks; each has a figure."""
    places = folders_in(tmp_path_factory.mktemp("page"))
    write_rows(places.fresh_rows / "fig01_batching.csv", decode_rows())
    gpu, figures = places.recorded_rows.parent / "h200", places.recorded_figures.parent / "h200"
    write_rows(gpu / "fig08.csv", operator_rows("cuda_graph", 20.0) + operator_rows("host_clock", 160.0))
    for folder, colour in ((places.fresh_figures, "red"), (figures, "blue")):
        folder.mkdir(parents=True)
        Image.new("RGB", (40, 30), colour).save(folder / "fig08_lora_operator.png")
    machines = [write_report(places)[0], machine_of(gpu, figures, PAPER, "h200")]
    pages = [places.fresh_rows.parent / "claims.md", gpu / "page.md"]
    write_results(machines[1], pages[1], gpu)
    found = write_page(machines, pages, places.fresh_rows.parent / "report.html")
    before = found.read_bytes()
    assert write_page(machines, pages, found).read_bytes() == before, "the same rows make the same bytes"
    return found


def test_every_claim_has_a_cell_per_machine(page):
    text = page.read_text(encoding="utf-8")
    assert text.count('<th scope="row"><a href="#C') == 52
    assert [text.count(f'data-label="{name}"') for name in ("this machine", "h200")] == [52, 52]
    row = text[text.index('id="C01"') : text.index('id="C02"')]
    assert "1.20 (llama-small, len 128: 10 -&gt; 12 ms)" in row  # escaped
    assert 'data-verdict="reproduced"' in row


def test_it_loads_nothing_and_its_links_resolve(page):
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


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_a_browser_filters_sorts_and_fits_a_phone(page, tmp_path):
    text = page.read_text(encoding="utf-8")
    used, frame = tmp_path / "used.html", tmp_path / "frame.html"
    used.write_text(text.replace("<head>", f"<head>{WATCH}", 1).replace("</body>", f"{USE}</body>"), encoding="utf-8")
    measure = "document.body.dataset.wide = this.contentDocument.documentElement.scrollWidth"
    frame.write_text(f"<body><iframe src='{page.as_uri()}' width=390 height=900 style='border:0' onload=\"{measure}\">")
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}"]
    dom, narrow = (
        subprocess.run([*command, one.as_uri()], capture_output=True, text=True, timeout=120, check=True).stdout
        for one in (used, frame)
    )
    assert re.search(r'data-wide="(\d+)"', narrow)[1] == "390"
    said = dict(re.findall(r'data-(\w+)="([^"]*)"', re.search(r"<html[^>]*>", dom)[0]))
    assert "error" not in said, said
    assert int(said["verdict"].split()[0]) == text.count('data-verdict="holds by arithmetic" data-order') // 2
    assert said["figure"].endswith(" of 52 claims")
    assert said["words"] == "1 of 52 claims"
    assert (said["sorted"], said["sides"], said["large"]) == ("C52", "1", "1")
    reproduced = re.findall(r'<td data-side="1" data-label="h200" data-verdict="(.*?)"', text).index("reproduced")
    assert said["byverdict"] == f"C{reproduced + 1:02d}"
