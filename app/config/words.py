"""The names that other trainers have for keys, for the message about a key that does not exist.

Accelerate, Lightning's Trainer, Hugging Face's TrainingArguments, torchrun and DeepSpeed have other
names for the same things. Spelling alone does not lead to the key that is meant: the key spelt most
like `batch_size` is optimizer.lr_batch_size.
"""

import re

FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
OPTIMIZER_ARGUMENTS = (
    *("amsgrad", "centered", "dampening", "foreach", "maximize", "momentum_decay", "nesterov"),
    *("ns_steps", "rho"),
)
"""Arguments of torch's optimizers that `optimizer` has no key for, and that mean nothing else."""
OTHER_NAMES = {
    "train.global_batch_size": "batch_size global_batch train_batch_size bs",
    "train.micro_batch_size": (
        "per_device_train_batch_size per_device_batch_size micro_batch "
        "train_micro_batch_size_per_gpu gradient_accumulation_steps accumulate_grad_batches "
        "grad_accum_steps gradient_accumulation"
    ),
    "train.eval_batch_size": "per_device_eval_batch_size val_batch_size",
    "train.steps": "max_steps num_steps total_steps iterations max_iters",
    "train.epochs": "epochs num_train_epochs max_epochs num_epochs",
    "train.precision": "precision fp16 bf16 mixed_precision amp dtype torch_dtype half",
    "train.compile": "compile torch_compile",
    "train.activation_checkpointing": (
        "gradient_checkpointing activation_checkpointing checkpointing recompute"
    ),
    "train.activation_offloading": (
        "activation_offloading enable_activation_offloading offload_activations activation_offload "
        "cpu_checkpointing save_on_cpu"
    ),
    "train.clip_norm": (
        "max_grad_norm gradient_clip_val gradient_clipping grad_clip clip_grad_norm clip"
    ),
    "train.log_every": "log_every logging_steps log_every_n_steps log_interval",
    "train.eval_every": (
        "eval_every eval_steps val_check_interval check_val_every_n_epoch eval_interval"
    ),
    "train.patience": "patience early_stopping_patience",
    "train.data_workers": "num_workers data_workers dataloader_num_workers",
    "train.seed": "seed manual_seed data_seed",
    "optimizer.name": "optim optimiser",
    "optimizer.lr": "lr learning_rate",
    "optimizer.weight_decay": "weight_decay wd",
    "optimizer.betas": "betas adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.eps": "eps adam_epsilon",
    "optimizer.groups": "param_groups parameter_groups no_decay",
    **{f"optimizer.args.{name}": name for name in OPTIMIZER_ARGUMENTS},
    "schedule.name": "scheduler lr_scheduler lr_scheduler_type",
    "schedule.decay_steps": "lr_decay_iters cooldown_steps num_decay_steps step_size",
    "schedule.warmup_steps": "warmup warmup_steps num_warmup_steps warmup_iters",
    "checkpoint.every_steps": (
        "save_steps save_every checkpoint_every save_interval every_n_train_steps"
    ),
    "checkpoint.keep_last": "save_total_limit save_top_k keep_last",
    "checkpoint.load": "resume_from_checkpoint ckpt_path load_checkpoint pretrained",
    "run.name": "name run_name experiment_name",
    "run.storage": "output_dir default_root_dir project_dir logging_dir save_dir storage",
    "workers": (
        "gpus num_gpus n_gpus num_processes nproc_per_node world_size devices nproc num_devices"
    ),
    "task_args.model": "model",
    "task_args.data": "data dataset data_path",
    "parallel.offload": "offload cpu_offload",
    "parallel.dp_replicate": "dp dp_size dp_degree data_parallel_size data_parallel",
    "parallel.tp": "tensor tp_size tp_degree tensor_parallel tensor_model_parallel_size",
    "parallel.pp": "pipeline pp_size pp_degree pipeline_parallel pipeline_model_parallel_size",
    "parallel.cp": "context cp_size context_parallel context_parallel_size",
    "parallel.ep": "expert ep_size expert_parallel expert_model_parallel_size",
    "strategy": "parallelism distributed",
    "resources_per_worker": "device accelerator cuda use_cuda no_cuda use_cpu gpu cpu",
}
"""For each key, the words that other trainers use for it, separated by spaces."""

