"""Over a hundred mistakes of a first hour: each is one sentence and exit code 2.

None waits until Ray has started. What is written stands beside the beginning of its sentence; "…"
stands for a part that is left out.
"""

import contextlib
import itertools
import re
import shlex
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.config.io import load_config
from app.run.manifest import Run
from tests.running import ROOT, environment, here, torchrun, trireme, wait_until

SECONDS = 8.0
"""Of a processor until the sentence: ten times what the slowest takes when all is imported."""
WAIT_SECONDS = 120.0
"""How long Ray takes to start: longer than it takes to find any mistake on a busy machine."""

TRAIN = [
    (
        "batch_size=32",
        "there is no key 'batch_size' (on the command … you mean 'train.global_batch_size'?",
    ),
    ("lr=0.1", "there is no key 'lr' (on the command line); did you mean 'optimizer.lr'?"),
    ("epochs=3", "there is no key 'epochs' (on the command line); did you mean 'train.epochs'?"),
    ("gpus=4", "there is no key 'gpus' (on the command line); did you mean 'workers'?"),
    (
        "max_epochs=3",
        "there is no key 'max_epochs' (on the command line); did you mean 'train.epochs'?",
    ),
    ("devices=4", "there is no key 'devices' (on the command line); did you mean 'workers'?"),
    (
        "num_train_epochs=3",
        "there is no key 'num_train_epochs' (on the … line); did you mean 'train.epochs'?",
    ),
    ("per_device_train_batch_size=8", "there is no key … mean 'train.micro_batch_size'?"),
    (
        "learning_rate=0.1",
        "there is no key 'learning_rate' (on the command line); did you mean 'optimizer.lr'?",
    ),
    ("accumulate_grad_batches=4", "there is no key … mean 'train.micro_batch_size'?"),
    (
        "precision=16-mixed",
        "there is no key 'precision' (on the command line); did you mean 'train.precision'?",
    ),
    (
        "train.precision=16-mixed",
        "train.precision is '16-mixed', but it … fp16, fp8 (did you mean 'fp16'?)",
    ),
    (
        "train.precision=fp64",
        "train.precision is 'fp64', but it must be one of fp32, bf16, fp16, fp8",
    ),
    (
        "train.precision=mxfp8",
        "train.precision is 'mxfp8', but Trireme has no formats in which a few numbers share a "
        "scale … write train.precision=fp8, which has a scale for each tensor, or bf16",
    ),
    (
        "train.steps=ten",
        "train.steps (on the command line) is 'ten', … write for instance train.steps=4",
    ),
    (
        "train.steps=1.5",
        "train.steps (on the command line) is 1.5, but … write for instance train.steps=4",
    ),
    ("train.steps=0", "train.steps is 0, but it must be greater than 0"),
    ("train.steps=-5", "train.steps is -5, but it must be greater than 0"),
    (
        "train.global_batch_size=abc",
        "train.global_batch_size (on the command … train.global_batch_size=64",
    ),
    (
        "train.global_batch_size=[8]",
        "train.global_batch_size (on the command … train.global_batch_size=64",
    ),
    (
        "optimizer.lr=fast",
        "optimizer.lr (on the command line) is 'fast', … for instance optimizer.lr=0.001",
    ),
    (
        "optimizer.lr=1e-3x",
        "optimizer.lr (on the command line) is … for instance optimizer.lr=0.001",
    ),
    (
        "optimizer.betas=0.9",
        "optimizer.betas (on the command line) is … 'optimizer.betas=[0.9, 0.999]'",
    ),
    (
        "optimizer.betas=[0.9,a]",
        "optimizer.betas (on the command line) is … 'optimizer.betas=[0.9, 0.999]'",
    ),
    (
        "optimizer=adamw",
        "optimizer (on the command line) is 'adamw', … a section: write optimizer.name=adamw",
    ),
    ("optimizer.name=AdamW", "optimizer.name is 'AdamW', but it must be … (did you mean 'adamw'?)"),
    ("optimizer.name=torch.optim.AdamW", "optimizer.name is … you mean 'torch.optim:AdamW'?)"),
    ("optimizer.name=torch.optim:AdamWW", "optimizer.name is … has no attribute 'AdamWW'"),
    (
        "optimizer.name=lion",
        "optimizer.name is 'lion', but it must be one … as my_package.my_module:MyOptimizer",
    ),
    (
        "schedule=cosine",
        "schedule (on the command line) is 'cosine', … a section: write schedule.name=cosine",
    ),
    (
        "schedule.name=cos",
        "schedule.name is 'cos', but it must be one of … step (did you mean 'cosine'?)",
    ),
    (
        "scheduler=cosine",
        "there is no key 'scheduler' (on the command line); did you mean 'schedule.name'?",
    ),
    ("strategy=fdsp", "strategy 'fdsp' is not known: did you mean fsdp?"),
    ("strategy=FSDP", "strategy 'FSDP' is not known: did you mean fsdp?"),
    ("strategy=ddp+tensro", "strategy 'tensro' is not known: did you mean tensor?"),
    (
        "strategy=",
        "strategy (on the command line) is empty, but it … text: write for instance strategy=auto",
    ),
    (
        "launcher=slurm",
        "launcher is 'slurm', but it must be one of … torchrun (did you mean 'torchrun'?)",
    ),
    (
        "launcher=tourchrun",
        "launcher is 'tourchrun', but it must be one … torchrun (did you mean 'torchrun'?)",
    ),
    ("launcher=torchrun", "launcher=torchrun finds neither RANK nor … or write launcher=ray"),
    ("workers=0", "workers is '0', but it must be auto or a whole number greater than 0"),
    ("workers=two", "workers is 'two', but it must be auto or a whole number greater than 0"),
    ("workers=-1", "workers is '-1', but it must be auto or a whole number greater than 0"),
    ("workers=2.5", "workers is '2.5', but it must be auto or a whole number greater than 0"),
    ("workers=2 launcher=local", "launcher=local is one process, but … 2 -m trireme train …"),
    (
        "device=cuda",
        "there is no key 'device' (on the command line); did you mean 'resources_per_worker'?",
    ),
    (
        "train.device=cuda:0",
        "there is no key 'train.device' (on the … did you mean 'resources_per_worker'?",
    ),
    (
        "resources_per_worker.GPU=one",
        "resources_per_worker.GPU (on the … resources_per_worker.GPU=0.1",
    ),
    (
        "resources_per_worker=GPU",
        "resources_per_worker (on the command … resources_per_worker.KEY=VALUE",
    ),
    (
        "task=tabulr",
        "there is no task 'tabulr' (did you mean … your own class as package.module:Class",
    ),
    (
        "task=mine",
        "there is no task 'mine': a task is the import path of its class, here mine:Points",
    ),
    (
        "task=mine:Nope",
        "task 'mine:Nope': module mine has no Nope: write mine:Points or mine:Needs",
    ),
    (
        "task=nomodule:Task",
        "task 'nomodule:Task' does not import: there … folder that holds it, or install it",
    ),
    (
        "task=mine.py",
        "there is no task 'mine.py': a task is the import path of its class, here mine:Points",
    ),
    (
        "task=mine.py:Points",
        "there is no task 'mine.py:Points': a task is … path of its class, here mine:Points",
    ),
    (
        "task=mine:helper",
        "task 'mine:helper' is not a task: helper must be a subclass of trireme.Task",
    ),
    (
        "task=broken_module:Task",
        "task 'broken_module:Task' does not import: SyntaxError: invalid syntax",
    ),
    ("task=needs_missing:Task", "task 'needs_missing:Task' does not … which is not installed"),
    ("task=fails_at_import:Task", "task 'fails_at_import:Task' does not … division by zero"),
    (
        "task_args.widht=8",
        "task_args.widht: task 'mine:Points' has no … it takes width, mode, rates, deep",
    ),
    (
        "task_args.width=wide",
        "task_args.width is 'wide', but task … for instance task_args.width=8",
    ),
    (
        "task_args.width=1.5",
        "task_args.width is 1.5, but task … write for instance task_args.width=8",
    ),
    (
        "task_args=8",
        "task_args (on the command line) is 8, but it … write for instance task_args.KEY=VALUE",
    ),
    (
        "task_args.rates=0.3",
        "task_args.rates is 0.3, but task … instance 'task_args.rates=[0.1,0.1]'",
    ),
    (
        "task_args.deep=maybe",
        "task_args.deep is 'maybe', but task … for instance task_args.deep=false",
    ),
    (
        "task=mine:Needs",
        "task 'mine:Needs' needs task_args.classes, which is not given; add it to the experiment",
    ),
    (
        "task_args.mode=init",
        "task 'mine:Points' cannot be made: … file or directory: 'not_there.csv'",
    ),
    ("task_args.mode=data", "the task's data cannot be read: KeyError: 'x'"),
    (
        "task_args.mode=sample",
        "a sample of the training data cannot be read: IndexError: list index out of range",
    ),
    (
        "task_args.mode=ragged",
        "samples of the training data do not make a … or a method collate_fn(samples) to",
    ),
    (
        "task_args.mode=empty",
        "the training data is empty: give the task data with at least one sample",
    ),
    (
        "task_args.mode=loader",
        "the training data is a DataLoader: give a … as train.global_batch_size says",
    ),
    (
        "task_args.mode=none",
        "the training data is a NoneType: give a data … made as train.global_batch_size says",
    ),
    (
        "task=image_classification task_args.data=nowhere",
        "task_args.data: there is no … path of existing data",
    ),
    (
        "task=image_classification task_args.data=folder",
        "task_args.data: folder … files as MNIST does",
    ),
    (
        "task=image_classification task_args.data=digits task_args.model=resnet5000",
        "task_args.model is … cnn, resnet, mlp",
    ),
    (
        "task=tabular task_args.data=nowhere.csv",
        "task_args.data: there is no … the path of existing data",
    ),
    ("task=tabular task_args.data=table.csv task_args.target=colour", "task_args.target"),
    (
        "task=tabular task_args.data=header.csv task_args.target=label",
        "header.csv has no … a table with some",
    ),
    (
        "task=tabular task_args.data=nothing.csv task_args.target=label",
        "nothing.csv cannot be … Empty CSV file",
    ),
    (
        "task=tabular task_args.data=folder task_args.target=label",
        "task_args.data: folder … or a .parquet file",
    ),
    ("task=language_modelling task_args.layers=three", "task_args.layers: task … eval_samples"),
    (
        "task=language_modelling task_args.data=nothing.txt task_args.n_layers=three",
        "task_args.n_layers is …",
    ),
    (
        "task=language_modelling task_args.data=nothing.txt",
        "task_args.data: there is … give files with text",
    ),
    (
        "task=language_modelling task_args.data=short.txt task_args.sequence_length=4096",
        "task_args.data: 60 … sequence_length",
    ),
    (
        "task=language_modelling task_args.data=short.txt task_args.d_model=10 task_args.n_heads=3",
        "d_model 10 cannot be … a multiple of 6",
    ),
    (
        "task=huggingface task_args.model=nowhere/model",
        "task 'huggingface' needs … it to the experiment",
    ),
    (
        "run.name=my/run",
        "run.name is 'my/run': use letters, digits, '.', '_' and '-' (at most 128)",
    ),
    (
        "run.name=",
        "run.name (on the command line) is empty, but it … text: write for instance run.name=NAME",
    ),
    (
        "run.storage=/proc/runs",
        "the storage /proc/runs/first cannot be … or the right to write there",
    ),
    ("run.storage=a_file", "the storage /a_file/first cannot be read … use another run.storage"),
    (
        "run.storage=s4://bucket",
        "the storage s4://bucket is of an unknown … use a local path, s3://… or gs://…",
    ),
    (
        "tracking.uri=http:/host",
        "tracking.uri='http:/host' is not an … such as ./runs, or databricks",
    ),
    ("tracking.uri=http://localhost:99999", "… as ./runs, or databricks"),
    (
        "tracking=false",
        "tracking (on the command line) is False, but it is a section: write tracking.KEY=VALUE",
    ),
    (
        "checkpoint.load=nowhere",
        "there is no committed checkpoint in … folder of a checkpoint or of a run",
    ),
    (
        "checkpoint.load=folder",
        "there is no committed checkpoint in … folder of a checkpoint or of a run",
    ),
    ("checkpoint.every_steps=0", "checkpoint.every_steps is 0, but it must be greater than 0"),
    (
        "checkpoint.mode=lowest",
        "checkpoint.mode is 'lowest', but it must … of min, max (did you mean 'min'?)",
    ),
    (
        "train.eval_every=often",
        "train.eval_every (on the command line) is … for instance train.eval_every=4",
    ),
    ("train.ema_decay=2", "train.ema_decay is 2.0, but it must be between 0 and 1, such as 0.999"),
    (
        "train.compile=maybe",
        "train.compile (on the command line) is … for instance train.compile=false",
    ),
    (
        "parallel.tp=two",
        "parallel.tp (on the command line) is 'two', … write for instance parallel.tp=4",
    ),
    ("parallel.pp=0", "parallel.pp is 0, but it must be greater than 0"),
    (
        "parallel.schedule=gpipee",
        "parallel.schedule is 'gpipee', but it … zbv (did you mean 'gpipe'?)",
    ),
    (
        "strategy=pipeline launcher=local",
        "a pipeline's stages are processes of … on several devices of this one",
    ),
    (
        "profile.steps=20",
        "profile.steps (on the command line) is 20, … for instance 'profile.steps=[20]'",
    ),
    (
        "profile.steps=[30,20]",
        "profile.steps is [30, 20], but it must be … and the last step, such as [20, 25]",
    ),
    (
        "budget=ten",
        "budget (on the command line) is 'ten', but it … a number: write for instance budget=0.1",
    ),
    (
        "budget=5 launcher=local",
        "budget is 5, but costs are not counted with launcher=local: write launcher=ray",
    ),
    (
        "train.steps=10 train.epochs=2",
        "train.steps and train.epochs are both … each sets the length: leave one out",
    ),
    (
        "cluster.when_pending=wait",
        "cluster.when_pending is 'wait', but it must be one of end, shrink",
    ),
    ("extra words", "there is no file extra: write the path of a YAML file"),
    # How numbers are written.
    ("train.steps=10k", "train.steps (on the command … whole number: write train.steps=10000"),
    ("train.steps=1e3", "train.steps (on the command … whole number: write train.steps=1000"),
    ("optimizer.lr=0,001", "optimizer.lr (on the command … a number: write optimizer.lr=0.001"),
    ("optimizer.lr=nan", "optimizer.lr is nan, but it must be a finite number"),
    ("optimizer.lr=inf", "optimizer.lr is inf, but it must be a finite number"),
    ("optimizer.momentum=2", "optimizer.momentum is 2.0, but it must be from 0 to 1, such as 0.9"),
    ("schedule.final_fraction=2", "schedule.final_fraction is 2.0, but it must be from 0 to 1"),
    (
        "resources_per_worker.memory=16GB",
        "resources_per_worker.memory … write resources_per_worker.memory=16000000000",
    ),
    (
        "resources_per_worker.gpu=1",
        "resources_per_worker.gpu is called GPU in Ray: write resources_per_worker.GPU=1",
    ),
    ("resources_per_worker.GPUs=1", "resources_per_worker.GPUs is called GPU in Ray: write"),
    ("optimizer.groups.bias.lr=fast", "optimizer.groups['bias'] has lr 'fast', but it must be a"),
    # How keys and words are written.
    ("train..steps=5", "'train..steps=5' is neither a YAML file nor key=value"),
    ("train.steps =5", "train.steps has no value: write train.steps=VALUE, in one word"),
    ("train.steps: 5", "train.steps: has no value: write train.steps=VALUE, in one word"),
    ("TRAIN.STEPS=5", "there is no key 'TRAIN' (on the command line); did you mean 'train'?"),
    ("resume=true", "there is no key 'resume' … a run continues when its command is run again"),
    ("checkpoint.resume=true", "there is no key 'checkpoint.resume' … a run continues when"),
    ("wandb=true", "there is no key 'wandb' (on the command line); metrics go to MLflow: tracking"),
    ("parallel.dp=2", "there is no key 'parallel.dp' … did you mean 'parallel.dp_replicate'?"),
    ("parallel.tensor=2", "there is no key 'parallel.tensor' … did you mean 'parallel.tp'?"),
    ("schedule.warmup_ratio=0.1", "there is no key … did you mean 'schedule.warmup_steps'?"),
    # Words of other libraries.
    ("strategy=ddp,fsdp", "strategy 'ddp,fsdp' names several: write one, or a combination such as"),
    ("strategy=ddp+", "strategy 'ddp+' has a + without a name beside it: write, say, ddp+tensor"),
    ("strategy=ddp+ddp", "strategy 'ddp+ddp' does not combine: write one of ddp, fsdp, hsdp"),
    ("strategy=tensor workers=2 parallel.tp=4", "… workers"),
    ("strategy=dataparallel", "strategy 'dataparallel' is called dp here: write strategy=dp"),
    ("strategy=tp", "strategy 'tp' is called tensor here: write strategy=tensor"),
    ("strategy=full_shard", "strategy 'full_shard' is called fsdp here: write strategy=fsdp"),
    (
        "train.activation_checkpointing=true",
        "train.activation_checkpointing is 'True': write none, full, selective, … true is full",
    ),
    (
        "train.matmul_precision=tf32",
        "train.matmul_precision is 'tf32', but it … (did you mean 'high'?)",
    ),
    (
        "train.compile=true train.compile_backend=tensorrt",
        "train.compile_backend is 'tensorrt', which torch does not have: write one of …inductor",
    ),
    # What can never be met.
    ("train.patience=3", "train.patience is 3 evaluations, but … write train.eval_every too"),
    (
        "train.patience=3 train.eval_every=1",
        "train.patience is 3 evaluations, but the task has no eval_data: leave it out",
    ),
    ("checkpoint.metric=accurracy", "checkpoint.metric is 'accurracy', but the task has no"),
    ("checkpoint.mode=max", "checkpoint.mode is max, but checkpoint.metric is loss, of which"),
    (
        "checkpoint.metric=accuracy",
        "checkpoint.mode is min, but … write checkpoint.mode=max, or another checkpoint.metric",
    ),
    ("cluster.file=nowhere.yaml", "there is no file nowhere.yaml: … names those of Trireme"),
    # Options of torch's optimizers.
    (
        "optimizer.args.amsgrda=true",
        "optimizer.args.amsgrda: … (did you mean 'amsgrad'?); it takes",
    ),
    (
        "optimizer.name=rmsprop optimizer.args.momentun=0.9",
        "optimizer.args.momentun: optimizer 'rmsprop' has no … 'momentum'?); it takes alpha, eps",
    ),
    ("optimizer.args.lr=0.1", "optimizer.args.lr: adamw gets it … write optimizer.lr=0.1"),
    ("optimizer.args.betas=[0.9,0.95]", "optimizer.args.betas: adamw gets … optimizer.betas=[0.9,"),
    ("optimizer.nesterov=true", "there is no key … did you mean 'optimizer.args.nesterov'?"),
    ("optimizer.args=amsgrad", "optimizer.args … write for instance optimizer.args.KEY=VALUE"),
    # What a shell or an editor makes of a word.
    ("profile.steps=[1, 3]", "3] closes a bracket of the word before it: put key=value in quotes"),
    ("task_args={width: 8}", "8} closes a bracket of the word before it: put key=value in quotes"),
    ("'task_args={width:8}'", "task_args has 'width:8', in … is missing: write {width: 8}, and"),
    ("'parallel.stage_resources=[{GPU:1}]'", "parallel.stage_resources has 'GPU:1', in which a"),
    ("–-again", "–-again begins with a long dash: write --again"),
    ("task=“mine:Points”", "the value of task is in typographic quotes: write it without, or"),
    ("strategy=fsdp tensor", "tensor is a strategy: write … or several, strategy=fsdp+tensor"),
    ("lr 0.1", "lr has no value: write optimizer.lr=VALUE, in one word"),
    ("experiments\\\\mnist.yaml", "there is no file experiments\\mnist.yaml: divide folders by /"),
    ("train.steps==4", "train.steps (on the command line) is '=4', but it must be a whole number"),
    ("+train.steps=4", "'+train.steps=4' is written for Hydra: write train.steps=4"),
    ("~train.steps", "~train.steps is written for Hydra: write train.steps=null"),
    ("optimizer.lr=0.1,0.01", "optimizer.lr (on the command line) is '0.1,0.01', but it must be a"),
    ("--optimizer.lr 0.1", "there is no option --optimizer.lr: write optimizer.lr=VALUE, without"),
    ("train.seed=99999999999999999999", "train.seed is 99999999999999999999, but it must be less"),
    (
        "train.steps=99999999999999999999",
        "train.steps is 99999999999999999999, but it must be less",
    ),
    ("schedule.warmup_steps=0.1", "schedule.warmup_steps (on the … must be a whole number"),
    ("task=tabular task_args.data=https://a.org/b.csv", "task_args.data is the address 'https"),
    ("tracking.uri=localhost:5000", "tracking.uri='localhost:5000' is … http://HOST:PORT"),
    ("cluster.file=good.yaml", "good.yaml:1: not a cluster file: it has task, train, run, but"),
    ("task=mine:Forgot", "task 'mine:Forgot' is not a task: Forgot must be a subclass"),
]
"""Written after `trireme train good.yaml`."""

