"""The speed of compressing: measured for every codec of a preset, kept, and refused where it cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from thinwire import parse
from thinwire.codecs import rotated, top_k
from thinwire.codecs.stages import Work
from thinwire.errors import OptionError
from thinwire.predict import devices
from thinwire.predict.devices import Device, Speed, measure_device, this_machine
from thinwire.recipe.presets import PRESETS


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "_ROUNDS", 1)
    monkeypatch.setattr(devices, "_LARGE", 1 << 18)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_every_stage_of_every_preset_is_timed() -> None:
    recipes = [parse(name) for name in PRESETS]
    device = measure_device([recipe.codec for recipe in recipes if not recipe.dense])
    for recipe in recipes:
        script = recipe.exchange.script(recipe.codec, 1 << 20, world_size=4, exact=10, shapes=[(1024, 1024)])
        for op in script:
            if isinstance(op, Work) and op.codec == recipe.codec and op.stage != "pass":
                assert f"{op.codec.spec()} {op.stage}" in device.speeds, recipe
                assert device.seconds(op) > 0


def test_what_was_measured_once_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = this_machine([rotated(2)])
    monkeypatch.setattr(devices, "_speeds_of", lambda codec: pytest.fail(f"{codec} was timed again"))
    assert this_machine([rotated(2)]).as_dict() == first.as_dict()


def test_what_is_missing_is_added_to_what_is_known() -> None:
    this_machine([rotated(2)])
    both = this_machine([top_k(0.01)])
    assert both.knows(rotated(2))
    assert both.knows(top_k(0.01))


@pytest.mark.parametrize("content", ["", "{}", '{"schema": 1, "kind": "network"}', "[]"])
def test_a_broken_cache_is_measured_anew(content: str) -> None:
    path = devices.cache_file()
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert this_machine([rotated(2)]).knows(rotated(2))
    assert json.loads(path.read_text())["kind"] == "device"


def test_a_codec_of_which_nothing_is_known_costs_passes() -> None:
    device = Device("bare", Speed(0.0, 1e-9))
    assert device.seconds(Work("encode", 1000, rotated(2))) == pytest.approx(6e-6)
    assert device.seconds(Work("pass", 1000)) == pytest.approx(1e-6)
    assert device.seconds(Work("encode", 0, rotated(2))) == 0.0


def test_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is no device"):
        Device.named("abacus")
    path = tmp_path / "device.json"
    path.write_text(json.dumps(Device("lab", Speed(1e-6, 1e-9)).as_dict()))
    assert Device.named(str(path)).sweep == Speed(1e-6, 1e-9)
    path.write_text(json.dumps({**Device("lab", Speed(1e-6, 1e-9)).as_dict(), "sweep": [-1, 0]}))
    with pytest.raises(OptionError, match="speeds that nothing has"):
        Device.named(str(path))
    with pytest.raises(OptionError, match="cannot read"):
        Device.named(str(tmp_path / "none.json"))
