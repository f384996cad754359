"""How gradients arrive from DDP, in every way that could lose some: each test is a trap of the hook's contract.

Most keep the books of error feedback (see `ledger`): what ranks give, receive and still owe has to add up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import thinwire
from support.forced_auto import EXACT, MIXED
from support.ledger import Ledger, Loss, assert_nothing_lost, assert_same_on_all, batch, copied, grad_of
from support.pool import Pool

Pools = Callable[[int], Pool]
TOP_K = "ef|top_k:0.05|all_gather"
RECIPES = [TOP_K, EXACT]  # with error feedback, so nothing may get lost
SMALL = 0.03  # MiB: less than two matrices of 64 x 64
WIDTH = 64
STEPS = 5


class Crossed(nn.Module):
    """Runs its layers in another order than it registers them."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for index in (4, 2, 0, 5, 3, 1):
            x = torch.tanh(self.layers[index](x))
        return x


class Checkpointed(nn.Module):
    """Four layers, of which those named are run again in backward."""

    def __init__(self, again: set[int], reentrant: bool) -> None:
        super().__init__()
        self.again, self.reentrant = again, reentrant
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()  # without it a reentrant checkpoint gives no gradients
        for index, layer in enumerate(self.layers):
            x = torch.tanh(checkpoint(layer, x, use_reentrant=self.reentrant) if index in self.again else layer(x))
        return x


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.between(torch.tanh(self.first(x)))))
        return out


