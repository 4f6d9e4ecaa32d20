"""Every key of the configuration: one tree of frozen dataclasses.

    dataclass defaults  <  YAML files  <  key=value on the command line

The string under a field is the documentation of its key; `trireme config` prints it above the
resolved value. A field whose default is `Options.NAME` is an option of parallelism, and takes its
documentation from strategies/options.py too. Every field is annotated: Python would take an
unannotated one for a class attribute, and there would be no such key.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Optional

from app.config.batch_schedule import AUTO, BatchSchedule
from strategies.options import Options


@dataclass(frozen=True)
class RunConfig:
    """The keys of `run`."""

    name: str = ""
    """Names the run: its folder in the storage, its MLflow run, and the run that a second call
    resumes. Empty: the experiment file's name."""
    storage: str = "runs"
    """Where runs are kept: a folder (local or NFS), or s3://… or gs://…; every node must see it."""
    log_format: str = "text"
    """Format of the logs in the run's folder: text, or json (one object a line, with time, run,
    attempt, rank and host; the driver's log also has what is printed on the terminal)."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The keys of `parallel`."""

    dp_replicate: Optional[int] = None
    """Copies of the model (or of its shards); gradients are averaged over them. null: the strategy
    decides."""
    dp_shard: Optional[int] = None
    """Workers that one copy's parameters, gradients and optimizer state are sharded over."""
    cp: Optional[int] = None
    """Workers that one sequence is split over (context parallelism)."""
    context: str = Options.context
    tp: Optional[int] = None
    """Workers that each layer's matrix products are split over (tensor parallelism)."""
    pp: Optional[int] = None
    """Stages that the model's blocks are split over (pipeline parallelism)."""
    ep: Optional[int] = None
    """Data-parallel workers that the experts of a mixture of experts are split over (expert
    parallelism). The other degrees alone multiply to the number of workers."""
    sequence_parallel: bool = Options.sequence_parallel
    async_tp: bool = Options.async_tp
    loss_parallel: bool = Options.loss_parallel
    reshard_after_forward: Optional[bool] = Options.reshard_after_forward
    offload: bool = Options.offload
    reduce_dtype: str = Options.reduce_dtype
    bucket_mb: float = Options.bucket_mb
    find_unused_parameters: bool = Options.find_unused_parameters
    accumulate_sharded: Optional[bool] = Options.accumulate_sharded
    schedule: str = Options.schedule
    chunks: int = Options.chunks
    stages: Optional[list[int]] = None
    """With pp: blocks of each chunk, first to last (their sum is the model's number of blocks).
    null: balanced by estimated cost."""
    stage_resources: list[dict[str, float]] = field(default_factory=list)
    """With pp: Ray resources of each stage's workers, first to last, so that different GPUs can
    serve in one pipeline. Empty: resources_per_worker for all."""
    profile_every: int = 100
    """With pp: measure computing, waiting and transfers once every this many steps, and in the
    fifth step (pipeline/… in MLflow). 0: never."""
    trace_step: Optional[int] = None
    """With pp: write this step as a Chrome trace into the run's folder and MLflow. null: none."""
    deepspeed: Optional[str] = None
    """With strategy deepspeed: path of a DeepSpeed JSON. null: ZeRO stage 2."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The keys of `train`."""

    steps: Optional[int] = None
    """Optimizer steps to train for in all. Give this or train.epochs."""
    epochs: Optional[float] = None
    """Passes over the training data to train for in all. Give this or train.steps."""
    global_batch_size: int = 64
    """Samples per optimizer step, over all workers together. With train.batch_schedule: its
    largest, or with auto the first."""
    batch_schedule: Any = field(default_factory=list)
    """Global batches that follow one another: [[0, 32], [200_000, 64]] is 32 until 200,000 samples
    have been seen (those of a run that is forked count), and then 64. optimizer.lr_scaling lets the
    rate follow, and schedule.name is then a curve over samples; whatever else counts steps counts
    steps. auto: begins with train.global_batch_size, tries twice the batch beside it whenever the
    samples seen have doubled, and continues with it if it is as good; train.steps counts steps of
    the first batch. Empty: always train.global_batch_size."""
    micro_batch_size: Optional[int] = None
    """Samples that one worker computes at once; gradients are accumulated over its share of the
    global batch. null: its whole share."""
    precision: str = Options.precision
    weight_dtype: str = Options.weight_dtype
    clip_norm: Optional[float] = None
    """Scale the gradient down to this total norm when it is longer. null: never."""
    compile: bool = Options.compile
    compile_backend: str = Options.compile_backend
    activation_checkpointing: str = Options.activation_checkpointing
    activation_offloading: bool = Options.activation_offloading
    seed: int = 0
    """Decides initial weights, data order and dropout; the same whatever the number of workers."""
    matmul_precision: str = "highest"
    """On GPUs, how float32 is multiplied (torch.set_float32_matmul_precision; convolutions too):
    highest (float32: all layouts agree to its rounding), high (TF32 where the GPU has it: several
    times as fast, factors rounded to 10 bits) or medium (bfloat16 too)."""
    deterministic: bool = False
    """Ask torch for deterministic algorithms everywhere (slower on GPUs)."""
    eval_every: Optional[int] = None
    """Evaluate on the held-out data once every this many steps, and always at the end. null: only
    at the end."""
    patience: Optional[int] = None
    """End training when checkpoint.metric has not improved in this many evaluations. null:
    never."""
    ema_decay: Optional[float] = None
    """Keep an exponential moving average of the weights with this decay (such as 0.999). It is
    evaluated as ema_loss and so on, and exported and stored as the model at the end. null: none."""
    eval_batch_size: Optional[int] = None
    """Samples that one worker evaluates at once. null: as in training."""
    eval_separate: bool = False
    """Evaluate committed checkpoints in a worker of its own while training goes on (in Ray).
    train.eval_every is then a multiple of checkpoint.every_steps, and patience and the best
    checkpoint follow when results come."""
    eval_resources: dict[str, float] = field(default_factory=dict)
    """With eval_separate: Ray resources of that worker, such as {GPU: 1}. Empty: one CPU, or none
    of its own where the cluster has no CPU beside the workers'."""
    log_every: int = 10
    """Log metrics once every this many steps."""
    noise_scale_every: Optional[int] = None
    """Measure and log the gradient noise scale once every this many steps: the batch size up to
    which a larger one saves steps. 50 costs less than 1 % of the time. null: never."""
    data_workers: int = 0
    """Processes per worker that load data, for data sets whose samples are costly to make. 0: a
    thread."""

    @property
    def grows_by_itself(self) -> bool:
        """Whether the run decides on its batch while it trains."""
        return bool(self.batch_schedule == AUTO)

    @property
    def batches(self) -> BatchSchedule:
        """The global batch over the samples seen; if the run decides on it, as it begins."""
        if not self.batch_schedule or self.grows_by_itself:
            return BatchSchedule.constant(self.global_batch_size)
        return BatchSchedule(tuple((begin, batch) for begin, batch in self.batch_schedule))

    def steps_for(self, samples: int | None) -> int:
        """The number of optimizer steps in all; one epoch's if neither steps nor epochs is set.

        If the run decides on its batch: those that it takes if the batch never grows.

        Args:
            samples: The size of the training set; None for a stream, which needs train.steps.
        """
        if self.steps:
            return self.steps
        epochs = self.epochs or 1.0
        if self.batch_schedule:
            return max(1, self.batches.steps_until(math.ceil(epochs * (samples or 1))))
        return max(1, math.ceil(epochs * (samples or 1) / self.global_batch_size))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The keys of `optimizer`."""

    name: str = "adamw"
    """adamw, adamw8bit (its moments in 8 bits: 2 bytes a weight instead of 8), adam, sgd, muon
    (matrices of hidden layers, adamw for the others), adafactor, adadelta, adagrad, adamax, asgd,
    nadam, radam, rmsprop, rprop (torch.optim's), or the import path of a class
    (my_package.my_module:MyOptimizer)."""
    state_dtype: str = "fp32"
    """Type of adamw's moments between steps: fp32, or bf16 (4 bytes a weight instead of 8) with
    stochastic rounding, which is right on average and the same under every layout."""
    lr: float = 1e-3
    """Learning rate at the top of the schedule."""
    lr_scaling: str = "none"
    """How lr follows the batch size: none, linear (twice the batch, twice the rate; for SGD) or
    sqrt (for Adam). With schedule.warmup_steps the rate rises from lr itself, as in Goyal et al.
    2017."""
    lr_batch_size: Optional[int] = None
    """With lr_scaling: the global batch size that lr is meant for."""
    weight_decay: float = 0.0
    """Weight decay; parameters with fewer than two dimensions (biases, norms) are not decayed."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of the first and second moment of adam, adamw, adamw8bit, adamax, nadam, radam
    and muon's adamw; those of others are in optimizer.args."""
    eps: float = 1e-8
    """Epsilon of the same ones."""
    momentum: float = 0.9
    """sgd's momentum."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer's class, such as {amsgrad: true}; muon's are Muon's."""
    groups: dict[str, Any] = field(default_factory=dict)
    """Arguments for parameters whose names match a pattern, such as {"*.bias": {weight_decay: 0}};
    of several patterns that match the later one counts. Its lr is that at the top of the
    schedule."""
    width_transfer: dict[str, Any] = field(default_factory=dict)
    """A rate found for a narrow model holds for a wide one (µP, arXiv 2203.03466): {base: {d_model:
    64, n_heads: 1}} are the task_args that make the narrow one, to which lr, groups and the initial
    weights belong. Each tensor's are multiplied by how much it has grown. Heads keep their size.
    `trireme coordinate-check` measures it. Empty: none."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The keys of `schedule`."""

    name: str = "constant"
    """What the learning rate does after warm-up: constant, linear, cosine, wsd (constant, then
    linear over the last decay_steps), inverse_sqrt, step (times decay_factor once every
    decay_steps) or one_cycle (up from a 25th over warmup_steps or 30 % of the steps, then down)."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises to its top, from 0; see lr_scaling and one_cycle."""
    final_fraction: float = 0.0
    """linear, cosine, wsd and one_cycle end at this fraction of the rate at the top."""
    decay_steps: Optional[int] = None
    """Steps of wsd's decay (null: a fifth of the run) or between two of step (null: a third)."""
    decay_factor: float = 0.1
    """What step multiplies the rate by."""
    steps: Optional[int] = None
    """Steps over which the curve goes; where it ends the rate stays. null: those of the run."""
    batch_size: Optional[int] = None
    """The global batch whose steps the schedule counts, so that the curve over samples stays what
    it was with that batch. A sweep of forks sets both to those of its run. null: the run's own."""
    join_samples: int = 0
    """A fork whose rate is not that of its checkpoint goes from one to the other over this many
    samples, by the same factor with each. 0: at once."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The keys of `checkpoint`."""

    every_steps: Optional[int] = None
    """Save once every this many steps. null: only at the end and when the run is asked to stop."""
    every_seconds: Optional[float] = 300.0
    """Save when this many seconds have passed since the last save. null: never by time."""
    auto: bool = False
    """Choose checkpoint.every_seconds while training, from the measured cost of a save and how
    often the run has failed (Young's and Daly's formula)."""
    keep_last: int = 2
    """How many of the newest committed checkpoints are kept."""
    keep_best: bool = True
    """Also keep the checkpoint with the best checkpoint.metric."""
    metric: str = "loss"
    """Evaluation metric that decides which checkpoint is best."""
    mode: str = "min"
    """min or max: which value of checkpoint.metric is best."""
    weights: bool = True
    """At the end also write all trained weights into one file, model/weights.pt of the run."""
    load: Optional[str] = None
    """Folder of a committed checkpoint (or of a run) whose weights a new run starts from."""
    fork: Optional[str] = None
    """Folder of a committed checkpoint (or of a run) from which a new run continues: weights,
    optimizer, step and position in the data. `trireme fork` sets it."""


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """The keys of `tracking`."""

    enabled: bool = True
    """Log to MLflow."""
    uri: Optional[str] = None
    """MLflow tracking URI. null: MLFLOW_TRACKING_URI, else a SQLite database in run.storage."""
    experiment: Optional[str] = None
    """MLflow experiment. null: MLFLOW_EXPERIMENT_NAME, else trireme."""
    also: list[str] = field(default_factory=list)
    """Trackers beside MLflow: tensorboard, the name of an installed one (entry point
    trireme.trackers) or the import path of a class (app/tracking/README.md)."""
    tags: dict[str, str] = field(default_factory=dict)
    """Tags of the MLflow run."""
    log_model: bool = True
    """Store the trained model as an MLflow model (mlflow.pytorch.load_model reads it); needs
    checkpoint.weights."""
    system_metrics_every: float = 5.0
    """Seconds between two samples of every node's CPU, memory and GPUs; 0: none."""
    flush_timeout: float = 15.0
    """Seconds to wait at the end for a tracking server that cannot be reached; metrics that it has
    not received by then stay spooled on disk."""


@dataclass(frozen=True)
class PlanConfig:
    """The keys of `plan`."""

    follow: bool = False
    """With strategy=auto, in Ray: when steps take longer than planned, save and continue with the
    layout that is now expected to be at least 10 % faster, restart included; the stages of a
    pipeline are divided again by their measured times. It tries at most two other layouts, each
    once, and returns to the fastest of all if they are slower."""


@dataclass(frozen=True)
class ProfileConfig:
    """The keys of `profile`."""

    steps: list[int] = field(default_factory=list)
    """The first and the last step to profile with torch.profiler, such as [20, 25]. Empty: none."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks to profile; in a pipeline, one rank of each stage is the most useful choice."""
    memory: bool = False
    """Also record what each operator allocates, and on GPUs a snapshot of every allocation;
    slower."""


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """The keys of `fault`."""

    max_restarts: int = 3
    """Restarts from the last checkpoint, after a worker or a node died, before the run gives up.
    Only the last hour counts, and a node whose removal was announced does not."""
    elastic_seconds: Optional[float] = 30.0
    """Seconds to wait for a lost worker's resources to come back (cluster.wait_seconds where an
    autoscaler may add nodes). Then the run continues with the largest layout that there is room
    for, of at least cluster.min_workers, at the same global batch, and grows again when there is
    room. null: it waits. Not with parallel.stage_resources."""
    start_seconds: float = 180.0
    """Seconds in which every worker must start, once it has its resources; after that the attempt
    is given up and tried again."""
    hang_seconds: float = 10.0
    """A run without progress for this long, and for five times its longest pause so far, is
    suspected to hang; if nothing moves for as long again, or for twice the longest pause, the
    worker that holds up the others is ended. Before that only a worker that does not answer for
    three times this (at least 20 s) is ended. Ten times this with train.compile. 0: never."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The keys of `cluster`."""

    file: Optional[str] = None
    """The file that the cluster was made from: its limits and prices. null: TRIREME_CLUSTER, else
    none."""
    wait_seconds: float = 600.0
    """Seconds to wait for the workers' resources, saying why, before cluster.when_pending
    decides."""
    when_pending: str = "end"
    """What to do if the resources do not come: end, or shrink (to the workers that there is room
    for)."""
    min_workers: int = 1
    """With cluster.when_pending=shrink or fault.elastic_seconds: the fewest workers to train
    with."""
    max_workers: Optional[int] = None
    """With train.batch_schedule, in Ray: the most workers to train with. When the batch grows, the
    run asks for as many as pay by the plan (twice as many that do at least 1.5 times the work, a
    restart counted), saves and continues with them when they are there, and continues without them
    if they do not come within cluster.wait_seconds. null: as many as at the beginning."""
    exclude_nodes: list[str] = field(default_factory=list)
    """Ids of nodes that get no worker, such as those that `trireme doctor --exclude-bad` prints."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """An experiment: everything that `trireme train` needs to know."""

    task: str = ""
    """What is trained: image_classification, language_modelling, tabular, huggingface, or the
    import path of a class of your own (my_package.my_module:MyTask)."""
    task_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task; `trireme config task=NAME` ends with a list of them."""
    strategy: str = "auto"
    """How the work is split: single, ddp, …; auto: single with one worker, else the simplest of the
    fastest strategies that the planner expects to fit; it also sets train.micro_batch_size if that
    is null."""
    workers: str = "auto"
    """Number of workers. auto: every GPU of the cluster, else 2 CPU workers."""
    resources_per_worker: dict[str, float] = field(default_factory=dict)
    """Ray resources of one worker. Empty: one GPU where workers use GPUs, else one CPU."""
    launcher: str = "auto"
    """ray (Ray Train's TorchTrainer; Ray actors where pp > 1), actors (Ray actors for any
    strategy), local (this process), or torchrun (the processes that torchrun or Slurm started).
    auto: torchrun in its environment; actors on the CPUs of a single machine, where fewer processes
    start sooner; else ray."""
    budget: Optional[float] = None
    """US dollars that this run may cost, over all its starts: it saves and stops before it spends
    more. null: no limit. Needs prices: those of cluster.file, else the list prices of its GPUs
    (cluster/hardware.yaml)."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """What the run requests from the cluster, and what happens if the resources do not come."""
    run: RunConfig = field(default_factory=RunConfig)
    """Name and place of the run."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Degrees of parallelism and how each kind behaves."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The training loop."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate over time."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What is saved, when, and what is kept."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """How the run is shown in MLflow."""
    plan: PlanConfig = field(default_factory=PlanConfig)
    """How a run follows its plan. 20 steps after a start with strategy=auto, the measured step is
    compared with the planned one by part: computing, communication, bubble, data."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Where the time of some steps goes; `trireme profile RUN` prints a table, and traces are in
    the run's folder."""
    fault: FaultConfig = field(default_factory=FaultConfig)
    """What happens when something breaks."""
