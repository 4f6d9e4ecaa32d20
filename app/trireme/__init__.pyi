"""What `import trireme` gives, for editors and type checkers.

Made by `python -m app.trireme.stub`: change app/config/schema.py or app/api.py instead.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from app.api import Plan as Plan
from app.api import Run as Run
from app.api import Scaling as Scaling
from app.api import Sweep as Sweep
from app.api import compare as compare
from app.api import load_run as load_run
from app.api import report as report
from app.errors import Interrupted as Interrupted
from app.errors import RunFailed as RunFailed
from app.errors import TriremeError as TriremeError
from app.errors import UserError as UserError
from app.tasks.base import Task as Task

def claim() -> None:
    """Make `app`, `strategies`, `cluster` and `experiments` Trireme's in this process."""

class ClusterKeys(TypedDict, total=False):
    """What the run requests from the cluster, and what happens if the resources do not come."""

    file: str | Path | None
    """The file that the cluster was made from: its limits and prices. null: TRIREME_CLUSTER, else
    none."""
    wait_seconds: float
    """Seconds to wait for the workers' resources, saying why, before cluster.when_pending
    decides."""
    when_pending: str
    """What to do if the resources do not come: end, or shrink (to the workers that there is room
    for)."""
    min_workers: int
    """With cluster.when_pending=shrink or fault.elastic_seconds: the fewest workers to train
    with."""
    max_workers: int | None
    """With train.batch_schedule, in Ray: the most workers to train with. When the batch grows, the
    run asks for as many as pay by the plan (twice as many that do at least 1.5 times the work, a
    restart counted), saves and continues with them when they are there, and continues without them
    if they do not come within cluster.wait_seconds. null: as many as at the beginning."""
    exclude_nodes: Sequence[str]
    """Ids of nodes that get no worker, such as those that `trireme doctor --exclude-bad` prints."""

class RunKeys(TypedDict, total=False):
    """Name and place of the run."""

    name: str
    """Names the run: its folder in the storage, its MLflow run, and the run that a second call
    resumes. Empty: the experiment file's name."""
    storage: str | Path
    """Where runs are kept: a folder (local or NFS), or s3://… or gs://…; every node must see it."""
    log_format: str
    """Format of the logs in the run's folder: text, or json (one object a line, with time, run,
    attempt, rank and host; the driver's log also has what is printed on the terminal)."""

class ParallelKeys(TypedDict, total=False):
    """Degrees of parallelism and how each kind behaves."""

    dp_replicate: int | None
    """Copies of the model (or of its shards); gradients are averaged over them. null: the strategy
    decides."""
    dp_shard: int | None
    """Workers that one copy's parameters, gradients and optimizer state are sharded over."""
    cp: int | None
    """Workers that one sequence is split over (context parallelism)."""
    context: str
    """With cp: how tokens attend to those of other workers: ring (keys go from worker to worker),
    allgather, ulysses (heads are exchanged for tokens), or auto: ulysses within a node if cp · tp
    divides the heads, else ring."""
    tp: int | None
    """Workers that each layer's matrix products are split over (tensor parallelism)."""
    pp: int | None
    """Stages that the model's blocks are split over (pipeline parallelism)."""
    ep: int | None
    """Data-parallel workers that the experts of a mixture of experts are split over (expert
    parallelism). The other degrees alone multiply to the number of workers."""
    sequence_parallel: bool
    """With tp: also split activations between the split layers along the sequence."""
    async_tp: bool
    """With tp: split layers send in pieces while they multiply (asynchronous tensor parallelism);
    for GPUs whose links take about as long as their products. Not in zb_h1, zb_h2 and zbv."""
    loss_parallel: bool
    """With tp: keep the logits split over the vocabulary and compute the loss on the parts."""
    reshard_after_forward: bool | None
    """With dp_shard: free gathered parameters after forward (less memory, one more all-gather).
    null: no for zero1 and zero2; yes for fsdp, zero3 and hsdp, unless they take less than an eighth
    of a GPU's free memory."""
    offload: bool
    """With dp_shard, or strategy=fsdp on one worker: keep parameters, gradients and optimizer state
    in host memory."""
    reduce_dtype: str
    """Type in which gradients are averaged over data-parallel workers: fp32 or bf16."""
    bucket_mb: float
    """With ddp: size of a gradient bucket, in MiB; smaller starts communicating earlier."""
    find_unused_parameters: bool
    """With ddp: a step may leave parameters unused. Each step then searches for them, which takes
    time."""
    accumulate_sharded: bool | None
    """With dp_shard and several micro-batches: reduce-scatter the gradients of each micro-batch
    instead of keeping whole gradients until the last one (less memory, more communication). null:
    yes for zero2, no for zero1, and for fsdp if whole gradients would take an eighth of a GPU's
    memory or more."""
    schedule: str
    """With pp: order of the micro-batches' forwards and backwards on each stage: gpipe, 1f1b,
    interleaved_1f1b, zb_h1, zb_h2 or zbv."""
    chunks: int
    """With pp: chunks of the model on each stage; 2 or more for interleaved_1f1b, 2 for zbv."""
    stages: Sequence[int] | None
    """With pp: blocks of each chunk, first to last (their sum is the model's number of blocks).
    null: balanced by estimated cost."""
    stage_resources: Sequence[Mapping[str, float]]
    """With pp: Ray resources of each stage's workers, first to last, so that different GPUs can
    serve in one pipeline. Empty: resources_per_worker for all."""
    profile_every: int
    """With pp: measure computing, waiting and transfers once every this many steps, and in the
    fifth step (pipeline/… in MLflow). 0: never."""
    trace_step: int | None
    """With pp: write this step as a Chrome trace into the run's folder and MLflow. null: none."""
    deepspeed: str | Path | None
    """With strategy deepspeed: path of a DeepSpeed JSON. null: ZeRO stage 2."""

