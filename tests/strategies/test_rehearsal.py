"""One step shows what a model does that some layouts cannot keep; only these layouts refuse it."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from strategies import registry
from strategies.blocks import find_blocks
from strategies.layout import LayoutError, choose
from strategies.options import Options
from strategies.rehearsal.observe import observe
from strategies.traits import Observation, Trait, require_kept

pytestmark = pytest.mark.pure

WIDTH = 8
STRATEGIES = ("ddp", "fsdp", "zero1", "hsdp", "tensor", "pipeline")
ALL = set(STRATEGIES)
SHARDED = {"fsdp", "zero1", "hsdp"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A chain of blocks, of which each subclass changes one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(WIDTH, 1)
        self.change()

    def change(self) -> None:
        """Change the new model."""

    def prepare(self, x: Tensor) -> Tensor:
        """Change the input of the model."""
        return x

    def call_block(self, number: int, x: Tensor) -> Tensor:
        """Call a block."""
        return self.blocks[number](x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(self.prepare(x))
        for number in range(len(self.blocks)):
            x = self.call_block(number, x)
        return self.out(x)


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch), batch[:, :1])


def _batches(device: str) -> list[Tensor]:
    whole = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).to(device)
    return [whole, whole[:2], whole[2:]]


def observed_traits(
    make: Callable[[], nn.Module], loss: Any = mean_square, device: str = "cpu"
) -> dict[Trait, tuple[str, ...]]:
    """What one step shows of a model: the names of its parts, by trait.

    Args:
        make: Makes the model.
        loss: Its loss.
        device: cpu, or meta, which sees one batch only.
    """

    def build() -> nn.Module:
        torch.manual_seed(0)
        with torch.device(device):
            return make()

    batches = _batches(device)
    if device == "meta":
        batches = batches[:1]
    observations = observe(build, find_blocks, loss, batches, torch.manual_seed)
    return {observation.trait: observation.names for observation in observations}


def refusing_strategies(traits: Iterable[Trait]) -> set[str]:
    """The strategies that refuse a model with these traits."""
    observations = [Observation(trait, ("here",)) for trait in traits]
    refusing = set()
    for name in STRATEGIES:
        layout = choose(name, 4, dp_shard=2) if name == "hsdp" else choose(name, 4)
        try:
            require_kept(
                layout, registry.records(name), Options(), observations, [registry.find("ddp")]
            )
        except LayoutError:
            refusing.add(name)
    return refusing


# --- parameters that the loss reads ---------------------------------------------------------------


def penalty_on_all(model: nn.Module, batch: Any) -> Tensor:
    return mean_square(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())


def penalty_on_one(model: Any, batch: Any) -> Tensor:
    return mean_square(model, batch) + model.out.weight.abs().mean()


def penalty_before(model: Any, batch: Any) -> Tensor:
    penalty = model.blocks[1].up.weight.norm()
    return mean_square(model, batch) + penalty


def orthogonal(model: Any, batch: Any) -> Tensor:
    weights = dict(model.named_parameters())["blocks.2.down.weight"]
    return mean_square(model, batch) + (weights @ weights.mT).square().mean()


def by_cosine(model: Any, batch: Any) -> Tensor:
    similarity = F.cosine_similarity(model.inp(batch), model.out.weight).mean()
    return 1 - similarity + 0 * mean_square(model, batch)


@pytest.mark.parametrize(
    "loss", [penalty_on_all, penalty_on_one, penalty_before, orthogonal, by_cosine]
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_that_the_loss_reads_are_seen(loss: Any, device: str) -> None:
    traits = observed_traits(Net, loss, device)
    assert Trait.LOSS_READS_PARAMETERS in traits
    assert {"tensor", "pipeline"} <= refusing_strategies(traits)
    assert "ddp" not in refusing_strategies(traits)
    reads_blocks = loss in (penalty_on_all, penalty_before, orthogonal)
    assert ("fsdp" in refusing_strategies(traits)) == reads_blocks


class ListsInForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(p.norm() for p in self.blocks.parameters())


class AsksForTypes(Net):
    """Asks its first parameter for type and device, as many models do.

    It also makes a tensor in the shape of a parameter.
    """

    def forward(self, x: Tensor) -> Tensor:
        first = next(self.parameters())
        zeros = torch.zeros_like(self.out.weight)
        y = super().forward(x.to(first.dtype).to(first.device))
        return y + zeros.sum() + first.dim() - first.numel()


class Tied(Net):
    def change(self) -> None:
        self.out.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.inp.weight = self.out.weight
        self.out.bias = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.inp.weight)[:, :1]


def test_only_reading_all_parameters_is_a_trait_and_not_asking_for_types() -> None:
    assert Trait.LISTS_PARAMETERS in observed_traits(ListsInForward)
    for net in (Net, AsksForTypes, Tied):
        assert observed_traits(net) == {}, net


# --- parameters that forward changes --------------------------------------------------------------


class MomentumCopy(Net):
    def change(self) -> None:
        self.target = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def prepare(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.inp.parameters()):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return x + self.target(x)


class Clamped(Net):
    def prepare(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.out.weight.clamp_(-0.1, 0.1)
        return x


class ClampedData(Net):
    """As the first implementations of Wasserstein critics do."""

    def prepare(self, x: Tensor) -> Tensor:
        self.out.weight.data.clamp_(-0.1, 0.1)
        return x


class Assigned(Net):
    def prepare(self, x: Tensor) -> Tensor:
        self.blocks[3].up.weight.data = F.normalize(self.blocks[3].up.weight.data)
        return x


class ShrinksItsWeight(Net):
    def call_block(self, number: int, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.blocks[number].up.weight *= 0.99
        return super().call_block(number, x)


class RunningMean(Net):
    """A parameter used as a buffer."""

    def change(self) -> None:
        self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def prepare(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


class ShortRows(Net):
    def change(self) -> None:
        self.table = nn.Embedding(8, WIDTH, max_norm=0.5)

    def prepare(self, x: Tensor) -> Tensor:
        return x + self.table((x[:, 0] * 3 + 4).long().clamp(0, 7))


class Buffer(Net):
    """Counts in a buffer, which no layout loses."""

    def change(self) -> None:
        self.register_buffer("steps", torch.zeros(()))

    def prepare(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x


@pytest.mark.parametrize("net", [MomentumCopy, Clamped, ClampedData, Assigned, ShrinksItsWeight])
def test_only_replicas_keep_parameters_that_forward_changes_alike(net: Any) -> None:
    traits = observed_traits(net)
    assert Trait.CHANGES_PARAMETERS in traits
    assert Trait.CHANGES_PARAMETERS_BY_DATA not in traits
    assert refusing_strategies(traits) == ALL - {"ddp"}
    traits_on_meta = observed_traits(net, device="meta")
    changes = {Trait.CHANGES_PARAMETERS, Trait.CHANGES_PARAMETERS_BY_DATA}
    assert changes & traits_on_meta.keys()


@pytest.mark.parametrize("net", [RunningMean, ShortRows])
def test_no_strategy_keeps_parameters_that_forward_changes_by_the_data(net: Any) -> None:
    traits = observed_traits(net)
    assert Trait.CHANGES_PARAMETERS_BY_DATA in traits
    assert refusing_strategies(traits) == ALL


class MeanInABuffer(Net):
    def change(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def prepare(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Queue(Net):
    """Negatives of earlier batches, as momentum contrast keeps them."""

    def change(self) -> None:
        self.register_buffer("queue", torch.zeros(16, WIDTH))

    def prepare(self, x: Tensor) -> Tensor:
        x = x + self.queue.mean(0)
        with torch.no_grad():
            self.queue.copy_(torch.cat([x, self.queue])[:16])
        return x


class Normalised(Net):
    """BatchNorm's statistics have a trait of their own."""

    def change(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def prepare(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_no_strategy_refuses_changed_buffers_which_have_several_traits() -> None:
    assert observed_traits(Buffer) == {Trait.CHANGES_BUFFERS: ("steps",)}
    assert observed_traits(MeanInABuffer) == {Trait.CHANGES_BUFFERS_BY_DATA: ("mean",)}
    assert observed_traits(Queue) == {Trait.CHANGES_BUFFERS_BY_DATA: ("queue",)}
    assert observed_traits(Normalised) == {Trait.NORMALISES_OVER_BATCH: ("norm",)}
    assert refusing_strategies([Trait.CHANGES_BUFFERS, Trait.CHANGES_BUFFERS_BY_DATA]) == set()


# --- hooks on parameters --------------------------------------------------------------------------


def _with_gradient_hook(hook: Any) -> type[Net]:
    class HookedNet(Net):
        def change(self) -> None:
            self.blocks[1].up.weight.register_hook(hook)

    return HookedNet


def _with_hook_after_accumulation(hook: Any) -> type[Net]:
    class HookedNet(Net):
        def change(self) -> None:
            self.blocks[1].up.weight.register_post_accumulate_grad_hook(hook)

    return HookedNet


MASK = torch.arange(16).remainder(2).float().unsqueeze(1)


def _do_nothing(_: Tensor) -> None:
    pass


@pytest.mark.parametrize(
    "hook",
    [
        lambda gradient: gradient * 0.0,
        lambda gradient: gradient * MASK.to(gradient.device),
        _do_nothing,
    ],
    ids=["zero", "mask", "nothing"],
)
def test_ddp_keeps_hooks_that_are_linear_in_the_gradient(hook: Any) -> None:
    """It averages what the hooks return, which is the same."""
    traits = observed_traits(_with_gradient_hook(hook))
    assert traits == {Trait.LINEAR_GRADIENT_HOOK: ("blocks.1.up.weight",)}
    assert refusing_strategies(traits) == ALL - {"ddp"}


@pytest.mark.parametrize(
    "net",
    [
        _with_gradient_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3)),
        _with_gradient_hook(lambda gradient: gradient / (gradient.norm() + 1e-6)),
        _with_hook_after_accumulation(_do_nothing),
    ],
    ids=["clamp", "normalise", "after accumulation"],
)
def test_no_strategy_keeps_other_hooks_on_parameters(net: Any) -> None:
    traits = observed_traits(net)
    assert traits == {Trait.GRADIENT_HOOK: ("blocks.1.up.weight",)}
    assert refusing_strategies(traits) == ALL


