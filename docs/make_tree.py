"""Writes the file list of docs/architecture.md from the first lines of module docstrings.

python docs/make_tree.py          write it
python docs/make_tree.py --check  fail if it is out of date
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- tree: made by docs/make_tree.py -->", "<!-- end of tree -->"


def first_line(path: Path) -> str:
    """The first line of a module's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.partition("\n")[0].rstrip(".")


def tree(source: Path) -> str:
    """One line a file, in folders; the files of the package itself come first."""
    folders: dict[Path, list[Path]] = {}
    for path in sorted(source.rglob("*.py")):
        folders.setdefault(path.parent.relative_to(source), []).append(path)
    sections = []
    for folder in sorted(folders, key=lambda folder: folder.parts):
        names = {path.relative_to(source).as_posix(): first_line(path) for path in folders[folder]}
        width = max(len(name) for name in names) + 2
        sections.append("\n".join(f"{name:<{width}}{line}".rstrip() for name, line in names.items()))
    return "\n\n".join(sections)


def written(page: str, source: Path) -> str:
    """The page with a fresh file list."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n```text\n{tree(source)}\n```\n\n{END}{after}"


def main() -> int:
    old = PAGE.read_text()
    new = written(old, ROOT / "src" / "thinwire")
    if "--check" in sys.argv[1:]:
        return int(old != new)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