class TrainKeys(TypedDict, total=False):
    """The training loop."""

    steps: int | None
    """Optimizer steps to train for in all. Give this or train.epochs."""
    epochs: float | None
    """Passes over the training data to train for in all. Give this or train.steps."""
    global_batch_size: int
    """Samples per optimizer step, over all workers together. With train.batch_schedule: its
    largest, or with auto the first."""
    batch_schedule: Sequence[Sequence[int]] | Literal["auto"]
    """Global batches that follow one another: [[0, 32], [200_000, 64]] is 32 until 200,000 samples
    have been seen (those of a run that is forked count), and then 64. optimizer.lr_scaling lets the
    rate follow, and schedule.name is then a curve over samples; whatever else counts steps counts
    steps. auto: begins with train.global_batch_size, tries twice the batch beside it whenever the
    samples seen have doubled, and continues with it if it is as good; train.steps counts steps of
    the first batch. Empty: always train.global_batch_size."""
    micro_batch_size: int | None
    """Samples that one worker computes at once; gradients are accumulated over its share of the
    global batch. null: its whole share."""
    precision: str
    """Type of the arithmetic: fp32, bf16, fp16 (with loss scaling), or fp8: bf16 with the blocks'
    linear layers in float8 (Ada and Hopper GPUs, or newer). Parameters, optimizer and loss stay
    float32."""
    weight_dtype: str
    """Type that weights and gradients are kept in: fp32, or with precision bf16 or fp8 also bf16,
    in half the memory. adamw and adamw8bit then round weights stochastically, up or down at random
    and right on average, so that steps too small for 16 bits are not lost."""
    clip_norm: float | None
    """Scale the gradient down to this total norm when it is longer. null: never."""
    compile: bool
    """Compile each block with torch.compile."""
    compile_backend: str
    """Backend of torch.compile; aot_eager compiles nothing and starts quickly."""
    activation_checkpointing: str
    """Recompute activations in backward instead of keeping them: none, full (each block), every_2
    (every second block; any number), or selective (each block, but the results of matrix products
    are kept)."""
    activation_offloading: bool
    """Keep what blocks save for backward in host memory instead of the GPU's. It is copied while
    other blocks compute, and costs time only where copying takes longer than computing."""
    seed: int
    """Decides initial weights, data order and dropout; the same whatever the number of workers."""
    matmul_precision: str
    """On GPUs, how float32 is multiplied (torch.set_float32_matmul_precision; convolutions too):
    highest (float32: all layouts agree to its rounding), high (TF32 where the GPU has it: several
    times as fast, factors rounded to 10 bits) or medium (bfloat16 too)."""
    deterministic: bool
    """Ask torch for deterministic algorithms everywhere (slower on GPUs)."""
    eval_every: int | None
    """Evaluate on the held-out data once every this many steps, and always at the end. null: only
    at the end."""
    patience: int | None
    """End training when checkpoint.metric has not improved in this many evaluations. null:
    never."""
    ema_decay: float | None
    """Keep an exponential moving average of the weights with this decay (such as 0.999). It is
    evaluated as ema_loss and so on, and exported and stored as the model at the end. null: none."""
    eval_batch_size: int | None
    """Samples that one worker evaluates at once. null: as in training."""
    eval_separate: bool
    """Evaluate committed checkpoints in a worker of its own while training goes on (in Ray).
    train.eval_every is then a multiple of checkpoint.every_steps, and patience and the best
    checkpoint follow when results come."""
    eval_resources: Mapping[str, float]
    """With eval_separate: Ray resources of that worker, such as {GPU: 1}. Empty: one CPU, or none
    of its own where the cluster has no CPU beside the workers'."""
    log_every: int
    """Log metrics once every this many steps."""
    noise_scale_every: int | None
    """Measure and log the gradient noise scale once every this many steps: the batch size up to
    which a larger one saves steps. 50 costs less than 1 % of the time. null: never."""
    data_workers: int
    """Processes per worker that load data, for data sets whose samples are costly to make. 0: a
    thread."""