class HooksItsActivation(Net):
    factor: Any = staticmethod(lambda gradient: gradient * 0.5)

    def call_block(self, number: int, x: Tensor) -> Tensor:
        if number == 1 and x.requires_grad:
            x.register_hook(self.factor)
        return super().call_block(number, x)


class ClampsItsActivation(HooksItsActivation):
    factor = staticmethod(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def _with_backward_hook(change: Callable[[Tensor], Tensor]) -> type[Net]:
    """A model with a hook that changes the gradient of a block's input."""

    def hook(module: nn.Module, input_gradients: Any, output_gradients: Any) -> tuple[Tensor]:
        return (change(input_gradients[0]),)

    class HookedNet(Net):
        def change(self) -> None:
            self.blocks[2].register_full_backward_hook(hook)

    return HookedNet


def test_hooks_on_activations_are_a_trait_if_they_depend_on_the_batch() -> None:
    assert observed_traits(HooksItsActivation) == {}
    traits = observed_traits(ClampsItsActivation)
    assert traits == {Trait.ACTIVATION_HOOK: ("the model",)}
    assert refusing_strategies(traits) == ALL - {"tensor"}


def test_hooks_on_the_backward_of_a_module_are_a_trait() -> None:
    halved = observed_traits(_with_backward_hook(lambda gradient: gradient * 0.5))
    assert halved == {Trait.BACKWARD_HOOK: ("blocks.2",)}
    assert refusing_strategies(halved) == {"pipeline"}
    clamped = observed_traits(_with_backward_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3)))
    assert clamped == {Trait.BACKWARD_HOOK: ("blocks.2",), Trait.ACTIVATION_HOOK: ("blocks.2",)}
    assert refusing_strategies(clamped) == ALL - {"tensor"}


