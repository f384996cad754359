"""The page of a proof: it says first what was proved and on what, parses, fetches nothing, and escapes everything."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from support.browser import MISSING, Browser
from thinwire.lab.prove.contract import CHECKS, checks_of
from thinwire.lab.prove.page import render_page
from thinwire.lab.prove.part import Part
from thinwire.lab.prove.run import result
from thinwire.lab.prove.settings import Settings

VOID = {"meta", "link", "br", "input"}
HOSTILE = '</script><img src=x onerror="alert(1)">&{{x}}'


class Elements(HTMLParser):
    """Checks that elements nest, and keeps attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def spread(middle: float) -> dict[str, float]:
    return {"median": middle, "low": 0.9 * middle, "high": 1.1 * middle, "least": 0.8 * middle, "most": 1.2 * middle}


def benchmark(name: str, environment: dict[str, str]) -> Part:
    """Made up: no such machine was measured."""
    times = {"ddp": 20.0, "no-communication": 10.0, "torch-bf16": 15.0, "two-shot-4": 12.0}
    rows = [
        {"contender": one, "rounds": 20, "step_ms": spread(ms), "times_ddp": spread(20.0 / ms), "bytes_per_step": 1e6}
        for one, ms in times.items()
    ]
    about = {"backend": "nccl", "processes": 2, "environment": environment, "model": "large", "parameters": 85_000_000}
    shape = {"batch_per_process": 8, "sequence": 128, "steps": 100, "lap": 5, "computes_in": "bfloat16", "rows": rows}
    return Part(name, "proved", 60.0, details={**about, **shape})


def on_gpus(problem: str = "") -> dict[str, Any]:
    """A made-up proof on two GPUs."""
    gpu = {"name": "NVIDIA made-up", "memory_gb": 24.0, "capability": "8.6"}
    links = {"peer_access": [], "pairs": 1, "links": {"0-1": "PHB"}, "nvlink": False}
    machine = {"processor": "a processor", "cores": 16, "torch": "2", "gpus": {"devices": [gpu, gpu], **links}}
    kernel = {"kernel": "pack", "device": "cuda:0", "body": "gpu", "cases": 9, "problem": problem or None}
    recipes = {name: dict.fromkeys(checks_of(name), "holds") for name in ("dense", "bf16")}
    contract = {"backend": "nccl", "processes": 2, "checks": 11, "held": 11, "recipes": recipes}
    parts = [
        Part("machine", "proved", 1.0, details=machine),
        Part("kernels on a GPU", "failed" if problem else "proved", 5.0, problem, {"cases": 9, "kernels": [kernel]}),
        Part("DDP contract over NCCL", "proved", 30.0, details=contract),
        benchmark("benchmark over NCCL", {}),
        benchmark("benchmark over NCCL without peer-to-peer", {"NCCL_P2P_DISABLE": "1"}),
    ]
    return result(parts, device="cuda", settings=Settings(), command="thinwire prove")


def on_cpus() -> dict[str, Any]:
    found = on_gpus()
    machine = Part("machine", "proved", 1.0, details={"processor": "a processor", "cores": 2, "gpus": None})
    absent = [
        Part(part["name"], "not here", 0.0, "no GPU here") for part in found["parts"] if part["name"] != "machine"
    ]
    return result([machine, *absent], device="cpu", settings=Settings())


@pytest.mark.parametrize("made", [on_gpus(), on_gpus("pack differs"), on_cpus()], ids=["gpus", "failed", "cpus"])
def test_it_parses_and_fetches_nothing(made: dict[str, Any]) -> None:
    found = Elements(render_page(made))
    assert len(set(found.ids)) == len(found.ids)
    for tag, name, value in found.attributes:
        assert name != "src"
        if name == "href":
            assert value in ("#", "data:,"), (tag, value)
    assert "http://" not in found.text
    assert "url(" not in render_page(made)
    assert ("meta", "http-equiv", "Content-Security-Policy") in found.attributes


def test_the_top_says_what_was_proved_on_what_and_what_was_not() -> None:
    top = Elements(render_page(on_gpus())).text.partition("Verdicts")[0]
    assert "Proved on GPUs: kernels and the DDP contract over NCCL" in top
    assert "2 x NVIDIA made-up (24.0 GB), no NVLink, peer access in 0 of 1 pairs" in top
    assert "not proved" not in top
    top = Elements(render_page(on_cpus())).text.partition("Verdicts")[0]
    assert "nothing was proved on a GPU" in top
    assert "a processor, 2 cores, no GPU" in top
    assert "no GPU here: kernels on a GPU, DDP contract over NCCL, benchmark over NCCL" in top
    top = Elements(render_page(on_gpus("pack differs"))).text.partition("Verdicts")[0]
    assert "Not proved: kernels on a GPU failed" in top
    assert "kernels on a GPU: failed: pack differs" in top


def test_every_check_recipe_and_number_is_there() -> None:
    page = Elements(render_page(on_gpus()))
    for check, function in CHECKS.items():
        assert check in page.text
        assert str(function.__doc__).partition("\n")[0] in page.text
    assert page.text.count("holds") >= 11
    assert "NCCL_P2P_DISABLE=1" in page.text
    assert ("td", "data-value", str(20.0 / 12.0)) in page.attributes
    assert "sm_86" in page.text


def test_the_page_holds_the_result() -> None:
    page = render_page(on_gpus())
    _, _, rest = page.partition('id="result">')
    assert json.loads(rest.partition("</script>")[0])["proved"] is True


def test_hostile_words_stay_words() -> None:
    made = on_gpus(HOSTILE)
    made["machine"]["processor"] = made["command"] = HOSTILE
    made["parts"][2]["details"]["recipes"] = {HOSTILE: {"replicas": HOSTILE}}
    made["parts"][3]["details"]["rows"][1]["contender"] = HOSTILE
    page = render_page(made)
    assert "<img" not in page
    assert HOSTILE in Elements(page).text


def test_a_part_that_failed_early_has_no_section() -> None:
    parts = [Part("DDP contract over NCCL", "failed", 1.0, "rank 0 was ended by signal 9")]
    page = Elements(render_page(result(parts, device="cuda", settings=Settings())))
    assert "rank 0 was ended by signal 9" in page.text
    assert "contract" not in page.ids


@pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
def test_in_a_browser_it_is_quiet_and_fits(tmp_path: Path) -> None:
    place = tmp_path / "prove.html"
    place.write_text(render_page(on_gpus()))
    browser = Browser()
    try:
        for width in (1200, 390):
            browser.window(width)
            browser.open(place)
            browser.settle()
            assert browser.script("return document.documentElement.scrollWidth") <= width
            assert browser.script("return document.querySelector('h1').innerText").startswith("Proved on GPUs")
            long = browser.script("return [...document.querySelectorAll('.bar .part')].map((b) => b.offsetWidth)")
            assert long[0] == pytest.approx(2 * long[1], abs=2)
        assert browser.script("return document.getElementById('download').href").startswith("blob:")
        assert browser.log() == []
    finally:
        browser.close()