class OptimizerKeys(TypedDict, total=False):
    """The optimizer."""

    name: str
    """adamw, adamw8bit (its moments in 8 bits: 2 bytes a weight instead of 8), adam, sgd, muon
    (matrices of hidden layers, adamw for the others), adafactor, adadelta, adagrad, adamax, asgd,
    nadam, radam, rmsprop, rprop (torch.optim's), or the import path of a class
    (my_package.my_module:MyOptimizer)."""
    state_dtype: str
    """Type of adamw's moments between steps: fp32, or bf16 (4 bytes a weight instead of 8) with
    stochastic rounding, which is right on average and the same under every layout."""
    lr: float
    """Learning rate at the top of the schedule."""
    lr_scaling: str
    """How lr follows the batch size: none, linear (twice the batch, twice the rate; for SGD) or
    sqrt (for Adam). With schedule.warmup_steps the rate rises from lr itself, as in Goyal et al.
    2017."""
    lr_batch_size: int | None
    """With lr_scaling: the global batch size that lr is meant for."""
    weight_decay: float
    """Weight decay; parameters with fewer than two dimensions (biases, norms) are not decayed."""
    betas: Sequence[float]
    """Decay rates of the first and second moment of adam, adamw, adamw8bit, adamax, nadam, radam
    and muon's adamw; those of others are in optimizer.args."""
    eps: float
    """Epsilon of the same ones."""
    momentum: float
    """sgd's momentum."""
    args: Mapping[str, Any]
    """Further arguments of the optimizer's class, such as {amsgrad: true}; muon's are Muon's."""
    groups: Mapping[str, Any]
    """Arguments for parameters whose names match a pattern, such as {"*.bias": {weight_decay: 0}};
    of several patterns that match the later one counts. Its lr is that at the top of the
    schedule."""
    width_transfer: Mapping[str, Any]
    """A rate found for a narrow model holds for a wide one (µP, arXiv 2203.03466): {base: {d_model:
    64, n_heads: 1}} are the task_args that make the narrow one, to which lr, groups and the initial
    weights belong. Each tensor's are multiplied by how much it has grown. Heads keep their size.
    `trireme coordinate-check` measures it. Empty: none."""

