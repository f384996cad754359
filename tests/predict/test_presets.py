"""One table of network presets: every command reads it, and an unknown name gives one error that lists them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from thinwire.errors import OptionError
from thinwire.lab.compare.runner import Settings as CompareSettings
from thinwire.lab.simulate import Settings as SimulateSettings
from thinwire.lab.simulate.links import Links
from thinwire.predict.network import NetworkModel
from thinwire.predict.presets import PRESETS, NetworkPreset, preset_names
from thinwire.predict.spec import named_network, parse_network

PAGE = Path(__file__).parents[2] / "docs" / "emulate.md"


COMMANDS: dict[str, Callable[[str], object]] = {
    "compare": lambda text: CompareSettings(("ddp",), network=text),
    "simulate": lambda text: SimulateSettings(network=text),
    "plan": NetworkModel.named,
    "emulate": parse_network,
}


def refusal(text: str, by: str) -> str:
    with pytest.raises(OptionError) as refused:
        COMMANDS[by](text)
    return str(refused.value)


def test_an_unknown_name_gives_the_same_error_everywhere() -> None:
    said, *others = (refusal("moon", by) for by in COMMANDS)
    assert others == [said] * 3
    assert all(preset.name in said for preset in PRESETS.values())


@pytest.mark.parametrize("name", PRESETS)
def test_every_command_takes_a_preset_or_says_why_not(name: str) -> None:
    preset = PRESETS[name]
    links = Links.named(name, workers=9)
    assert links.about == preset.about
    if preset.uniform:
        model = NetworkModel.named(name)
        assert model.link.latency == preset.latency
        assert 8 / model.link.byte_seconds == pytest.approx(preset.bandwidth)
        assert float(links.up[0]) == pytest.approx(preset.bandwidth / 8)
        assert float(links.between[0, 0]) == preset.latency
        assert links.hosts == -(-9 // model.per_host)
    else:
        assert "thinwire simulate" in refusal(name, "plan")
    if preset.emulated:
        phase = parse_network(name).phases[0]
        assert (phase.rate_bits, phase.delay_seconds) == (preset.bandwidth, preset.latency)
        assert (phase.jitter_seconds, phase.loss_fraction) == (preset.jitter, preset.loss)
    else:
        for by in ("compare", "emulate"):
            assert "thinwire simulate" in refusal(name, by)


def test_names_are_found_in_any_case_and_by_alias() -> None:
    assert named_network(" 10GBE ") is PRESETS["10gbe"]
    assert PRESETS["lan-1g"] is PRESETS["1gbe"]
    assert PRESETS["home-dsl"] is PRESETS["dsl"]
    assert "lan-1g" not in preset_names()


def test_households_are_drawn_by_seed_within_their_limits() -> None:
    household = PRESETS["home-1000"].household
    assert household is not None
    links = Links.named("home-1000", workers=2000, seed=3)
    assert (links.up == Links.named("home-1000", workers=2000, seed=3).up).all()
    assert (links.up != Links.named("home-1000", workers=2000, seed=4).up).any()
    assert 8 * float(np.median(links.up)) == pytest.approx(20e6, rel=0.1)
    assert 8 * float(links.up.min()) >= household.up[0]
    assert 8 * float(links.up.max()) <= household.up[1]
    assert household.last_mile[0] <= float(links.mile.min()) <= float(links.mile.max()) <= household.last_mile[1]


def test_the_table_of_the_page_is_the_table_of_the_code() -> None:
    table = PAGE.read_text().partition("\n## Presets\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*) \| (.*) \| (.*) \|$", table, re.MULTILINE)
    presets = list({preset.name: preset for preset in PRESETS.values()}.values())
    assert rows == [_row(preset) for preset in presets]


def _row(preset: NetworkPreset) -> tuple[str, str, str]:
    names = " or ".join(f"`{name}`" for name in (preset.name, *preset.aliases))
    if preset.emulated:
        link = f"`{parse_network(preset.name)}`"
    else:
        link = "for `plan` and `simulate`" if preset.uniform else "for `simulate`"
    return names, link, preset.about.rstrip(".")
