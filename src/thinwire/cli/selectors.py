"""`thinwire study selectors`: its options, its table and its file."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import OptionError
from .files import check_writable, write_json

if TYPE_CHECKING:
    from ..lab.study.selectors import Row


def selectors(
    sizes: Annotated[
        str, typer.Option(help="Elements of drawn tensors, with commas; 1e8 needs 6 GB of memory.")
    ] = "1e5,1e6,1e7",
    densities: Annotated[str, typer.Option(help="Shares to keep, with commas.")] = "0.001,0.01",
    data: Annotated[
        str, typer.Option(help="With commas: gaussian, laplace, student_t, layers; mlp, gpt (recorded in training).")
    ] = "gaussian,laplace,student_t,layers,mlp",
    gradients: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Also your own: a tensor, a dict of tensors, or a list of these, by torch.save."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds for each tensor.")] = 5,
    feedback_steps: Annotated[int, typer.Option(help="Steps with error feedback; 0 for none.")] = 200,
    feedback_size: Annotated[str, typer.Option(help="Elements of drawn tensors in these steps.")] = "1e6",
    seed: Annotated[int, typer.Option(help="Seed of data, weights and draws.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show the table only.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Also write the rows as JSON; - for standard output.")
    ] = None,
) -> None:
    """Time every selector of the largest elements on this machine, and measure what it selects.

    First on one tensor, then with error feedback over many steps, where each selector has its own memory. x top_k and
    x add are median times relative to exact Top-k and to `e += g` in the same rounds. energy is that of the selected
    elements relative to exact Top-k on the same tensor. residual is what was not sent in the end, relative to exact
    Top-k. One thread. Gradients of mlp and gpt are recorded from training without compression, by one worker.
    """
    from ..lab.compare.machine import describe_machine
    from ..lab.study.selector_data import sources
    from ..lab.study.selectors import check, check_feedback, one_tensor, with_feedback

    lengths, shares = _numbers("--sizes", sizes), _numbers("--densities", densities)
    steady = int(_numbers("--feedback-size", feedback_size)[0])
    for length in (*lengths, steady):
        for share in shares:
            check(int(length), share, rounds=rounds)
    if feedback_steps:
        check_feedback(feedback_steps)
    if json_file is not None:
        check_writable(json_file)
    chosen = sources(_words(data), file=gradients)
    if not chosen:
        raise OptionError("there is nothing to choose from: name --data or a file of --gradients")
    tensors = [(source, int(length)) for source in chosen for length in lengths]
    tensors = [(source, n) for source, n in tensors if not (source.sizes_of_its_own and n != int(lengths[0]))]
    total = len(shares) * (len(tensors) + len(chosen) * feedback_steps)
    found: list[Row] = []
    with typer.progressbar(length=total, label="selecting", file=sys.stderr, hidden=quiet) as bar:
        for source, length in tensors:
            x = source.one(length, seed=seed)
            for share in shares:
                found += one_tensor(x, share, data=source.name, rounds=rounds, seed=seed)
                bar.update(1)
        for source in chosen if feedback_steps else ():
            for share in shares:
                steps = {"steps": feedback_steps, "seed": seed}
                found += with_feedback(source, steady, share, **steps, on_step=lambda: bar.update(1))
    if json_file != "-":
        _print(found)
    if json_file is not None:
        settings = {"rounds": rounds, "feedback_steps": feedback_steps, "seed": seed, "threads": 1}
        write_json(json_file, {**settings, "machine": describe_machine(), "rows": [asdict(row) for row in found]})


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(option: str, text: str) -> list[float]:
    try:
        found = [float(word) for word in _words(text)]
    except ValueError:
        found = []
    if not found or not all(0 < number < 2**31 for number in found):
        raise OptionError(f"{option} takes positive numbers with commas, such as 1e6 or 0.01, not {text!r}")
    return found


def _print(rows: list[Row]) -> None:
    heads = ("best ms", "median ms", "x top_k", "x add", "passes", "selected/k", "5 to 95 %", "energy", "residual")
    widths = (10, 10, 9, 8, 8, 12, 14, 9, 10)
    before = None
    for row in rows:
        about = (row.data, row.numel, row.density, row.steps)
        if about != before:
            how = f"{row.steps} steps with error feedback" if row.steps else "one tensor"
            typer.echo(f"\n{row.data}, {row.numel:,} elements, k/d = {row.density:.3g}, {how}")
            typer.echo(f"{'selector':12}" + "".join(f"{h:>{w}}" for h, w in zip(heads, widths, strict=True)))
        before = about
        cells = (
            f"{row.seconds * 1e3:.3f}",
            f"{row.median_seconds * 1e3:.3f}",
            f"{row.x_top_k:.2f}",
            f"{row.x_add:.2f}",
            "-" if row.passes is None else f"{row.passes:.2f}",
            f"{row.selected_over_k:.3f}",
            f"{row.low:.2f}..{row.high:.2f}" if row.steps else "-",
            f"{row.energy_over_top_k:.3f}",
            "-" if row.memory_over_top_k is None else f"{row.memory_over_top_k:.2f}",
        )
        typer.echo(f"{row.selector:12}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)))
    typer.echo("\nmedians of one thread; residual: what was not sent in the end, over that of exact Top-k")
