"""Recipes round-trip through text, Python and YAML, and nonsense is refused in one sentence that names the fix."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import thinwire as tw
from thinwire import Recipe, RecipeError, chain, parse
from thinwire.codecs.frames import HEADER_BYTES
from thinwire.recipe.registry import ALIASES, STAGES
from thinwire.recipe.stage import Stage

PACKAGES = (tw.codecs, tw.memory, tw.exchange)
BLOCKS = st.sampled_from([0, 64, 128, 512])
RATIOS = st.floats(1e-6, 1.0, exclude_min=True)
INDICES = st.sampled_from(["auto", "int32", "packed", "bitmap", "elias_fano"])

SPARSIFIERS = st.one_of(
    st.sampled_from([tw.codecs.top_k, tw.codecs.gaussian_k, tw.codecs.dgc_k, tw.codecs.threshold_k]).flatmap(
        lambda kind: st.builds(kind, RATIOS, indices=INDICES)
    ),
    st.builds(tw.codecs.trimmed_k, RATIOS, eps=st.floats(0.01, 0.99)),
    st.builds(tw.codecs.random_k, RATIOS, shared=st.booleans(), scaled=st.booleans()),
)
CASTS = st.sampled_from([tw.codecs.fp32(), tw.codecs.fp16(), tw.codecs.bf16()])
QUANTIZERS = st.one_of(
    st.builds(tw.codecs.qsgd, st.integers(1, 8), block=BLOCKS),
    st.builds(tw.codecs.terngrad, BLOCKS),
    st.just(tw.codecs.natural()),
    st.builds(tw.codecs.min_max, st.integers(2, 8), block=BLOCKS),
    st.builds(tw.codecs.abs_max, st.integers(2, 8), block=BLOCKS),
    st.builds(tw.codecs.sign, BLOCKS),
    st.builds(tw.codecs.fp8, BLOCKS),
)
DENSE = st.one_of(
    CASTS,
    QUANTIZERS,
    st.builds(tw.codecs.rotated, st.integers(2, 4)),
    st.builds(
        tw.codecs.global_qsgd,
        st.integers(2, 8),
        dither=st.sampled_from(["linear", "exponential"]),
        norm=st.sampled_from(["linf", "l2"]),
        block=BLOCKS,
    ),
)
LOW_RANK = st.builds(tw.codecs.low_rank, st.integers(1, 64), iterations=st.integers(1, 3))
CODECS = st.one_of(
    st.just([]),
    DENSE.map(lambda codec: [codec]),
    st.tuples(SPARSIFIERS, st.one_of(CASTS, QUANTIZERS)).map(list),
    SPARSIFIERS.map(lambda codec: [codec]),
    st.tuples(LOW_RANK, CASTS).map(list),
)
MEMORIES: st.SearchStrategy[list[Stage]] = st.one_of(
    st.just([]),
    st.builds(tw.memory.error_feedback, st.floats(0.01, 1.0)).map(lambda memory: [memory]),
    st.builds(tw.memory.momentum_correction, st.floats(0, 0.99), nesterov=st.booleans(), masking=st.booleans()).map(
        lambda memory: [memory]
    ),
)
EXCHANGES = st.one_of(
    st.sampled_from([tw.exchange.all_reduce(), tw.exchange.all_gather(), tw.exchange.local()]),
    st.builds(tw.exchange.two_shot, st.integers(0, 8)),
    st.builds(tw.exchange.shared_top_k, st.sampled_from(["turn", "norm"])),
)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    stages = [*draw(MEMORIES), *draw(CODECS), draw(EXCHANGES)]
    try:
        return chain(*stages)
    except RecipeError as refusal:
        assert_one_sentence(str(refusal))
        assume(False)
        raise


def assert_one_sentence(text: str) -> None:
    assert "\n" not in text
    assert ". " not in text
    assert 20 < len(text) < 400


# ------------------------------------------------------------------------------------------------------- round trips


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(recipes())
def test_a_recipe_survives_text_python_yaml_and_pickle(recipe: Recipe) -> None:
    assert parse(str(recipe)) == recipe
    assert eval(repr(recipe), {"chain": chain, **STAGES}) == recipe
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert hash(parse(str(recipe))) == hash(recipe)
    assert chain(*recipe.stages()) == recipe


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(recipes(), st.integers(0, 3000))
def test_wire_bytes_are_those_of_a_real_message(recipe: Recipe, numel: int) -> None:
    framed = recipe.codec.encode(torch.linspace(-1, 1, numel)).numel()
    assert framed == HEADER_BYTES + recipe.wire_bytes(numel) == recipe.codec.wire_bytes(numel)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="efkopt_:|,=.01 abcdl", max_size=40))
def test_any_text_gives_a_recipe_or_one_sentence(text: str) -> None:
    try:
        parse(text)
    except RecipeError as refusal:
        assert_one_sentence(str(refusal))


def test_text_python_and_parts_are_the_same() -> None:
    recipe = chain(tw.memory.error_feedback(), tw.codecs.threshold_k(0.01), tw.codecs.bf16(), tw.exchange.all_gather())
    assert parse("ef|threshold_k:0.01|bf16|all_gather") == recipe
    assert repr(recipe) == "chain(error_feedback(), threshold_k(0.01), bf16(), all_gather())"
    assert recipe.codec == tw.codecs.threshold_k(0.01, values=tw.codecs.bf16())
    assert chain(tw.memory.error_feedback(), recipe.codec, tw.exchange.all_gather()) == recipe
    assert (recipe.memory, recipe.exchange) == (tw.memory.error_feedback(), tw.exchange.all_gather())


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("all_reduce", "fp32|all_reduce"),
        ("none|all_reduce", "fp32|all_reduce"),
        ("dense | all_reduce", "fp32|all_reduce"),
        ("  ef |\n top_k : 0.01 | bf16|all_gather ", "error_feedback|top_k:0.01|bf16|all_gather"),
        ("dgc|top_k:0.001|all_gather", "momentum_correction|top_k:0.001|all_gather"),
        ("dgc:0.8,true|top_k:0.001|all_gather", "momentum_correction:0.8,nesterov=True|top_k:0.001|all_gather"),
        ("top_k:ratio=0.5|all_gather", "top_k:0.5|all_gather"),
        ("top_k:0.5,bitmap|all_gather", "top_k:0.5,indices=bitmap|all_gather"),
        ("top_k:1e-3|fp32|all_gather", "top_k:0.001|all_gather"),
        ("global_qsgd:8,dither=exponential,norm=l2|all_reduce", "global_qsgd:dither=exponential,norm=l2|all_reduce"),
        ("low_rank:4|bf16|all_reduce", "low_rank|bf16|all_reduce"),
        ("rotated:3|two_shot:back=4", "rotated:3|two_shot:4"),
        ("top_k:0.01|shared_top_k:norm", "top_k:0.01|shared_top_k:norm"),
    ],
)
def test_ways_to_write_the_same(written: str, canonical: str) -> None:
    assert str(parse(written)) == canonical
    assert parse(canonical) == parse(written)


def test_low_rank_takes_the_cast_of_its_factors() -> None:
    assert parse("low_rank:2|bf16|all_reduce").codec == tw.codecs.low_rank(2, factors=tw.codecs.bf16())


def test_every_stage_is_public_under_its_name() -> None:
    listed = {name: getattr(package, name) for package in PACKAGES for name in package.__all__ if name in STAGES}
    assert listed.items() <= dict(STAGES).items()
    for name, stage in STAGES.items():  # one that is in no list is found by its name too
        assert any(getattr(package, name, None) is stage for package in PACKAGES)
    assert set(ALIASES.values()) <= set(STAGES)
    for name, stage in STAGES.items():
        assert issubclass(stage, Stage)
        assert stage.name == name


@pytest.mark.parametrize(
    "source",
    [
        "[ef, {top_k: {ratio: 0.01}}, bf16, all_gather]",
        "[ef, {top_k: {ratio: 1e-2}}, bf16, all_gather]",
        "- ef\n- top_k:0.01\n- bf16\n- all_gather\n",
        "ef|top_k:0.01|bf16|all_gather",
    ],
)
def test_yaml_may_be_written_by_hand(source: str) -> None:
    assert Recipe.from_yaml(source) == parse("ef|top_k:0.01|bf16|all_gather")


# ------------------------------------------------------------------------------------------------------------- facts


def test_unbiased_needs_an_unbiased_codec_and_no_memory() -> None:
    assert parse("qsgd:4,block=64|all_gather").unbiased
    assert not parse("ef|qsgd:4,block=64|all_gather").unbiased
    assert not parse("bf16|all_reduce").unbiased
    assert not parse("random_k:0.1,scaled=false|all_reduce").unbiased


def test_describe_tells_size_and_error() -> None:
    told = parse("rotated:3|two_shot:4").describe()
    assert told.startswith("rotated:3|two_shot:4\n")
    assert f"unbiased, expected squared error at most {tw.codecs.rotated(3).omega(1 << 20):.3g} |x|^2" in told
    told = parse("ef|low_rank:4|all_reduce").describe()
    assert "32,768 bytes, 128.0 x fewer than fp32; biased, expected squared error at most 1 |x|^2" in told


def test_a_recipe_is_frozen_and_a_changed_copy_is_checked() -> None:
    recipe = parse("top_k:0.01|all_gather")
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.codec = tw.codecs.fp32()  # type: ignore[misc]
    with pytest.raises(RecipeError, match="use all_gather, or shared_top_k"):
        dataclasses.replace(recipe, exchange=tw.exchange.all_reduce())


# ---------------------------------------------------------------------------------------------------------- refusals

REFUSED = {
    # unknown words
    "topk:0.01|all_gather": "there is no stage topk: did you mean top_k?",
    "top-k:0.01|all_gather": "did you mean top_k?",
    "gausian_k:0.01|all_gather": "did you mean gaussian_k?",
    "xyzzyq|all_gather": "there is no stage xyzzyq: use error_feedback, momentum_correction, bin_mean, fp32",
    "top_k:0.01,shape=3|all_gather": "top_k has no option shape: use ratio, indices",
    "bf16:7|all_reduce": "bf16 has no option 7: write bf16 alone",
    "top_k:0.01,auto,3|all_gather": "top_k has no option 3: use ratio, indices",
    "top_k:0.01,ratio=0.1|all_gather": "gives ratio twice: keep one",
    # bad values
    "qsgd:four|all_gather": "bits of qsgd is a whole number, not four",
    "qsgd:2.5|all_gather": "bits of qsgd is a whole number, not 2.5",
    "top_k:much|all_gather": "ratio of top_k is a number, not much",
    "dgc:0.9,nesterov=7|top_k:0.1|all_gather": "nesterov of momentum_correction is true or false, not 7",
    "global_qsgd:8,dither=cubic|all_reduce": "dither of global_qsgd is linear or exponential, not cubic",
    "top_k:0.01|shared_top_k:loudest": "leader of shared_top_k is turn or norm, not loudest",
    "qsgd:9|all_gather": "bits must be 1 to 8",
    "qsgd:4,block=100|all_gather": "a multiple of 64",
    "top_k:2|all_gather": "use 0.01",
    "ef:2|top_k:0.1|all_gather": "decay must be above 0 and at most 1",
    "dgc:1|top_k:0.1|all_gather": "momentum must be at least 0 and below 1",
    "low_rank:0|all_reduce": "rank must be 1 or more",
    "qsgd:4|two_shot:9": "back is 1 to 8 bits",
    "qsgd|all_gather": "qsgd needs bits: write qsgd:4",
    "top_k|all_gather": "top_k needs ratio: write top_k:0.01",
    # order and number of stages
    "": "write a recipe such as ef|top_k:0.01|bf16|all_gather",
    "ef||all_gather": "a stage is missing",
    "top_k:0.1|ef|all_gather": "write error_feedback|top_k:0.1|all_gather",
    "all_gather|top_k:0.1": "write top_k:0.1|all_gather",
    "ef|dgc|top_k:0.1|all_gather": "error_feedback and momentum_correction both keep what was not sent: keep one",
    "ef|top_k:0.1|all_gather|all_reduce": "all_gather and all_reduce both combine the ranks: keep one",
    "ef|top_k:0.1": "end it with an exchange, error_feedback|top_k:0.1|all_gather",
    "fp16": "end it with an exchange, fp16|all_reduce",
    "ef": "end it with an exchange, error_feedback|all_reduce",
    # codecs that do not go together
    "bf16|top_k:0.1|all_gather": "write top_k:0.1|bf16",
    "qsgd:4|top_k:0.1|all_gather": "write top_k:0.1|qsgd:4",
    "bf16|low_rank:2|all_reduce": "write low_rank:2|bf16",
    "top_k:0.1|random_k:0.1|all_gather": "top_k and random_k both choose elements: keep one",
    "qsgd:4|abs_max:4|all_gather": "qsgd and abs_max do not go together: keep one",
    "bf16|fp16|all_reduce": "bf16 and fp16 do not go together: keep one",
    "top_k:0.1|bf16|qsgd:4|all_gather": "bf16 and qsgd do not go together: keep one",
    "top_k:0.1|rotated:4|all_gather": "rotated needs whole tensors, and top_k leaves single values: "
    "write top_k:0.1|abs_max:4",
    "top_k:0.1|global_qsgd:4|all_gather": "write top_k:0.1|abs_max:4",
    "top_k:0.1|low_rank|all_gather": "low_rank needs whole tensors",
    "rotated:4|top_k:0.1|all_gather": "rotated and top_k do not go together: keep one",
    "low_rank|top_k:0.1|all_gather": "top_k cannot write the factors of low_rank, which ranks add: write low_rank|bf16",
    "low_rank|qsgd:4|all_reduce": "write low_rank|bf16",
    "low_rank|low_rank|all_reduce": "write low_rank|bf16",
    # exchanges
    "top_k:0.01|all_reduce": "top_k keeps other positions on every rank, so its messages cannot be added: "
    "use all_gather, or shared_top_k",
    "threshold_k:0.01|bf16|all_reduce": "use all_gather, or shared_top_k",
    "qsgd:4|all_reduce": "on a scale of its own, so its messages cannot be added: "
    "use global_qsgd, all_gather or two_shot",
    "rotated:4|all_reduce": "use global_qsgd, all_gather or two_shot",
    "sign|all_reduce": "use global_qsgd, all_gather or two_shot",
    "fp8|all_reduce": "use bf16, all_gather or two_shot",
    "natural|all_reduce": "use bf16, all_gather or two_shot",
    "random_k:0.1,shared=false|all_reduce": "write random_k:0.1, or use all_gather",
    "random_k:0.1|qsgd:4|all_reduce": "write random_k:0.1|bf16, or use all_gather",
    "top_k:0.01|two_shot": "write top_k:0.01|two_shot:feedback=true, or use all_gather or shared_top_k",
    "low_rank|two_shot": "low_rank needs the whole matrix: use all_reduce",
    "bf16|two_shot:4": "write two_shot without a number",
    "rotated:3|two_shot:8": "bits must be 1, 2, 3 or 4",
    "bf16|shared_top_k": "write top_k:0.01|bf16|shared_top_k, or use all_reduce",
    "shared_top_k": "write top_k:0.01|bf16|shared_top_k, or use all_reduce",
    "qsgd:4|shared_top_k": "write top_k:0.01|bf16|shared_top_k, or use two_shot",
    "top_k:0.01|qsgd:4|shared_top_k": "write top_k:0.01|bf16|shared_top_k",
    "random_k:0.01|shared_top_k": "use all_reduce",
    # memories
    "dgc|bf16|all_reduce": "use it with a sparsifier such as top_k:0.01, or use error_feedback",
    "dgc|all_reduce": "use it with a sparsifier such as top_k:0.01",
    "ef|qsgd:4|all_gather": "needs a contraction, and qsgd:4 may err by more than the gradient itself: "
    "leave out error_feedback, or write qsgd:4,block=128",
    "ef|global_qsgd|all_reduce": "write global_qsgd:block=1024",
    "ef|random_k:0.01|all_reduce": "write random_k:0.01,scaled=False",
    "dgc|random_k:0.01|all_reduce": "leave out momentum_correction, or write random_k:0.01,scaled=False",
    "ef|terngrad|all_gather": "use abs_max:4",
    "ef|top_k:0.01|qsgd:2|all_gather": "write top_k:0.01|qsgd:4,block=128",
}


@pytest.mark.parametrize("text", REFUSED)
def test_nonsense_is_refused_with_the_fix(text: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        parse(text)
    assert REFUSED[text] in str(refusal.value)
    assert_one_sentence(str(refusal.value))


@pytest.mark.parametrize("text", REFUSED)
def test_what_a_refusal_says_to_write_is_accepted(text: str) -> None:
    """Every `write <recipe>` in a sentence is a recipe, or becomes one with the exchange and memory of the original."""
    with pytest.raises(RecipeError) as refusal:
        parse(text)
    sentence = str(refusal.value)
    if "write " not in sentence or "write a recipe" in sentence or "two_shot without" in sentence:
        return
    fix = sentence.split("write ")[-1].split(" alone")[0].split(", or ")[0]
    stages = text.split("|")
    if fix.split("|")[-1].split(":")[0] not in ("all_gather", "all_reduce", "shared_top_k", "two_shot"):
        fix += "|" + stages[-1]
    if "contraction" in sentence:
        fix = f"{stages[0]}|{fix}"
    parse(fix)


@pytest.mark.parametrize(
    ("stages", "fix"),
    [
        (("ef", tw.exchange.all_gather()), "use parse() for text"),
        ((tw.codecs.bf16, tw.exchange.all_reduce()), "write bf16(...)"),
        ((parse("all_reduce"),), "is a whole recipe: use it as it is"),
        ((3, tw.exchange.all_gather()), "such as top_k(0.01)"),
        ((None,), "such as top_k(0.01)"),
        ((tw.codecs.top_k(0.1, values=tw.codecs.bf16()), tw.codecs.fp16(), tw.exchange.all_gather()), "leave out fp16"),
        ((tw.codecs.top_k(0.1, values=tw.codecs.rotated(4)), tw.exchange.all_gather()), "write top_k:0.1|abs_max:4"),
        ((), "end it with an exchange, all_reduce"),
    ],
)
def test_chain_refuses_what_is_no_stage(stages: tuple[object, ...], fix: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        chain(*stages)  # type: ignore[arg-type]
    assert fix in str(refusal.value)
    assert_one_sentence(str(refusal.value))


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        ("{top_k: 1}", "is a list of stages"),
        ("[1, 2]", "a stage in YAML is a name"),
        ("[{top_k: 0.01}, all_gather]", "top_k: {ratio: 0.01}"),
        ("[{top_k: {ratio: yes}}, all_gather]", "ratio of top_k is a number, not True"),
        ("[{qsgd: {bits: 2.5}}, all_gather]", "bits of qsgd is a whole number, not 2.5"),
        ("[{qsgd: {1: 2}}, all_gather]", "a stage in YAML is a name"),
        ("[ef, ", "write a list of stages"),
    ],
)
def test_yaml_that_is_no_recipe_is_refused(source: str, fix: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        Recipe.from_yaml(source)
    assert fix in str(refusal.value)
    assert_one_sentence(str(refusal.value))


def test_parse_takes_text_only() -> None:
    with pytest.raises(RecipeError, match="use chain"):
        parse(tw.codecs.bf16())  # type: ignore[arg-type]
