"""The documentation: links, examples, the built site, and the README in the form that a package index shows."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

import dissociated
import dissociated.spark
from dissociated import ipc
from support.pages import PAGES, ROOT, blocks

SITE_NEEDS = ("griffe_sphinx", "mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers.python")


def installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


@dataclass
class Page(HTMLParser):
    """The anchors, the links and the loaded resources of a page of the site."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag in ("a", "area") and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and "href" in given:
            self.loads.append(given["href"])
        elif "src" in given:
            self.loads.append(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does."""
    if absent := [package for package in SITE_NEEDS if not installed(package)]:
        pytest.skip(f"the site needs {', '.join(absent)}: pip install 'dissociated[docs]'")
    directory = tmp_path_factory.mktemp("site")
    # Looking for garbage takes a quarter of the time.
    program = "import gc; from mkdocs.__main__ import cli; gc.disable(); cli()"
    command = [sys.executable, "-c", program, "build", "--strict", "--site-dir", str(directory)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stdout + run.stderr
    return directory


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    parsed = {}
    for path in site.rglob("*.html"):
        page = Page()
        page.feed(path.read_text())
        parsed[path] = page
    return parsed


def test_every_link_within_the_site_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    dead = []
    for path, page in pages.items():
        if path.name == "404.html":  # Its links assume a server's root.
            continue
        for link in (*page.links, *page.loads):
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            known = pages[target].anchors if target in pages else set()
            if not target.exists() or (target in pages and anchor and anchor not in known):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert not dead


def test_the_site_loads_nothing_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    assert not {link for page in pages.values() for link in page.loads if urlsplit(link).netloc}
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"url\(['\"]?https?:[^)]*|@import[^;]*", styles)


@pytest.mark.parametrize("package", [dissociated, ipc, dissociated.spark], ids=lambda package: package.__name__)
def test_every_public_name_is_in_the_reference(pages: dict[Path, Page], package: ModuleType) -> None:
    anchors = {anchor for page in pages.values() for anchor in page.anchors}
    public = {name: getattr(package, name) for name in package.__all__}
    absent = [
        name
        for name, it in public.items()
        if not isinstance(it, ModuleType | str)  # packages, the version
        and anchors.isdisjoint(
            {f"{package.__name__}.{name}", f"dissociated.{name}", f"{it.__module__}.{it.__qualname__}"}
        )
    ]
    assert absent == []


def test_what_the_reference_lists_is_there() -> None:
    for page in (ROOT / "docs" / "api").glob("*.md"):
        for block in page.read_text().split("\n::: ")[1:]:
            what = named(block.split()[0])
            members = re.search(r"members: \[(.*?)\]", block, re.DOTALL)
            for member in members[1].replace(",", " ").split() if members else ():
                assert hasattr(what, member), f"{page.name}: {block.split()[0]} has no {member}"


def named(path: str) -> object:
    """Return the object that a dotted path names."""
    module = path
    names: list[str] = []
    while not installed(module):
        module, _, name = module.rpartition(".")
        names.insert(0, name)
    found: object = importlib.import_module(module)
    for name in names:
        found = getattr(found, name)
    return found


def links(page: Path) -> Iterator[str]:
    prose = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
    return (match[1] for match in re.finditer(r"\]\(([^)\s]+)\)", prose))


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_the_links_of_a_page_outside_of_the_site_lead_somewhere(page: Path) -> None:
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme:
            continue
        target = page.parent / parts.path if parts.path else page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
        assert not parts.fragment or parts.fragment in slugs, link


def test_a_package_index_shows_a_readme_whose_links_all_work() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    readme = (ROOT / "README.md").read_text()
    for change in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        readme = re.sub(change["pattern"], change["replacement"], readme)
    assert re.findall(r"\]\((?!https://)[^)]*\)|\]:\s*(?!https://)\S+|(?:src|href)=", readme) == []
    assert "`docs/spark.md`" in readme


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_fits_80_columns(page: Path) -> None:
    wide = [
        f"{page.name}:{block.line + number}: {len(line)} columns"
        for block in blocks(page)
        for number, line in enumerate(block.code.splitlines())
        if len(line) > 80
    ]
    assert wide == []


def test_the_files_that_the_architecture_names_exist() -> None:
    named = set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text()))
    source = ROOT / "src" / "dissociated"
    assert len(named) > 30
    assert [name for name in sorted(named) if not (source / name).exists() and not (ROOT / name).exists()] == []


def test_a_walk_through_the_files_is_short() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    walks = page.split("## Five walks")[1].split("\n## ")[0].split("\n### ")[1:]
    steps = {
        walk.partition(":")[0]: len(re.findall(r"^\| \d \| `[a-z_/]+\.py` \|", walk, re.MULTILINE)) for walk in walks
    }
    assert steps == {"Publish": 8, "Send": 8, "Read": 8, "Filter": 8, "Commit": 8}