class ScheduleKeys(TypedDict, total=False):
    """The learning rate over time."""

    name: str
    """What the learning rate does after warm-up: constant, linear, cosine, wsd (constant, then
    linear over the last decay_steps), inverse_sqrt, step (times decay_factor once every
    decay_steps) or one_cycle (up from a 25th over warmup_steps or 30 % of the steps, then down)."""
    warmup_steps: int
    """Steps over which the learning rate rises to its top, from 0; see lr_scaling and one_cycle."""
    final_fraction: float
    """linear, cosine, wsd and one_cycle end at this fraction of the rate at the top."""
    decay_steps: int | None
    """Steps of wsd's decay (null: a fifth of the run) or between two of step (null: a third)."""
    decay_factor: float
    """What step multiplies the rate by."""
    steps: int | None
    """Steps over which the curve goes; where it ends the rate stays. null: those of the run."""
    batch_size: int | None
    """The global batch whose steps the schedule counts, so that the curve over samples stays what
    it was with that batch. A sweep of forks sets both to those of its run. null: the run's own."""
    join_samples: int
    """A fork whose rate is not that of its checkpoint goes from one to the other over this many
    samples, by the same factor with each. 0: at once."""

class CheckpointKeys(TypedDict, total=False):
    """What is saved, when, and what is kept."""

    every_steps: int | None
    """Save once every this many steps. null: only at the end and when the run is asked to stop."""
    every_seconds: float | None
    """Save when this many seconds have passed since the last save. null: never by time."""
    auto: bool
    """Choose checkpoint.every_seconds while training, from the measured cost of a save and how
    often the run has failed (Young's and Daly's formula)."""
    keep_last: int
    """How many of the newest committed checkpoints are kept."""
    keep_best: bool
    """Also keep the checkpoint with the best checkpoint.metric."""
    metric: str
    """Evaluation metric that decides which checkpoint is best."""
    mode: str
    """min or max: which value of checkpoint.metric is best."""
    weights: bool
    """At the end also write all trained weights into one file, model/weights.pt of the run."""
    load: str | Path | None
    """Folder of a committed checkpoint (or of a run) whose weights a new run starts from."""
    fork: str | Path | None
    """Folder of a committed checkpoint (or of a run) from which a new run continues: weights,
    optimizer, step and position in the data. `trireme fork` sets it."""

class TrackingKeys(TypedDict, total=False):
    """How the run is shown in MLflow."""

    enabled: bool
    """Log to MLflow."""
    uri: str | None
    """MLflow tracking URI. null: MLFLOW_TRACKING_URI, else a SQLite database in run.storage."""
    experiment: str | None
    """MLflow experiment. null: MLFLOW_EXPERIMENT_NAME, else trireme."""
    also: Sequence[str]
    """Trackers beside MLflow: tensorboard, the name of an installed one (entry point
    trireme.trackers) or the import path of a class (app/tracking/README.md)."""
    tags: Mapping[str, str]
    """Tags of the MLflow run."""
    log_model: bool
    """Store the trained model as an MLflow model (mlflow.pytorch.load_model reads it); needs
    checkpoint.weights."""
    system_metrics_every: float
    """Seconds between two samples of every node's CPU, memory and GPUs; 0: none."""
    flush_timeout: float
    """Seconds to wait at the end for a tracking server that cannot be reached; metrics that it has
    not received by then stay spooled on disk."""

class PlanKeys(TypedDict, total=False):
    """How a run follows its plan. 20 steps after a start with strategy=auto, the measured step is
    compared with the planned one by part: computing, communication, bubble, data."""

    follow: bool
    """With strategy=auto, in Ray: when steps take longer than planned, save and continue with the
    layout that is now expected to be at least 10 % faster, restart included; the stages of a
    pipeline are divided again by their measured times. It tries at most two other layouts, each
    once, and returns to the fastest of all if they are slower."""

class ProfileKeys(TypedDict, total=False):
    """Where the time of some steps goes; `trireme profile RUN` prints a table, and traces are in
    the run's folder."""

    steps: Sequence[int]
    """The first and the last step to profile with torch.profiler, such as [20, 25]. Empty: none."""
    ranks: Sequence[int]
    """Ranks to profile; in a pipeline, one rank of each stage is the most useful choice."""
    memory: bool
    """Also record what each operator allocates, and on GPUs a snapshot of every allocation;
    slower."""

