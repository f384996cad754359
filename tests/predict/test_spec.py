"""Networks as text: what is written is what is read, and every mistake is one sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import OptionError
from thinwire.predict.presets import PRESETS
from thinwire.predict.spec import NetworkSpec, Phase, parse_network


@st.composite
def phases(draw: st.DrawFn, at: float = 0.0) -> Phase:
    rate = draw(st.none() | st.integers(64_000, 100_000_000_000))
    delay = draw(st.floats(0, 10))
    jitter = draw(st.floats(0, 1)) * delay
    return Phase(at, rate, delay, jitter, draw(st.floats(0, 0.5)))


@given(st.data())
def test_text_and_network_round_trip(data: st.DataObject) -> None:
    times = sorted(data.draw(st.sets(st.floats(0.001, 1e6), max_size=3)))
    network = NetworkSpec(tuple(data.draw(phases(at=at)) for at in (0.0, *times)))
    assert parse_network(str(network)) == network


def test_the_same_network_in_other_words() -> None:
    plain = parse_network("100mbit,5ms,jitter=1ms,loss=0.1%")
    assert plain.phases == (Phase(0.0, 100_000_000, 0.005, 0.001, 0.001),)
    for text in ("0.1gbit, 5000us, loss=0.1%, jitter=0.001s", "rate=100000kbit,delay=5ms,jitter=1ms,loss=0.1%@0s"):
        assert parse_network(text) == plain
    assert parse_network("LAN-100M") == parse_network("100mbit,1ms")


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.emulated])
def test_presets_are_networks_and_may_be_scheduled(name: str) -> None:
    assert parse_network(name).shaped
    assert len(parse_network(f"{name};unshaped@10s").phases) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "missing"),
        ("fast", "neither a rate, a delay nor a preset"),
        ("100", "neither a rate"),
        ("100mbit,,1ms", "missing"),
        ("100mbit,1ms,2ms", "two values for delay"),
        ("100mbit,10mbit", "two values for rate"),
        ("1.2.3mbit", "not a rate"),
        ("100zbit", "not a rate"),
        ("-5mbit", "not a rate"),
        ("1bit", "not a rate"),
        ("nanmbit", "not a rate"),
        ("1kbit", "64kbit to 100gbit"),
        ("5min", "not a delay"),
        ("60s", "0 to 10s"),
        ("jitter=1ms", "jitter must be between 0 and the delay"),
        ("5ms,loss=0.1", "not a loss"),
        ("5ms,loss=90%", "0% to 50%"),
        ("5ms,speed=3", "not a property"),
        ("unshaped,5ms", "stands alone"),
        ("dsl,loss=1%", "stands alone"),
        ("1gbit;50mbit", "needs the time"),
        ("1gbit@5s", "begins at 0"),
        ("1gbit@0s;50mbit@30", "time after @"),
        ("1gbit@0s;50mbit@30s;10mbit@30s", "one after the other"),
    ],
)
def test_mistakes_are_one_sentence_that_names_the_text(text: str, words: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_network(text)
    assert words in str(caught.value)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_packet_never_blocks_the_link_for_long() -> None:
    for text in ("64kbit", "10mbit", "100mbit", "100mbit,loss=1%", "1gbit", "10gbit", "1gbit;64kbit@1s"):
        network = parse_network(text)
        assert 1500 <= network.mtu <= 60_000
        for phase in network.phases:
            assert network.mtu == 1500 or network.mtu * 8 / (phase.rate_bits or 1) <= 0.0101
