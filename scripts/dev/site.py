"""Gather the pages of the site in build/pages, in the repository's own layout: python -m scripts.dev.site

README.md and docs/*.md come first, then every file that a page links to; a linked folder becomes its README.md, or a
page that lists its files. `make docs` builds build/site from it and from mkdocs.yml.
"""

import re
import shutil
from pathlib import Path

from scripts.dev.docs import ROOT, pages

PAGES = ROOT / "build" / "pages"
_LINK = re.compile(r"\]\(([^)\s#:]+)(?:#([^)\s]*))?\)")  # ](path#anchor), not ](https://...) and not ](#anchor)
_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)


def links(text: str) -> list[tuple[str, str]]:
    """The relative links outside code: (path, anchor without #)."""
    return _LINK.findall(_CODE.sub("", text))


def gather(into: Path) -> list[Path]:
    """Copy the pages and all that they link to. Raises FileNotFoundError for a link to nothing."""
    shutil.rmtree(into, ignore_errors=True)
    waiting, done = [*pages(), ROOT / "docs" / "site.css"], list[Path]()
    while waiting:
        source = waiting.pop()
        if source in done:
            continue
        done.append(source)
        target = into / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            target.mkdir(exist_ok=True)
            (target / "README.md").write_text(_listing(source), encoding="utf-8")
            waiting += [path for path in source.iterdir() if path.is_file()]
        else:
            shutil.copyfile(source, target)
        if source.suffix == ".md":
            linked = [(source.parent / link).resolve() for link, _ in links(source.read_text(encoding="utf-8"))]
            waiting += [path / "README.md" if (path / "README.md").exists() else path for path in linked]
    return done


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    return "\n".join([f"# {folder.relative_to(ROOT)}", "", *(f"- [{name}]({name})" for name in names), ""])


if __name__ == "__main__":
    print(f"{len(gather(PAGES))} files in {PAGES.relative_to(ROOT)}")