class FaultKeys(TypedDict, total=False):
    """What happens when something breaks."""

    max_restarts: int
    """Restarts from the last checkpoint, after a worker or a node died, before the run gives up.
    Only the last hour counts, and a node whose removal was announced does not."""
    elastic_seconds: float | None
    """Seconds to wait for a lost worker's resources to come back (cluster.wait_seconds where an
    autoscaler may add nodes). Then the run continues with the largest layout that there is room
    for, of at least cluster.min_workers, at the same global batch, and grows again when there is
    room. null: it waits. Not with parallel.stage_resources."""
    start_seconds: float
    """Seconds in which every worker must start, once it has its resources; after that the attempt
    is given up and tried again."""
    hang_seconds: float
    """A run without progress for this long, and for five times its longest pause so far, is
    suspected to hang; if nothing moves for as long again, or for twice the longest pause, the
    worker that holds up the others is ended. Before that only a worker that does not answer for
    three times this (at least 20 s) is ended. Ten times this with train.compile. 0: never."""

def train(
    *experiment: str | Path,
    again: bool = False,
    quiet: bool = False,
    task: str | type[Task] | Task = ...,
    task_args: Mapping[str, Any] = ...,
    strategy: str = ...,
    workers: int | str = ...,
    resources_per_worker: Mapping[str, float] = ...,
    launcher: str = ...,
    budget: float | None = ...,
    cluster: ClusterKeys = ...,
    run: RunKeys = ...,
    parallel: ParallelKeys = ...,
    train: TrainKeys = ...,
    optimizer: OptimizerKeys = ...,
    schedule: ScheduleKeys = ...,
    checkpoint: CheckpointKeys = ...,
    tracking: TrackingKeys = ...,
    plan: PlanKeys = ...,
    profile: ProfileKeys = ...,
    fault: FaultKeys = ...,
) -> Run:
    """Train an experiment to its end; the same call continues a run that was stopped.

    Args:
        experiment: Paths of YAML files and key=value.
        again: If the run has finished, train it once more under a new name.
        quiet: Print nothing.
        task: What is trained: image_classification, language_modelling, tabular, huggingface, or
            the import path of a class of your own (my_package.my_module:MyTask).
        task_args: Arguments of the task; `trireme config task=NAME` ends with a list of them.
        strategy: How the work is split: single, ddp, …; auto: single with one worker, else the
            simplest of the fastest strategies that the planner expects to fit; it also sets
            train.micro_batch_size if that is null.
        workers: Number of workers. auto: every GPU of the cluster, else 2 CPU workers.
        resources_per_worker: Ray resources of one worker. Empty: one GPU where workers use GPUs,
            else one CPU.
        launcher: ray (Ray Train's TorchTrainer; Ray actors where pp > 1), actors (Ray actors for
            any strategy), local (this process), or torchrun (the processes that torchrun or Slurm
            started). auto: torchrun in its environment; actors on the CPUs of a single machine,
            where fewer processes start sooner; else ray.
        budget: US dollars that this run may cost, over all its starts: it saves and stops before it
            spends more. null: no limit. Needs prices: those of cluster.file, else the list prices
            of its GPUs (cluster/hardware.yaml).
        cluster: What the run requests from the cluster, and what happens if the resources do not
            come.
        run: Name and place of the run.
        parallel: Degrees of parallelism and how each kind behaves.
        train: The training loop.
        optimizer: The optimizer.
        schedule: The learning rate over time.
        checkpoint: What is saved, when, and what is kept.
        tracking: How the run is shown in MLflow.
        plan: How a run follows its plan. 20 steps after a start with strategy=auto, the measured
            step is compared with the planned one by part: computing, communication, bubble, data.
        profile: Where the time of some steps goes; `trireme profile RUN` prints a table, and traces
            are in the run's folder.
        fault: What happens when something breaks.

    Raises:
        UserError: The input is wrong.
        RunFailed: Training failed; its last good checkpoint is intact.
        Interrupted: Training was stopped by Ctrl-C or a signal, after a checkpoint.
    """

