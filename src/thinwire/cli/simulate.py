"""`thinwire simulate`: its options, output and files."""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ..predict.presets import preset_names
from .bar import Bar
from .files import check_writable, write_json


def simulate(
    workers: Annotated[int, typer.Option(help="Workers, all in this process.")] = 64,
    algorithm: Annotated[
        str | None, typer.Option(help="With commas: dpsgd, naive, dcd, ecd, choco, auto, allreduce; dcd:8 has 8 bits.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="With commas: ddp, presets such as two-shot-2, or whole recipes.")
    ] = None,
    topology: Annotated[
        str, typer.Option(help="For --algorithm: ring, torus, exponential, one_peer_exponential, complete or star.")
    ] = "exponential",
    codec: Annotated[str | None, typer.Option(help="For --algorithm, such as min_max:4,block=512.")] = None,
    network: Annotated[
        str, typer.Option(help=f"100mbit,5ms, a schedule (A@0s;B@30s), or a preset: {preset_names()}.")
    ] = "home-1000",
    steps: Annotated[int, typer.Option(help="Steps of every worker.")] = 200,
    learn: Annotated[
        bool,
        typer.Option("--learn/--cost-only", help="Train by a virtual clock, or compute time and bytes only."),
    ] = True,
    workload: Annotated[str, typer.Option(help="mlp-100k, mlp, gpt or cnn (which needs --data).")] = "mlp-100k",
    data: Annotated[str | None, typer.Option(metavar="DIR", help="Folder with Fashion-MNIST or CIFAR-10.")] = None,
    skew: Annotated[float, typer.Option(help="0: all workers have data of all kinds; 1: each has its own.")] = 0.0,
    parameters: Annotated[int | None, typer.Option(help="Size of the model, for --cost-only.")] = None,
    compute_ms: Annotated[float, typer.Option(help="Forward and backward of one worker, the median.")] = 100.0,
    straggle: Annotated[
        float | None, typer.Option(help="Spread of that from step to step: the sigma of its logarithm.")
    ] = None,
    uneven: Annotated[
        float | None, typer.Option(help="The same from worker to worker. Default: the network's.")
    ] = None,
    loss: Annotated[float, typer.Option(help="Share of the messages that never arrive.")] = 0.0,
    churn: Annotated[
        str | None,
        typer.Option(help="Mean seconds present and absent, 600/60, or a JSON file [[worker, leaves, returns]]."),
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds after which nobody waits for a message. Default: none.")
    ] = None,
    device: Annotated[
        str,
        typer.Option(help="The device that compresses: a100, h100, a10g, t4, this (this machine), or a file."),
    ] = "a100",
    cores: Annotated[float, typer.Option(help="Of that device, for each worker.")] = 1.0,
    bucket_mb: Annotated[float, typer.Option(help="Size of the buckets of --recipe.")] = 25.0,
    compute: Annotated[
        str, typer.Option(help="Gradients: each (the same bits as in a process), batched, or auto.")
    ] = "auto",
    lap: Annotated[
        int | None, typer.Option(help="Steps between two looks at held-out data. Default: 20 looks.")
    ] = None,
    growth: Annotated[
        bool, typer.Option("--growth/--no-growth", help="Also compute the step time for other numbers of workers.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed of weights, data, draws, links and absences.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show the table only.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON; - for standard output.")
    ] = None,
    report: Annotated[str | None, typer.Option(metavar="FILE", help="Write the report as one HTML file.")] = None,
) -> None:
    """Train with up to thousands of workers in one process, by a virtual clock.

    Exchanges and algorithms run the code of real runs. Only network and time are simulated. The same seed gives the
    same result.
    """
    from ..lab.compare.runner import split_recipes
    from ..lab.simulate import Settings
    from ..lab.simulate import simulate as run

    chosen = algorithm if algorithm is not None or recipe is not None else "dcd"
    settings = Settings(
        workers=workers, algorithms=split_recipes(chosen or ""), recipes=split_recipes(recipe or ""), topology=topology,
        codec=codec, network=network, steps=steps, cost_only=not learn, workload=workload, data=data, skew=skew,
        parameters=parameters, compute_ms=compute_ms, straggle=straggle, uneven=uneven, loss=loss, churn=churn,
        deadline=deadline, device=device, cores=cores, bucket_mb=bucket_mb, compute=compute, lap=lap,
        growth=growth, seed=seed,
    )  # fmt: skip
    for option, target in (("--json", json_file), ("--report", report)):
        if target is not None:
            check_writable(target, option=option)
    shown = learn and not quiet
    with _without_warnings(), Bar("simulating", steps=steps * len(settings.names), shown=shown) as show:
        result = run(settings, on_event=show, command=f"thinwire {shlex.join(sys.argv[1:])}")
    if json_file != "-":
        _print(result)
    if json_file is not None:
        write_json(json_file, result)
    if report is not None:
        from ..lab.report import write_report

        write_report(result, report)
        typer.echo(f"report: {Path(report).resolve()}", err=True)


def _print(result: dict[str, Any]) -> None:
    from ..lab.draw.numbers import size

    heads = ("step ms", "virtual s", "bytes/step", "loss", "apart", "computing", "real s")
    names = max(len("row"), *(len(row["recipe"]) for row in result["rows"]))
    typer.echo(f"{'row':{names}}" + "".join(f"{head:>11}" for head in heads) + "  the slowest worker's time")
    for row in result["rows"]:
        apart = row.get("consensus_distance")
        cells = (
            f"{row['step_ms']:,.1f}",
            f"{row['virtual_seconds']:,.1f}",
            size(row["bytes_per_step"]),
            "-" if row["final_loss"] is None else f"{row['final_loss']:.3f}",
            "-" if apart is None else f"{apart:.2g}",
            f"{row['utilisation']['mean']:.0%}",
            f"{row['real_seconds']:,.1f}",
        )
        phases = row["critical_path"]["phases"]
        total = sum(phases.values()) or 1.0
        most = [f"{name} {value / total:.0%}" for name, value in _largest(phases) if value / total > 0.01]
        typer.echo(f"{row['recipe']:{names}}" + "".join(f"{cell:>11}" for cell in cells) + "  " + ", ".join(most[:3]))
    typer.echo(f"\n{result['network']['asked']}: {result['network']['about']}")
    typer.echo(result["headline"])


def _largest(phases: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(phases.items(), key=lambda phase: -phase[1])


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """A thousand workers would warn a thousand times."""
    log = logging.getLogger("thinwire")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