# --- gradients that do not come back, or are taken in the loss ------------------------------------


class Detached(Net):
    def call_block(self, number: int, x: Tensor) -> Tensor:
        return super().call_block(number, x.detach() if number == 2 else x)


class DetachedData(Net):
    def call_block(self, number: int, x: Tensor) -> Tensor:
        return super().call_block(number, x.data if number == 2 else x)


class StraightThrough(Net):
    """Rounds in forward; the gradient comes back all the same."""

    def call_block(self, number: int, x: Tensor) -> Tensor:
        x = super().call_block(number, x)
        return x + (x.round() - x).detach()


def test_a_cut_graph_is_seen() -> None:
    for net in (Detached, DetachedData):
        traits = observed_traits(net)
        assert traits[Trait.CUTS_GRAPH] == ("blocks.0", "blocks.1")
        assert traits.keys() == {Trait.CUTS_GRAPH, Trait.UNUSED_PARAMETERS}
        assert refusing_strategies(traits) == {"ddp", "pipeline"}
    assert observed_traits(StraightThrough) == {}


def gradient_penalty(model: nn.Module, batch: Any) -> Tensor:
    x = batch.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return mean_square(model, batch) + (gradient.norm(dim=1) - 1).square().mean()


def tangent_penalty(model: Any, batch: Any) -> Tensor:
    _, tangent = torch.func.jvp(model, (batch,), (torch.ones_like(batch),))
    return mean_square(model, batch) + tangent.square().mean()


def sharpness(model: Any, batch: Any) -> Tensor:
    gradient = torch.func.grad(lambda x: model(x).sum())(batch)
    return mean_square(model, batch) + gradient.square().mean()


@pytest.mark.parametrize("loss", [gradient_penalty, tangent_penalty, sharpness])
def test_gradients_that_the_loss_takes_are_seen(loss: Any) -> None:
    traits = observed_traits(Net, loss)
    assert Trait.GRADIENT_IN_LOSS in traits
    assert refusing_strategies(traits) == ALL - {"ddp"}


