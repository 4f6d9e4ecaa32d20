"""A grammar of small models as users write them, drawn by a seed and printed as Python.

A model is a choice on each of several axes (what a block is, what holds the blocks, how they are
called, which hooks there are, what the loss reads, …). Each choice, a `Feature`, adds lines to one
template, so that the text that is shown is the text that was trained. A failing model is shrunk by
replacing features by the plain choice of their axis.

Placeholders in the lines: BLOCKS iterates over the blocks, CALL calls one (`block` with `x`), STEP
is the line that computes the next `x`, ANSWER is what the model predicts, CRITERION is the plain
loss of PREDICTION (`predicted`), and AGAIN calls the model a second time.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

VECTOR = "vector"
TOKENS = "tokens"
IMAGE = "image"
ANY = (VECTOR, TOKENS, IMAGE)
FLAT = (VECTOR, TOKENS)
"""Domains whose features are the last dimension."""


LEFT_BY_LAST_CALL = frozenset({"recording_hook", "set_on_blocks"})
"""Features whose loss reads what the last call of a block has left, of the samples in that call."""


@dataclass(frozen=True)
class Feature:
    """One choice on one axis.

    Args:
        lines: Code by slot of the template. It is added to the slot or, for those in `ONE_OF`,
            replaces its content.
        domains: The domains in which it makes sense.
        needs: Names of features of which one must be chosen too.
        config: Values of the configuration by dotted key.
        random: Whether results depend on how the batch is split, as with dropout, so that no
            layout which splits it can be equal.
        couples: Whether samples of a batch depend on one another, so that a layout which splits
            the batch may note this.
        weighs_items: Whether parts of a batch are weighted by items. A mean over rows, which other
            features add to the loss, then couples samples too.
        counts: Whether results depend on the number of calls, so that a layout with micro-batches
            may note this.
        weight: How often it is drawn, relative to the others of its axis.
    """

    lines: dict[str, str] = field(default_factory=dict)
    domains: tuple[str, ...] = ANY
    needs: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    random: bool = False
    couples: bool = False
    weighs_items: bool = False
    counts: bool = False
    weight: float = 1.0


Axis = dict[str, Feature]

ONE_OF = ("stem", "enter", "head", "answer", "data", "criterion", "predict", "body", "body_init")
ONE_OF += ("returns", "arguments", "container", "iterate", "call", "step", "loop", "give", "read")
ONE_OF += ("build",)
"""Slots whose content is that of the last feature which has them; in others, lines are appended."""

PREAMBLE = """
import contextlib
import copy
import dataclasses
import random
import typing

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from app.tasks import Task
from strategies.context.apply import ContextPlan
"""

# --- what is trained on ---------------------------------------------------------------------------

DOMAIN: Axis = {
    VECTOR: Feature(
        {
            "stem": "self.inp = nn.Linear(8, 8)",
            "enter": "x = self.inp(x)",
            "head": "self.out = nn.Linear(8, 1)",
            "answer": "self.out(x)",
            "data": (
                "return TensorDataset(torch.randn(32, 8, generator=g), torch.randn(32, 1, "
                "generator=g))"
            ),
            "criterion": "F.mse_loss(PREDICTION, y)",
        }
    ),
    TOKENS: Feature(
        {
            "stem": "self.inp = nn.Embedding(16, 8)",
            "enter": "x = self.inp(x)",
            "head": "self.out = nn.Linear(8, 16)",
            "answer": "self.out(x)",
            "data": "return TensorDataset(*torch.randint(0, 16, (2, 32, 6), generator=g))",
            "criterion": "F.cross_entropy(PREDICTION.flatten(0, 1), y.flatten())",
        },
        domains=(TOKENS,),
    ),
    IMAGE: Feature(
        {
            "stem": "self.inp = nn.Conv2d(3, 8, 3, padding=1)",
            "enter": "x = self.inp(x)",
            "head": "self.out = nn.Linear(8, 5)",
            "answer": "self.out(x.mean((2, 3)))",
            "data": (
                "return TensorDataset(torch.randn(32, 3, 5, 5, generator=g), "
                "torch.randint(0, 5, (32,), generator=g))"
            ),
            "criterion": "F.cross_entropy(PREDICTION, y)",
            "body_init": "self.conv = nn.Conv2d(8, 8, 3, padding=1)",
            "body": "F.gelu(self.conv(x))",
        },
        domains=(IMAGE,),
    ),
}

# --- a block --------------------------------------------------------------------------------------


def _block(init: str, body: str, domains: tuple[str, ...] = FLAT, **options: Any) -> Feature:
    return Feature({"body_init": init, "body": body}, domains=domains, **options)


_NO_POSITIONS = "def context_plan(self, model):\n    return ContextPlan(lambda places: {})"
BLOCK: Axis = {
    "mlp": _block(
        "self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)",
        "self.down(F.gelu(self.up(self.norm(x))))",
    ),
    "linear": _block("self.up = nn.Linear(8, 8)", "torch.tanh(self.up(x))", weight=2),
    "no_bias": _block("self.up = nn.Linear(8, 8, bias=False)", "torch.tanh(self.up(x))"),
    "rms_norm": _block(
        "self.norm, self.up = nn.RMSNorm(8), nn.Linear(8, 8)", "self.up(self.norm(x))"
    ),
    "group_norm": _block(
        "self.norm, self.up = nn.GroupNorm(2, 8), nn.Linear(8, 8)",
        "self.up(self.norm(x))",
        domains=(VECTOR,),
    ),
    "batch_norm": _block(
        "self.norm, self.up = nn.BatchNorm1d(8), nn.Linear(8, 8)",
        "self.up(self.norm(x))",
        domains=(VECTOR,),
        couples=True,
    ),
    "instance_norm": _block(
        "self.norm, self.up = nn.InstanceNorm1d(8, affine=True), nn.Linear(8, 8)",
        "self.up(self.norm(x.transpose(1, 2)).transpose(1, 2))",
        domains=(TOKENS,),
    ),
    "bilinear": _block("self.pair = nn.Bilinear(8, 8, 8)", "torch.tanh(self.pair(x, x))"),
    "bare": _block(
        "self.w = nn.Parameter(0.1 * torch.randn(8, 8))", "torch.tanh(x @ self.w)", weight=2
    ),
    "parameter_list": _block(
        "self.w = nn.ParameterList(0.1 * torch.randn(8, 8) for _ in range(2))",
        "torch.tanh(x @ self.w[0]) @ self.w[1]",
    ),
    "parameter_dict": _block(
        "self.w = nn.ParameterDict({'a': 0.1 * torch.randn(8, 8), 'b': torch.zeros(8)})",
        "torch.tanh(x @ self.w['a'] + self.w['b'])",
    ),
    "strided": _block(
        "self.w = nn.Parameter(0.1 * torch.randn(8, 8).t())", "torch.tanh(x @ self.w)"
    ),
    "expanded": _block(
        "self.w = nn.Parameter(torch.randn(1, 8).expand(8, 8).clone()[::2])",
        "torch.tanh(x @ self.w.t() @ self.w)",
    ),
    "scalar": _block(
        "self.gain, self.up = nn.Parameter(torch.tensor(0.5)), nn.Linear(8, 8)",
        "self.gain * self.up(x)",
    ),
    "empty": _block(
        "self.none, self.up = nn.Parameter(torch.empty(0, 8)), nn.Linear(8, 8)",
        "torch.tanh(self.up(x)) + self.none.sum()",
    ),
    "complex": _block(
        "self.w = nn.Parameter(0.1 * torch.randn(8, 8, dtype=torch.cfloat))",
        "(x.to(torch.cfloat) @ self.w).abs()",
    ),
    "complex_linear": _block(
        "self.w = nn.Linear(8, 8, dtype=torch.cfloat)",
        "self.w(x.to(torch.cfloat)).real",
        weight=0.5,
    ),
    "fourier": _block(
        "self.w = nn.Parameter(torch.randn(5, 2))",
        "torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.w), n=8)",
    ),
    "lazy": _block("self.up = nn.LazyLinear(8)", "torch.tanh(self.up(x))"),
    "old_weight_norm": _block(
        "self.up = nn.utils.weight_norm(nn.Linear(8, 8))", "torch.tanh(self.up(x))"
    ),
    "weight_norm": _block(
        "self.up = parametrizations.weight_norm(nn.Linear(8, 8))", "torch.tanh(self.up(x))"
    ),
    "old_spectral_norm": _block(
        "self.up = nn.utils.spectral_norm(nn.Linear(8, 8))", "torch.tanh(self.up(x))", counts=True
    ),
    "spectral_norm": _block(
        "self.up = parametrizations.spectral_norm(nn.Linear(8, 8))",
        "torch.tanh(self.up(x))",
        counts=True,
    ),
    "orthogonal": _block(
        "self.up = parametrizations.orthogonal(nn.Linear(8, 8))", "torch.tanh(self.up(x))"
    ),
    "tied_inside": _block(
        ("self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)\nself.b.weight = self.a.weight"),
        "self.b(F.gelu(self.a(x)))",
    ),
    "used_as_data": _block(
        "self.up = nn.Linear(8, 12)", "F.gelu(self.up(x)) @ self.up.weight", weight=2
    ),
    "routed": _block(
        (
            "self.gate = nn.Linear(8, 2)\n"
            "self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))"
        ),
        (
            "sum(e(x) * (self.gate(x).argmax(-1, keepdim=True) == i) for i, e "
            "in enumerate(self.experts))"
        ),
    ),
    "unused_expert": _block(
        "self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))",
        "self.experts[int(x.sum() > 0)](x)",
        couples=True,
    ),
    "buffer": _block(
        "self.up = nn.Linear(8, 8)\nself.register_buffer('scale', torch.linspace(0.5, 1.5, 8))",
        "self.up(x) * self.scale",
    ),
    "hidden_buffer": _block(
        (
            "self.up = nn.Linear(8, 8)\n"
            "self.register_buffer('scale', torch.linspace(0.5, 1.5, 8), persistent=False)"
        ),
        "self.up(x) * self.scale",
    ),
    "plain_tensor": _block(
        "self.up, self.scale = nn.Linear(8, 8), torch.randn(8)", "self.up(x) * self.scale"
    ),
    "listed_tensors": _block(
        "self.up, self.scale = nn.Linear(8, 8), [torch.randn(8)]", "self.up(x) * self.scale[0]"
    ),
    "in_a_list": _block(
        ("self.up = [nn.Parameter(torch.zeros(8))]\nself.w = nn.Linear(8, 8)"),
        "self.w(x) + self.up[0]",
    ),
    "lambda": _block(
        ("self.up = nn.Linear(8, 8)\nself.run = lambda x: torch.tanh(self.up(x))"),
        "self.run(x)",
        weight=0.5,
    ),
    "no_parameters": _block("self.act = nn.Tanh()", "self.act(x)", weight=0.5),
    "rnn": _block("self.rnn = nn.RNN(8, 8, batch_first=True)", "self.rnn(x)[0]", domains=(TOKENS,)),
    "lstm": _block(
        "self.rnn = nn.LSTM(8, 8, batch_first=True)", "self.rnn(x)[0]", domains=(TOKENS,)
    ),
    "gru": _block(
        "self.rnn = nn.GRU(8, 4, batch_first=True, bidirectional=True)",
        "self.rnn(x)[0]",
        domains=(TOKENS,),
    ),
    "lstm_projected": _block(
        "self.rnn = nn.LSTM(8, 12, proj_size=8, batch_first=True)",
        "self.rnn(x)[0]",
        domains=(TOKENS,),
    ),
    "gru_cell": _block("self.cell = nn.GRUCell(8, 8)", "self.cell(x)", domains=(VECTOR,)),
    "attention": Feature(
        {
            "body_init": "self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))",
            "body_first": (
                "q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (self.q, "
                "self.k, self.v))"
            ),
            "body": (
                "self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, "
                "2).flatten(2))"
            ),
            "task": _NO_POSITIONS,
        },
        domains=(TOKENS,),
        weight=3,
    ),
    "multihead": _block(
        "self.attend = nn.MultiheadAttention(8, 2, batch_first=True)",
        "self.attend(x, x, x)[0]",
        domains=(TOKENS,),
    ),
    "multihead_kdim": _block(
        (
            "self.attend = nn.MultiheadAttention(8, 2, kdim=8, vdim=8, batch_first=True, "
            "add_bias_kv=True)"
        ),
        "self.attend(x, x, x)[0]",
        domains=(TOKENS,),
    ),
    "encoder_layer": _block(
        "self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)",
        "self.layer(x)",
        domains=(TOKENS,),
    ),
    "decoder_layer": _block(
        "self.layer = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True)",
        "self.layer(x, x)",
        domains=(TOKENS,),
    ),
    "conv1d": _block(
        "self.conv = nn.Conv1d(8, 8, 3, padding=1)",
        "self.conv(x.transpose(1, 2)).transpose(1, 2)",
        domains=(TOKENS,),
    ),
    "shifted": _block(
        "self.up = nn.Linear(8, 8)",
        "self.up(x - F.pad(x, (0, 0, 1, 0))[:, :-1])",
        domains=(TOKENS,),
    ),
    "positions": _block(
        "self.up, self.place = nn.Linear(8, 8), nn.Parameter(0.1 * torch.randn(6, 8))",
        "self.up(x + self.place[:x.shape[1]])",
        domains=(TOKENS,),
    ),
    "conv": _block(
        "self.conv = nn.Conv2d(8, 8, 3, padding=1)",
        "F.gelu(self.conv(x))",
        domains=(IMAGE,),
        weight=2,
    ),
    "conv_group_norm": _block(
        "self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8)",
        "F.gelu(self.norm(self.conv(x)))",
        domains=(IMAGE,),
    ),
    "conv_batch_norm": _block(
        "self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)",
        "F.gelu(self.norm(self.conv(x)))",
        domains=(IMAGE,),
        couples=True,
    ),
    "depthwise": _block(
        "self.deep, self.wide = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1)",
        "self.wide(F.gelu(self.deep(x)))",
        domains=(IMAGE,),
    ),
    "transposed": _block(
        "self.down, self.up = nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 8, 3)",
        "self.up(F.gelu(self.down(x)))",
        domains=(IMAGE,),
    ),
    "channels_last": _block(
        "self.conv = nn.Conv2d(8, 8, 3, padding=1).to(memory_format=torch.channels_last)",
        "F.gelu(self.conv(x))",
        domains=(IMAGE,),
    ),
    "dropout": _block(
        "self.up, self.drop = nn.Linear(8, 8), nn.Dropout(0.2)",
        "self.drop(torch.tanh(self.up(x)))",
        random=True,
    ),
}

_OTHER = """
class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.up(x))
"""

# --- what holds the blocks ------------------------------------------------------------------------

CONTAINER: Axis = {
    "blocks": Feature(
        {
            "container": "self.blocks = nn.ModuleList(Block() for _ in range(4))",
            "iterate": "SELF.blocks",
        },
    ),
    "two_blocks": Feature({"container": "self.blocks = nn.ModuleList(Block() for _ in range(2))"}),
    "layers": Feature(
        {
            "container": "self.layers = nn.ModuleList(Block() for _ in range(4))",
            "iterate": "SELF.layers",
        }
    ),
    "nested": Feature(
        {
            "container": (
                "self.encoder = nn.Module()\n"
                "self.encoder.layers = nn.ModuleList(Block() for _ in range(4))"
            ),
            "iterate": "SELF.encoder.layers",
        }
    ),
    "module_dict": Feature(
        {
            "container": "self.blocks = nn.ModuleDict({f'b{i}': Block() for i in range(4)})",
            "iterate": "SELF.blocks.values()",
        }
    ),
    "sequential": Feature(
        {"container": "self.blocks = nn.Sequential(*(Block() for _ in range(4)))"}
    ),
    "sequential_called": Feature(
        {
            "container": "self.blocks = nn.Sequential(*(Block() for _ in range(4)))",
            "loop": "x = self.blocks(x)",
        }
    ),
    "sequences": Feature(
        {
            "container": (
                "self.blocks = nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(2)))"
            ),
            "iterate": "[block for part in SELF.blocks for block in part]",
        }
    ),
    "attributes": Feature(
        {
            "container": "self.b0, self.b1, self.b2, self.b3 = (Block() for _ in range(4))",
            "iterate": "(SELF.b0, SELF.b1, SELF.b2, SELF.b3)",
        }
    ),
    "shared_block": Feature(
        {
            "container": (
                "first = Block()\nself.blocks = nn.ModuleList([first, Block(), first, Block()])"
            )
        }
    ),
    "mixed_classes": Feature(
        {
            "classes": _OTHER,
            "container": "self.blocks = nn.ModuleList([Block(), Other(), Block(), Other()])",
        },
        domains=FLAT,
    ),
    "tied_blocks": Feature(
        {
            "container": (
                "self.blocks = nn.ModuleList(Block() for _ in range(4))\n"
                "for one, other in zip(self.blocks[0].children(), self.blocks[3].children()):\n"
                "    for name, parameter in one.named_parameters(recurse=False):\n"
                "        setattr(other, name, parameter)"
            )
        }
    ),
}

# --- what a block returns -------------------------------------------------------------------------

_RESULT = """
@dataclasses.dataclass
class Result:
    x: torch.Tensor
    other: torch.Tensor | None = None