OTHERS = [
    (
        "tran x.yaml",
        "unknown command 'tran' (did you mean 'train'?): … queue, doctor, plan, calibrate, cluster",
    ),
    (
        "trian mnist.yaml",
        "unknown command 'trian' (did you mean … doctor, plan, calibrate, cluster",
    ),
    ("train", "no experiment is given: write for instance experiments/mnist.yaml"),
    ("train nothere.yaml", "there is no file nothere.yaml: write the path of a YAML file"),
    ("train folder", "folder is a folder: write the path of a YAML file"),
    ("train binary.yaml", "binary.yaml is not a text in UTF-8: write the path of a YAML file"),
    ("train empty.yaml", "task is empty: write for instance task=image_classification"),
    (
        "train broken.yaml",
        "broken.yaml cannot be read as YAML at line 2: … are not allowed in this context",
    ),
    (
        "train list.yaml",
        "list.yaml holds no keys: write lines such as `task: image_classification`",
    ),
    (
        "train mnist.yaml steps=10",
        "there is no key 'steps' (on the command line); did you mean 'train.steps'?",
    ),
    (
        "train --workers 4 good.yaml",
        "there is no option --workers: write workers=VALUE, without dashes",
    ),
    (
        "train --steps 10 good.yaml",
        "there is no option --steps: write train.steps=VALUE, without dashes",
    ),
    ("train --gpus 2 good.yaml", "there is no option --gpus: write workers=VALUE, without dashes"),
    (
        "config good.yaml trian.steps=1",
        "there is no key 'trian' (on the command line); did you mean 'train'?",
    ),
    (
        "config task=tabulr",
        "there is no task 'tabulr' (did you mean … own class as package.module:Class",
    ),
    ("plan", "no experiment is given: write for instance experiments/mnist.yaml"),
    ("plan good.yaml --gpus four", "Invalid value for '--gpus': 'four' is not a valid integer."),
    (
        "plan good.yaml --gpu h1000",
        "the GPU 'h1000' is not in the catalogue … on it or write an entry there)",
    ),
    (
        "plan good.yaml --cluster nowhere.yaml",
        "there is no file nowhere.yaml: … names those of Trireme",
    ),
    ("plan good.yaml --gpus 0", "--gpus is 0: write at least 1"),
    (
        "plan good.yaml --interconnect fast",
        "a link of 'fast' cannot be read: … or 50GB (bytes a second)",
    ),
    ("sweep", "give one sweep file: write for instance trireme sweep experiments/sweep_mnist.yaml"),
    ("sweep nowhere.yaml", "there is no file nowhere.yaml: write the path of a YAML file"),
    (
        "sweep good.yaml",
        "good.yaml is an experiment, which `trireme … a sweep file has experiment and space",
    ),
    (
        "sweep sweep.yaml trails=3",
        "there is no key 'trails' (on the command line) (did you mean 'trials'?)",
    ),
    (
        "sweep sweep.yaml searcher=optunna",
        "there is no searcher 'optunna' (did … one of grid, random, optuna",
    ),
    (
        "sweep sweep.yaml trials=many",
        "trials is 'many', but it must be a whole number greater than 0",
    ),
    (
        "scale good.yaml",
        "--workers is missing: write trireme scale … trireme scale --help explains it",
    ),
    (
        "scale good.yaml --workers two",
        "--workers is 'two': write numbers with commas, such as 1,2,4",
    ),
    (
        "scale good.yaml --workers 1",
        "--workers 1 is one point, which shows no scaling: write for instance 1,2",
    ),
    (
        "scale good.yaml --workers 0,1",
        "--workers needs numbers greater than … for instance --workers 1,2,4",
    ),
    (
        "runs nowhere",
        "there is no folder nowhere: write the run.storage of your experiments, such as runs",
    ),
    (
        "watch nowhere",
        "nowhere is not a run's folder: write the one … `trireme runs FOLDER` lists them",
    ),
    (
        "report nowhere",
        "there is no folder nowhere: write one that `trireme train`, sweep or scale named",
    ),
    (
        "report",
        "FOLDER… is missing: write trireme report FOLDER…; trireme report --help explains it",
    ),
    (
        "profile nowhere",
        "nowhere is not a run's folder: write the one … `trireme runs FOLDER` lists them",
    ),
    (
        "export nowhere --to torch",
        "nowhere is not a run's folder: write the … `trireme runs FOLDER` lists them",
    ),
    (
        "export",
        "RUN_FOLDER is missing: write trireme export RUN_FOLDER; trireme export --help explains it",
    ),
    (
        "generate nowhere hello",
        "nowhere is not a run's folder: write the … `trireme runs FOLDER` lists them",
    ),
    ("generate", "RUN is missing: write trireme generate RUN; trireme generate --help explains it"),
    (
        "sync nowhere",
        "nowhere is not a run's folder: write the one … train` named, such as runs/mnist",
    ),
    (
        "submit stop",
        "JOB is missing: write trireme submit stop JOB; trireme submit stop --help explains it",
    ),
    (
        "doctor --cluster nowhere.yaml",
        "there is no file nowhere.yaml: … list` names those of Trireme",
    ),
    (
        "cluster up nowhere.yaml",
        "there is no file nowhere.yaml: `trireme cluster list` names those of Trireme",
    ),
    (
        "cluster chek x.yaml",
        "unknown command 'chek': write one of list, show, validate, up, down, status",
    ),
    ("parity good.yaml --rows ddpp", "there is no row 'ddpp' (did you mean … zero2+tensor, zero3"),
    (
        "parity good.yaml --workers two",
        "these strategies have no row with two workers: write some of 1, 2, 4, 8",
    ),
    ("calibrate --nope", "No such option '--nope'. `trireme calibrate --help` lists"),
    ("train good.yaml --resume", "there is no option --resume: a run continues when its command"),
    ("train --config good.yaml", "there is no option --config: an experiment's file is written"),
    ("train mine.py", "mine.py is not a YAML file: a task is written as task=mine:Points"),
    ("train table.csv", "table.csv is not a YAML file: write the path of one, in which data may"),
    ("train tabs.yaml", "tabs.yaml cannot be read as YAML at line 3: a line begins with a tab"),
    (
        "train dotted.yaml",
        "there is no key 'train.steps' (in dotted.yaml); in a file its section comes first: "
        "`train: {steps: …}`",
    ),
    ("train indent.yaml", "train (in indent.yaml) is empty, but it is a section: indent its keys"),
    ("train unset.yaml", "run.name cannot be resolved: Environment variable 'NOT_SET' not found"),
    ("train date.yaml", "date.yaml cannot be read … run.name is read as a date: put it in quotes"),
    ("scale good.yaml --workers 1 2", "--workers 1 2 has spaces: write --workers 1,2"),
    ("scale good.yaml --workers 1, 2, 4", "--workers 1, 2, 4 has spaces: write --workers 1,2,4"),
    ("scale good.yaml --workers 1-4", "--workers is '1-4': write numbers with commas, such as"),
    ("scale good.yaml --workers 1,2 --strategy ddp fsdp", "--strategy ddp fsdp has spaces: write"),
    ("parity good.yaml --rows ddp fsdp+tensor", "… write --rows ddp,fsdp+tensor"),
    ("parity good.yaml --workers 2 4", "--workers 2 4 has spaces: write --workers 2,4"),
    ("coordinate-check good.yaml --widths 64 128", "… has spaces: write --widths 64,128"),
    ("runs good.yaml", "good.yaml is a file: write the run.storage of your experiments, such as"),
    ("report good.yaml", "good.yaml is a file: write the folder that `trireme train`, sweep or"),
    ("compare folder", "folder is not a run's folder: write the one"),
    ("fork good.yaml --at 3", "good.yaml is not a run's folder: write the one"),
    ("fields nope", "there is no command 'nope': `trireme fields` lists them"),
    (
        "calibrate good.yaml",
        "good.yaml is unexpected: `trireme calibrate --help` lists the arguments",
    ),
    ("plan good.yaml --gpu", "--gpu has no value: write --gpu VALUE"),
    (
        "train utf16.yaml",
        "utf16.yaml is not a text in UTF-8: write the path of a YAML file that is",
    ),
    ("train two.yaml", "two.yaml cannot be read as YAML at line 2: a line of --- begins another"),
    ("train hydra.yaml", "there is no key 'defaults' … several files are merged in their order"),
    ("parity good.yaml --rows single", "every row is compared with single, which has no row"),
    ("plan good.yaml task=mine:Pointz --gpus 8", "task 'mine:Pointz': module mine has no Pointz"),
    ("scale good.yaml task=min:Points --workers 1,2", "… there is no module 'min' on Python's"),
]
"""Written after `trireme`."""

