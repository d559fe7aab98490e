"""What `make docs` adds to the pages in docs/: the project's own pages, and generated reference."""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent))

import reference  # noqa: E402

# Pages of the repository's root, and where the site has them.
OWN = {
    "ARCHITECTURE.md": "explanation/architecture.md",
    "CONTRIBUTING.md": "explanation/contributing.md",
    "SECURITY.md": "explanation/security.md",
    "CHANGELOG.md": "reference/changelog.md",
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)((?:#[^)]*)?)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add what does not lie in docs/."""
    for name, place in OWN.items():
        text = (ROOT / name).read_text("utf-8")
        files.append(File.generated(config, place, content=relinked(text, "", place)))
    for place, text in reference.pages().items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links out of docs/ lead to the site's page of them, or name the file in the sources."""
    place = page.file.src_uri
    if place in OWN.values():
        return markdown
    return relinked(markdown, f"docs/{Path(place).parent.as_posix()}", place)


def relinked(text: str, folder: str, place: str) -> str:
    """Links of a page that lies in `folder` of the repository, for the site's page `place`."""
    here = Path(place).parent

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found.groups()
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        whole = _plain(Path(folder) / target)
        inside = OWN.get(whole) or (whole[5:] if whole.startswith("docs/") else "")
        if inside:
            return f"[{text}]({_from(here, inside)}{anchor})"
        if not (ROOT / whole).exists():
            raise FileNotFoundError(f"{place} links to {target}, which is not there")
        return f"{text} (`{whole}` in the sources)"

    return LINK.sub(link, text)


def _plain(path: Path) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def _from(here: Path, target: str) -> str:
    up = [] if here == Path(".") else [".."] * len(here.parts)
    return "/".join([*up, target])
