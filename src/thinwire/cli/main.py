"""The `thinwire` command: every subcommand has --help and --json, and errors are one line with a non-zero exit code."""

from __future__ import annotations

import importlib
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import OptionError, ThinwireError
from ..predict.presets import emulated_names
from .files import check_writable, write_json
from .plan import plan, probe
from .prove import prove
from .simulate import simulate
from .study import study_app

# Typer carries click inside or beside it, depending on its version; its own exceptions lead to the base class.
_UsageProblem: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

_DEFAULT_RECIPES = "ddp,torch-fp16,torch-powersgd:4,global-qsgd-8,two-shot-4,two-shot-2,threshold-k,ar-top-k,powersgd-4"

app = typer.Typer(
    name="thinwire",
    help="Compressed gradients for training over slow networks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"thinwire {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def kernels(
    numel: Annotated[int, typer.Option(help="Elements (float32) of the tensor; at least 1024 a thread.")] = 25_000_000,
    threads: Annotated[int, typer.Option(help="Threads; each takes a contiguous share of the tensor.")] = 1,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; the best of each is reported.")] = 7,
    codecs: Annotated[
        bool,
        typer.Option("--codecs", help="Time the stages of every registered codec instead."),
    ] = False,
    plugins: Annotated[
        list[str] | None, typer.Option("--import", help="Import this module first: it registers codecs of your own.")
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Also write the rows as JSON; - for standard output.")
    ] = None,
) -> None:
    """Time every hot loop here, beside a plain copy, `e += g`, and the torch code one would write instead.

    x copy and x add are the time over that of the copy and of `e += g` (below 1: quicker than moving the tensor once);
    x torch is how many times faster we are than the torch code. Compare within one run only: shared machines drift.
    """
    from ..lab.compare.machine import describe_machine
    from ..lab.kernels.cases import GROUPS
    from ..lab.kernels.table import check_run, kernel_rows

    check_run(numel, threads=threads, rounds=rounds)
    if json_file is not None:
        check_writable(json_file)
    for plugin in plugins or ():
        try:
            importlib.import_module(plugin)
        except ImportError as problem:
            raise OptionError(f"cannot import {plugin}: {problem}") from None
    if codecs:
        _time_codecs(numel, rounds, json_file)
        return
    with typer.progressbar(length=GROUPS, label="timing kernels", file=sys.stderr) as bar:
        rows = kernel_rows(numel, threads=threads, rounds=rounds, on_group=lambda done: bar.update(1))
    if json_file != "-":
        copy, add = min(row.copy_seconds for row in rows), min(row.add_seconds for row in rows)
        typer.echo(f"{numel:,} float32, {threads} thread(s), best of {rounds} rounds")
        typer.echo(f"floors: copy {copy * 1e3:.2f} ms, e += g {add * 1e3:.2f} ms\n")
        typer.echo(f"{'':33}{'ours':>30}{'torch':>28}{'':>10}")
        heads = ("ms", "GB/s", "x copy", "x add", "ms", "GB/s", "x copy")
        typer.echo(f"{'kernel':24}{'density':>9}" + "".join(f"{head:>9}" for head in heads) + f"{'x torch':>9}")
        for row in rows:
            density = "" if row.density is None else f"{row.density:.1%}"
            typer.echo(
                f"{row.name:24}{density:>9}"
                f"{row.seconds * 1e3:>9.2f}{row.gb_per_s:>9.1f}{row.x_copy:>9.2f}{row.x_add:>9.2f}"
                f"{row.torch_seconds * 1e3:>9.1f}{row.torch_gb_per_s:>9.1f}{row.torch_x_copy:>9.2f}{row.x_torch:>9.1f}"
            )
    if json_file is not None:
        run = {"numel": numel, "threads": threads, "rounds": rounds}
        write_json(json_file, {**run, "machine": describe_machine(), "rows": [asdict(row) for row in rows]})


def _time_codecs(numel: int, rounds: int, json_file: str | None) -> None:
    from ..lab.compare.machine import describe_machine
    from ..lab.kernels.codec_rows import codec_rows, registered_codecs

    numel = 1 << (numel.bit_length() - 1)  # low_rank sees it as a matrix
    rows = []
    with typer.progressbar(length=len(registered_codecs()), label="timing codecs", file=sys.stderr) as bar:
        rows = list(codec_rows(numel, rounds=rounds, on_codec=lambda name: bar.update(1)))
    if json_file != "-":
        typer.echo(f"{numel:,} float32, 1 thread, best of {rounds} rounds\n")
        typer.echo(f"{'codec':40}{'stage':>8}{'bits':>9}{'ns/element':>12}{'x copy':>9}")
        for row in rows:
            typer.echo(f"{row.codec:40}{row.stage:>8}{row.bits:>9.2f}{row.ns_per_element:>12.3f}{row.x_copy:>9.2f}")
    if json_file is not None:
        run = {"numel": numel, "threads": 1, "rounds": rounds}
        write_json(json_file, {**run, "machine": describe_machine(), "codecs": [asdict(row) for row in rows]})


@app.command()
def compare(
    workload: Annotated[str, typer.Option(help="gpt, mlp, mlp-100k or cnn (which needs --data).")] = "gpt",
    workers: Annotated[int, typer.Option(help="Processes, each on its own emulated host.")] = 4,
    network: Annotated[
        str,
        typer.Option(
            help="100mbit,5ms (also loss=0.1%, jitter=1ms, unshaped), a schedule (A@0s;B@30s), or a preset: "
            f"{emulated_names()}."
        ),
    ] = "lan-100m",
    recipes: Annotated[
        str | None,
        typer.Option(
            help="With commas: ddp, auto, torch-fp16, torch-bf16, torch-powersgd:RANK, presets, recipes. Default: nine "
            "of them, or ddp where there are --algorithms."
        ),
    ] = None,
    algorithms: Annotated[
        str | None,
        typer.Option(
            help="Decentralised ones, with commas: allreduce, dpsgd, naive:4, dcd:4, ecd:8, choco:sign, auto."
        ),
    ] = None,
    topology: Annotated[
        str, typer.Option(help="For --algorithms: ring, torus, exponential, one_peer_exponential, complete or star.")
    ] = "ring",
    codec: Annotated[
        str | None, typer.Option(help="For --algorithms that name none, such as min_max:4,block=512.")
    ] = None,
    skew: Annotated[
        float, typer.Option(help="0: all workers have data of all kinds; 1: each has its own kinds.")
    ] = 0.0,
    steps: Annotated[int, typer.Option(help="Steps for each recipe; with --target-loss, at most.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of weights, data and draws.")] = 0,
    repeats: Annotated[int, typer.Option(help="Runs of each, with seeds that follow.")] = 1,
    target_loss: Annotated[
        float | None,
        typer.Option(help="Stop a recipe at this held-out loss. Default: the loss of ddp at its last step."),
    ] = None,
    extra: Annotated[float, typer.Option(help="Share of further steps that a recipe may take to reach it.")] = 0.5,
    lap: Annotated[int, typer.Option(help="Steps of a recipe before it is the next one's turn.")] = 10,
    bucket_mb: Annotated[float, typer.Option(help="Size of DDP's buckets; torch-powersgd has one in any case.")] = 25.0,
    data: Annotated[str | None, typer.Option(metavar="DIR", help="Folder with Fashion-MNIST or CIFAR-10.")] = None,
    method: Annotated[
        str | None, typer.Option(help="How to emulate: kernel, switch or paced. Default: see thinwire doctor.")
    ] = None,
    probe_seconds: Annotated[
        float, typer.Option(help="Seconds of measuring the network first, for predictions; 0 makes none.")
    ] = 12.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show the table only.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON; - for standard output.")
    ] = None,
    report: Annotated[str | None, typer.Option(metavar="FILE", help="Write the report as one HTML file.")] = None,
) -> None:
    """Train the same model by several recipes on an emulated slow network, and compare them.

    Every recipe starts from the same weights and sees the same data. Recipes take turns, so that a busy machine hurts
    all of them alike. Step times are compared with plain DDP and with training without communication.
    """
    from rich.console import Console

    from ..lab.compare.gossips import gossip_names
    from ..lab.compare.runner import Settings, split_recipes
    from ..lab.compare.runner import compare as run
    from ..lab.compare.screen import Screen, print_table

    decentral = gossip_names(split_recipes(algorithms or ""), topology=topology, codec=codec)
    names = recipes if recipes is not None else "ddp" if decentral else _DEFAULT_RECIPES
    settings = Settings(
        workload=workload,
        workers=workers,
        network=network,
        recipes=split_recipes(names) + decentral,
        steps=steps,
        seed=seed,
        repeats=repeats,
        lap=lap,
        extra=extra,
        bucket_mb=bucket_mb,
        target_loss=target_loss,
        data=data,
        method=method,
        skew=skew,
        probe_seconds=probe_seconds,
    )
    for option, target in (("--json", json_file), ("--report", report)):
        if target is not None:
            check_writable(target, option=option)
    aside = Console(stderr=True)

    def keep(result: dict[str, Any]) -> None:
        screen.close()  # remove the bars before the table
        measured = any(row["curve"] for row in result["rows"])
        if measured:
            print_table(result, aside if json_file == "-" else Console())
        if json_file is not None:
            write_json(json_file, result)
        if report is not None and measured:
            from ..lab.report import write_report

            write_report(result, report)
            aside.print(f"report: {Path(report).resolve()}", soft_wrap=True, markup=False, highlight=False)

    command = f"thinwire {shlex.join(sys.argv[1:])}"
    with Screen(settings.recipes, steps=steps, repeats=repeats, console=aside, quiet=quiet) as screen:
        run(settings, keep=keep, on_event=screen.show, command=command)


@app.command()
def doctor(
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Also write the findings as JSON; - for standard output."),
    ] = None,
) -> None:
    """Tell which slow networks this machine can emulate, what the others need, and what is installed."""
    from ..lab.emulate.doctor import as_json, best_method, examine

    if json_file is not None:
        check_writable(json_file)
    findings = examine()
    if json_file != "-":
        for finding in findings:
            typer.echo(str(finding))
        typer.echo(best_method(findings))
    if json_file is not None:
        write_json(json_file, as_json(findings))


app.command()(probe)
app.command()(plan)
app.command()(simulate)
app.command()(prove)
app.add_typer(study_app, name="study")


def main() -> None:
    """Entry point. A user error is one line on standard error and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except _UsageProblem as problem:
        message = problem.format_message()
        asked_nothing = message.startswith("Usage:")  # a bare `thinwire` shows its help
        typer.echo(message if asked_nothing else f"thinwire: {message} (see thinwire --help)", err=not asked_nothing)
        code = 0 if asked_nothing else 2
    except ThinwireError as problem:
        typer.echo(f"thinwire: {problem}", err=True)
        code = 2
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("thinwire: stopped", err=True)
        code = 130
    raise SystemExit(code or 0)
