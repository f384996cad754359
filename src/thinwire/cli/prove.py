"""`thinwire prove`: options in, a verdict for each part, a JSON file and a page out."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import OptionError
from .files import check_writable, write_json


def prove(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer cases and a smaller benchmark: about a minute.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of each contender in the benchmark. Default: 100 on GPUs, 60 on CPUs; quick: 20."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Model of the benchmark: tiny (0.5 M parameters), small (3 M), medium (25 M), large (85 M) or huge "
            "(303 M). Default: large on GPUs of 20 GB or more, medium on others, small on CPUs.",
        ),
    ] = None,
    recipes: Annotated[
        str | None,
        typer.Option(help="With commas: presets or whole recipes. Default: every preset, and six in the benchmark."),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes. Default: one for each GPU, at most 8; without GPUs 2.")
    ] = None,
    interpret: Annotated[
        bool, typer.Option("--interpret", help="Also run the Triton kernels in Triton's interpreter, on the CPU.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds without a sign of life after which a part fails.")] = 300.0,
    json_file: Annotated[
        str, typer.Option("--json", metavar="FILE", help="Where the result goes; - for standard output.")
    ] = "prove.json",
    report: Annotated[
        str, typer.Option(metavar="FILE", help="Where the page goes: one HTML file, which needs nothing else.")
    ] = "prove.html",
    quiet: Annotated[bool, typer.Option("--quiet", help="Show the verdicts only.")] = False,
) -> None:
    """Prove on this machine what thinwire promises, and say what could not be proved here.

    With two or more GPUs: every kernel bit for bit against its definition; the DDP contract over NCCL (equal replicas,
    dense equal to plain DDP, no_sync, overflow, resume, set_recipe) for every preset; and a paired benchmark against
    plain DDP and torch's bf16 hook, with and without NCCL_P2P_DISABLE=1. Without GPUs the same on CPUs over gloo.

    The exit code is 0 if no part failed, 1 if one did, 2 if an option is wrong. A part that needs hardware which is not
    here does not fail: it is listed as not proved.
    """
    from rich.console import Console

    from ..lab.compare.runner import split_recipes
    from ..lab.draw.page import write_page
    from ..lab.prove.page import render_page
    from ..lab.prove.run import prove as run
    from ..lab.prove.screen import Screen
    from ..lab.prove.settings import Settings
    from ..lab.prove.words import summary

    names = None if recipes is None else split_recipes(recipes)
    if names == ():
        raise OptionError("--recipes is empty: leave it out for every preset, or give a list such as dense,two-shot-4")
    if report == "-":
        raise OptionError("--report takes the name of a file, not -")
    settings = Settings(
        quick=quick,
        steps=steps,
        model=model,
        recipes=names or (),
        processes=processes,
        interpret=interpret,
        timeout=timeout,
    )
    for option, target in (("--json", json_file), ("--report", report)):
        check_writable(target, option=option)
    console = Console(stderr=True)
    with Screen(console, quiet=quiet) as screen:
        result = run(settings, on_event=screen.show, command=f"thinwire {shlex.join(sys.argv[1:])}")
    write_json(json_file, result)
    write_page(render_page(result), report)
    if json_file != "-":
        typer.echo(summary(result))
        typer.echo(f"result: {Path(json_file).resolve()}", err=True)
    typer.echo(f"page: {Path(report).resolve()}", err=True)
    if not result["proved"]:
        raise typer.Exit(1)
