"""Measure again what a paper claims, and build its page under docs/reproductions.

    python -m benchmarks.papers.reproduce NAME                 measure into benchmarks/results, then build the page
    python -m benchmarks.papers.reproduce NAME --page [FILE]   only build the page, from the newest results or from FILE
    python -m benchmarks.papers.reproduce NAME --parts a,b     measure some parts; the file keeps its other parts

NAME is top-k, global-qsgd, flexible or decentralized; each takes up to 20 minutes. Run nothing else meanwhile: some
parts report times.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import run


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("name", choices=run.NAMES, help="the page")
    made.add_argument("--page", type=Path, nargs="?", const=Path(), metavar="FILE", help="build the page only")
    made.add_argument("--parts", help="measure only these, separated by commas")
    made.add_argument("--quick", action="store_true", help="tiny sizes for tests; needs --out and --docs")
    made.add_argument("--seeds", type=int, default=3, help="runs of each setting (default: %(default)s)")
    made.add_argument("--data", default=run.default_data(), help="a folder with Fashion-MNIST (default: %(default)s)")
    made.add_argument("--out", type=Path, help="the file to write (default: in benchmarks/results, with the date)")
    made.add_argument(
        "--docs", type=Path, default=run.DOCS, help="the folder of the page (default: docs/reproductions)"
    )
    return made


def main(arguments: list[str] | None = None) -> None:
    made = parser()
    options = made.parse_args(arguments)
    if options.seeds < 1:
        made.error("--seeds is at least 1")
    if options.quick and (options.out is None or options.docs == run.DOCS):
        made.error("--quick needs --out and --docs, so that no published page shows its numbers")
    try:
        if options.page is not None:
            file = options.page if options.page != Path() else run.newest(options.name)
            if file is None:
                made.error(f"no results of {options.name} yet: run it without --page, or name a file")
            found = run.load(file)
            if found.get("name") != options.name:
                made.error(f"{file} is of {found.get('name')}, not of {options.name}")
        else:
            asked = run.Options(seeds=options.seeds, quick=options.quick, data=options.data)
            parts = options.parts.split(",") if options.parts else None
            out = options.out or run.default_file(options.name)
            found = run.measure(options.name, asked, out=out, parts=parts)
            if lacking := run.missing(found):
                print(f"no page yet: {out} lacks {', '.join(lacking)}")
                return
        print(run.build(found).write(options.docs))
    except run.MixedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