WORKERS = [
    ("item", 2, "the loss is a float, but it must be a tensor", "return loss.item()"),
    ("detached", 2, "the loss has no gradient", "return loss.detach()"),
    ("tuple", 2, "the loss is a tuple", 'return (loss, 1) if self.mode == "tuple" else loss'),
    ("shapes", 1, "RuntimeError", "loss = F.cross_entropy(model(batch[0]), batch[1])"),
    ("attribute", 1, "AttributeError", "return nn.Linear(2, self.widht)"),
    ("labels", 1, "IndexError", "loss = F.cross_entropy(model(batch[0]), batch[1])"),
]
"""What only a worker meets: by mode the exit code, the sentence, and the task's own line."""
MORE_MISTAKES = ("item", "attribute", "labels")
"""Of a loss that is no tensor, and errors in the task's code, of which `make test` has one."""

MINE = """import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from app.tasks.base import Task


def helper():
    return 1


class Forgot:
    def build_model(self):
        return nn.Linear(2, 4)


class Rows:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.rows[index]


class Points(Task):
    def __init__(
        self,
        *,
        width: int = 8,
        mode: str = "",
        rates: list[float] | None = None,
        deep: bool = False,
    ):
        self.width = width
        self.mode = mode
        if mode == "init":
            self.rows = open("not_there.csv").read()

    def build_model(self):
        if self.mode == "shapes":
            return nn.Sequential(nn.Linear(2, self.width), nn.Linear(5, 4))
        if self.mode == "attribute":
            return nn.Linear(2, self.widht)
        return nn.Sequential(nn.Linear(2, self.width), nn.ReLU(), nn.Linear(self.width, 4))

    def train_data(self):
        if self.mode == "data":
            return [row["x"] for row in [{"y": 1}]]
        if self.mode == "sample":
            return Rows([])
        if self.mode == "ragged":
            return Rows([(torch.zeros(2 + index), 0) for index in range(8)])
        if self.mode == "empty":
            return TensorDataset(torch.zeros(0, 2), torch.zeros(0))
        if self.mode == "none":
            return None
        inputs = torch.randn(64, 2)
        targets = torch.zeros(64).long() + (7 if self.mode == "labels" else 0)
        data = TensorDataset(inputs, targets)
        return DataLoader(data) if self.mode == "loader" else data

    def loss(self, model, batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if self.mode == "item":
            return loss.item()
        if self.mode == "detached":
            return loss.detach()
        return (loss, 1) if self.mode == "tuple" else loss


class Needs(Points):
    def __init__(self, *, classes: int):
        super().__init__()
"""
FILES: dict[str, str | bytes] = {
    "good.yaml": "task: mine:Points\ntrain: {steps: 4, global_batch_size: 8}\nrun: {name: first}\n"
    "tracking: {enabled: false}\n",
    "sweep.yaml": "experiment: good.yaml\nspace: {optimizer.lr: [0.1, 0.01]}\n",
    "tabs.yaml": "task: mine:Points\ntrain:\n\tsteps: 4\n",
    "dotted.yaml": "task: mine:Points\ntrain.steps: 4\n",
    "indent.yaml": "task: mine:Points\ntrain:\nsteps: 4\n",
    "unset.yaml": "task: mine:Points\nrun: {name: '${oc.env:NOT_SET}'}\n",
    "date.yaml": "task: mine:Points\nrun: {name: 2026-11-27}\n",
    "utf16.yaml": "task: mine:Points\n".encode("utf-16"),
    "two.yaml": "task: mine:Points\n---\ntrain: {steps: 4}\n",
    "hydra.yaml": "defaults: [base]\ntask: mine:Points\n",
    "mnist.yaml": "",
    "empty.yaml": "",
    "broken.yaml": "task: a\n  b: : c",
    "list.yaml": "- a\n",
    "binary.yaml": b"\x80\x04\x95\xff\xfe",
    "table.csv": "a,label\n1,x\n2,y\n",
    "header.csv": "a,label\n",
    "nothing.csv": "",
    "nothing.txt": "",
    "short.txt": "hello world\n" * 5,
    "a_file": "x",
    "mine.py": MINE,
    "broken_module.py": "def f(:\n",
    "needs_missing.py": "import nowhere_to_be_found\n",
    "fails_at_import.py": "from app.tasks.base import Task\n\nx = 1\ny = x / 0\n",
}
MODULES = [Path(name).stem for name in FILES if name.endswith(".py")]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with what a newcomer may have there; Ray must not start."""
    for name, content in FILES.items():
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def matches(sentence: str, expected: str) -> bool:
    """Whether a sentence begins as expected; "…" stands for anything."""
    pattern = ".*".join(map(re.escape, expected.split("…")))
    return bool(re.match(pattern, sentence, re.DOTALL))


def start_slowly(*args: Any, **options: Any) -> None:
    """Stands for ray.init, which waits for Ray's processes."""
    time.sleep(WAIT_SECONDS)
    raise AssertionError("the command has waited for Ray")