def fork(
    parent: Run | str | Path,
    *overrides: str,
    at: int | None = None,
    quiet: bool = False,
    task: str | type[Task] | Task = ...,
    task_args: Mapping[str, Any] = ...,
    strategy: str = ...,
    workers: int | str = ...,
    resources_per_worker: Mapping[str, float] = ...,
    launcher: str = ...,
    budget: float | None = ...,
    cluster: ClusterKeys = ...,
    run: RunKeys = ...,
    parallel: ParallelKeys = ...,
    train: TrainKeys = ...,
    optimizer: OptimizerKeys = ...,
    schedule: ScheduleKeys = ...,
    checkpoint: CheckpointKeys = ...,
    tracking: TrackingKeys = ...,
    plan: PlanKeys = ...,
    profile: ProfileKeys = ...,
    fault: FaultKeys = ...,
) -> Run:
    """Continue a checkpoint of a run as a new run, with other keys.

    The fork takes over weights, optimizer, step and position in the data; the same call continues
    it.

    Args:
        parent: The run, or its folder; it is not changed.
        overrides: key=value.
        at: The step of the checkpoint; None means the newest good one.
        quiet: Print nothing.
        task: What is trained: image_classification, language_modelling, tabular, huggingface, or
            the import path of a class of your own (my_package.my_module:MyTask).
        task_args: Arguments of the task; `trireme config task=NAME` ends with a list of them.
        strategy: How the work is split: single, ddp, …; auto: single with one worker, else the
            simplest of the fastest strategies that the planner expects to fit; it also sets
            train.micro_batch_size if that is null.
        workers: Number of workers. auto: every GPU of the cluster, else 2 CPU workers.
        resources_per_worker: Ray resources of one worker. Empty: one GPU where workers use GPUs,
            else one CPU.
        launcher: ray (Ray Train's TorchTrainer; Ray actors where pp > 1), actors (Ray actors for
            any strategy), local (this process), or torchrun (the processes that torchrun or Slurm
            started). auto: torchrun in its environment; actors on the CPUs of a single machine,
            where fewer processes start sooner; else ray.
        budget: US dollars that this run may cost, over all its starts: it saves and stops before it
            spends more. null: no limit. Needs prices: those of cluster.file, else the list prices
            of its GPUs (cluster/hardware.yaml).
        cluster: What the run requests from the cluster, and what happens if the resources do not
            come.
        run: Name and place of the run.
        parallel: Degrees of parallelism and how each kind behaves.
        train: The training loop.
        optimizer: The optimizer.
        schedule: The learning rate over time.
        checkpoint: What is saved, when, and what is kept.
        tracking: How the run is shown in MLflow.
        plan: How a run follows its plan. 20 steps after a start with strategy=auto, the measured
            step is compared with the planned one by part: computing, communication, bubble, data.
        profile: Where the time of some steps goes; `trireme profile RUN` prints a table, and traces
            are in the run's folder.
        fault: What happens when something breaks.

    Raises:
        UserError: There is no such checkpoint, or the input is wrong.
        RunFailed: Training failed; its last good checkpoint is intact.
        Interrupted: Training was stopped by Ctrl-C or a signal, after a checkpoint.
    """