class Branches(nn.Module):
    """Leaves out any of its branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, used: str) -> Tensor:
        x = torch.tanh(self.stem(x))
        return sum((getattr(self, branch)(x) for branch in used.split()), start=x)


class Mixed(nn.Module):
    """One layer for each type of number."""

    def __init__(self, types: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).to(dtype) for dtype in types)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float()


def conv() -> nn.Module:
    layers = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 8, 3)
    module: Any = nn.Sequential(*layers)  # torch does not declare memory_format
    last: nn.Module = module.to(memory_format=torch.channels_last)
    return last


def frozen() -> nn.Module:
    module = Crossed()
    module.layers[3].requires_grad_(False)
    module.layers[0].bias.requires_grad_(False)
    return module


def squares(rank: int, step: int, *shape: int) -> Loss:
    x = batch(rank, step, *(shape or (8, WIDTH)))
    return lambda module: module(x.clone()).square().sum()


def sent_by(
    ddp: DistributedDataParallel, recipe: str, rank: int, *, shape: tuple[int, ...] = (), micro: int = 1
) -> dict[str, Any]:
    """The books of a few steps, with weights that change in between."""
    ledger = Ledger(ddp, recipe, exempt=())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    for step in range(STEPS):
        ledger.step(*(squares(rank, 10 * step + part, *shape) for part in range(micro)))
        optimizer.step()
    assert ledger.link.step == STEPS
    return ledger.books()


# -------------------------------------------------------------------------------------------------- other buckets


def static_later(rank: int, world_size: int, recipe: str) -> dict[str, Any]:
    ddp = DistributedDataParallel(Crossed(), bucket_cap_mb=SMALL)
    ledger = Ledger(ddp, recipe, exempt=())
    ddp._set_static_graph()
    for step in range(STEPS):
        ledger.step(squares(rank, step))
    return ledger.books()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_graph_that_is_called_static_after_attach(pools: Pools, recipe: str) -> None:
    """Its first backward pass must not wait for its own end."""
    assert_nothing_lost(pools(2).run(static_later, recipe, deadline=40.0))


def rebuilt(rank: int, world_size: int, recipe: str, options: dict[str, Any]) -> dict[str, Any]:
    return sent_by(DistributedDataParallel(Crossed(), bucket_cap_mb=SMALL, **options), recipe, rank)


@pytest.mark.parametrize("recipe", [TOP_K, "powersgd-4", EXACT])
@pytest.mark.parametrize("option", ["default", "static_graph", "gradient_as_bucket_view", "find_unused_parameters"])
def test_memory_follows_its_parameter_into_other_buckets(pools: Pools, option: str, recipe: str) -> None:
    books = pools(2).run(rebuilt, recipe, {} if option == "default" else {option: True})
    assert_nothing_lost(books)
    counts = [len(step) for step in books[0]["buckets"]]
    first_rebuilt = {"static_graph": 2, "find_unused_parameters": 0}.get(option, 1)
    assert counts == [1] * first_rebuilt + [counts[-1]] * (STEPS - first_rebuilt)
    assert counts[-1] >= 3
    # What is sent together came together in the end, or it would wait for a later bucket.
    assert sorted(books[0]["layout"]) == sorted(sorted(names) for _, _, names in books[0]["buckets"][-1])
    if option != "find_unused_parameters":
        assert {"layers.1.weight", "layers.3.weight"} <= set(books[0]["layout"][0])


def of_types(rank: int, world_size: int, recipe: str, types: tuple[torch.dtype, ...], static_graph: bool) -> Any:
    plain = DistributedDataParallel(Mixed(types), static_graph=static_graph)
    ddp = DistributedDataParallel(copy.deepcopy(plain.module), static_graph=static_graph)
    ledger = Ledger(ddp, recipe, exempt=())
    wide = True
    for step in range(STEPS):
        ledger.step(squares(rank, step))
        plain.zero_grad()
        squares(rank, step)(plain).backward()
        pairs = zip(plain.parameters(), ddp.parameters(), strict=True)
        wide &= all(
            torch.equal(grad_of(theirs), grad_of(ours)) for theirs, ours in pairs if ours.dtype == torch.float64
        )
    return ledger.books(), wide


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize(
    "others", [(torch.bfloat16,), (torch.float64,), (torch.bfloat16, torch.float64, torch.float16)]
)
def test_types_that_mix(pools: Pools, others: list[torch.dtype], static_graph: bool, recipe: str) -> None:
    """In the first step of a static graph all buckets have index 0. Float64 is not compressed, but sent as it is."""
    books, wide = zip(*pools(2).run(of_types, recipe, (torch.float32, *others), static_graph), strict=True)
    first = [(index, is_last) for index, is_last, _ in books[0]["buckets"][0]]
    assert len(first) == 1 + len(others)
    assert first == [(0, False)] * len(first) or not static_graph
    assert_nothing_lost(books, tolerance=2e-2)  # a mean is rounded to the type of its parameter
    assert wide == (True, True)


def accumulated(rank: int, world_size: int, recipe: str, micro: int, bucket_view: bool) -> dict[str, Any]:
    ddp = DistributedDataParallel(Crossed(), bucket_cap_mb=SMALL, gradient_as_bucket_view=bucket_view)
    return sent_by(ddp, recipe, rank, micro=micro)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("micro", [2, 3])
def test_accumulation_without_sync(pools: Pools, micro: int, bucket_view: bool, recipe: str) -> None:
    books = pools(3).run(accumulated, recipe, micro, bucket_view)
    assert len(books[0]["buckets"]) == STEPS
    assert_nothing_lost(books)


# ---------------------------------------------------------------------------------------------- unused parameters


def used(rank: int, step: int, branches: str) -> Loss:
    x = batch(rank, step, 8, WIDTH)
    return lambda module: module(x, branches).square().sum()


def momentum_of(ledger: Ledger) -> Tensor:
    [state] = ledger.link.state_dict().values()
    momentum: Tensor = state.get("memory", {}).get("right.weight", {}).get("momentum", torch.zeros(1))
    return momentum


def owed_to_right(ledger: Ledger) -> Tensor:
    """With what second shots kept back."""
    return ledger.residuals()["right.weight"].double()


def unused(rank: int, world_size: int, recipe: str, flush: bool, owing: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    ledger = Ledger(
        DistributedDataParallel(Branches(), bucket_cap_mb=SMALL, find_unused_parameters=True), recipe, exempt=()
    )
    for step in range(3):
        ledger.step(used(rank, step, "left right" if rank in owing else "left"))
    before, momentum = owed_to_right(ledger), momentum_of(ledger)
    if flush:
        ledger.link.set_recipe("dense")
    nones, kept = [], []
    for step in range(3, 6):  # nobody uses the right branch
        ledger.step(used(rank, step, "left"))
        nones.append(ledger.module.right.weight.grad is None)
        same = torch.equal(owed_to_right(ledger), before)
        kept.append(same and torch.equal(momentum_of(ledger), momentum))
    for step in range(6, 9):  # only one rank does
        ledger.step(used(rank, step, "left right" if rank == 1 else "left"))
    ledger.step(used(rank, 9, "left right"))
    return ledger.books() | {"nones": nones, "kept": kept, "norm": float(before.norm())}


@pytest.mark.parametrize(
    "recipe", [TOP_K, "powersgd-4", "ef|top_k:0.05|shared_top_k", "ef|abs_max:4|all_gather", EXACT]
)
def test_what_is_owed_to_an_unused_parameter_is_kept(pools: Pools, recipe: str) -> None:
    """DDP throws the mean of a parameter away that no rank used."""
    books = pools(2).run(unused, recipe, flush=False)
    for book in books:
        assert book["nones"] == [True] * 3
        assert book["norm"] > 0 or recipe == EXACT  # it went dense in the step before
        assert book["kept"] == [True] * 3
    assert_nothing_lost(books)


def test_momentum_of_an_unused_parameter_is_kept(pools: Pools) -> None:
    for book in pools(2).run(unused, "dgc|top_k:0.05|all_gather", flush=False):
        assert book["kept"] == [True] * 3


@pytest.mark.parametrize(
    "recipe", ["two-shot-2-ef", "rotated:1|two_shot:2,feedback=true", "ef|rotated:4|two_shot", MIXED]
)
def test_what_is_owed_to_an_unused_parameter_is_kept_where_codecs_mix_elements(pools: Pools, recipe: str) -> None:
    """A rotation spreads the values of one parameter over its neighbours in the bucket."""
    for book in pools(2).run(unused, recipe, flush=False):
        assert book["kept"] == [True] * 3


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("owing", [(0, 1), (1,)])
def test_what_is_owed_to_an_unused_parameter_outlives_its_recipe(
    pools: Pools, owing: tuple[int, ...], recipe: str
) -> None:
    """A recipe without a memory sends what was owed with its first step, unless DDP throws that away.

    Where only one rank owes anything, all ranks still have to end it in the same step.
    """
    assert_nothing_lost(pools(2).run(unused, recipe, flush=True, owing=owing, deadline=50.0))


def frozen_for_a_while(rank: int, world_size: int, recipe: str) -> dict[str, Any]:
    """Parameters are frozen between steps of training, and thawed again."""
    ddp = DistributedDataParallel(Branches(), bucket_cap_mb=SMALL, find_unused_parameters=True)
    ledger = Ledger(ddp, recipe, exempt=())
    for step in range(12):
        for model in (ledger.module, ledger.local):
            model.right.requires_grad_(step % 5 < 3)
            model.stem.bias.requires_grad_(step % 4 != 2)
        ledger.step(used(rank, step, "left right"))
    for model in (ledger.module, ledger.local):
        model.requires_grad_(True)
    return ledger.books()


@pytest.mark.parametrize("recipe", [TOP_K, "powersgd-4", "ar-top-k", "dense", EXACT])
def test_parameters_that_are_frozen_for_a_while(pools: Pools, recipe: str) -> None:
    assert_nothing_lost(pools(2).run(frozen_for_a_while, recipe))


# -------------------------------------------------------------------------------------------------- uneven inputs


def uneven(rank: int, world_size: int, recipe: str, options: dict[str, Any], check_every: int = 100) -> dict[str, Any]:
    ddp = DistributedDataParallel(Crossed(), bucket_cap_mb=SMALL, **options)
    ledger = Ledger(ddp, recipe, exempt=(), check_every=check_every)
    optimizer = torch.optim.SGD(ledger.ddp.parameters(), lr=1e-4)
    with ledger.ddp.join():
        for step in range(3 * rank + 1):
            ledger.step(squares(rank, step))
            optimizer.step()
    return ledger.books() | {"weights": copied(ledger.module.named_parameters()), "steps": ledger.link.step}


@pytest.mark.parametrize(
    "recipe", ["dense", TOP_K, "powersgd-4", "ar-top-k-var", "two-shot-8", "global-qsgd-8", EXACT, MIXED]
)
def test_ranks_that_run_out_of_data(pools: Pools, recipe: str) -> None:
    """They go on with gradients of zero and what they still owe, until the last is done; then DDP copies its model."""
    books = pools(3).run(uneven, recipe, {})
    assert_same_on_all([book["weights"] for book in books])
    assert {book["steps"] for book in books} == {7}
    if recipe in (TOP_K, "powersgd-4", "ar-top-k-var", EXACT):
        assert_nothing_lost(books)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("option", ["static_graph", "gradient_as_bucket_view", "find_unused_parameters"])
def test_ranks_that_run_out_of_data_with(pools: Pools, option: str, recipe: str) -> None:
    books = pools(2).run(uneven, recipe, {option: True})
    assert_same_on_all([book["weights"] for book in books])
    assert_nothing_lost(books)


@pytest.mark.parametrize("recipe", ["dense", *RECIPES])
@pytest.mark.parametrize("option", ["gradient_as_bucket_view", "find_unused_parameters"])
def test_ranks_that_run_out_of_data_are_not_called_different(pools: Pools, option: str, recipe: str) -> None:
    """Their weights are older until DDP copies its model."""
    assert_same_on_all([book["weights"] for book in pools(2).run(uneven, recipe, {option: True}, 2)])


def parted(rank: int, world_size: int, after: bool) -> str:
    """The weights of rank 1 change while rank 0 has run out of data, or when that is over."""
    ddp = DistributedDataParallel(Crossed(), bucket_cap_mb=SMALL)
    link = thinwire.attach(ddp, "bf16", check_every=2)

    def train(steps: int, *, part_at: int) -> None:
        for step in range(steps):
            if rank == 1 and step == part_at:
                next(ddp.parameters()).data.add_(1.0)
            ddp.zero_grad()
            squares(rank, step)(ddp).backward()

    try:
        with ddp.join():
            train(2 if rank == 0 else 6, part_at=-1 if after else 3)
        train(4, part_at=1)
    except thinwire.ExchangeError as failure:
        return str(failure)
    finally:
        link.close()
    return "nothing was raised"


@pytest.mark.parametrize(
    ("after", "told"), [(False, "no majority: rank 1 against rank 2"), (True, "rank 1 differs from the other 2")]
)
def test_weights_that_part_are_noticed_in_join_and_after_it(pools: Pools, after: bool, told: str) -> None:
    """Also where one rank keeps older weights, which do not count."""
    for text in pools(3).run(parted, after):
        assert "different weights of" in text
        assert told in text, text


# ---------------------------------------------------------------------------------------------------- other models

MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "frozen": frozen,
    "in another order": Crossed,
    "checkpointed": lambda: Checkpointed({0, 1, 2, 3}, reentrant=False),
    "checkpointed, reentrant": lambda: Checkpointed({0, 1, 2, 3}, reentrant=True),
    "the last half checkpointed, reentrant": lambda: Checkpointed({2, 3}, reentrant=True),
    "the first half checkpointed, reentrant": lambda: Checkpointed({0, 1}, reentrant=True),
}


def trained(rank: int, world_size: int, model: str, recipe: str, static_graph: bool = False) -> dict[str, Any]:
    ddp = DistributedDataParallel(MODELS[model](), bucket_cap_mb=SMALL, static_graph=static_graph)
    return sent_by(ddp, recipe, rank)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_models(pools: Pools, model: str, static_graph: bool, recipe: str) -> None:
    assert_nothing_lost(pools(2).run(trained, model, recipe, static_graph, deadline=40.0))


@pytest.mark.parametrize("recipe", [TOP_K, "powersgd-4", "ef|top_k:0.05|bf16|all_gather", EXACT])
def test_alone(pools: Pools, recipe: str) -> None:
    assert_nothing_lost(pools(1).run(trained, "tied", recipe))


def with_images(rank: int, world_size: int, recipe: str, bucket_view: bool) -> dict[str, Any]:
    ddp = DistributedDataParallel(conv(), gradient_as_bucket_view=bucket_view)
    assert ddp.module[2].weight.is_contiguous(memory_format=torch.channels_last)
    return sent_by(ddp, recipe, rank, shape=(2, 3, 12, 12))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bucket_view", [False, True])
def test_channels_last(pools: Pools, bucket_view: bool, recipe: str) -> None:
    """What is remembered lies as the gradient does, also where DDP shows it in another order."""
    assert_nothing_lost(pools(2).run(with_images, recipe, bucket_view))


def behind_another(rank: int, world_size: int, recipe: str) -> Any:
    """The layer before the model gets its gradient after all buckets are under way."""
    before, ddp = nn.Linear(WIDTH, WIDTH), DistributedDataParallel(Crossed(), bucket_cap_mb=SMALL)
    ledger = Ledger(ddp, recipe, exempt=())
    seen = []
    before.weight.register_hook(lambda grad: seen.append(ledger.link.reducer._open is not None))
    for step in range(STEPS):
        x = batch(rank, step, 8, WIDTH)

        def loss(module: nn.Module, x: Tensor = x) -> Any:
            return module(before(x)).square().sum()

        ledger.enter(loss)
        before.zero_grad()
        ddp.zero_grad()
        ddp(before(x)).square().sum().backward()
        ledger.receive()
    return ledger.books(), seen[1::2], before.weight.grad is not None


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_module_before_the_model(pools: Pools, recipe: str) -> None:
    books, still_open, has_gradient = zip(*pools(2).run(behind_another, recipe), strict=True)
    assert_nothing_lost(books)
    assert still_open == ([True] * STEPS,) * 2
    assert has_gradient == (True, True)


def two_in_a_row(rank: int, world_size: int, recipes: tuple[str, str]) -> list[dict[str, Any]]:
    """As in a GAN: one backward pass through two models, each with a link."""
    models = [DistributedDataParallel(module, bucket_cap_mb=SMALL) for module in (Crossed(), Tied())]
    first, last = (Ledger(ddp, recipe, exempt=()) for ddp, recipe in zip(models, recipes, strict=True))
    for step in range(STEPS):
        x = batch(rank, step, 8, WIDTH)

        def loss_of_first(module: nn.Module, x: Tensor = x) -> Any:
            return last.module(module(x)).square().sum()

        def loss_of_last(module: nn.Module, x: Tensor = x) -> Any:
            return module(first.module(x)).square().sum()

        first.enter(loss_of_first)
        last.enter(loss_of_last)
        for model in models:
            model.zero_grad()
        models[1](models[0](x)).square().sum().backward()
        first.receive()
        last.receive()
    return [first.books(), last.books()]


@pytest.mark.parametrize("recipes", [(TOP_K, "powersgd-4"), (EXACT, EXACT)])
def test_two_models_in_one_backward(pools: Pools, recipes: tuple[str, str]) -> None:
    for books in zip(*pools(2).run(two_in_a_row, recipes), strict=True):
        assert_nothing_lost(books)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH, sparse=True)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(self.words(x))
        return out


def sparse(rank: int, world_size: int, recipe: str) -> Any:
    plain = DistributedDataParallel(Words())
    ddp = DistributedDataParallel(copy.deepcopy(plain.module))
    ledger = Ledger(ddp, recipe, exempt=())
    same = []
    for step in range(STEPS):
        x = torch.randint(50, (8,), generator=torch.Generator().manual_seed(100 * rank + step))

        def loss(module: nn.Module, x: Tensor = x) -> Any:
            return module(x).square().sum()

        ledger.step(loss)
        plain.zero_grad()
        loss(plain).backward()
        theirs, ours = (model.module.words.weight.grad for model in (plain, ddp))
        same.append(ours.is_sparse and torch.equal(theirs.to_dense(), ours.to_dense()))
    return ledger.books(), same


@pytest.mark.parametrize("recipe", RECIPES)
def test_sparse_gradients_pass_as_they_are(pools: Pools, recipe: str) -> None:
    books, same = zip(*pools(2).run(sparse, recipe), strict=True)
    assert same == ([True] * STEPS,) * 2
    assert_nothing_lost(books)


def in_groups(rank: int, world_size: int, recipes: tuple[str, str]) -> dict[str, Any]:
    """Even ranks train one model, odd ones another."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    odd = rank % 2
    module = Tied() if odd else Crossed()
    ddp = DistributedDataParallel(module, process_group=groups[odd], bucket_cap_mb=SMALL)
    books = sent_by(ddp, recipes[odd], rank)
    link = ddp._comm_hooks[0][1]
    assert isinstance(link, thinwire.Link)
    return books | {"rank": link.rank}