def with_its_parameters(model: Any, batch: Any) -> Tensor:
    predicted = torch.func.functional_call(model, dict(model.named_parameters()), (batch,))
    return F.mse_loss(predicted, batch[:, :1])


def test_a_model_that_is_called_with_given_parameters_is_not_copied_or_cut() -> None:
    assert observed_traits(Net, with_its_parameters) == {Trait.FUNCTIONAL_CALL: ("the model",)}
    observations = [Observation(Trait.FUNCTIONAL_CALL, ("the model",))]
    with pytest.raises(
        LayoutError, match=r"by torch\.func\.functional_call.* strategy dp .*write strategy=ddp"
    ):
        require_kept(
            choose("dp", 1), registry.records("dp"), Options(), observations, [registry.find("ddp")]
        )
    assert refusing_strategies([Trait.FUNCTIONAL_CALL]) == {"pipeline"}


def model_twice(model: Any, batch: Any) -> Tensor:
    return mean_square(model, batch) + 0.1 * model(batch).square().mean()


class CallsABlockTwice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.blocks[0](x))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_block_that_a_step_calls_twice_is_no_part_of_a_pipeline(device: str) -> None:
    traits = observed_traits(Net, model_twice, device=device)
    assert traits == {Trait.CALLED_TWICE: tuple(f"blocks.{number}" for number in range(4))}
    assert observed_traits(CallsABlockTwice, device=device)[Trait.CALLED_TWICE] == ("blocks.0",)
    assert refusing_strategies(traits) == {"pipeline"}


# --- blocks that change their input, or are not called every time ---------------------------------


class AddsToItsInput(Net):
    def change(self) -> None:
        for block in self.blocks:
            block.forward = functools.partial(self.add_to_input, block)

    def add_to_input(self, block: Any, x: Tensor) -> Tensor:
        return x.add_(block.down(F.gelu(block.up(block.norm(x.clone())))))


class AddsToItsKeyword(AddsToItsInput):
    def call_block(self, number: int, x: Tensor) -> Tensor:
        return self.blocks[number](x=x)


class StartsWithInplaceReLU(Net):
    def change(self) -> None:
        for block in self.blocks:
            block.norm = nn.ReLU(inplace=True)


class Recomputes(Net):
    """Its blocks run a second time in backward."""

    def call_block(self, number: int, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[number], x, use_reentrant=False)


@pytest.mark.parametrize("net", [AddsToItsInput, AddsToItsKeyword, StartsWithInplaceReLU])
def test_blocks_that_change_their_input_are_refused_by_sharded_and_pipelined(net: Any) -> None:
    traits = observed_traits(net)
    assert traits == {Trait.CHANGES_INPUT: tuple(f"blocks.{i}" for i in range(4))}
    assert refusing_strategies(traits) == SHARDED | {"pipeline"}


def test_recomputation_by_the_model_itself_is_no_trait() -> None:
    assert observed_traits(Recomputes) == {}


def require_kept_by_ddp(trait: Trait, names: tuple[str, ...], mode: str) -> None:
    """Check whether ddp keeps a trait with activation checkpointing.

    Args:
        trait: The trait.
        names: The parts of the model that have it.
        mode: The mode of activation checkpointing.
    """
    options = Options(activation_checkpointing=mode)
    observation = Observation(trait, names)
    require_kept(choose("ddp", 2), registry.records("ddp"), options, [observation], [])


def test_blocks_that_change_their_input_are_not_recomputed() -> None:
    pattern = r"blocks\.1 changes its input.*write train\.activation_checkpointing=none"
    with pytest.raises(LayoutError, match=pattern):
        require_kept_by_ddp(Trait.CHANGES_INPUT, ("blocks.1",), "full")


def test_blocks_that_change_buffers_are_not_recomputed() -> None:
    power_iteration = "blocks.0.up.parametrizations.weight.0._u"
    pattern = r"changes the buffer .*_u.*write train\.activation_checkpointing=none"
    with pytest.raises(LayoutError, match=pattern):
        require_kept_by_ddp(Trait.CHANGES_BUFFERS, (power_iteration,), "full")


