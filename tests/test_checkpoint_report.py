"""The checkpoint's HTML report: complete, self-contained, well-formed, and drawn by a browser where there is one."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from checkpoint_document import document

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from dcp_decode.checkpoint import summary
from dcp_decode.checkpoint.plots import labelled
from dcp_decode.checkpoint.report import render_report
from dcp_decode.checkpoint.summary import notes

VOID = {"meta", "link", "br", "hr", "img", "input"}
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "headless_shell")
WIDTHS = (1280, 420)


@pytest.fixture(scope="module")
def page() -> str:
    return render_report(document())


@pytest.mark.parametrize(
    ("extents", "place", "kept"),
    [
        ([64, 128, 256, 288, 512, 1024, 2048], math.log2, [64, 128, 256, 512, 1024, 2048]),
        ([1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 40], float, [1, 6, 12, 24, 32, 40]),
        ([64, 96, 128], float, [64, 96, 128]),
        ([1, 50, 99, 100], float, [1, 50, 100]),
        ([5], float, [5]),
    ],
)
def test_labels_of_an_axis_stay_apart(extents, place, kept) -> None:
    assert labelled(extents, place) == kept


class Balance(HTMLParser):
    """Fails at the first end tag that doesn't close the innermost element."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"


def test_page_is_well_formed_and_its_ids_are_unique(page: str) -> None:
    parser = Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert len(parser.ids) == len(set(parser.ids))
    for target in re.findall(r'(?:url\(#|href="#)([^")]+)', page):
        assert target in parser.ids, f"#{target} is drawn nowhere"


def test_well_formedness_check_can_fail(page: str) -> None:
    parser = Balance()
    with pytest.raises(AssertionError):
        parser.feed(page.replace("</table>", "", 1))


def test_page_needs_nothing_beside_it(page: str) -> None:
    assert "<script" not in page
    for attribute in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert attribute.startswith("#"), attribute
    assert "@import" not in page
    assert len(page) < 1_000_000


def test_headline_method_and_caveats_come_in_this_order(page: str) -> None:
    made = document()
    sparse = made["points"][0]["stages"]["sparse_decode"]["p50_us"]
    text = re.sub(r"<style.*?</style>|<svg.*?</svg>", "", page, flags=re.DOTALL)
    places = [
        text.index(words)
        for words in (f"{sparse:.2f} us", "faster than the best public peer", "Read this first", "no NVLink time in it",
                      "Stages against their floors", "Peers in the same run", "Scaling", "Method", "Environment")
    ]  # fmt: skip
    assert places == sorted(places)


def test_everything_measured_is_in_the_page(page: str) -> None:
    made = document()
    for figure in ("Stages against their floors", "Peers", "Distribution over rounds", "Scaling over batch",
                   "Scaling over keys"):  # fmt: skip
        assert f'aria-label="{figure}"' in page
    for point in made["points"]:
        assert f"{point['stages']['chain']['p50_us']:.2f}" in page
    for words in (
        "torch &lt;is&gt; not installed",
        "flash_mla_sparse_decode",
        "NVIDIA H200",
        "0123456789ab",
        "4.20 TB/s",
    ):
        assert words in page
    assert "torch <is>" not in page


def test_document_with_one_point_and_no_peers_is_drawn() -> None:
    made = document()
    made |= {"points": made["points"][:1], "step": [], "sweep": [], "layout": [], "platform": {}, "device": None}
    made["points"][0] |= {"peers": [], "floors": {"wire": {"p50_us": 1.5}}}
    page = render_report(made)
    assert "Peers in the same run" not in page
    assert 'aria-label="Stages against their floors"' in page