@pytest.mark.parametrize(
    ("words", "expected"),
    [*((f"train good.yaml {words}", expected) for words, expected in TRAIN), *OTHERS],
)
def test_a_mistake_is_told_at_once(
    words: str,
    expected: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("ray.init", start_slowly)
    monkeypatch.setattr("cluster.connect.running_here", lambda: None)
    started = time.process_time()
    ended = here(monkeypatch, capsys, *shlex.split(words))
    seconds = time.process_time() - started
    message = ended.err.removeprefix("trireme: ").replace(str(folder), "").replace(f"{ROOT}/", "")
    assert ended.code == 2 and ended.err.startswith("trireme: ") and "Traceback" not in ended.err, (
        ended
    )
    assert matches(message, expected), message
    assert seconds < SECONDS, f"{seconds:.1f} s"


@pytest.mark.slow
def test_a_mistake_in_the_data_ends_the_ray_that_starts(folder: Path) -> None:
    (folder / "late.py").write_text(
        "import time, torch, trireme\n"
        "class Late(trireme.Task):\n"
        "    def build_model(self): return torch.nn.Linear(2, 1)\n"
        "    def train_data(self):\n"
        "        time.sleep(2)\n"
        "        raise ValueError('no rows')\n"
        "    def loss(self, model, batch): return model(batch[0]).mean()\n"
    )
    mark = f"LATE_{uuid.uuid4().hex}"
    command = [sys.executable, "-m", "app", "train", "good.yaml", "task=late:Late"]
    ended = subprocess.run(
        command,
        env={**environment(), "RAY_ADDRESS": "local", mark: "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 2, ended
    assert "the task's data cannot be read: ValueError: no rows" in ended.stderr

    def left() -> list[str]:
        """The processes that have the command's environment."""
        names = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if mark in process.environ():
                    names.append(process.name())
        return names

    wait_until(lambda: not left())


def test_a_run_that_has_finished_says_so_before_torch_and_ray_are_imported(folder: Path) -> None:
    run = Run(load_config(["good.yaml"]))
    run.open(run.config, steps=4)
    run.end("finished", {"step": 4})
    command = (
        "import sys; from app.cli import _run_command; code = _run_command(); "
        "print(code, {'torch', 'ray', 'mlflow'} & sys.modules.keys())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", command, "train", "good.yaml"],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.startswith("first has finished already (4 steps, ")
    assert ended.stdout.endswith("\n0 set()\n")


def test_there_are_a_hundred_and_no_two_alike() -> None:
    commands = [words for words, _ in itertools.chain(TRAIN, OTHERS)]
    assert len(set(commands)) == len(commands) >= 100


@pytest.mark.parametrize(
    ("mode", "code", "sentence", "line"),
    [pytest.param(*row, marks=[pytest.mark.slow] * (row[0] in MORE_MISTAKES)) for row in WORKERS],
)
def test_a_worker_in_this_process_names_the_line(
    mode: str,
    code: int,
    sentence: str,
    line: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["train", "good.yaml", "launcher=local", "strategy=single", f"task_args.mode={mode}"]
    ended = here(monkeypatch, capsys, *words)
    assert_line_is_named(ended.err, sentence, line, folder)
    assert ended.code == code


def assert_line_is_named(message: str, sentence: str, line: str, folder: Path) -> None:
    """What is printed has the sentence, and then the line of the task's own code with its place."""
    number = MINE[: MINE.index(line)].count("\n") + 1
    method = re.findall(r"def (\w+)", MINE[: MINE.index(line)])[-1]
    assert sentence in message and "Traceback" not in message, message
    assert f'File "{folder}/mine.py", line {number}, in {method}\n    {line}\n' in message, message


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ray", "actors", "torchrun"])
@pytest.mark.parametrize(("mode", "code", "sentence", "line"), WORKERS)
def test_a_worker_in_another_process_names_the_line(
    mode: str,
    code: int,
    sentence: str,
    line: str,
    launcher: str,
    folder: Path,
    ray_environment: dict[str, str],
) -> None:
    words = [
        "train",
        str(folder / "good.yaml"),
        f"run.storage={folder}/runs",
        f"task_args.mode={mode}",
    ]
    words += ["strategy=ddp", "workers=2", f"launcher={launcher}"]
    env = ray_environment | {"PYTHONPATH": f"{folder}:{ROOT}"}
    ended = torchrun(*words, env=env) if launcher == "torchrun" else trireme(*words, env=env)
    message = ended.err
    if launcher == "torchrun":  # which has exit codes of its own, and prints a traceback of its own
        message = message.partition("torch/distributed/elastic")[0]
    else:
        assert ended.code == code
    assert_line_is_named(message, sentence, line, folder)