def plan(
    *experiment: str | Path,
    cluster: str | None = None,
    gpus: int | None = None,
    gpu: str | None = None,
    gpus_per_node: int | None = None,
    interconnect: str | None = None,
    task: str | type[Task] | Task = ...,
    task_args: Mapping[str, Any] = ...,
    strategy: str = ...,
    workers: int | str = ...,
    resources_per_worker: Mapping[str, float] = ...,
    launcher: str = ...,
    budget: float | None = ...,
    run: RunKeys = ...,
    parallel: ParallelKeys = ...,
    train: TrainKeys = ...,
    optimizer: OptimizerKeys = ...,
    schedule: ScheduleKeys = ...,
    checkpoint: CheckpointKeys = ...,
    tracking: TrackingKeys = ...,
    plan: PlanKeys = ...,
    profile: ProfileKeys = ...,
    fault: FaultKeys = ...,
) -> Plan:
    """Predict which layouts of an experiment fit, how fast they train and at what cost.

    Nothing is started. Without the arguments below the plan is for the cluster or the machine on
    which `train` would train.

    Args:
        experiment: Paths of YAML files and key=value.
        cluster: A cluster's file, or the name of one of Trireme's own.
        gpus: Plan for this number of GPUs, which need not exist.
        gpu: The name of the GPU.
        gpus_per_node: The number of GPUs of one node.
        interconnect: The rate between nodes, such as 400Gb.
        task: What is trained: image_classification, language_modelling, tabular, huggingface, or
            the import path of a class of your own (my_package.my_module:MyTask).
        task_args: Arguments of the task; `trireme config task=NAME` ends with a list of them.
        strategy: How the work is split: single, ddp, …; auto: single with one worker, else the
            simplest of the fastest strategies that the planner expects to fit; it also sets
            train.micro_batch_size if that is null.
        workers: Number of workers. auto: every GPU of the cluster, else 2 CPU workers.
        resources_per_worker: Ray resources of one worker. Empty: one GPU where workers use GPUs,
            else one CPU.
        launcher: ray (Ray Train's TorchTrainer; Ray actors where pp > 1), actors (Ray actors for
            any strategy), local (this process), or torchrun (the processes that torchrun or Slurm
            started). auto: torchrun in its environment; actors on the CPUs of a single machine,
            where fewer processes start sooner; else ray.
        budget: US dollars that this run may cost, over all its starts: it saves and stops before it
            spends more. null: no limit. Needs prices: those of cluster.file, else the list prices
            of its GPUs (cluster/hardware.yaml).
        run: Name and place of the run.
        parallel: Degrees of parallelism and how each kind behaves.
        train: The training loop.
        optimizer: The optimizer.
        schedule: The learning rate over time.
        checkpoint: What is saved, when, and what is kept.
        tracking: How the run is shown in MLflow.
        plan: How a run follows its plan. 20 steps after a start with strategy=auto, the measured
            step is compared with the planned one by part: computing, communication, bubble, data.
        profile: Where the time of some steps goes; `trireme profile RUN` prints a table, and traces
            are in the run's folder.
        fault: What happens when something breaks.

    Raises:
        UserError: The input is wrong.
    """

def scale(
    *experiment: str | Path,
    workers: Sequence[int],
    strategy: str | Sequence[str] | None = None,
    weak: bool = False,
    repeats: int = 3,
    steps: int = 10,
    blocks: int = 5,
    quiet: bool = False,
    task: str | type[Task] | Task = ...,
    task_args: Mapping[str, Any] = ...,
    resources_per_worker: Mapping[str, float] = ...,
    launcher: str = ...,
    budget: float | None = ...,
    cluster: ClusterKeys = ...,
    run: RunKeys = ...,
    parallel: ParallelKeys = ...,
    train: TrainKeys = ...,
    optimizer: OptimizerKeys = ...,
    schedule: ScheduleKeys = ...,
    checkpoint: CheckpointKeys = ...,
    tracking: TrackingKeys = ...,
    plan: PlanKeys = ...,
    profile: ProfileKeys = ...,
    fault: FaultKeys = ...,
) -> Scaling:
    """Measure an experiment on several numbers of workers; the same call continues the study.

    Args:
        experiment: Paths of YAML files and key=value.
        workers: The numbers of workers to measure.
        strategy: One strategy or several; None means the experiment's.
        weak: Let the batch grow with the workers, instead of sharing the same one.
        repeats: Measurements of every point, in turns.
        steps: Steps in a block.
        blocks: Blocks of each measurement.
        quiet: Print nothing.
        task: What is trained: image_classification, language_modelling, tabular, huggingface, or
            the import path of a class of your own (my_package.my_module:MyTask).
        task_args: Arguments of the task; `trireme config task=NAME` ends with a list of them.
        resources_per_worker: Ray resources of one worker. Empty: one GPU where workers use GPUs,
            else one CPU.
        launcher: ray (Ray Train's TorchTrainer; Ray actors where pp > 1), actors (Ray actors for
            any strategy), local (this process), or torchrun (the processes that torchrun or Slurm
            started). auto: torchrun in its environment; actors on the CPUs of a single machine,
            where fewer processes start sooner; else ray.
        budget: US dollars that this run may cost, over all its starts: it saves and stops before it
            spends more. null: no limit. Needs prices: those of cluster.file, else the list prices
            of its GPUs (cluster/hardware.yaml).
        cluster: What the run requests from the cluster, and what happens if the resources do not
            come.
        run: Name and place of the run.
        parallel: Degrees of parallelism and how each kind behaves.
        train: The training loop.
        optimizer: The optimizer.
        schedule: The learning rate over time.
        checkpoint: What is saved, when, and what is kept.
        tracking: How the run is shown in MLflow.
        plan: How a run follows its plan. 20 steps after a start with strategy=auto, the measured
            step is compared with the planned one by part: computing, communication, bubble, data.
        profile: Where the time of some steps goes; `trireme profile RUN` prints a table, and traces
            are in the run's folder.
        fault: What happens when something breaks.

    Raises:
        UserError: The input is wrong.
        RunFailed: A point could not be measured.
    """