class ScalesItsBatch(nn.Module):
    """Has no blocks, so that all of it is recomputed, from a batch that it has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inp(x.mul_(0.5))))


class ScalesItsMask(Net):
    def change(self) -> None:
        self.mask = torch.ones(1)
        for block in self.blocks:
            block.forward = functools.partial(self.scale_mask, block)

    def scale_mask(self, block: Any, x: Tensor, mask: Tensor) -> Tensor:
        return x + block.down(block.up(x)) * mask.mul_(0.5).clone()

    def call_block(self, number: int, x: Tensor) -> Tensor:
        return self.blocks[number](x, mask=self.mask)


class TakesOtherTypes(Net):
    """Has blocks that take boolean and complex numbers."""

    def change(self) -> None:
        for block in self.blocks:
            block.forward = functools.partial(self.scale_output, block)

    def scale_output(self, block: Any, x: Tensor, mask: Tensor, rotation: Tensor) -> Tensor:
        return x + block.down(block.up(block.norm(x))) * mask.any() * rotation.real

    def call_block(self, number: int, x: Tensor) -> Tensor:
        mask = torch.ones(2, dtype=torch.bool)
        rotation = torch.ones(1, dtype=torch.cfloat)
        return self.blocks[number](x, mask, rotation)


def test_blocks_may_take_numbers_of_any_type() -> None:
    assert observed_traits(TakesOtherTypes) == {}


class CountsInside(ScalesItsBatch):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.out(torch.tanh(self.inp(x))) * (1 + 0.1 * (self.calls > 2))


class BlocksCount(Net):
    def change(self) -> None:
        self.calls = 0
        self.blocks[1].forward = self.block

    def block(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


@pytest.mark.parametrize(("net", "name"), [(CountsInside, "the model"), (BlocksCount, "blocks.1")])
def test_parts_whose_second_call_has_another_result_are_not_recomputed(net: Any, name: str) -> None:
    traits = observed_traits(net)
    assert traits[Trait.OUTPUT_VARIES_BY_CALL] == (name,)
    assert refusing_strategies([Trait.OUTPUT_VARIES_BY_CALL]) == set()
    pattern = rf"{name} returns other.*write train\.activation_checkpointing=none"
    with pytest.raises(LayoutError, match=pattern):
        require_kept_by_ddp(Trait.OUTPUT_VARIES_BY_CALL, (name,), "full")


@pytest.mark.parametrize(
    ("net", "name"), [(ScalesItsBatch, "the model"), (ScalesItsMask, "blocks.0")]
)
def test_parts_that_change_the_data_are_not_recomputed(net: Any, name: str) -> None:
    traits = observed_traits(net, lambda model, batch: model(batch.clone()).square().mean())
    names = traits[Trait.CHANGES_DATA]
    assert names[0] == name
    assert refusing_strategies([Trait.CHANGES_DATA]) == set()
    pattern = rf"{name} .*changes in place.*write train\.activation_checkpointing=none"
    with pytest.raises(LayoutError, match=pattern):
        require_kept_by_ddp(Trait.CHANGES_DATA, names, "full")


class AddsBetween(Net):
    def call_block(self, number: int, x: Tensor) -> Tensor:
        x = super().call_block(number, x)
        x += 1
        return x


class ReentrantCheckpoint(Net):
    def call_block(self, number: int, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[number], x, use_reentrant=True)


class TiedReentrantCheckpoints(ReentrantCheckpoint):
    def change(self) -> None:
        self.blocks[3].up.weight = self.blocks[0].up.weight


class LooksBackWithoutGradients(Net):
    """Runs its blocks also without gradients, as a teacher does."""

    def call_block(self, number: int, x: Tensor) -> Tensor:
        with torch.no_grad():
            before = super().call_block(number, x) + super().call_block(number, x)
        return super().call_block(number, x) + before


class LeavesALoss(Net):
    """A block leaves a part of the loss in an attribute, which alone gives it a gradient."""

    def call_block(self, number: int, x: Tensor) -> Tensor:
        block: Any = self.blocks[number]
        if number == 1:
            block.forward = functools.partial(self.leave_loss, block)
        return super().call_block(number, x.detach() if number == 2 else x)

    def leave_loss(self, block: Any, x: Tensor) -> Tensor:
        y = block.down(block.up(x))
        block.aux = y.square().mean()
        return x + y


class FrozenStart(Net):
    """Blocks that are not trained may run without gradients."""

    def call_block(self, number: int, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(number > 0 and torch.is_grad_enabled()):
            return super().call_block(number, x)

    def change(self) -> None:
        self.inp.requires_grad_(False)
        self.blocks[0].requires_grad_(False)


def test_a_pipeline_refuses_outputs_that_are_changed_between_blocks() -> None:
    traits = observed_traits(AddsBetween)
    assert traits.keys() == {Trait.CHANGES_OUTPUT}
    assert refusing_strategies(traits) == {"pipeline"}


def test_a_pipeline_refuses_reentrant_checkpoints_and_ddp_those_of_tied_weights() -> None:
    traits = observed_traits(ReentrantCheckpoint)
    assert traits.keys() == {Trait.RUNS_WITHOUT_GRADIENT}
    assert refusing_strategies(traits) == {"pipeline"}
    traits = observed_traits(TiedReentrantCheckpoints)
    assert traits[Trait.USED_BY_REENTRANT_CHECKPOINTS] == ("blocks.0.up.weight",)
    assert refusing_strategies(traits) == {"pipeline", "ddp"}
    traits = observed_traits(ReentrantCheckpoint, penalty_on_all)
    names = traits[Trait.USED_BY_REENTRANT_CHECKPOINTS]
    assert "blocks.0.up.weight" in names and "out.weight" not in names


@pytest.mark.parametrize(
    ("net", "traits"),
    [(FrozenStart, set()), (LooksBackWithoutGradients, {Trait.CALLED_TWICE})],
)
def test_blocks_may_run_without_gradients_that_nobody_needs(net: Any, traits: set[Trait]) -> None:
    assert observed_traits(net).keys() == traits


def _loss_with_attribute_of_block(model: Any, batch: Any) -> Tensor:
    return mean_square(model, batch) + model.blocks[1].aux


def test_sharded_strategies_refuse_gradients_that_bypass_the_output_of_a_block() -> None:
    traits = observed_traits(LeavesALoss, _loss_with_attribute_of_block)
    assert traits[Trait.GRADIENT_PAST_OUTPUT] == ("blocks.1",)
    assert refusing_strategies(traits) >= SHARDED
    assert Trait.GRADIENT_PAST_OUTPUT not in observed_traits(Detached)


class Recurs(Net):
    def change(self) -> None:
        for block in self.blocks:
            block.up = nn.GRU(WIDTH, 16)
            block.forward = functools.partial(self.run_rnn, block)

    def run_rnn(self, block: Any, x: Tensor) -> Tensor:
        hidden, _ = block.up(block.norm(x))
        return x + block.down(hidden)


class RecursByStep(Net):
    def change(self) -> None:
        for block in self.blocks:
            block.up = nn.GRUCell(WIDTH, 16)


class RecursWithoutBlocks(nn.Module):
    """No list of blocks: the whole model is recomputed as one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.GRUCell(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


@pytest.mark.parametrize("net", [Recurs, RecursByStep])
def test_recurrent_layers_are_not_recomputed_selectively(net: Any) -> None:
    traits = observed_traits(net)
    assert traits.keys() == {Trait.RECURRENT}
    assert refusing_strategies(traits) == set()
    names = traits[Trait.RECURRENT]
    require_kept_by_ddp(Trait.RECURRENT, names, "full")
    pattern = r"blocks\.0\.up .*recurrent.*: write train\.activation_checkpointing=full$"
    with pytest.raises(LayoutError, match=pattern):
        require_kept_by_ddp(Trait.RECURRENT, names, "selective")


def test_a_recurrent_layer_of_a_model_without_blocks_is_seen() -> None:
    """Such a model is recomputed as one block."""
    assert observed_traits(RecursWithoutBlocks)[Trait.RECURRENT] == ("up",)


def test_a_step_with_two_backwards_is_not_recomputed_selectively() -> None:
    require_kept_by_ddp(Trait.GRADIENT_IN_LOSS, ("the loss",), "full")
    pattern = r"takes a gradient .*: write train\.activation_checkpointing=full$"
    with pytest.raises(LayoutError, match=pattern):
        require_kept_by_ddp(Trait.GRADIENT_IN_LOSS, ("the loss",), "selective")


class SkipsBySample(Net):
    def call_block(self, number: int, x: Tensor) -> Tensor:
        return super().call_block(number, x) if number != 2 or x.sum() > 0 else x


class DropsLayers(Net):
    def call_block(self, number: int, x: Tensor) -> Tensor:
        return super().call_block(number, x) if torch.rand(()) > 0.5 else x


class SeldomDropsLayers(Net):
    """As LayerDrop and stochastic depth do by default; a few batches do not show it."""

    def call_block(self, number: int, x: Tensor) -> Tensor:
        return super().call_block(number, x) if torch.rand([]) > 1e-4 else x


class OrderBySample(Net):
    def prepare(self, x: Tensor) -> Tensor:
        self.backwards = bool(x.sum() > 0)
        return x

    def call_block(self, number: int, x: Tensor) -> Tensor:
        return super().call_block(3 - number if self.backwards else number, x)


@pytest.mark.parametrize("net", [SkipsBySample, DropsLayers, SeldomDropsLayers])
def test_only_tensor_keeps_blocks_that_are_not_always_called(net: Any) -> None:
    traits = observed_traits(net)
    assert {Trait.CALLS_VARY, Trait.PARAMETERS_VARY} <= traits.keys()
    assert refusing_strategies(traits) == ALL - {"tensor"}


def test_sharded_and_pipelined_refuse_an_order_of_blocks_that_varies() -> None:
    traits = observed_traits(OrderBySample)
    assert Trait.PARAMETERS_VARY not in traits
    assert refusing_strategies(traits) == SHARDED | {"pipeline"}


def _skipping_if(condition: Callable[[Tensor], Any]) -> type[Net]:
    """A model that skips a block on a condition."""

    class SkippingNet(Net):
        def call_block(self, number: int, x: Tensor) -> Tensor:
            if number == 2 and condition(x):
                return x
            return super().call_block(number, x)

    return SkippingNet


RARE_CONDITIONS: dict[str, Callable[[Tensor], Any]] = {
    "bool": lambda x: x.abs().max() > 100,
    "item": lambda x: x.abs().max().item() > 100,
    "float": lambda x: float(x.mean()) < -100,
    "int": lambda x: int(x.abs().max() > 100),
    "index": lambda x: [False, True][(x.abs().max() > 100).long()],
    "contains": lambda x: 12345.0 in x,
    "allclose": lambda x: torch.allclose(x, torch.zeros_like(x)),
}
"""Conditions on the data that none of the batches here meets."""


@pytest.mark.parametrize("condition", RARE_CONDITIONS.values(), ids=RARE_CONDITIONS.keys())
def test_a_branch_on_data_is_found_although_no_sample_takes_it(condition: Any) -> None:
    net = _skipping_if(condition)
    traits = observed_traits(net)
    assert {Trait.CALLS_VARY, Trait.PARAMETERS_VARY, Trait.BRANCHES_ON_DATA} <= traits.keys()
    assert traits[Trait.CALLS_VARY] == ("blocks.2",)
    assert refusing_strategies(traits) == ALL - {"tensor"}
    assert Trait.CALLS_VARY in observed_traits(net, device="meta")


def _raise_unless_finite(x: Tensor) -> bool:
    if not x.isfinite().all():
        raise ValueError("not finite")
    return False


CONDITIONS_WITHOUT_DATA: dict[str, Callable[[Tensor], Any]] = {
    "a layer that is never dropped": lambda x: torch.rand(()) < 0.0,
    "a layer that is always dropped": lambda x: torch.rand(()) >= 1.0,
    "a check that raises": _raise_unless_finite,
    "a number that is not the batch's": lambda x: torch.ones(3, device="cpu").sum() > 100,
}


@pytest.mark.parametrize(
    "condition", CONDITIONS_WITHOUT_DATA.values(), ids=CONDITIONS_WITHOUT_DATA.keys()
)
def test_a_condition_that_no_batch_can_change_is_no_branch(condition: Any) -> None:
    assert observed_traits(_skipping_if(condition)) == {}


class LogsItsNorm(Net):
    """Reads a number and does the same whatever it is."""

    def prepare(self, x: Tensor) -> Tensor:
        self.norm = x.norm().item()
        return x if bool((x > 0).any()) else x * 1.0


class WaitsForNumbers(Net):
    """Has a loop that does not end without numbers."""

    def prepare(self, x: Tensor) -> Tensor:
        while not bool(x.norm() < 1):
            x = x / 2
        return x


def test_numbers_without_consequences_are_no_branch() -> None:
    for net in (LogsItsNorm, WaitsForNumbers):
        assert observed_traits(net) == {}
    assert observed_traits(LogsItsNorm, device="meta") == {}
    with pytest.raises(RuntimeError, match="waits for a value"):
        observed_traits(WaitsForNumbers, device="meta")


class EverySecondCall(Net):
    calls = 0

    def prepare(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x

    def call_block(self, number: int, x: Tensor) -> Tensor:
        return super().call_block(number, x) if number != 2 or self.calls % 2 else x


class SkipsInLaterCalls(EverySecondCall):
    """Stops using a block after some calls."""

    def call_block(self, number: int, x: Tensor) -> Tensor:
        return Net.call_block(self, number, x) if number != 2 or self.calls < 3 else x


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_that_counts_its_calls_is_called_again(device: str) -> None:
    for net in (EverySecondCall, SkipsInLaterCalls):
        traits = observed_traits(net, device=device)
        assert traits == {Trait.VARIES_BY_CALL: ("blocks.2",)}
        assert refusing_strategies(traits) == {"ddp", "pipeline"}


class Thaws(Net):
    def prepare(self, x: Tensor) -> Tensor:
        self.inp.requires_grad_(bool(x.sum() > -100))
        return x


ONCE_PER_STEP = [
    (EverySecondCall, "blocks.2 is used in some calls"),
    (MomentumCopy, "forward changes target.weight"),
    (RunningMean, "forward changes mean"),
    (Thaws, "forward changes requires_grad of inp.weight"),
    (_with_hook_after_accumulation(_do_nothing), "blocks.1.up.weight has a hook"),
    (ClampsItsActivation, "the model puts a hook"),
]
"""Models that one device trains in one piece, and what refuses them in micro-batches."""


def require_kept_by_single(make: Any, *, micro_batches: int) -> None:
    """Check whether one device keeps what a model does in several micro-batches per step."""
    observations = [Observation(trait, names) for trait, names in observed_traits(make).items()]
    require_kept(
        choose("single", 1),
        registry.records("single"),
        Options(),
        observations,
        [],
        micro_batches=micro_batches,
    )


@pytest.mark.parametrize(("net", "sentence"), ONCE_PER_STEP)
def test_changes_once_per_step_are_not_made_in_micro_batches(net: Any, sentence: str) -> None:
    require_kept_by_single(net, micro_batches=1)
    pattern = rf"{sentence}.* the 4 micro-batches of a step .*leave train.micro_batch_size"
    with pytest.raises(LayoutError, match=pattern):
        require_kept_by_single(net, micro_batches=4)


@pytest.mark.parametrize("net", [Clamped, ClampedData, Buffer])
def test_changes_that_do_not_depend_on_their_number_may_be_repeated(net: Any) -> None:
    require_kept_by_single(net, micro_batches=4)


class Unused(Net):
    def change(self) -> None:
        self.extra = nn.Linear(WIDTH, WIDTH)


class Swaps(Net):
    def prepare(self, x: Tensor) -> Tensor:
        self.out.weight = nn.Parameter(self.out.weight.detach() * 0.5)
        return x


class UsedBySample(Net):
    def change(self) -> None:
        self.extra = nn.Linear(WIDTH, WIDTH)

    def prepare(self, x: Tensor) -> Tensor:
        return x + self.extra(x) if x.sum() > 0 else x


def test_ddp_refuses_unused_parameters() -> None:
    traits = observed_traits(Unused)
    assert traits == {Trait.UNUSED_PARAMETERS: ("extra.weight", "extra.bias")}
    assert refusing_strategies(traits) == {"ddp"}


def test_only_tensor_keeps_requires_grad_that_forward_changes() -> None:
    traits = observed_traits(Thaws)
    assert traits == {Trait.CHANGES_REQUIRES_GRAD: ("inp.weight", "inp.bias")}
    assert refusing_strategies(traits) == ALL - {"tensor"}


def test_no_strategy_keeps_parameters_that_forward_replaces() -> None:
    traits = observed_traits(Swaps)
    assert Trait.REPLACES_PARAMETERS in traits
    assert refusing_strategies(traits) == ALL


def test_only_tensor_keeps_parameters_whose_use_depends_on_the_data() -> None:
    traits = observed_traits(UsedBySample)
    assert Trait.PARAMETERS_VARY in traits
    assert Trait.CALLS_VARY not in traits
    assert refusing_strategies(traits) == ALL - {"tensor"}


def test_ddp_keeps_unused_parameters_if_it_searches_for_them() -> None:
    observation = Observation(Trait.PARAMETERS_VARY, ("blocks.2.up.weight",))
    layout = choose("ddp", 2)
    records = registry.records("ddp")
    with pytest.raises(LayoutError, match=r"find_unused_parameters=true"):
        require_kept(layout, records, Options(), [observation], [])
    require_kept(layout, records, Options(find_unused_parameters=True), [observation], [])


LOSS_READS_PARAMETERS = Observation(Trait.LOSS_READS_PARAMETERS, ("out.weight", "out.bias"))
ALTERNATIVES = [registry.find("ddp"), registry.find("fsdp")]


def test_a_refusal_says_what_the_model_does_where_and_what_to_write_instead() -> None:
    layout = choose("pipeline", 2, pp=2)
    records = registry.records("pipeline")
    with pytest.raises(LayoutError) as error:
        require_kept(layout, records, Options(), [LOSS_READS_PARAMETERS], ALTERNATIVES)
    assert str(error.value) == (
        "the loss reads out.weight (and 1 more) outside of the model's forward, and strategy "
        "pipeline cannot train such a model as one device would: write strategy=ddp, or change the "
        "model: for a penalty on all weights there is optimizer.weight_decay"
    )


def test_a_refusal_names_all_parameters_although_a_layout_keeps_some() -> None:
    layout = choose("fsdp", 2)
    records = registry.records("fsdp")
    block_read = Observation(Trait.BLOCK_READ_FROM_OUTSIDE, ("out.bias",))
    observations = [LOSS_READS_PARAMETERS, block_read]
    with pytest.raises(LayoutError, match=r"the loss reads out\.weight \(and 1 more\)"):
        require_kept(layout, records, Options(), observations, ALTERNATIVES)


def test_a_refusal_without_an_alternative_proposes_one_device() -> None:
    layout = choose("pipeline", 2, pp=2)
    records = registry.records("pipeline")
    by_data = Observation(Trait.CHANGES_PARAMETERS_BY_DATA, ("table.weight",))
    with pytest.raises(LayoutError, match="write strategy=single and workers=1"):
        require_kept(layout, records, Options(), [by_data], ALTERNATIVES)