"""
_NAMED = """
class Result(typing.NamedTuple):
    x: torch.Tensor
    other: torch.Tensor | None = None
"""
OUTPUT: Axis = {
    "tensor": Feature({"returns": "return x + y", "step": "x = CALL"}),
    "no_residual": Feature({"returns": "return y"}),
    "pair": Feature({"returns": "return x + y, y.mean()", "step": "x, _ = CALL"}),
    "pair_none": Feature({"returns": "return x + y, None", "step": "x, _ = CALL"}),
    "list": Feature({"returns": "return [x + y, y]", "step": "x = CALL[0]"}),
    "dict": Feature({"returns": "return {'x': x + y, 'other': None}", "step": "x = CALL['x']"}),
    "nested_output": Feature({"returns": "return {'x': (x + y, [y])}", "step": "x = CALL['x'][0]"}),
    "dataclass": Feature(
        {"classes": _RESULT, "returns": "return Result(x + y)", "step": "x = CALL.x"}
    ),
    "named_tuple": Feature(
        {"classes": _NAMED, "returns": "return Result(x + y)", "step": "x = CALL.x"}
    ),
    "auxiliary_loss": Feature(
        {
            "returns": "return x + y, y.square().mean()",
            "net_first": "self.aux = 0.0",
            "step": "x, aux = CALL\nself.aux = self.aux + aux",
            "loss": "loss = loss + 0.1 * model.aux",
        }
    ),
    "auxiliary_returned": Feature(
        {
            "returns": "return x + y, y.square().mean()",
            "net_first": "total = 0.0",
            "step": "x, aux = CALL\ntotal = total + aux",
            "give": "return ANSWER, total",
            "read": "predicted, aux = model(x)",
            "predict": "model(x)[0]",
            "loss": "loss = loss + 0.1 * aux",
        }
    ),
    "in_place": Feature(
        {
            "returns": "return kept.add_(y)",
            "body_first": "kept, x = x, x.clone()\n",
            "step": "x = CALL",
        }
    ),
    "in_place_input": Feature({"returns": "x.data.add_(0.1)\nreturn x + y"}),
    "state_passed": Feature(
        {
            "arguments": "x, state",
            "net_first": "state = None",
            "returns": "return x + y, y if state is None else state + y",
            "call": "block(x, state)",
            "step": "x, state = CALL",
            "net_last": "x = x + 0.1 * state",
        }
    ),
}

# --- what the model returns -----------------------------------------------------------------------

GIVES: Axis = {
    "plain_answer": Feature(
        {"give": "return ANSWER", "predict": "model(x)", "read": "predicted = AGAIN"}
    ),
    "answer_pair": Feature({"give": "return ANSWER, x", "predict": "model(x)[0]"}),
    "answer_dict": Feature(
        {"give": "return {'y': ANSWER, 'none': None}", "predict": "model(x)['y']"}
    ),
    "answer_dataclass": Feature(
        {
            "classes": (
                "\n@dataclasses.dataclass\nclass Answer:\n    y: torch.Tensor\n"
                "    hidden: torch.Tensor\n"
            ),
            "give": "return Answer(ANSWER, x)",
            "predict": "model(x).y",
        }
    ),
    "answer_model_output": Feature(
        {
            "classes": (
                "\n@dataclasses.dataclass\nclass Answer(transformers.utils.ModelOutput):\n"
                "    y: torch.Tensor = None\n    hidden: torch.Tensor = None\n"
            ),
            "imports": "import transformers",
            "give": "return Answer(ANSWER, x)",
            "predict": "model(x).y",
        },
        weight=0.5,
    ),
    "hidden_states": Feature(
        {
            "net_first": "seen = []",
            "after_step": "seen.append(x)",
            "give": "return ANSWER, seen",
            "read": "predicted, seen = model(x)",
            "predict": "model(x)[0]",
            "loss": "loss = loss + 0.1 * sum(hidden.square().mean() for hidden in seen)",
        }
    ),
    "keyword": Feature({"predict": "model(x=x)"}),
    "loss_inside": Feature(
        {
            "give": "return ANSWER if target is None else (ANSWER, CRITERION)",
            "net_arguments": ", target=None",
            "read": "_, loss = model(x, y)",
        },
        domains=(VECTOR, IMAGE),
    ),
}

# --- how blocks are called ------------------------------------------------------------------------

_FOR = "for block in BLOCKS:\n    STEP"
CALL: Axis = {
    "in_order": Feature({"loop": _FOR, "call": "block(x)"}),
    "twice": Feature({"loop": "for block in BLOCKS:\n    STEP\n    STEP"}),
    "whole_twice": Feature(
        {"loop": ("for _ in range(2):\n    for block in BLOCKS:\n        STEP")}
    ),
    "reversed": Feature({"loop": "for block in reversed(list(BLOCKS)):\n    STEP"}),
    "skip": Feature({"loop": f"first = x\n{_FOR}\nx = x + first"}),
    "dense": Feature(
        {"loop": ("seen = [x]\nfor block in BLOCKS:\n    STEP\n    seen.append(x)\nx = sum(seen)")}
    ),
    "u_net": Feature(
        {
            "loop": "kept = []\nfor i, block in enumerate(BLOCKS):\n    STEP\n"
            "    x = x + kept.pop() if i > 1 else x\n"
            "    kept.append(x)"
        }
    ),
    "input_again": Feature(
        {"loop": ("start = x\nfor block in BLOCKS:\n    STEP\n    x = x + 0.1 * start")}
    ),
    "stochastic_mean": Feature(
        {"loop": ("for block in BLOCKS:\n    STEP\n    x = x - x.mean(-1, keepdim=True)")}
    ),
    "first_detached": Feature(
        {
            "loop": (
                "for i, block in enumerate(BLOCKS):\n    STEP\n    x = x.detach() if i == 0 else x"
            )
        }
    ),
    "detached": Feature(
        {
            "loop": (
                "for i, block in enumerate(BLOCKS):\n    STEP\n    x = x.detach() if i == 1 else x"
            )
        }
    ),
    "all_detached": Feature({"loop": f"{_FOR}\nx = x.detach()"}),
    "stop_gradient_branch": Feature(
        {"loop": ("for block in BLOCKS:\n    before = x\n    STEP\n    x = x + before.detach()")}
    ),
    "no_grad_part": Feature(
        {
            "loop": (
                "for i, block in enumerate(BLOCKS):\n"
                "    with torch.set_grad_enabled(i > 1):\n        STEP"
            )
        }
    ),
    "no_grad_context": Feature(
        {"enter_last": ("with torch.no_grad():\n    x = x / x.norm().clamp_min(1.0)")}, couples=True
    ),
    "checkpoint": Feature({"call": "checkpoint(block, x, use_reentrant=False)"}),
    "checkpoint_reentrant": Feature({"call": "checkpoint(block, x, use_reentrant=True)"}),
    "method": Feature(
        {"block_methods": ("def run(self, x):\n    return self(x)"), "call": "block.run(x)"}
    ),
    "not_forward": Feature({"forward_name": "encode", "call": "block.encode(x)"}),
    "forward_called": Feature({"call": "block.forward(x)"}),
    "keywords": Feature({"call": "block(x=x)"}),
    "extra_argument": Feature(
        {"arguments": "x, scale", "call": "block(x, 0.5)", "body_last": "y = y * scale"}
    ),
    "extra_tensor": Feature(
        {
            "arguments": "x, mask",
            "net_first": "mask = (x.reshape(len(x), -1)[:, :1] > 0).float()",
            "call": "block(x, mask)",
            "body_last": "y = y * mask.reshape(-1, *[1] * (y.dim() - 1))",
        }
    ),
    "buffer_argument": Feature(
        {
            "arguments": "x, gain",
            "net_init": "self.register_buffer('gain', torch.tensor(0.7))",
            "call": "block(x, self.gain)",
            "body_last": "y = y * gain",
        }
    ),
    "parameter_argument": Feature(
        {
            "arguments": "x, gain",
            "net_init": "self.gain = nn.Parameter(torch.full((1,), 0.7))",
            "call": "block(x, self.gain)",
            "body_last": "y = y * gain",
        }
    ),
    "stem_argument": Feature(
        {
            "arguments": "x, start",
            "enter_last": "start = x",
            "call": "block(x, start)",
            "body_last": "y = y + 0.1 * start",
        }
    ),
    "branch_on_data": Feature(
        {"loop": ("for block in BLOCKS:\n    if x.sum() > 0:\n        STEP")}, couples=True
    ),
    "branch_on_batch": Feature(
        {
            "net_first": "positive = x.float().sum() > 0",
            "loop": ("for i, block in enumerate(BLOCKS):\n    if i or positive:\n        STEP"),
        },
        couples=True,
    ),
    "early_exit": Feature(
        {"loop": ("for block in BLOCKS:\n    STEP\n    if x.abs().max() > 3:\n        break")},
        couples=True,
    ),
    "branch_at_random": Feature(
        {"loop": "for block in BLOCKS:\n    if torch.rand(()) < 0.5:\n        STEP"}, random=True
    ),
    "layer_drop": Feature(
        {"loop": ("for block in BLOCKS:\n    if random.random() < 0.5:\n        STEP")}, random=True
    ),
    "every_second_step": Feature(
        {
            "net_init": "self.calls = 0",
            "net_first": "self.calls += 1",
            "loop": (
                "for i, block in enumerate(BLOCKS):\n    if self.calls % 2 or i != 1:\n        STEP"
            ),
        }
    ),
    "noise": Feature(
        {"loop": ("for block in BLOCKS:\n    STEP\n    x = x + 0.1 * torch.randn_like(x)")},
        random=True,
    ),
    "in_place_between": Feature({"loop": "for block in BLOCKS:\n    STEP\n    x.mul_(0.9)"}),
    "in_place_batch": Feature({"net_first": "x = x.mul_(0.5)"}, domains=(VECTOR, IMAGE)),
    "autocast": Feature(
        {
            "loop": (
                "with torch.autocast('cpu', dtype=torch.bfloat16):\n"
                "    for block in BLOCKS:\n"
                "        STEP\n"
                "x = x.float()"
            )
        },
        config={"coarse": True},
    ),
    "energy": Feature(
        {
            "loop": f"x = x.detach().requires_grad_()\n{_FOR}\n"
            f"(x,) = torch.autograd.grad(x.square().sum(), "
            "[x], create_graph=True)"
        },
        weight=0.3,
    ),
    "two_halves": Feature(
        {
            "loop": (
                "parts = []\n"
                "for x in x.chunk(2):\n"
                "    for block in BLOCKS:\n"
                "        STEP\n"
                "    parts.append(x)\n"
                "x = torch.cat(parts)"
            )
        }
    ),
    "towers": Feature(
        {
            "loop": (
                "left = x\n"
                "for block in list(BLOCKS)[::2]:\n"
                "    STEP\n"
                "right, x = x, left\n"
                "for block in list(BLOCKS)[1::2]:\n"
                "    STEP\n"
                "x = x + right"
            )
        }
    ),
    "last_left_out": Feature({"loop": "for block in list(BLOCKS)[:-1]:\n    STEP"}),
    "first_of_output": Feature(
        {"loop": f"{_FOR}\nx = x + 0 * x.flatten(1).mean(1).reshape(-1, *[1] * (x.dim() - 1))"}
    ),
}

# --- further parts of the model -------------------------------------------------------------------

_IDS = "(x[:, 0] * 4 + 8).long().clamp(0, 15)"


def _table(arguments: str, **options: Any) -> Feature:
    lines = {
        "net_init": f"self.table = nn.Embedding(16, 8, {arguments})",
        "net_first": f"ids = {_IDS}",
    }
    return Feature({**lines, "enter_last": "x = x + self.table(ids)"}, domains=(VECTOR,), **options)


PART: Axis = {
    "nothing_more": Feature(),
    "sparse": _table("sparse=True"),
    "max_norm": _table("max_norm=0.5"),
    "padding_idx": _table("padding_idx=8"),
    "scaled_by_frequency": _table("scale_grad_by_freq=True", couples=True),
    "embedding": _table("_freeze=False"),
    "bag": Feature(
        {
            "net_init": "self.table = nn.EmbeddingBag(16, 8)",
            "net_first": "ids = (x * 4 + 8).long().clamp(0, 15)",
            "enter_last": "x = x + self.table(ids)",
        },
        domains=(VECTOR,),
    ),
    "sparse_bag": Feature(
        {
            "net_init": "self.table = nn.EmbeddingBag(16, 8, sparse=True)",
            "net_first": "ids = (x * 4 + 8).long().clamp(0, 15)",
            "enter_last": "x = x + self.table(ids)",
        },
        domains=(VECTOR,),
    ),
    "frozen_stem": Feature({"net_init": "self.inp.requires_grad_(False)"}),
    "frozen_block": Feature({"net_init": "list(BLOCKS)[1].requires_grad_(False)"}),
    "frozen_all_blocks": Feature(
        {"net_init": ("for block in BLOCKS:\n    block.requires_grad_(False)")}
    ),
    "frozen_biases": Feature(
        {"net_init": ("for p in self.parameters():\n    p.requires_grad_(p.dim() > 1)")}
    ),
    "unused": Feature({"net_init": "self.extra = nn.Linear(8, 8)"}),
    "unused_frozen": Feature({"net_init": "self.extra = nn.Linear(8, 8).requires_grad_(False)"}),
    "used_by_half": Feature(
        {
            "net_init": "self.extra = nn.Linear(8, 8)",
            "net_first": "first = bool(x.flatten()[0] > 0)",
            "enter_last": "x = x + self.extra(x) if first else x",
        },
        domains=FLAT,
        couples=True,
    ),
    "net_scalar": Feature(
        {"net_init": "self.gain = nn.Parameter(torch.tensor(1.5))", "net_last": "x = x * self.gain"}
    ),
    "net_vector": Feature(
        {"net_init": "self.shift = nn.Parameter(torch.zeros(8))", "net_last": "x = x + self.shift"},
        domains=FLAT,
    ),
    "net_three": Feature(
        {
            "net_init": "self.shift = nn.Parameter(torch.zeros(3))",
            "net_last": "x = x + self.shift.sum()",
        }
    ),
    "net_buffer": Feature(
        {
            "net_init": "self.register_buffer('gain', torch.tensor(1.5))",
            "net_last": "x = x * self.gain",
        }
    ),
    "net_hidden_buffer": Feature(
        {
            "net_init": "self.register_buffer('gain', torch.tensor(1.5), persistent=False)",
            "net_last": "x = x * self.gain",
        }
    ),
    "net_plain": Feature(
        {"net_init": "self.gain = torch.tensor(1.5)", "net_last": "x = x * self.gain"}
    ),
    "none_buffer": Feature(
        {
            "net_init": (
                "self.register_buffer('nothing', None)\nself.register_parameter('bias', None)"
            )
        }
    ),
    "tied_ends": Feature(
        {"net_init": "self.out.weight = self.inp.weight"}, domains=(TOKENS,), weight=2
    ),
    "functional_tie": Feature(
        {"head": "pass", "answer": "F.linear(x, self.inp.weight)"}, domains=(TOKENS,)
    ),
    "functional_linear": Feature(
        {"enter": "x = F.linear(x, self.inp.weight, self.inp.bias)"}, domains=(VECTOR,)
    ),
    "lazy_head": Feature({"head": "self.out = nn.LazyLinear(1)"}, domains=(VECTOR,)),
    "weight_norm_head": Feature({"net_init": "nn.utils.weight_norm(self.out)"}),
    "net_batch_norm": Feature(
        {"net_init": "self.norm = nn.BatchNorm1d(8)", "net_last": "x = self.norm(x)"},
        domains=(VECTOR,),
        couples=True,
    ),
    "net_dropout": Feature(
        {"net_init": "self.drop = nn.Dropout(0.2)", "net_last": "x = self.drop(x)"}, random=True
    ),
    "net_complex": Feature(
        {
            "net_init": "self.turn = nn.Parameter(torch.randn(8, dtype=torch.cfloat))",
            "net_last": "x = (x * self.turn).abs()",
        },
        domains=FLAT,
    ),
    "net_strided": Feature(
        {
            "net_init": "self.turn = nn.Parameter(torch.randn(8, 8).t())",
            "enter_last": "x = x @ self.turn",
        },
        domains=FLAT,
    ),
    "net_double": Feature(
        {
            "net_init": "self.shift = nn.Parameter(torch.zeros(8, dtype=torch.float64))",
            "net_last": "x = x + self.shift.to(x.dtype)",
        },
        domains=FLAT,
    ),
    "net_half": Feature(
        {
            "net_init": "self.shift = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))",
            "net_last": "x = x + self.shift.to(x.dtype)",
        },
        domains=FLAT,
        config={"coarse": True},
    ),
    "integer_parameter": Feature(
        {"net_init": "self.count = nn.Parameter(torch.arange(3), requires_grad=False)"}
    ),
    "init_orthogonal": Feature({"net_init": "nn.init.orthogonal_(self.out.weight)"}),
    "parametrized": Feature(
        {
            "classes": (
                "\nclass Symmetric(nn.Module):\n    def forward(self, x):\n"
                "        return x.triu() + x.triu(1).t()\n"
            ),
            "net_init": (
                "self.turn = nn.Linear(8, 8)\n"
                "parametrize.register_parametrization(self.turn, 'weight', Symmetric())"
            ),
            "net_last": "x = self.turn(x)",
        },
        domains=FLAT,
    ),
}

# --- types ----------------------------------------------------------------------------------------

TYPE: Axis = {
    "float32": Feature(),
    "float64": Feature(
        {
            "build": "return Net().double()",
            "net_first": "x = x.double() if x.is_floating_point() else x",
            "loss_first": "y = y.double() if y.is_floating_point() else y",
        }
    ),
    "bfloat16": Feature(
        {
            "net_last_init": "self.to(torch.bfloat16)",
            "net_first": "x = x.to(torch.bfloat16) if x.is_floating_point() else x",
            "float_answer": "1",
        },
        config={"coarse": True},
    ),
    "float32_norms": Feature(
        {
            "net_last_init": (
                "self.to(torch.bfloat16)\nfor block in BLOCKS:\n    block.norm.float()"
            ),
            "net_first": "x = x.to(torch.bfloat16) if x.is_floating_point() else x",
            "body": "self.down(F.gelu(self.up(self.norm(x.float()).to(x.dtype))))",
            "float_answer": "1",
        },
        domains=FLAT,
        needs=("mlp",),
        config={"coarse": True},
    ),
    "float32_head": Feature(
        {
            "net_last_init": "self.to(torch.bfloat16)\nself.out.float()",
            "net_first": "x = x.to(torch.bfloat16) if x.is_floating_point() else x",
            "net_last": "x = x.float()",
        },
        config={"coarse": True},
    ),
}

# --- hooks ----------------------------------------------------------------------------------------

HOOK: Axis = {
    "no_hooks": Feature(),
    "block_pre_hook": Feature(
        {
            "net_last_init": (
                "for block in BLOCKS:\n"
                "    block.register_forward_pre_hook(lambda m, args: (args[0] * 0.9, "
                "*args[1:]))"
            )
        }
    ),
    "layer_hook": Feature(
        {"net_last_init": "self.out.register_forward_hook(lambda m, args, y: y * 1.5)"}
    ),
    "block_hook": Feature(
        {
            "net_last_init": (
                "for block in BLOCKS:\n    block.register_forward_hook(lambda m, args, y: y * 0.9)"
            )
        },
        needs=("tensor", "no_residual"),
    ),
    "recording_hook": Feature(
        {
            "net_last_init": (
                "self.seen = {}\n"
                "list(BLOCKS)[1].register_forward_hook(lambda m, args, "
                "y: self.seen.update(y=y))"
            ),
            "loss": "loss = loss + 0.1 * model.seen['y'].square().mean()",
        },
        needs=("tensor", "no_residual"),
    ),
    "model_hook": Feature(
        {"net_last_init": "self.register_forward_hook(lambda m, args, y: y * 1.5)"},
        needs=("plain_answer",),
    ),
    "model_pre_hook": Feature(
        {"net_last_init": "self.register_forward_pre_hook(lambda m, args: (args[0] * 1,))"}
    ),
    "backward_hook": Feature(
        {
            "net_last_init": (
                "self.out.register_full_backward_hook(lambda m, inward, outward: (inward[0] "
                "* 0.5,))"
            )
        }
    ),
    "block_backward_hook": Feature(
        {
            "net_last_init": "for block in BLOCKS:\n    block.register_full_backward_hook("
            "lambda m, inward, outward: tuple(g * 0.5 for g in inward))"
        },
        needs=("tensor", "no_residual"),
    ),
    "backward_pre_hook": Feature(
        {
            "net_last_init": (
                "self.out.register_full_backward_pre_hook(lambda m, outward: (outward[0] * 0.5,))"
            )
        }
    ),
    "tensor_hook": Feature({"net_last": "x.register_hook(lambda gradient: gradient * 0.5)"}),
    "block_tensor_hook": Feature(
        {"body_last": ("if y.requires_grad:\n    y.register_hook(lambda gradient: gradient * 0.5)")}
    ),
    "tensor_hook_clamp": Feature(
        {"net_last": "x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))"}
    ),
    "retain_grad": Feature({"net_last": "x.retain_grad()\nself.last = x"}),
    "parameter_hook": Feature(
        {"net_last_init": "self.out.weight.register_hook(lambda gradient: gradient * 0.0)"}
    ),
    "parameter_hook_mask": Feature(
        {
            "net_last_init": (
                "self.out.weight.register_hook(lambda gradient: gradient "
                "* torch.ones(8).cumsum(0).lt(4))"
            )
        }
    ),
    "parameter_hook_clamp": Feature(
        {
            "net_last_init": "self.out.weight.register_hook(lambda gradient: "
            "gradient.clamp(-0.01, 0.01))"
        }
    ),
    "block_parameter_hook": Feature(
        {
            "net_last_init": (
                "for p in list(BLOCKS)[0].parameters():\n"
                "    p.register_hook(lambda gradient: gradient * 0.5)"
            )
        }
    ),
    "post_accumulate_hook": Feature(
        {
            "net_last_init": (
                "self.out.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "
                "'grad', p.grad * 0.5))"
            )
        }
    ),
    "post_accumulate_clamp": Feature(
        {
            "net_last_init": (
                "self.out.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "
                "'grad', p.grad.clamp(-0.01, 0.01)))"
            )
        }
    ),
    "forward_replaced": Feature(
        {
            "net_last_init": (
                "for block in BLOCKS:\n    block.forward = lambda x, b=block: type(b).forward(b, x)"
            )
        },
        needs=("in_order",),
    ),
    "state_dict_hook": Feature(
        {
            "net_last_init": "self.register_state_dict_post_hook("
            "lambda m, state, prefix, local: None)"
        }
    ),
}

# --- what forward changes -------------------------------------------------------------------------

_NO_GRAD = "with torch.no_grad():\n    "
STATE: Axis = {
    "no_state": Feature(),
    "momentum_copy": Feature(
        {
            "net_init": "self.target = copy.deepcopy(self.inp).requires_grad_(False)",
            "net_first": _NO_GRAD
            + (
                "for p, q in zip(self.target.parameters(), self.inp.parameters()):\n"
                "        p.lerp_(q, 0.1)"
            ),
            "enter_last": "x = x + self.target(given)",
            "net_start": "given = x",
        },
        domains=(VECTOR, IMAGE),
    ),
    "momentum_data": Feature(
        {
            "net_init": "self.target = copy.deepcopy(self.inp).requires_grad_(False)",
            "net_first": (
                "for p, q in zip(self.target.parameters(), self.inp.parameters()):\n"
                "    p.data = 0.9 * p.data + 0.1 * q.data"
            ),
            "enter_last": "x = x + self.target(given)",
            "net_start": "given = x",
        },
        domains=(VECTOR, IMAGE),
    ),
    "clamp": Feature({"net_first": _NO_GRAD + "self.out.weight.clamp_(-0.2, 0.2)"}),
    "clamp_data": Feature({"net_first": "self.out.weight.data.clamp_(-0.2, 0.2)"}),
    "normalised": Feature(
        {"net_first": _NO_GRAD + "self.out.weight.div_(self.out.weight.norm(dim=1, keepdim=True))"}
    ),
    "block_scales": Feature(
        {"body_first": _NO_GRAD + ("for p in self.parameters():\n        p.mul_(0.99)")}
    ),
    "counter": Feature(
        {
            "net_init": "self.register_buffer('steps', torch.zeros((), dtype=torch.long))",
            "net_first": "self.steps += 1",
            "net_last": "x = x * (1 + 0.1 * (self.steps > 2))",
        },
        counts=True,
    ),
    "block_counter": Feature(
        {
            "body_init_more": "self.register_buffer('steps', torch.zeros((), dtype=torch.long))",
            "body_first": "self.steps += 1",
        },
        counts=True,
    ),
    "python_counter": Feature(
        {
            "net_init": "self.calls = 0",
            "net_first": "self.calls += 1",
            "net_last": "x = x * (1 + 0.1 * (self.calls > 2))",
        },
        counts=True,
    ),
    "running_mean": Feature(
        {
            "net_init": "self.register_buffer('mean', torch.zeros(8))",
            "net_last": _NO_GRAD
            + ("self.mean.lerp_(x.flatten(0, -2).mean(0), 0.1)\nx = x - self.mean"),
        },
        domains=FLAT,
        couples=True,
    ),
    "queue": Feature(
        {
            "net_init": "self.register_buffer('queue', torch.zeros(16, 8))",
            "net_last": "x = x + self.queue.mean(0)\n"
            + _NO_GRAD
            + "self.queue.copy_(torch.cat([x.flatten(0, -2), self.queue])[:16])",
        },
        domains=FLAT,
        couples=True,
    ),
    "cached": Feature({"net_init": "self.kept = None", "net_last": "self.kept = x.detach()"}),
    "swapped": Feature(
        {"net_first": "self.out.weight = nn.Parameter(self.out.weight.detach())"}, weight=0.3
    ),
    "requires_grad_changed": Feature(
        {
            "net_init": "self.calls = 0",
            "net_first": ("self.calls += 1\nself.inp.requires_grad_(self.calls > 1)"),
        }
    ),
}

# --- the loss -------------------------------------------------------------------------------------


def _mean_of(term: str) -> Feature:
    return Feature({"loss": f"loss = loss + 0.1 * {term}"})


_MASKED = (
    "y = torch.randint(0, 16, (32, 6), generator=g)\n"
    "y[torch.rand(32, generator=g) < 0.5] = -100\n"
    "return TensorDataset(torch.randint(0, 16, (32, 6), generator=g), y)"
)
LOSS: Axis = {
    "mean": Feature(),
    "masked": Feature(
        {
            "data": _MASKED,
            "task": "items_vary = True\n\ndef items(self, batch):\n"
            "    return (batch[1] != -100).sum()",
        },
        domains=(TOKENS,),
        weighs_items=True,
    ),
    "masked_items_only": Feature(
        {"data": _MASKED, "task": "def items(self, batch):\n    return (batch[1] != -100).sum()"},
        domains=(TOKENS,),
        weighs_items=True,
    ),
    "penalty": _mean_of(
        "sum(p.abs().square().sum() for p in model.parameters() if p.requires_grad)"
    ),
    "penalty_trained_norm": _mean_of(
        "torch.stack([p.abs().float().norm() for p in model.parameters()]).sum()"
    ),
    "penalty_named": _mean_of("model.out.weight.abs().sum()"),
    "penalty_block": _mean_of("sum(p.abs().square().sum() for p in list(BLOCKS)[0].parameters())"),
    "penalty_detached": _mean_of("loss * model.out.weight.detach().norm()"),
    "gradient_penalty": Feature(
        {
            "loss": (
                "(gradient,) = torch.autograd.grad(predicted.sum(), x, create_graph=True)\n"
                "loss = loss + 0.1 * gradient.flatten(1).square().sum(1).mean()"
            ),
            "loss_first": "x = x.clone().requires_grad_()",
        },
        domains=(VECTOR, IMAGE),
    ),
    "weight_gradient_penalty": Feature(
        {
            "loss": (
                "(gradient,) = torch.autograd.grad(loss, model.out.weight, create_graph=True)\n"
                "loss = loss + 0.1 * gradient.square().sum()"
            )
        },
        couples=True,
    ),
    "left_by_blocks": Feature(
        {
            "body_last": "self.aux = y.square().mean()",
            "loss": "loss = loss + 0.1 * sum(block.aux for block in BLOCKS)",
        }
    ),
    "left_by_net": Feature(
        {"net_last": "self.aux = x.square().mean()", "loss": "loss = loss + 0.1 * model.aux"}
    ),
    "set_on_blocks": Feature(
        {
            "after_step": "block.aux = x.square().mean()",
            "loss": "loss = loss + 0.1 * sum(block.aux for block in BLOCKS)",
        }
    ),
    "contrastive": Feature(
        {
            "loss": (
                "values = F.normalize(PREDICTION.flatten(1) + 1, dim=1)\n"
                "loss = loss + F.cross_entropy(values @ values.t(), torch.arange(len(values)))"
            )
        },
        couples=True,
    ),
    "hardest": Feature({"loss": "loss = loss + 0.1 * PREDICTION.max()"}, couples=True),
    "square_of_mean": Feature({"loss": "loss = loss + loss.square()"}, couples=True),
    "summed": Feature({"loss": "loss = loss + 0.01 * PREDICTION.square().sum()"}, couples=True),
    "model_twice": Feature({"loss": "loss = loss + F.mse_loss(predicted, AGAIN * 0.5)"}),
    "model_without_grad": Feature(
        {
            "loss": (
                "with torch.no_grad():\n    target = AGAIN\n"
                "loss = loss + 0.1 * F.mse_loss(0.5 * predicted, target)"
            )
        }
    ),
    "parts": Feature(
        {
            "loss": (
                "loss = loss + 0.1 * model.out(torch.ones(len(x), 8, "
                "dtype=loss.dtype)).square().mean()"
            )
        }
    ),
    "parts_only": Feature({"loss": "loss = loss + 0.1 * model.inp(x).square().mean()"}),
    "reads_buffer": Feature(
        {
            "net_init": "self.register_buffer('weight', torch.tensor(0.7))",
            "loss": "loss = loss * model.weight",
        }
    ),
    "reads_type": Feature({"loss": "loss = loss + 0 * sum(p.numel() for p in model.parameters())"}),
    "scheduled": Feature(
        {
            "task": "calls = 0",
            "loss": ("self.calls += 1\nloss = loss * (1 + 0.1 * (self.calls > 1))"),
        },
        counts=True,
    ),
    "logged": Feature({"loss": "self.log('part', loss)"}),
    "task_parameter": Feature(
        {"loss": "loss = loss * self.scale", "task": "scale = torch.tensor(0.7)"}
    ),
    "label_smoothing": Feature(
        {
            "criterion": "F.cross_entropy("
            "PREDICTION.flatten(0, 1), y.flatten(), label_smoothing=0.1)"
        },
        domains=(TOKENS,),
    ),
    "eval_inside": Feature(
        {
            "loss": (
                "model.eval()\n"
                "with torch.no_grad():\n"
                "    target = AGAIN\n"
                "model.train()\n"
                "loss = loss + 0.1 * F.mse_loss(0.5 * predicted, target)"
            )
        }
    ),
    "functional_call": Feature(
        {
            "loss": (
                "loss = loss + 0.1 * torch.func.functional_call(model, dict("
                "model.named_parameters()), (x,)).square().mean()"
            )
        },
        needs=("plain_answer",),
    ),
    "adversarial": Feature(
        {
            "loss": (
                "noisy = x.clone().requires_grad_()\n"
                "(gradient,) = torch.autograd.grad(model(noisy).sum(), noisy)\n"
                "x = x + 0.1 * gradient.sign()\npredicted = AGAIN\nloss = loss + CRITERION"
            )
        },
        domains=(VECTOR, IMAGE),
        needs=("plain_answer",),
    ),
}

# --- how it is trained ----------------------------------------------------------------------------


def _optimizer(name: str, **config: Any) -> Feature:
    return Feature(
        config={
            "optimizer.name": name,
            **{f"optimizer.{key}": value for key, value in config.items()},
        }
    )


OPTIMIZER: Axis = {
    "adamw": Feature(),
    "sgd": _optimizer("sgd", lr=0.05),
    "sgd_plain": _optimizer("sgd", lr=0.05, momentum=0.0),
    "adam_decay": _optimizer("adam", weight_decay=0.1),
    "adamw_decay": _optimizer("adamw", weight_decay=0.1),
    "nesterov": _optimizer("sgd", lr=0.05, args={"nesterov": True}),
    "amsgrad": _optimizer("adamw", args={"amsgrad": True}),
    "rmsprop": _optimizer("torch.optim:RMSprop", lr=0.001, args={"eps": 1e-3}),
    "adagrad": _optimizer("torch.optim:Adagrad", args={"eps": 1e-3}),
    "adamax": _optimizer("torch.optim:Adamax", args={"eps": 1e-3}),
    "nadam": _optimizer("torch.optim:NAdam", args={"eps": 1e-3}),
    "asgd": _optimizer("torch.optim:ASGD"),
    "own_groups": Feature(
        {
            "task": (
                "def optimizer(self, parameters):\n"
                "    first = [p for name, p in parameters if name.startswith('out.')]\n"
                "    rest = [p for name, p in parameters if not name.startswith('out.')]\n"
                "    return torch.optim.SGD([{'params': first, 'lr': 0.1}, "
                "{'params': rest}], lr=0.05, momentum=0.9)"
            )
        }
    ),
}
CLIP: Axis = {"unclipped": Feature(), "clipped": Feature(config={"train.clip_norm": 0.1})}

AXES: dict[str, Axis] = {
    "domain": DOMAIN,
    "block": BLOCK,
    "container": CONTAINER,
    "output": OUTPUT,
    "gives": GIVES,
    "call": CALL,
    "part": PART,
    "type": TYPE,
    "hook": HOOK,
    "state": STATE,
    "loss": LOSS,
    "optimizer": OPTIMIZER,
    "clip": CLIP,
}
PLAIN = {axis: next(iter(features)) for axis, features in AXES.items()}
PLAIN_SHARE = {
    "domain": 0.5,
    "block": 0.25,
    "container": 0.7,
    "output": 0.78,
    "gives": 0.82,
    "call": 0.7,
    "part": 0.7,
}
PLAIN_SHARE |= {
    "type": 0.88,
    "hook": 0.78,
    "state": 0.85,
    "loss": 0.7,
    "optimizer": 0.6,
    "clip": 0.6,
}
"""How often an axis has its plain choice: a model has three or four unusual ones."""
FEWEST = "two_blocks"
"""The container that makes a plain one smaller, and is not to be made plain again."""


@dataclass(frozen=True)
class Model:
    """A choice on each axis; equal choices are the same text."""

    choices: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, **choices: str) -> Model:
        """The plain model but for these choices, by axis."""
        return cls(tuple({**PLAIN, **choices}.items()))

    @classmethod
    def draw(cls, seed: int) -> Model:
        """The model of this seed."""
        generator = random.Random(seed)
        while True:
            choices = {}
            for axis, features in AXES.items():
                plain, *unusual = features
                weights = [features[name].weight for name in unusual]
                is_plain = generator.random() < PLAIN_SHARE[axis]
                choices[axis] = plain if is_plain else generator.choices(unusual, weights)[0]
            if choices["domain"] == IMAGE and choices["block"] == PLAIN["block"]:
                choices["block"] = "conv"
            model = cls(tuple(choices.items()))
            if model.makes_sense():
                return model

    @property
    def choice_by_axis(self) -> dict[str, str]:
        """The name of the chosen feature by axis."""
        return dict(self.choices)

    @property
    def couples(self) -> bool:
        """Whether samples of a batch depend on one another."""
        is_weighted = any(feature.weighs_items for feature in self.features)
        adds = any("loss" in feature.lines for feature in self.features if not feature.weighs_items)
        chosen = {name for _, name in self.choices}
        reads_last_half = "two_halves" in chosen and bool(chosen & LEFT_BY_LAST_CALL)
        is_coupled = any(feature.couples for feature in self.features)
        return is_coupled or (is_weighted and adds) or reads_last_half

    @property
    def features(self) -> list[Feature]:
        """The chosen feature of each axis."""
        return [AXES[axis][name] for axis, name in self.choices]

    @property
    def unusual(self) -> frozenset[str]:
        """The choices that are not plain."""
        return frozenset(name for axis, name in self.choices if name != PLAIN[axis])

    def makes_sense(self) -> bool:
        """Whether all choices fit the domain and one another."""
        domain = self.choice_by_axis["domain"]
        chosen = {name for _, name in self.choices}
        fits = all(
            domain in feature.domains and (not feature.needs or chosen & set(feature.needs))
            for feature in self.features
        )
        return fits and not any(pair <= chosen for pair in APART)

    def config(self) -> dict[str, Any]:
        """The values of the configuration that the choices need, by dotted key."""
        values: dict[str, Any] = {}
        for feature in self.features:
            values |= feature.config
        return values

    def smaller(self) -> Iterator[Model]:
        """Models with one unusual choice less, and one with fewer blocks."""
        for axis, name in self.choices:
            if name not in (PLAIN[axis], FEWEST):
                plain = (
                    "conv"
                    if axis == "block" and self.choice_by_axis["domain"] == IMAGE
                    else PLAIN[axis]
                )
                model = Model(tuple({**self.choice_by_axis, axis: plain}.items()))
                if plain != name and model.makes_sense():
                    yield model
        if self.choice_by_axis["container"] == "blocks":
            yield Model(tuple({**self.choice_by_axis, "container": FEWEST}.items()))

    def source(self) -> str:
        """The module that holds its task, `Model`."""
        return _render(self)

    def __str__(self) -> str:
        return " ".join(sorted(self.unusual)) or "plain"


APART = [
    {"sequential_called", name}
    for name in (*(n for n in OUTPUT if n not in ("tensor", "no_residual")), *CALL)
    if name != "in_order"
]
APART += [{"sequential_called", name} for name in ("hidden_states", "set_on_blocks")]
APART += [
    {"loss_inside", name}
    for name in LOSS
    if "predicted" in str(LOSS[name].lines)
    or "PREDICTION" in str(LOSS[name].lines)
    or "criterion" in LOSS[name].lines
]
APART += [
    {name, call}
    for name in ("state_passed",)
    for call in CALL
    if "call" in CALL[call].lines and call != "in_order"
]
# Where all blocks are dropped, no state is left to add.
APART += [{"state_passed", "layer_drop"}]
APART += [{"auxiliary_returned", name} for name in GIVES if name != "plain_answer"]
APART += [
    {"mixed_classes", call}
    for call in CALL
    if CALL[call].lines.keys() & {"arguments", "forward_name", "block_methods"}
]
APART += [
    {"mixed_classes", output}
    for output in OUTPUT
    if output not in ("tensor", "no_residual", "in_place_input")
]
APART += [{"mixed_classes", "left_by_blocks"}, {"mixed_classes", "float32_norms"}]
APART += [
    {"functional_tie", name}
    for name in (*HOOK, *STATE, *LOSS, *PART, *TYPE)
    if any(
        "self.out" in text or "model.out" in text
        for axis in (HOOK, STATE, LOSS, PART, TYPE)
        if name in axis
        for text in axis[name].lines.values()
    )
]
APART += [{"forward_replaced", output} for output in OUTPUT if "arguments" in OUTPUT[output].lines]


# --- as Python ------------------------------------------------------------------------------------

_TEMPLATE = """{preamble}{classes}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
{body_init}

    def {forward_name}(self, {arguments}):
{body}
{block_methods}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
{init}

    def forward(self, x{net_arguments}):
{forward}


