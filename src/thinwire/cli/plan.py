"""`thinwire probe` and `thinwire plan`: their options, output and files."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ..errors import OptionError
from ..predict.presets import emulated_names, preset_names
from .files import check_writable, write_json, write_text

if TYPE_CHECKING:
    from ..lab.emulate.hosts import Method
    from ..lab.plan.advise import Plan
    from ..predict.devices import Device
    from ..predict.network import NetworkModel
    from ..predict.workload import Profile

_JSON = typer.Option("--json", metavar="FILE", help="Write everything as JSON; - for standard output.")
_EMULATE = typer.Option(
    metavar="NETWORK", help=f"Emulate this network here and measure it: 100mbit,5ms or {emulated_names()}."
)
_METHOD = typer.Option(help="How to emulate: kernel, switch or paced. Default: see thinwire doctor.")


def probe(
    emulate: Annotated[str | None, _EMULATE] = None,
    workers: Annotated[int, typer.Option(help="Hosts to emulate; under torchrun, its ranks are used.")] = 4,
    seconds: Annotated[float, typer.Option(help="About how long to measure.")] = 40.0,
    pairs: Annotated[bool, typer.Option("--pairs", help="Also measure the link between every two hosts.")] = False,
    out: Annotated[str, typer.Option(metavar="FILE", help="The file to write the network to.")] = "network.json",
    method: Annotated[str | None, _METHOD] = None,
    json_file: Annotated[str | None, _JSON] = None,
) -> None:
    """Measure a network as training uses it: latency and bandwidth of every collective, by message size.

    Start it with torchrun on the machines of a cluster, or give --emulate. `thinwire plan --network network.json`
    reads the file.
    """
    if not 1 <= seconds <= 600:
        raise OptionError(f"--seconds is from 1 to 600, not {seconds:g}")
    check_writable(out, option="--out")
    if json_file is not None:
        check_writable(json_file)
    begin = time.perf_counter()
    network: NetworkModel | None
    if emulate is not None:
        network = _probed(emulate, workers, seconds=seconds, pairs=pairs, method=method)
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        network = _probed_by_torchrun(seconds=seconds, pairs=pairs)
    else:
        raise OptionError(
            "there is nothing to measure: start with torchrun on several hosts, or give --emulate 100mbit,5ms"
        )
    if network is None:  # another rank writes the result
        return
    network.save(out)
    if json_file != "-":
        _print_network(network, time.perf_counter() - begin, out)
    if json_file is not None:
        write_json(json_file, network.as_dict())


def _probed(text: str, workers: int, *, seconds: float, pairs: bool, method: str | None) -> NetworkModel:
    from ..lab.plan.probe import probe_emulated

    with _Progress("measuring the network") as show:
        return probe_emulated(
            text,
            workers=workers,
            method=cast("Method | None", method),  # emulated_hosts refuses others
            seconds=seconds,
            pairs=pairs,
            on_event=lambda event: show(event) if event["event"] == "probing" else None,
        )


def _probed_by_torchrun(*, seconds: float, pairs: bool) -> NetworkModel | None:
    import torch

    from ..comm.communicator import joined
    from ..lab.plan.probe import measure

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    with joined("nccl" if cuda else "gloo", meet_at="env://") as comm:
        with _Progress("measuring the network", shown=comm.rank == 0) as show:
            found = measure(
                comm,
                seconds=seconds,
                pairs=pairs,
                device=device,
                tell=lambda what, done, of: show({"what": what, "done": done, "of": of}),
            )
        return found if comm.rank == 0 else None


class _Progress:
    """A bar on standard error from the first event on, so that an earlier error is one line."""

    def __init__(self, label: str, *, shown: bool = True) -> None:
        self._label, self._shown = label, shown
        self._bar: Any = None
        self._done = 0

    def __enter__(self) -> Callable[[dict[str, Any]], None]:
        return self._show

    def __exit__(self, *what: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*what)

    def _show(self, event: dict[str, Any]) -> None:
        if self._shown and self._bar is None:
            self._bar = typer.progressbar(length=1000, label=self._label, file=sys.stderr).__enter__()
        if self._bar is not None:
            now = 1000 * event["done"] // max(1, event["of"])
            self._bar.update(now - self._done)
            self._done = now


def _print_network(network: NetworkModel, seconds: float, out: str) -> None:
    typer.echo(f"{network.about or network.name}, measured in {seconds:.0f} s\n")
    typer.echo(f"{'collective':12}{'sizes':>22}{'latency ms':>12}{'Mbit/s':>10}{'off by':>8}")
    for fit in network.fits.values():
        low = "0"
        for regime in fit.regimes:
            high = "" if regime.upto == float("inf") else f"{regime.upto / 1e3:,.0f} kB"
            rate = f"{8e-6 / regime.byte_seconds:,.0f}" if regime.byte_seconds > 1e-13 else "-"
            sizes = f"{low} to {high}" if high else f"from {low}"
            typer.echo(f"{fit.collective:12}{sizes:>22}{1e3 * regime.latency:>12.2f}{rate:>10}{fit.error:>8.1%}")
            low = high
    for pair, link in network.pairs.items():
        typer.echo(f"hosts {pair}: {1e3 * link.latency:.2f} ms, {8e-6 / link.byte_seconds:,.0f} Mbit/s")
    typer.echo(f"\nwritten to {out}; Mbit/s count the bytes given to the collective, not the bytes on the wire")


# ------------------------------------------------------------------------------------------------------------ plan


def plan(
    model: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="A function that returns a model and its loss on a batch."),
    ] = None,
    params: Annotated[str | None, typer.Option(help="Instead: the number of parameters, such as 25.6M.")] = None,
    step_time: Annotated[
        str | None, typer.Option(help="With --params: a step without communication, such as 120ms.")
    ] = None,
    workload: Annotated[str | None, typer.Option(help="Instead: gpt or mlp, as compare trains them.")] = None,
    workers: Annotated[str, typer.Option(help="Workers, or a range for a map: 2..64.")] = "4",
    network: Annotated[
        str | None,
        typer.Option(help=f"100mbit,5ms, a file of probe, a range (10mbit..10gbit), or a preset: {preset_names()}."),
    ] = None,
    emulate: Annotated[str | None, _EMULATE] = None,
    device: Annotated[
        str | None,
        typer.Option(help="The device that compresses: this (timed here; default), t4, a10g, a100, h100, or a file."),
    ] = None,
    recipes: Annotated[
        str | None, typer.Option(help="With commas. Default: all presets and torch's fp16 hook.")
    ] = None,
    bucket_mb: Annotated[float | None, typer.Option(help="Size of DDP's buckets. Default: 25.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="With --emulate: train the recipes there and compare with the prediction.")
    ] = False,
    steps: Annotated[int | None, typer.Option(help="With --verify: steps of each recipe. Default: 30.")] = None,
    method: Annotated[str | None, _METHOD] = None,
    report: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the map of a range as one HTML file.")
    ] = None,
    json_file: Annotated[str | None, _JSON] = None,
) -> None:
    """Say before training whether compression will pay, with which recipe, by how much and why.

    Nothing is sent. The step time is computed from the network, the buckets of the model and the compression overhead.
    A plan from given numbers takes less than a second; missing numbers are measured first.
    """
    from ..lab.compare.contenders import Contender
    from ..lab.compare.runner import split_recipes
    from ..lab.plan.heat import networks_between, numbers_between

    for option, target in (("--json", json_file), ("--report", report)):
        if target is not None:
            check_writable(target, option=option)
    counts = numbers_between(workers)
    chosen = None if recipes is None else split_recipes(recipes)
    for name in chosen or ():
        Contender.named(name)  # raises if it is wrong
    if verify:
        unused = {"--model": model, "--params": params, "--step-time": step_time, "--network": network}
        _refuse(
            unused | {"--device": device, "--bucket-mb": bucket_mb, "--report": report}, "does not go with --verify"
        )
        _verify(emulate, counts, workload or "gpt", chosen, steps=steps or 30, method=method, json_file=json_file)
        return
    _refuse({"--steps": steps}, "goes with --verify")
    if emulate is None:
        _refuse({"--method": method}, "goes with --emulate")
    else:
        _refuse({"--network": network}, "does not go with --emulate: give one of them")
    texts = networks_between(network or "lan-100m") if emulate is None else (emulate,)
    profile = _profile(model, params, step_time, workload, bucket_mb=25.0 if bucket_mb is None else bucket_mb)
    speeds = _device(device or "this", chosen)
    base = None if emulate is None else _probed(emulate, max(2, counts[0]), seconds=20.0, pairs=False, method=method)
    if len(texts) * len(counts) > 1:
        _show_heat(profile, texts, speeds, counts, base, chosen, report=report, json_file=json_file)
        return
    if report is not None:
        raise OptionError("--report draws a map: give a range, such as --workers 2..64 or --network 10mbit..10gbit")
    _show_plan(profile, base, texts[0], speeds, counts[0], chosen, json_file=json_file)


def _refuse(given: dict[str, object], why: str) -> None:
    """Refuse options that would have no effect."""
    for option, value in given.items():
        if value is not None:
            raise OptionError(f"{option} {why}")


def _show_plan(
    profile: Profile,
    base: NetworkModel | None,
    text: str,
    device: Device,
    workers: int,
    chosen: tuple[str, ...] | None,
    *,
    json_file: str | None,
) -> None:
    from ..lab.plan.advise import RECIPES, make_plan
    from ..predict.network import NetworkModel

    if workers < 2:
        raise OptionError("one worker sends nothing: a plan is for 2 workers or more")
    begin = time.perf_counter()
    network = base if base is not None else NetworkModel.named(text)
    made = make_plan(profile, network, device, workers=workers, recipes=chosen or RECIPES)
    seconds = time.perf_counter() - begin
    if json_file != "-":
        _print_plan(made)
    if json_file is not None:
        asked = {"workers": workers, "network": text, "model": profile.name, "device": device.name}
        write_json(json_file, {"schema": 1, "kind": "plan", **asked, "seconds": seconds, **made.as_dict()})


def _show_heat(
    profile: Profile,
    texts: tuple[str, ...],
    device: Device,
    counts: tuple[int, ...],
    base: NetworkModel | None,
    chosen: tuple[str, ...] | None,
    *,
    report: str | None,
    json_file: str | None,
) -> None:
    from ..lab.plan.advise import RECIPES
    from ..lab.plan.heat import as_html, as_text, make_heat

    heat = make_heat(profile, texts, device, workers=counts, base=base, recipes=chosen or RECIPES)
    if json_file != "-":
        typer.echo(as_text(heat))
    if report is not None:
        notes = (f"{profile.name}, {1e3 * profile.compute:.0f} ms of computing a step; compression on {device.name}.",)
        write_text(report, as_html(heat, title="What would pay", notes=notes), option="--report")
        typer.echo(f"report: {os.path.abspath(report)}", err=True)
    if json_file is not None:
        write_json(json_file, {"schema": 1, "kind": "heat", "model": profile.name, **heat.as_dict()})


def _print_plan(made: Plan) -> None:
    typer.echo(made.verdict)
    typer.echo(f"{made.why}\n{made.sure}\n")
    typer.echo(
        f"  {'recipe':18}{'step ms':>9}{'x DDP':>7}{'MB sent':>9}{'coding':>8}{'messages':>9}  price in progress"
    )
    for row in made.rows:
        cost, mark = row.prediction, "*" if row.recipe in made.marked else " "
        typer.echo(
            f"{mark} {row.recipe:18}{1e3 * cost.step:>9,.0f}{row.speedup:>7.1f}{cost.sent_bytes / 1e6:>9,.1f}"
            f"{1e3 * cost.coding:>8,.0f}{1e3 * cost.exchange:>9,.0f}  {row.price}"
        )
    for name, problem in made.refused.items():
        typer.echo(f"  {name}: {problem}")


def _profile(
    model: str | None, params: str | None, step_time: str | None, workload: str | None, *, bucket_mb: float
) -> Profile:
    from ..predict.workload import measured_profile, model_named, of_size

    if sum(given is not None for given in (model, params, workload)) != 1:
        raise OptionError("say what is trained: one of --model module:function, --params 25.6M, --workload gpt")
    if not bucket_mb > 0:
        raise OptionError(f"--bucket-mb is a size in megabytes, above 0, not {bucket_mb:g}")
    if params is not None:
        if step_time is None:
            raise OptionError("--params needs --step-time, such as 120ms: how long a step takes without communication")
        count = _number(params, {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}, option="--params", example="25.6M")
        seconds = _number(step_time, {"us": 1e-6, "ms": 1e-3, "s": 1.0}, option="--step-time", example="120ms")
        return of_size(round(count), seconds, bucket_mb=bucket_mb)
    if step_time is not None:
        raise OptionError("--step-time goes with --params; of a model it is measured")
    if workload is not None:
        from ..lab.compare.forecast import workload_profile

        return workload_profile(workload, bucket_mb=bucket_mb)
    assert model is not None
    net, loss_of = model_named(model)
    return measured_profile(model, net, loss_of, bucket_mb=bucket_mb)


def _number(text: str, units: dict[str, float], *, option: str, example: str) -> float:
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in units or not float(match[1]) > 0:
        raise OptionError(f"{option} is such as {example}, not {text}")
    return float(match[1]) * units[match[2]]


def _device(name: str, chosen: tuple[str, ...] | None) -> Device:
    from ..lab.plan.advise import RECIPES
    from ..predict.devices import Device

    if name != "this":
        return Device.named(name)
    from ..lab.compare.forecast import device_for

    return device_for(chosen or RECIPES)


def _verify(
    network: str | None,
    counts: tuple[int, ...],
    workload: str,
    chosen: tuple[str, ...] | None,
    *,
    steps: int,
    method: str | None,
    json_file: str | None,
) -> None:
    from ..lab.compare.verify import RECIPES, as_text, verify

    if network is None:
        raise OptionError("--verify trains on an emulated network: give --emulate 100mbit,5ms")
    with _Progress("training") as show:
        found = verify(
            network,
            workers=counts,
            workload=workload,
            recipes=chosen or RECIPES,
            steps=steps,
            method=method,
            on_progress=lambda done, of: show({"done": done, "of": of}),
        )
    if json_file != "-":
        typer.echo(as_text(found))
    if json_file is not None:
        write_json(json_file, found)
