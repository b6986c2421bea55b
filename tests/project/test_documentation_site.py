"""The built documentation, opened in a browser from its folder: it is searched and fits a phone."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from browsers import chromium
from doc_pages import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="a package without docs"),
]

PHONE = """<body><iframe id="frame" style="width:390px;height:800px;border:0"></iframe>
<pre id="found"></pre><script>
const widths = {}, pages = PAGES;
function next() {
  if (!pages.length) { found.textContent = JSON.stringify(widths); return }
  const page = pages.shift();
  frame.onload = () => setTimeout(() => {
    const root = frame.contentDocument.documentElement;
    widths[page] = root.scrollWidth - root.clientWidth;
    next();
  }, 300);
  frame.src = page;
}
next();
</script></body>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason="needs the documentation's packages: make docs")
    site = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(site)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=True,
        timeout=300,
    )
    return site


def opened(address: str, folder: Path) -> str:
    """Return a page as it is when its scripts have run."""
    return subprocess.run(
        [
            chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--allow-file-access-from-files",
            "--virtual-time-budget=60000", f"--user-data-dir={folder / 'profile'}", "--dump-dom",
            address,
        ],
        capture_output=True, text=True, check=True, timeout=240,
    ).stdout  # fmt: skip


def test_it_is_searched_from_its_folder(site, tmp_path):
    page = opened(f"{(site / 'reference/settings.html').as_uri()}?q=shadow+mode", tmp_path)
    assert re.search(r"md-search-result__meta[^>]*>\s*\d+ matching documents", page)
    links = re.findall(r'<a href="([^"]*)" class="md-search-result__link"', page)
    assert any("guides/measuring.html" in link for link in links)


def test_the_reference_lists_all_metrics(site):
    page = (site / "reference/cache.html").read_text(encoding="utf-8")
    assert page.count("<td><code>ctxreuse_") > 30


def test_programs_find_all_pages_and_how_they_begin(site):
    listed = (site / "llms.txt").read_text(encoding="utf-8")
    links = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \S", listed, re.MULTILINE)
    pages = {one.relative_to(site).as_posix() for one in site.rglob("*.html")}
    assert set(links) == pages - {"index.html", "404.html"}


def test_no_page_is_wider_than_a_phone(site, tmp_path):
    pages = sorted(one.as_uri() for one in site.rglob("*.html") if one.name != "404.html")
    frame = tmp_path / "phone.html"
    frame.write_text(PHONE.replace("PAGES", json.dumps(pages)), encoding="utf-8")
    page = opened(frame.as_uri(), tmp_path)
    [found] = re.findall(r'<pre id="found">(.*?)</pre>', page, re.S)
    widths = json.loads(html.unescape(found))
    assert set(widths) == set(pages)
    assert {page: more for page, more in widths.items() if more > 0} == {}