def sweep(
    file: str | Path,
    *,
    quiet: bool = False,
    budget: float | Mapping[str, float] = ...,
    concurrent: int | None = ...,
    confirm: int | None = ...,
    confirm_seeds: int = ...,
    fork: str = ...,
    metric: str = ...,
    mode: str = ...,
    more_rates: int | None = ...,
    name: str = ...,
    next: str = ...,
    reports: int | None = ...,
    samples: int | None = ...,
    scheduler: str = ...,
    searcher: str = ...,
    seed: int = ...,
    space: Mapping[str, Any] = ...,
    target: float | None = ...,
    time: str = ...,
    trials: int | None = ...,
    task: str | type[Task] | Task = ...,
    task_args: Mapping[str, Any] = ...,
    strategy: str = ...,
    workers: int | str = ...,
    resources_per_worker: Mapping[str, float] = ...,
    launcher: str = ...,
    cluster: ClusterKeys = ...,
    run: RunKeys = ...,
    parallel: ParallelKeys = ...,
    train: TrainKeys = ...,
    optimizer: OptimizerKeys = ...,
    schedule: ScheduleKeys = ...,
    checkpoint: CheckpointKeys = ...,
    tracking: TrackingKeys = ...,
    plan: PlanKeys = ...,
    profile: ProfileKeys = ...,
    fault: FaultKeys = ...,
) -> Sweep:
    """Search the space of a sweep file; the same call continues the sweep.

    Args:
        file: The path of the sweep file.
        quiet: Print nothing.
        budget: As in a sweep file.
        concurrent: As in a sweep file.
        confirm: As in a sweep file.
        confirm_seeds: As in a sweep file.
        fork: As in a sweep file.
        metric: As in a sweep file.
        mode: As in a sweep file.
        more_rates: As in a sweep file.
        name: As in a sweep file.
        next: As in a sweep file.
        reports: As in a sweep file.
        samples: As in a sweep file.
        scheduler: As in a sweep file.
        searcher: As in a sweep file.
        seed: As in a sweep file.
        space: As in a sweep file.
        target: As in a sweep file.
        time: As in a sweep file.
        trials: As in a sweep file.
        task: What is trained: image_classification, language_modelling, tabular, huggingface, or
            the import path of a class of your own (my_package.my_module:MyTask).
        task_args: Arguments of the task; `trireme config task=NAME` ends with a list of them.
        strategy: How the work is split: single, ddp, …; auto: single with one worker, else the
            simplest of the fastest strategies that the planner expects to fit; it also sets
            train.micro_batch_size if that is null.
        workers: Number of workers. auto: every GPU of the cluster, else 2 CPU workers.
        resources_per_worker: Ray resources of one worker. Empty: one GPU where workers use GPUs,
            else one CPU.
        launcher: ray (Ray Train's TorchTrainer; Ray actors where pp > 1), actors (Ray actors for
            any strategy), local (this process), or torchrun (the processes that torchrun or Slurm
            started). auto: torchrun in its environment; actors on the CPUs of a single machine,
            where fewer processes start sooner; else ray.
        cluster: What the run requests from the cluster, and what happens if the resources do not
            come.
        run: Name and place of the run.
        parallel: Degrees of parallelism and how each kind behaves.
        train: The training loop.
        optimizer: The optimizer.
        schedule: The learning rate over time.
        checkpoint: What is saved, when, and what is kept.
        tracking: How the run is shown in MLflow.
        plan: How a run follows its plan. 20 steps after a start with strategy=auto, the measured
            step is compared with the planned one by part: computing, communication, bubble, data.
        profile: Where the time of some steps goes; `trireme profile RUN` prints a table, and traces
            are in the run's folder.
        fault: What happens when something breaks.

    Raises:
        UserError: The input is wrong.
    """