def group_document() -> dict:
    """Two points of mode group; rounds are kept of chains alone."""
    made = document()
    exchange = made["points"][0]["peers"][1] | {"name": "nccl", "kind": "public", "error": None, "lse_base": None}
    exchange.pop("rounds_us")
    made |= {"mode": "group", "points": made["points"][:2], "step": [], "sweep": [], "layout": [], "platform": {}}
    for point in made["points"]:
        chain = point["stages"]["chain"]
        fused = chain | {"p50_us": chain["p50_us"] - 2.0}
        stages = {
            name: {key: value for key, value in stage.items() if key != "rounds_us"}
            for name, stage in point["stages"].items()
        }
        point |= {
            "mode": "group",
            "stages": stages | {"chain": chain, "fused_chain": fused, "rank_skew": stages["merge"]},
            "peers": [exchange | {"name": "nccl_chain", "p50_us": 4 * chain["p50_us"]}, exchange],
            "floors": {
                "wire": {"p50_us": 1.5},
                "solo_chain": chain | {"p50_us": chain["p50_us"] - 1.25},
                "solo_fused_chain": chain | {"p50_us": chain["p50_us"] - 2.5},
                "event_node": stages["merge"],
            },
        }
    return made


def test_document_of_real_ranks_says_so_and_has_no_modelled_total() -> None:
    page = render_report(group_document())
    assert "real ranks, maximum over ranks per iteration" in page
    assert "rank skew" in page
    assert "nccl_chain" in page
    assert "fastest chain + modelled wire" not in page
    assert "no NVLink time" not in page


def test_table_of_real_ranks_compares_chains_with_one_rank_alone_and_with_nccl() -> None:
    made = group_document()
    lines = [line for line in notes(made) if "on one rank alone" in line]
    assert len(lines) == 4
    assert ": chain " in lines[0]
    assert "+1.25 us on one rank alone" in lines[0]
    assert lines[0].endswith("4.0 x")
    assert ": fused chain " in lines[1]
    assert "+0.50 us on one rank alone" in lines[1]
    assert summary.lead(made["points"][0]) is None, "an exchange is no alternative to the sparse decode"


def test_peers_of_real_ranks_are_drawn_beside_the_chains() -> None:
    page = render_report(group_document())
    assert "fused chain (this project)" in page
    assert "sparse decode (this project)" not in page


@pytest.mark.parametrize("width", WIDTHS)
def test_browser_draws_the_page_within_its_width(page: str, width: int, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)}")
    from PIL import Image  # comes with matplotlib

    probe = (
        "<script>addEventListener('load', () => { const wide = [...document.querySelectorAll('body > *')]"
        ".filter(one => one.getBoundingClientRect().right > innerWidth + 1).map(one => one.tagName);"
        "const flat = [...document.querySelectorAll('svg')].filter(one => one.getBoundingClientRect().height < 60);"
        "document.title = JSON.stringify({wide, flat: flat.length, page: document.documentElement.scrollWidth,"
        " height: document.documentElement.scrollHeight}); });</script>"
    )
    source = tmp_path / "report.html"
    source.write_text(page.replace("</body>", f"{probe}</body>"))
    base = [browser, "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={tmp_path / 'profile'}"]
    dumped = subprocess.run(
        [*base, f"--window-size={width},900", "--dump-dom", source.as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", dumped.stdout)
    assert title is not None
    seen = json.loads(title[1].replace("&quot;", '"'))
    assert seen["wide"] == []
    assert seen["flat"] == 0
    assert seen["page"] <= width
    shot = tmp_path / "report.png"
    subprocess.run(
        [*base, f"--window-size={width},{min(4000, seen['height'])}", f"--screenshot={shot}", source.as_uri()],
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    with Image.open(shot) as image:
        colors = image.convert("RGB").getcolors(1 << 24)
        assert image.width == width
    assert colors is not None
    shares = {color: count / (image.width * image.height) for count, color in colors}
    assert 0.5 < shares[255, 255, 255] < 0.98, "a blank page, or no white ground"
    assert shares.get((0x0B, 0x5F, 0xA5), 0) > 1e-4, "our bars are missing"