class Model(Task):
{task}
    def build_model(self):
        {build}

    def train_data(self):
        g = torch.Generator().manual_seed(0)
{data}

    def loss(self, model, batch):
        x, y = batch
{loss}
        return loss
"""


def _render(model: Model) -> str:
    slots: dict[str, str] = {}
    plain = [AXES[axis][name] for axis, name in PLAIN.items()]
    for feature in [*plain, *(feature for feature in model.features if feature not in plain)]:
        for slot, text in feature.lines.items():
            replaces = slot in ONE_OF or slot not in slots
            slots[slot] = text if replaces else f"{slots[slot]}\n{text}"
    get = slots.get
    float_answer = ".float()" if get("float_answer") else ""
    answer = slots["answer"] + float_answer

    def in_net(text: str) -> str:
        return text.replace("BLOCKS", get("iterate", "")).replace("SELF", "self")

    def in_loss(text: str) -> str:
        text = text.replace("CRITERION", slots["criterion"]).replace("PREDICTION", "predicted")
        return (
            text.replace("AGAIN", second_call)
            .replace("BLOCKS", get("iterate", ""))
            .replace("SELF", "model")
        )

    step = slots["step"].replace("CALL", slots["call"])
    if "after_step" in slots:
        step += "\n" + slots["after_step"]
    loop = _put(slots["loop"], "STEP", step)
    give = slots["give"].replace("ANSWER", answer)
    inner_criterion = slots["criterion"].replace("PREDICTION", answer).replace("y)", "target)")
    give = give.replace("CRITERION", inner_criterion)
    body = [get("body_first", ""), f"y = {slots['body']}", get("body_last", ""), slots["returns"]]
    init = [slots["stem"], slots["container"], slots["head"]]
    init += [get("net_init", ""), get("net_last_init", "")]
    forward = [get("net_start", ""), get("net_first", ""), slots["enter"], get("enter_last", "")]
    forward += [loop, get("net_last", ""), give]
    second_call = slots["predict"]
    read = slots["read"].replace("AGAIN", second_call)
    criterion = "" if read.startswith("_, loss") else "loss = CRITERION"
    loss = [get("loss_first", ""), read, criterion, get("loss", "")]
    methods = get("block_methods", "")
    text = _TEMPLATE.format(
        preamble="",
        classes=get("classes", ""),
        body_init=_indent([slots["body_init"], get("body_init_more", "")], 8),
        forward_name=get("forward_name", "forward"),
        arguments=get("arguments", "x"),
        body=_indent(body, 8),
        block_methods=f"\n{_indent([methods], 4)}\n" if methods else "",
        init=in_net(_indent([part for part in init if part != "pass"], 8)),
        net_arguments=get("net_arguments", ""),
        forward=in_net(_indent(forward, 8)),
        task=_indent([get("task", "")], 4) + ("\n" if get("task") else ""),
        build=get("build", "return Net()"),
        data=_indent([slots["data"]], 8),
        loss=in_loss(_indent(loss, 8)),
    )
    text = text.replace("class Model(Task):\n\n", "class Model(Task):\n")
    if text.startswith("\n\n"):
        return f"{_imports(text)}\n{text.lstrip()}"
    return f"{_imports(text)}{text}"


def _imports(text: str) -> str:
    """The lines of the preamble that the text needs."""
    needed = []
    for line in [*PREAMBLE.strip().splitlines(), "import transformers"]:
        names = line.rpartition("import ")[2]
        imported = [part.rpartition(" as ")[2].strip() for part in names.split(",")]
        used = [name for name in imported if name in text]
        if line.startswith("from ") and used:
            needed.append(f"{line.partition(' import ')[0]} import {', '.join(used)}")
        elif used:
            needed.append(line)
    return "\n".join(needed) + "\n"


def _put(text: str, placeholder: str, lines: str) -> str:
    """The text with each placeholder line replaced by other lines with the same indentation."""
    result = []
    for line in text.splitlines():
        if line.strip() == placeholder:
            result.append(textwrap.indent(lines, line[: len(line) - len(line.lstrip())]))
        else:
            result.append(line)
    return "\n".join(result)


def _indent(parts: list[str], by: int) -> str:
    return textwrap.indent("\n".join(part.strip("\n") for part in parts if part.strip()), " " * by)