OTHER_VALUES = {
    "train.precision": {
        "fp32": "32 32-true float32 float single no none",
        "bf16": "bf16-mixed bf16-true bfloat16",
        "fp16": "16 16-mixed 16-true float16 half",
        "": "fp64 float64 64 64-true double",
    },
    "schedule.name": {
        "cosine": "cosine_with_restarts cosineannealing cosineannealinglr cosine_annealing",
        "constant": "none constant_with_warmup",
        "linear": "linear_with_warmup",
    },
    "train.matmul_precision": {
        "highest": "fp32 float32 ieee",
        "high": "tf32 true",
        "medium": "bf16 bfloat16",
    },
    "launcher": {
        "torchrun": "slurm srun torchelastic elastic",
        "local": "none single no process",
    },
    "checkpoint.mode": {"min": "lowest smallest minimize", "max": "highest largest maximize"},
}
"""For some keys, the words that other trainers use for each of its values; "" if it has none."""

NO_BLOCK_SCALES = (
    "Trireme has no formats in which a few numbers share a scale (MXFP8, MXFP4, NVFP4): write "
    "train.precision=fp8, which has a scale for each tensor, or bf16"
)
REMARKS_ON_VALUES = {
    "train.precision": dict.fromkeys(
        ("mxfp8", "mxfp4", "nvfp4", "fp4", "mx", "mxfp8_e4m3"), NO_BLOCK_SCALES
    )
}
"""For some keys, what is said of values that other trainers have and Trireme does not."""

CONTINUES = "a run continues when its command is run again"
MERGED = "several files are merged in their order: trireme train base.yaml this.yaml"
METRICS = "metrics go to MLflow: tracking.uri says to which"
REMARKS = {
    **dict.fromkeys(("resume", "auto_resume", "restart", "continue", "resume_training"), CONTINUES),
    **dict.fromkeys(("wandb", "logger", "report_to", "tensorboard", "mlflow", "log_with"), METRICS),
    **dict.fromkeys(("defaults", "includes", "extends", "_base_"), MERGED),
    **dict.fromkeys(("config", "cfg", "file", "yaml"), "an experiment's file is written as it is"),
}
"""What is said of words that other trainers have keys for, and Trireme does without."""

KEY_OF_WORD = {word: key for key, words in OTHER_NAMES.items() for word in words.split()}


def meant_key(written: str) -> str | None:
    """The key that another trainer's word means; None for a word that no trainer uses.

    Args:
        written: A word as on a command line, such as `learning-rate` or `training.batch_size`.
    """
    return KEY_OF_WORD.get(_last_word(written))


def remark_on(written: str) -> str | None:
    """What to say of another trainer's word that no key stands for; None for other words.

    Args:
        written: A word as on a command line, such as `--resume` or `checkpoint.resume`.
    """
    return REMARKS.get(_last_word(written))


def _last_word(written: str) -> str:
    return written.rpartition(".")[2].lstrip("-").replace("-", "_").lower()


def meant_number(written: object) -> int | float | None:
    """The number that a text means, such as 10k, 1e3, 0,001 or 16GB; None for other texts."""
    if isinstance(written, float):
        return int(written) if written.is_integer() else written
    text = str(written).strip()
    match = re.fullmatch(r"(\d+(?:[.,]\d+)?)\s*([kKmMgG]?)[bB]?", text)
    if match is None:
        return None
    number = float(match[1].replace(",", ".")) * FACTORS[match[2].lower()]
    return int(number) if number.is_integer() else number


def remark_on_value(key: str, written: object) -> str | None:
    """What to say of a value that other trainers have and Trireme does not; None for others.

    Args:
        key: A key of the configuration.
        written: What was written for it.
    """
    return REMARKS_ON_VALUES.get(key, {}).get(str(written).lower())


def meant_value(key: str, written: object) -> str | None:
    """The value of a key that another trainer's word means.

    Args:
        key: A key of the configuration.
        written: What was written for it.

    Returns:
        None for a word that no trainer uses; "" for one that means nothing that the key may be.
    """
    word = str(written).lower()
    for value, words in OTHER_VALUES.get(key, {}).items():
        if word == value or word in words.split():
            return value
    return None