@pytest.mark.parametrize("recipes", [("powersgd-4", TOP_K), (EXACT, MIXED)])
def test_groups_do_not_meet(pools: Pools, recipes: tuple[str, str]) -> None:
    books = pools(4).run(in_groups, recipes)
    assert [book["rank"] for book in books] == [0, 0, 1, 1]
    assert_nothing_lost(books[0::2])
    if MIXED not in recipes:
        assert_nothing_lost(books[1::2])
    assert_same_on_all([book["grads"] for book in books[1::2]])


# ---------------------------------------------------------------------------------------------------- torch.compile


def compiled(rank: int, world_size: int, recipe: str, backend: str, inside: bool) -> Any:
    """The optimizer of torch.compile wants no bucket to be smaller than the first, which has 1 MiB."""
    weights, books = [], []
    for compiles in (False, True):
        torch.manual_seed(0)
        module: Any = Crossed(512)
        if compiles and inside:
            module = torch.compile(module, backend=backend)
        ddp: Any = DistributedDataParallel(module, bucket_cap_mb=1)
        if compiles and not inside:
            ddp = torch.compile(ddp, backend=backend)
        books.append(sent_by(ddp, recipe, rank, shape=(4, 512)))
        weights.append([p.detach().clone() for p in ddp.parameters()])
    return books[1], weights


@pytest.mark.parametrize("recipe", [TOP_K, pytest.param(EXACT, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("backend", "inside"), [("eager", False), ("aot_eager", True)])
def test_compiled(pools: Pools, backend: str, inside: bool, recipe: str) -> None:
    books, weights = zip(*pools(2).run(compiled, recipe, backend, inside), strict=True)
    assert len(books[0]["buckets"][-1]) > 1
    assert_nothing_lost(books)
    for eager, quick in weights:
        if backend == "eager":  # the other one rounds otherwise
            assert_same_on_all([eager, quick])


def attached_before_compiling(rank: int, world_size: int) -> list[int]:
    ddp = DistributedDataParallel(Crossed())
    link = thinwire.attach(ddp, TOP_K)
    quick: Any = torch.compile(ddp, backend="eager")
    squares(rank, 0)(quick).backward()
    weights = [p for p in ddp.parameters() if p.dim() == 2]
    assert link.step == 1
    return [int(grad_of(p).count_nonzero()) for p in weights]


def test_attached_before_compiling(pools: Pools) -> None:
    for counts in pools(2).run(attached_before_compiling):
        assert 0 < sum(counts) <= 2 * 0.05 * 4 * WIDTH * WIDTH + 4
