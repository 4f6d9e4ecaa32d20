"""What a model does that some layouts cannot keep is seen in one step, and refused under these layouts alone."""

from collections.abc import Callable
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
NAMES = ("ddp", "fsdp", "zero1", "hsdp", "tensor", "pipeline")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A chain of blocks; each test changes one thing about it."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(WIDTH, 1)
        self.change()

    def change(self) -> None: ...

    def before(self, x: Tensor) -> Tensor:
        return x

    def between(self, number: int, x: Tensor) -> Tensor:
        return self.blocks[number](x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(self.before(x))
        for number in range(len(self.blocks)):
            x = self.between(number, x)
        return self.out(x)


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch), batch[:, :1])


def _batches(device: str) -> list[Tensor]:
    whole = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).to(device)
    return [whole, whole[:2], whole[2:]]


def seen(net: Callable[[], nn.Module], loss: Any = mean_square, device: str = "cpu") -> dict[Trait, tuple[str, ...]]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        with torch.device(device):
            return net()

    batches = _batches(device)[: 1 if device == "meta" else 3]
    observations = observe(build, find_blocks, loss, batches, torch.manual_seed)
    return {observation.trait: observation.names for observation in observations}


def refusing(traits: Any) -> set[str]:
    """The strategies that refuse a model with these traits."""
    observations = [Observation(trait, ("here",)) for trait in traits]
    refused = set()
    for name in NAMES:
        layout = choose(name, 4, **({"dp_shard": 2} if name == "hsdp" else {}))
        try:
            require_kept(layout, registry.records(name), Options(), observations, [registry.find("ddp")])
        except LayoutError:
            refused.add(name)
    return refused


# --- parameters that the loss reads -----------------------------------------------------------------------------------


def penalty_on_all(model: nn.Module, batch: Any) -> Tensor:
    return mean_square(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())


def penalty_on_one(model: Any, batch: Any) -> Tensor:
    return mean_square(model, batch) + model.out.weight.abs().mean()


def penalty_before(model: Any, batch: Any) -> Tensor:
    reward = model.blocks[1].up.weight.norm()
    return mean_square(model, batch) + reward


def orthogonal(model: Any, batch: Any) -> Tensor:
    weights = dict(model.named_parameters())["blocks.2.down.weight"]
    return mean_square(model, batch) + (weights @ weights.mT).square().mean()


def by_cosine(model: Any, batch: Any) -> Tensor:
    features = model.inp(batch)
    return 1 - F.cosine_similarity(features, model.out.weight).mean() + 0 * mean_square(model, batch)


@pytest.mark.parametrize("loss", [penalty_on_all, penalty_on_one, penalty_before, orthogonal, by_cosine])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_that_the_loss_reads_are_seen(loss: Any, device: str) -> None:
    traits = seen(Net, loss, device)
    assert Trait.LOSS_READS_PARAMETERS in traits
    assert {"tensor", "pipeline"} <= refusing(traits)
    assert "ddp" not in refusing(traits)
    in_block = loss in (penalty_on_all, penalty_before, orthogonal)
    assert ("fsdp" in refusing(traits)) == in_block


class ListsInForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(p.norm() for p in self.blocks.parameters())


class AsksForTypes(Net):
    """What many models do: asks its first parameter for type and device, and makes tensors like others."""

    def forward(self, x: Tensor) -> Tensor:
        first = next(self.parameters())
        mask = torch.zeros_like(self.out.weight)
        return super().forward(x.to(first.dtype).to(first.device)) + mask.sum() + first.dim() - first.numel()


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


def test_a_model_that_goes_through_its_parameters_is_told_from_one_that_asks_for_types() -> None:
    assert Trait.LISTS_PARAMETERS in seen(ListsInForward)
    for net in (Net, AsksForTypes, Tied):
        assert seen(net) == {}, net


# --- parameters that forward changes ----------------------------------------------------------------------------------


