"""Mixed precision: float32 where numbers are kept, 16 bits where they are multiplied.

Parameters, gradients, optimizer state and loss stay float32; matrix products run in bfloat16 (8 bits of exponent:
never overflows, nothing else to do) or float16 (5 bits: gradients underflow, so the loop scales the loss). Micikevicius
et al. 2018, https://arxiv.org/abs/1710.03740; https://docs.pytorch.org/docs/stable/amp.html.

Two ways, by layout:

- replicated parameters (single, ddp, tensor): `torch.autocast` around forward casts operation by operation;
- sharded parameters (zero*, fsdp, hsdp): `fully_shard`'s `MixedPrecisionPolicy` casts the shards *before* they are
  gathered, which halves that communication, and reduces gradients in `reduce_dtype`. Everything inside then runs in
  16 bits, norms included, and the module's output comes back as float32 for the loss (unless `float_output` is false:
  a loss that takes 16 bits spares a float32 copy of the logits).

The two round at different places, so they agree to bfloat16's rounding (2⁻⁸ relative per number), not bit by bit; the
second, which also adds up the residual stream in 16 bits, is the noisier one (experiments/parity/matrix.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""fp8 is bf16 but for what float8.py changes."""


def autocast(precision: str, device_type: str) -> Callable[[], AbstractContextManager[object]]:
    """What to wrap forward in, for replicated parameters."""
    if precision == "fp32":
        return contextlib.nullcontext
    dtype = DTYPES[precision]
    return lambda: torch.autocast(device_type, dtype=dtype)


def shard_policies(
    precision: str, reduce_dtype: str, float_output: bool = True
) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """What `fully_shard` casts, for sharded parameters: of a block, and of the whole module, whose output is the loss
    function's input: float32 again, unless not wanted."""
    compute = None if precision == "fp32" else DTYPES[precision]
    reduce = None if compute is None and reduce_dtype == "fp32" else DTYPES[reduce_dtype]
    output = torch.float32 if compute is not None and float_output else None
    return MixedPrecisionPolicy(compute, reduce), MixedPrecisionPolicy(compute, reduce, output)
