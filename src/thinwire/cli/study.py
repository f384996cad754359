"""`thinwire study`: its options, output and files."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import OptionError
from .bar import Bar
from .files import check_writable, write_json
from .selectors import selectors

study_app = typer.Typer(
    name="study",
    help="Study gradients: their distribution, the energy Top-k leaves out, and the cost of selectors.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)


@study_app.callback()
def _root() -> None:
    """Study gradients: their distribution, the energy Top-k leaves out, and the cost of selectors."""


@study_app.command()
def gradients(
    workload: Annotated[str, typer.Option(help="mlp, mlp-100k, gpt or cnn (which needs --data).")] = "mlp",
    recipe: Annotated[
        str, typer.Option(help="With commas: dense, presets, or whole recipes; each trains from the same weights.")
    ] = "dense,ef|top_k:0.01|all_gather",
    workers: Annotated[int, typer.Option(help="Workers, all in this process; the first one is described.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps of every recipe.")] = 200,
    at: Annotated[
        str | None, typer.Option(help="Steps to look at, from 0 on, with commas. Default: 0, 20, 100 and the last.")
    ] = None,
    densities: Annotated[
        str | None, typer.Option(help="Shares that top-k keeps, with commas. Default: nine from 0.001 to 0.5.")
    ] = None,
    elements: Annotated[int, typer.Option(help="Of each tensor, to fit densities; the rest uses all.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Seed of weights, data and draws.")] = 0,
    data: Annotated[str | None, typer.Option(metavar="DIR", help="Folder with Fashion-MNIST or CIFAR-10.")] = None,
    skew: Annotated[float, typer.Option(help="0: all workers have data of all kinds; 1: each has its own.")] = 0.0,
    bucket_mb: Annotated[float, typer.Option(help="Size of the buckets that are compressed as one.")] = 25.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show the table only.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON; - for standard output.")
    ] = None,
    report: Annotated[str | None, typer.Option(metavar="FILE", help="Write the page as one HTML file.")] = None,
) -> None:
    """Train a model by one or more recipes and describe u = g + e: the gradient plus the residual of its memory.

    For every layer and for the whole model, at the chosen steps: histogram and fitted densities (Gaussian, Laplace,
    Student t), kurtosis, whether there is one hump, and |u - TopK(u)|^2 / |u|^2 beside Random-k, 1 - k/d and
    (1 - k/d)^2. Give dense and a recipe with a memory to see the effect of error feedback.

    In the table: memory is |e|^2 / (|g|^2 + |e|^2); KS the distance of the best fit from the data (Kolmogorov and
    Smirnov); out of place the share of the mass that would have to move for one hump; top-k leaves |u - TopK(u)|^2 /
    |u|^2.
    """
    from ..lab.compare.runner import split_recipes
    from ..lab.study.bounds import DENSITIES
    from ..lab.study.gradients import Settings, study_gradients
    from ..lab.study.portrait import Lens
    from ..lab.study.result import summary

    looks = _numbers(at, "--at", int) if at is not None else [step for step in (0, 20, 100, steps - 1) if step < steps]
    shares = DENSITIES if densities is None else tuple(_numbers(densities, "--densities", float))
    settings = Settings(
        split_recipes(recipe),
        workload=workload,
        workers=workers,
        steps=steps,
        at=tuple(sorted({int(step) for step in looks})),
        seed=seed,
        data=data,
        skew=skew,
        bucket_mb=bucket_mb,
        lens=Lens(elements=elements, densities=shares, seed=seed),
    )
    for option, target in (("--json", json_file), ("--report", report)):
        if target is not None:
            check_writable(target, option=option)
    command = f"thinwire {shlex.join(sys.argv[1:])}"
    with Bar("training", steps=steps * len(settings.recipes), shown=not quiet) as show:
        result = study_gradients(settings, on_event=show, command=command)
    if json_file != "-":
        typer.echo(summary(result))
    if json_file is not None:
        write_json(json_file, result)
    if report is not None:
        from ..lab.study.page import write_page

        write_page(result, report)
        typer.echo(f"report: {Path(report).resolve()}", err=True)


study_app.command()(selectors)


def _numbers(text: str, option: str, kind: type[int] | type[float]) -> list[float]:
    try:
        return [kind(piece) for piece in text.split(",") if piece.strip()]
    except ValueError:
        words = "whole numbers" if kind is int else "numbers"
        raise OptionError(f"{option} takes {words} with commas, not {text}") from None