class MomentumCopy(Net):
    def change(self) -> None:
        self.target = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def before(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.inp.parameters()):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return x + self.target(x)


class Clamped(Net):
    def before(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.out.weight.clamp_(-0.1, 0.1)
        return x


class ClampedData(Net):
    """As the first implementations of Wasserstein critics did it."""

    def before(self, x: Tensor) -> Tensor:
        self.out.weight.data.clamp_(-0.1, 0.1)
        return x


class Assigned(Net):
    def before(self, x: Tensor) -> Tensor:
        self.blocks[3].up.weight.data = F.normalize(self.blocks[3].up.weight.data)
        return x


class ShrinksItsWeight(Net):
    def between(self, number: int, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.blocks[number].up.weight *= 0.99
        return super().between(number, x)


class RunningMean(Net):
    """A parameter used as a buffer."""

    def change(self) -> None:
        self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def before(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


class ShortRows(Net):
    def change(self) -> None:
        self.table = nn.Embedding(8, WIDTH, max_norm=0.5)

    def before(self, x: Tensor) -> Tensor:
        return x + self.table((x[:, 0] * 3 + 4).long().clamp(0, 7))


class Buffer(Net):
    """A counter in a buffer is nobody's loss."""

    def change(self) -> None:
        self.register_buffer("steps", torch.zeros(()))

    def before(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x


@pytest.mark.parametrize("net", [MomentumCopy, Clamped, ClampedData, Assigned, ShrinksItsWeight])
def test_parameters_that_forward_changes_alike_are_kept_by_replicas_alone(net: Any) -> None:
    traits = seen(net)
    assert Trait.CHANGES_PARAMETERS in traits and Trait.CHANGES_PARAMETERS_BY_DATA not in traits
    assert refusing(traits) == set(NAMES) - {"ddp"}
    assert {Trait.CHANGES_PARAMETERS, Trait.CHANGES_PARAMETERS_BY_DATA} & seen(net, device="meta").keys()


@pytest.mark.parametrize("net", [RunningMean, ShortRows])
def test_parameters_that_forward_changes_by_the_samples_are_kept_by_no_split(net: Any) -> None:
    traits = seen(net)
    assert Trait.CHANGES_PARAMETERS_BY_DATA in traits
    assert refusing(traits) == set(NAMES)


class MeanInABuffer(Net):
    def change(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def before(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Queue(Net):
    """Negatives of earlier batches, as momentum contrast keeps them."""

    def change(self) -> None:
        self.register_buffer("queue", torch.zeros(16, WIDTH))

    def before(self, x: Tensor) -> Tensor:
        x = x + self.queue.mean(0)
        with torch.no_grad():
            self.queue.copy_(torch.cat([x, self.queue])[:16])
        return x


class Normalised(Net):
    """What BatchNorm keeps has a note of its own."""

    def change(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def before(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_buffers_may_be_changed_and_are_told_apart() -> None:
    assert seen(Buffer) == {Trait.CHANGES_BUFFERS: ("steps",)}
    assert seen(MeanInABuffer) == {Trait.CHANGES_BUFFERS_BY_DATA: ("mean",)}
    assert seen(Queue) == {Trait.CHANGES_BUFFERS_BY_DATA: ("queue",)}
    assert seen(Normalised) == {Trait.NORMALISES_OVER_BATCH: ("norm",)}
    assert refusing([Trait.CHANGES_BUFFERS, Trait.CHANGES_BUFFERS_BY_DATA]) == set()


# --- hooks on parameters ----------------------------------------------------------------------------------------------


def _hooked(hook: Any, after: bool = False) -> type[Net]:
    class Hooked(Net):
        def change(self) -> None:
            weight = self.blocks[1].up.weight
            weight.register_post_accumulate_grad_hook(hook) if after else weight.register_hook(hook)

    return Hooked


MASK = torch.arange(16).remainder(2).float().unsqueeze(1)


def _nothing(_: Tensor) -> None: ...


@pytest.mark.parametrize(
    ("net", "trait", "kept"),
    [
        (_hooked(lambda gradient: gradient * 0.0), Trait.LINEAR_GRADIENT_HOOK, True),
        (_hooked(lambda gradient: gradient * MASK.to(gradient.device)), Trait.LINEAR_GRADIENT_HOOK, True),
        (_hooked(_nothing), Trait.LINEAR_GRADIENT_HOOK, True),
        (_hooked(lambda gradient: gradient.clamp(-1e-3, 1e-3)), Trait.GRADIENT_HOOK, False),
        (_hooked(lambda gradient: gradient / (gradient.norm() + 1e-6)), Trait.GRADIENT_HOOK, False),
        (_hooked(_nothing, after=True), Trait.GRADIENT_HOOK, False),
    ],
)
def test_hooks_on_parameters_are_seen_and_averaged_where_that_is_the_same(net: Any, trait: Trait, kept: bool) -> None:
    traits = seen(net)
    assert traits == {trait: ("blocks.1.up.weight",)}
    assert refusing(traits) == set(NAMES) - ({"ddp"} if kept else set())


class HooksItsActivation(Net):
    factor: Any = staticmethod(lambda gradient: gradient * 0.5)

    def between(self, number: int, x: Tensor) -> Tensor:
        if number == 1 and x.requires_grad:
            x.register_hook(self.factor)
        return super().between(number, x)


class ClampsItsActivation(HooksItsActivation):
    factor = staticmethod(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def _hooked_backward(hook: Any) -> type[Net]:
    class HookedBackward(Net):
        def change(self) -> None:
            self.blocks[2].register_full_backward_hook(hook)

    return HookedBackward


def test_hooks_on_activations_are_seen_where_they_depend_on_the_batch() -> None:
    assert seen(HooksItsActivation) == {}
    traits = seen(ClampsItsActivation)
    assert traits == {Trait.ACTIVATION_HOOK: ("the model",)}
    assert refusing(traits) == set(NAMES) - {"tensor"}


def test_hooks_on_the_backward_of_a_module_are_seen() -> None:
    halved = seen(_hooked_backward(lambda module, inward, outward: (inward[0] * 0.5,)))
    assert halved == {Trait.BACKWARD_HOOK: ("blocks.2",)}
    assert refusing(halved) == {"pipeline"}
    clamped = seen(_hooked_backward(lambda module, inward, outward: (inward[0].clamp(-1e-3, 1e-3),)))
    assert clamped == {Trait.BACKWARD_HOOK: ("blocks.2",), Trait.ACTIVATION_HOOK: ("blocks.2",)}
    assert refusing(clamped) == set(NAMES) - {"tensor"}


# --- gradients that do not come back, or are taken in the loss --------------------------------------------------------


class Detached(Net):
    def between(self, number: int, x: Tensor) -> Tensor:
        return super().between(number, x.detach() if number == 2 else x)


class DetachedData(Net):
    def between(self, number: int, x: Tensor) -> Tensor:
        return super().between(number, x.data if number == 2 else x)


class StraightThrough(Net):
    """Rounds in forward; the gradient comes back all the same."""

    def between(self, number: int, x: Tensor) -> Tensor:
        x = super().between(number, x)
        return x + (x.round() - x).detach()


def test_a_cut_graph_is_seen() -> None:
    for net in (Detached, DetachedData):
        traits = seen(net)
        assert traits[Trait.CUTS_GRAPH] == ("blocks.0", "blocks.1")
        assert traits.keys() == {Trait.CUTS_GRAPH, Trait.UNUSED_PARAMETERS}
        assert refusing(traits) == {"ddp", "pipeline"}
    assert seen(StraightThrough) == {}


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
    traits = seen(Net, loss)
    assert Trait.GRADIENT_IN_LOSS in traits
    assert refusing(traits) == set(NAMES) - {"ddp"}


def with_its_parameters(model: Any, batch: Any) -> Tensor:
    predicted = torch.func.functional_call(model, dict(model.named_parameters()), (batch,))
    return F.mse_loss(predicted, batch[:, :1])


def test_a_model_that_is_called_with_given_parameters_is_not_copied_or_cut() -> None:
    assert seen(Net, with_its_parameters) == {Trait.FUNCTIONAL_CALL: ("the model",)}
    observations = [Observation(Trait.FUNCTIONAL_CALL, ("the model",))]
    with pytest.raises(LayoutError, match=r"by torch\.func\.functional_call.* strategy dp .*write strategy=ddp"):
        require_kept(choose("dp", 1), registry.records("dp"), Options(), observations, [registry.find("ddp")])
    assert refusing([Trait.FUNCTIONAL_CALL]) == {name for name in NAMES if "pipeline" in name}


# --- blocks that change their input, or are not called every time -----------------------------------------------------


class AddsToItsInput(Net):
    def change(self) -> None:
        for block in self.blocks:
            block.forward = lambda x, block=block: x.add_(block.down(F.gelu(block.up(block.norm(x.clone())))))


class AddsToItsKeyword(AddsToItsInput):
    def between(self, number: int, x: Tensor) -> Tensor:
        return self.blocks[number](x=x)


class BeginsWithReLU(Net):
    def change(self) -> None:
        for block in self.blocks:
            block.norm = nn.ReLU(inplace=True)


class Recomputes(Net):
    """Its blocks run a second time in backward."""

    def between(self, number: int, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[number], x, use_reentrant=False)


def test_blocks_that_change_their_input_are_seen_and_not_recomputed() -> None:
    for net in (AddsToItsInput, AddsToItsKeyword, BeginsWithReLU):
        traits = seen(net)
        assert traits == {Trait.CHANGES_INPUT: tuple(f"blocks.{i}" for i in range(4))}
        assert refusing(traits) == {"fsdp", "zero1", "hsdp", "pipeline"}
    assert seen(Recomputes) == {}
    observation = Observation(Trait.CHANGES_INPUT, ("blocks.1",))
    layout, options = choose("ddp", 2), Options(activation_checkpointing="full")
    with pytest.raises(LayoutError, match=r"blocks\.1 changes its input.*write train\.activation_checkpointing=none"):
        require_kept(layout, registry.records("ddp"), options, [observation], [])
    power_iteration = Observation(Trait.CHANGES_BUFFERS, ("blocks.0.up.parametrizations.weight.0._u",))
    with pytest.raises(LayoutError, match=r"changes the buffer .*_u.*write train\.activation_checkpointing=none"):
        require_kept(layout, registry.records("ddp"), options, [power_iteration], [])


class ScalesItsBatch(nn.Module):
    """Without blocks all of it is recomputed, from a batch that has been changed."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inp(x.mul_(0.5))))


class ScalesItsMask(Net):
    def change(self) -> None:
        self.mask = torch.ones(1)
        for block in self.blocks:
            block.forward = lambda x, mask, block=block: x + block.down(block.up(x)) * mask.mul_(0.5).clone()

    def between(self, number: int, x: Tensor) -> Tensor:
        return self.blocks[number](x, mask=self.mask)


class TakesOtherTypes(Net):
    """Blocks that are given what is no floating-point number."""

    def change(self) -> None:
        for block in self.blocks:
            block.forward = lambda x, mask, turn, block=block: (
                x + block.down(block.up(block.norm(x))) * mask.any() * turn.real
            )

    def between(self, number: int, x: Tensor) -> Tensor:
        return self.blocks[number](x, torch.ones(2, dtype=torch.bool), torch.ones(1, dtype=torch.cfloat))


def test_blocks_may_be_given_any_type() -> None:
    assert seen(TakesOtherTypes) == {}


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


@pytest.mark.parametrize(("net", "where"), [(CountsInside, "the model"), (BlocksCount, "blocks.1")])
def test_what_answers_otherwise_when_it_is_called_again_is_not_recomputed(net: Any, where: str) -> None:
    traits = seen(net)
    assert traits[Trait.OUTPUT_VARIES_BY_CALL] == (where,)
    assert refusing([Trait.OUTPUT_VARIES_BY_CALL]) == set()
    observations = [Observation(Trait.OUTPUT_VARIES_BY_CALL, (where,))]
    with pytest.raises(LayoutError, match=rf"{where} puts out other.*write train\.activation_checkpointing=none"):
        recomputing = Options(activation_checkpointing="full")
        require_kept(choose("ddp", 2), registry.records("ddp"), recomputing, observations, [])


@pytest.mark.parametrize(("net", "where"), [(ScalesItsBatch, "the model"), (ScalesItsMask, "blocks.0")])
def test_what_changes_the_data_it_is_given_is_not_recomputed(net: Any, where: str) -> None:
    traits = seen(net, lambda model, batch: model(batch.clone()).square().mean())
    assert traits[Trait.CHANGES_DATA][0] == where
    assert refusing([Trait.CHANGES_DATA]) == set()
    observations = [Observation(Trait.CHANGES_DATA, traits[Trait.CHANGES_DATA])]
    with pytest.raises(LayoutError, match=rf"{where} .*changes in place.*write train\.activation_checkpointing=none"):
        recomputing = Options(activation_checkpointing="full")
        require_kept(choose("ddp", 2), registry.records("ddp"), recomputing, observations, [])


class AddsBetween(Net):
    def between(self, number: int, x: Tensor) -> Tensor:
        x = super().between(number, x)
        x += 1
        return x


class ReentrantCheckpoint(Net):
    def between(self, number: int, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[number], x, use_reentrant=True)


class TiedReentrantCheckpoints(ReentrantCheckpoint):
    def change(self) -> None:
        self.blocks[3].up.weight = self.blocks[0].up.weight


class LooksBackWithoutGradients(Net):
    """A block that also runs without gradients, as a teacher does, and never again for them."""

    def between(self, number: int, x: Tensor) -> Tensor:
        with torch.no_grad():
            before = super().between(number, x) + super().between(number, x)
        return super().between(number, x) + before


class LeavesALoss(Net):
    """Nothing but what a block has left in an attribute gives it a gradient."""

    def between(self, number: int, x: Tensor) -> Tensor:
        block: Any = self.blocks[number]
        if number == 1:
            block.forward = lambda x: self.left(block, x)
        return super().between(number, x.detach() if number == 2 else x)

    def left(self, block: Any, x: Tensor) -> Tensor:
        y = block.down(block.up(x))
        block.aux = y.square().mean()
        return x + y


class FrozenStart(Net):
    """Blocks that are not trained may run without gradients."""

    def between(self, number: int, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(number > 0 and torch.is_grad_enabled()):
            return super().between(number, x)

    def change(self) -> None:
        self.inp.requires_grad_(False)
        self.blocks[0].requires_grad_(False)


def test_what_happens_to_outputs_between_blocks_is_seen() -> None:
    assert seen(AddsBetween).keys() == {Trait.CHANGES_OUTPUT}
    assert seen(ReentrantCheckpoint).keys() == {Trait.RUNS_WITHOUT_GRADIENT}
    assert seen(FrozenStart) == {}
    assert refusing(seen(AddsBetween)) == refusing(seen(ReentrantCheckpoint)) == {"pipeline"}
    assert refusing(seen(TiedReentrantCheckpoints)) == {"pipeline", "ddp"}
    assert seen(TiedReentrantCheckpoints)[Trait.USED_BY_REENTRANT_CHECKPOINTS] == ("blocks.0.up.weight",)
    assert seen(LooksBackWithoutGradients) == {}


def test_gradients_that_pass_a_block_s_output_by_are_seen() -> None:
    traits = seen(LeavesALoss, lambda model, batch: mean_square(model, batch) + model.blocks[1].aux)
    assert traits[Trait.GRADIENT_PAST_OUTPUT] == ("blocks.1",)
    assert {"fsdp", "zero1", "hsdp"} <= refusing(traits)
    assert Trait.GRADIENT_PAST_OUTPUT not in seen(Detached)


class Recurs(Net):
    def change(self) -> None:
        for block in self.blocks:
            block.up = nn.GRU(WIDTH, 16)
            block.forward = lambda x, block=block: x + block.down(block.up(block.norm(x))[0])


class RecursByStep(Net):
    def change(self) -> None:
        for block in self.blocks:
            block.up = nn.GRUCell(WIDTH, 16)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("net", [Recurs, RecursByStep])
def test_recurrent_layers_are_not_recomputed_selectively(net: Any, mode: str) -> None:
    traits = seen(net)
    assert traits.keys() == {Trait.RECURRENT} and refusing(traits) == set()
    observations = [Observation(trait, names) for trait, names in traits.items()]
    layout, options = choose("ddp", 2), Options(activation_checkpointing=mode)
    if mode == "full":
        require_kept(layout, registry.records("ddp"), options, observations, [])
        return
    with pytest.raises(LayoutError, match=r"blocks\.0\.up .*recurrent.*: write train\.activation_checkpointing=full$"):
        require_kept(layout, registry.records("ddp"), options, observations, [])


def test_a_step_with_two_backwards_is_not_recomputed_selectively() -> None:
    observation = Observation(Trait.GRADIENT_IN_LOSS, ("the loss",))
    layout = choose("ddp", 2)
    require_kept(layout, registry.records("ddp"), Options(activation_checkpointing="full"), [observation], [])
    with pytest.raises(LayoutError, match=r"takes a gradient .*: write train\.activation_checkpointing=full$"):
        selective = Options(activation_checkpointing="selective")
        require_kept(layout, registry.records("ddp"), selective, [observation], [])


class SkipsBySample(Net):
    def between(self, number: int, x: Tensor) -> Tensor:
        return super().between(number, x) if number != 2 or x.sum() > 0 else x


class DropsLayers(Net):
    def between(self, number: int, x: Tensor) -> Tensor:
        return super().between(number, x) if torch.rand(()) > 0.5 else x


class SeldomDropsLayers(Net):
    """As LayerDrop and stochastic depth do by default: a few batches show nothing of it."""

    def between(self, number: int, x: Tensor) -> Tensor:
        return super().between(number, x) if torch.rand([]) > 1e-4 else x


class OrderBySample(Net):
    def before(self, x: Tensor) -> Tensor:
        self.backwards = bool(x.sum() > 0)
        return x

    def between(self, number: int, x: Tensor) -> Tensor:
        return super().between(3 - number if self.backwards else number, x)


def test_ways_through_the_model_that_differ_are_seen() -> None:
    for net in (SkipsBySample, DropsLayers, SeldomDropsLayers):
        traits = seen(net)
        assert {Trait.CALLS_VARY, Trait.PARAMETERS_VARY} <= traits.keys()
        assert refusing(traits) == set(NAMES) - {"tensor"}
    assert Trait.PARAMETERS_VARY not in seen(OrderBySample)
    assert refusing(seen(OrderBySample)) == {"fsdp", "zero1", "hsdp", "pipeline"}


class SkipsIf(Net):
    """None of the batches here decides otherwise than the others."""

    def decides(self, x: Tensor) -> Any: ...

    def between(self, number: int, x: Tensor) -> Tensor:
        return x if number == 2 and self.decides(x) else super().between(number, x)


def _skips_if(decides: Any) -> type[SkipsIf]:
    class Skips(SkipsIf):
        pass

    Skips.decides = lambda self, x: decides(x)  # type: ignore[method-assign]
    return Skips


RARE: dict[str, Callable[[Tensor], Any]] = {
    "bool": lambda x: x.abs().max() > 100,
    "item": lambda x: x.abs().max().item() > 100,
    "float": lambda x: float(x.mean()) < -100,
    "int": lambda x: int(x.abs().max() > 100),
    "index": lambda x: [False, True][(x.abs().max() > 100).long()],
    "contains": lambda x: 12345.0 in x,
    "allclose": lambda x: torch.allclose(x, torch.zeros_like(x)),
}


@pytest.mark.parametrize("decides", RARE.values(), ids=RARE.keys())
def test_a_branch_on_data_is_seen_where_all_samples_take_it_alike(decides: Any) -> None:
    net = _skips_if(decides)
    traits = seen(net)
    assert {Trait.CALLS_VARY, Trait.PARAMETERS_VARY, Trait.BRANCHES_ON_DATA} <= traits.keys()
    assert traits[Trait.CALLS_VARY] == ("blocks.2",)
    assert refusing(traits) == set(NAMES) - {"tensor"}
    assert Trait.CALLS_VARY in seen(net, device="meta")


def _checks(x: Tensor) -> bool:
    if not x.isfinite().all():
        raise ValueError("not finite")
    return False


NO_BRANCH: dict[str, Callable[[Tensor], Any]] = {
    "a layer that is never dropped": lambda x: torch.rand(()) < 0.0,
    "a layer that is always dropped": lambda x: torch.rand(()) >= 1.0,
    "a check that raises": _checks,
    "a number that is not the batch's": lambda x: torch.ones(3, device="cpu").sum() > 100,
}


@pytest.mark.parametrize("decides", NO_BRANCH.values(), ids=NO_BRANCH.keys())
def test_what_no_batch_can_decide_is_no_branch(decides: Any) -> None:
    assert seen(_skips_if(decides)) == {}


class LogsItsNorm(Net):
    """Asks for a number and does the same whatever it is."""

    def before(self, x: Tensor) -> Tensor:
        self.norm = x.norm().item()
        return x if bool((x > 0).any()) else x * 1.0


class WaitsForNumbers(Net):
    """A loop that does not end without numbers."""

    def before(self, x: Tensor) -> Tensor:
        while not bool(x.norm() < 1):
            x = x / 2
        return x


def test_numbers_that_decide_nothing_are_no_branch() -> None:
    for net in (LogsItsNorm, WaitsForNumbers):
        assert seen(net) == {}
    assert seen(LogsItsNorm, device="meta") == {}
    with pytest.raises(RuntimeError, match="waits for numbers"):
        seen(WaitsForNumbers, device="meta")


class EverySecondCall(Net):
    calls = 0

    def before(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x

    def between(self, number: int, x: Tensor) -> Tensor:
        return super().between(number, x) if number != 2 or self.calls % 2 else x


class LaterOtherwise(EverySecondCall):
    """An expert that the first calls do not use."""

    def between(self, number: int, x: Tensor) -> Tensor:
        return Net.between(self, number, x) if number != 2 or self.calls < 3 else x


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_that_counts_its_calls_is_called_again(device: str) -> None:
    for net in (EverySecondCall, LaterOtherwise):
        traits = seen(net, device=device)
        assert traits == {Trait.VARIES_BY_CALL: ("blocks.2",)}
        assert refusing(traits) == {"ddp", "pipeline"}


class Thaws(Net):
    def before(self, x: Tensor) -> Tensor:
        self.inp.requires_grad_(bool(x.sum() > -100))
        return x


ONCE_A_STEP = [
    (EverySecondCall, "blocks.2 is used in some calls"),
    (MomentumCopy, "forward changes target.weight"),
    (RunningMean, "forward changes mean"),
    (Thaws, "forward changes requires_grad of inp.weight"),
    (_hooked(_nothing, after=True), "blocks.1.up.weight has a hook"),
    (ClampsItsActivation, "the model puts a hook"),
]
"""On one device in one piece all of it is trained."""


@pytest.mark.parametrize(("net", "sentence"), ONCE_A_STEP)
def test_what_happens_once_a_step_is_not_done_in_micro_batches(net: Any, sentence: str) -> None:
    observations = [Observation(trait, names) for trait, names in seen(net).items()]
    single = choose("single", 1), registry.records("single"), Options(), observations, []
    require_kept(*single)
    with pytest.raises(
        LayoutError, match=rf"{sentence}.* the 4 micro-batches of a step .*leave train.micro_batch_size"
    ):
        require_kept(*single, micro_batches=4)


@pytest.mark.parametrize("net", [Clamped, ClampedData, Buffer])
def test_what_is_kept_within_bounds_may_be_done_in_micro_batches(net: Any) -> None:
    observations = [Observation(trait, names) for trait, names in seen(net).items()]
    require_kept(choose("single", 1), registry.records("single"), Options(), observations, [], micro_batches=4)


class Unused(Net):
    def change(self) -> None:
        self.extra = nn.Linear(WIDTH, WIDTH)


class Swaps(Net):
    def before(self, x: Tensor) -> Tensor:
        self.out.weight = nn.Parameter(self.out.weight.detach() * 0.5)
        return x


class UsedBySample(Net):
    def change(self) -> None:
        self.extra = nn.Linear(WIDTH, WIDTH)

    def before(self, x: Tensor) -> Tensor:
        return x + self.extra(x) if x.sum() > 0 else x


def test_parameters_that_are_not_always_trained_are_seen() -> None:
    assert seen(Unused) == {Trait.UNUSED_PARAMETERS: ("extra.weight", "extra.bias")}
    assert refusing(seen(Unused)) == {"ddp"}
    assert seen(Thaws) == {Trait.CHANGES_REQUIRES_GRAD: ("inp.weight", "inp.bias")}
    assert refusing(seen(Thaws)) == set(NAMES) - {"tensor"}
    assert Trait.REPLACES_PARAMETERS in seen(Swaps)
    assert refusing(seen(Swaps)) == set(NAMES)
    assert Trait.PARAMETERS_VARY in seen(UsedBySample) and Trait.CALLS_VARY not in seen(UsedBySample)
    assert refusing(seen(UsedBySample)) == set(NAMES) - {"tensor"}


def test_ddp_may_leave_parameters_out_where_it_is_told_so() -> None:
    observation = Observation(Trait.PARAMETERS_VARY, ("blocks.2.up.weight",))
    layout, records = choose("ddp", 2), registry.records("ddp")
    with pytest.raises(LayoutError, match=r"find_unused_parameters=true"):
        require_kept(layout, records, Options(), [observation], [])
    require_kept(layout, records, Options(find_unused_parameters=True), [observation], [])


def test_the_sentence_says_what_where_and_what_to_write() -> None:
    observation = Observation(Trait.LOSS_READS_PARAMETERS, ("out.weight", "out.bias"))
    layout, records = choose("pipeline", 2, pp=2), registry.records("pipeline")
    alternatives = [registry.find("ddp"), registry.find("fsdp")]
    with pytest.raises(LayoutError) as error:
        require_kept(layout, records, Options(), [observation], alternatives)
    assert str(error.value) == (
        "the loss reads out.weight (and 1 more) outside of the model's forward, and strategy pipeline cannot train "
        "such a model as one device would: write strategy=ddp, or change the model: for a penalty on all weights "
        "there is optimizer.weight_decay"
    )
    block_read = Observation(Trait.BLOCK_READ_FROM_OUTSIDE, ("out.bias",))
    with pytest.raises(LayoutError, match=r"the loss reads out\.weight \(and 1 more\)"):
        require_kept(choose("fsdp", 2), registry.records("fsdp"), Options(), [observation, block_read], alternatives)
    by_data = Observation(Trait.CHANGES_PARAMETERS_BY_DATA, ("table.weight",))
    with pytest.raises(LayoutError, match="write strategy=single and workers=1"):
        require_kept(layout, records, Options(), [by_data], alternatives)
