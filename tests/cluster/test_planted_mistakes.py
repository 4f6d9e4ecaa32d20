"""Mistakes that people make in cluster files although every value alone is right.

Each is named as what would happen. Values that only look like one of them are accepted.
"""

import copy
import functools
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray.autoscaler
import yaml

from cluster import cloud_rules, command_rules
from cluster.files import FOLDER, validate_file

pytestmark = pytest.mark.pure

A100 = "available_node_types.a100"
SPOT = "available_node_types.a100-spot"
HEAD = "available_node_types.head"
CONFIG = f"{A100}.node_config"
SPOT_CONFIG = f"{SPOT}.node_config"
HEAD_CONFIG = f"{HEAD}.node_config"
ARM = f"{CONFIG}.azure_arm_parameters"
HEAD_START = "head_start_ray_commands.1"
WORKER_START = "worker_start_ray_commands.1"
CLUSTER = "spec.rayClusterSpec"
WORKERS = f"{CLUSTER}.workerGroupSpecs.0"
POD = f"{WORKERS}.template.spec"
CONTAINER = f"{POD}.containers.0"
HEAD_GROUP = f"{CLUSTER}.headGroupSpec"
HEAD_CONTAINER = f"{HEAD_GROUP}.template.spec.containers.0"
IMAGE = "registry.example.com/trireme:0.1.0-ray{}-py{}-cuda"
DOCKER = {"image": "rayproject/ray:2.60.0-py311-gpu", "container_name": "ray"}
CARD = {
    "DeviceIndex": 0,
    "SubnetId": "subnet-0123456789abcdef0",
    "Groups": ["sg-0123456789abcdef0"],
}
GONE = object()
"""What is put where a key is to be taken out."""


class Text(NamedTuple):
    """A part of a text, and what is written in its place."""

    before: str
    after: str


class Mistake(NamedTuple):
    """Changes to one of our files, and how the sentence about them begins.

    Attributes:
        file: The file's name.
        changes: What is put where. Keys are joined by points; the last may be new.
        outcome: What would happen.
    """

    file: str
    changes: Mapping[str, Any]
    outcome: str


MISTAKES = [
    # Google Cloud
    Mistake(
        "gcp", {f"{SPOT_CONFIG}.scheduling.automaticRestart": True}, "Google refuses a100-spot"
    ),
    Mistake("gcp", {f"{CONFIG}.scheduling.onHostMaintenance": "MIGRATE"}, "Google refuses a100: "),
    Mistake("gcp", {f"{SPOT_CONFIG}.scheduling.preemptible": False}, "Google refuses a100-spot"),
    Mistake(
        "gcp",
        {f"{SPOT_CONFIG}.scheduling.provisioningModel": "STANDARD"},
        "Google refuses a100-spot",
    ),
    Mistake(
        "gcp", {f"{CONFIG}.scheduling.instanceTerminationAction": "STOP"}, "Google refuses a100: "
    ),
    Mistake("gcp", {f"{CONFIG}.disks.0.boot": False}, "Google refuses a100: no disk is to boot"),
    Mistake(
        "gcp", {f"{CONFIG}.networkInterfaces.0.nicType": "VIRTIO_NET"}, "Google refuses a100: TI"
    ),
    Mistake(
        "gcp",
        {f"{HEAD_CONFIG}.guestAccelerators": [{"acceleratorType": "nvidia-tesla-t4"}]},
        "Google refuses head: GPUs can be attached to n1 machines",
    ),
    Mistake(
        "gcp",
        {
            f"{HEAD_CONFIG}.machineType": "n1-standard-8",
            f"{HEAD_CONFIG}.guestAccelerators": [{"acceleratorType": "nvidia-tesla-t4"}],
        },
        "Google refuses head: a machine with GPUs cannot be moved, which is the default",
    ),
    Mistake("gcp", {f"{A100}.resources": {"CPU": 96}}, "no a100 is ever started for a run"),
    Mistake("gcp", {f"{HEAD}.resources": {"CPU": 4, "GPU": 1}}, "machines are started in vain"),
    Mistake(
        "gcp",
        {
            "worker_setup_commands": [],
            f"{CONFIG}.metadata": GONE,
            f"{CONFIG}.disks.0.initializeParams.sourceImage": (
                "projects/ubuntu-os-cloud/global/images/ubuntu-2204-jammy-v20250701"
            ),
        },
        "torch sees no GPU on a100",
    ),
    Mistake(
        "gcp",
        {f"{CONFIG}.metadata.items": [{"key": "wandb_api_key", "value": "0a1b2c3d4e5f"}]},
        "everyone who may list the machines can read a secret",
    ),
    Mistake(
        "gcp",
        {f"{CONFIG}.metadata.items": [{"key": "x", "value": "export T=hf_abcdefghijklmnop"}]},
        "everyone who may list the machines can read a secret",
    ),
    # AWS
    Mistake(
        "aws", {f"{HEAD_CONFIG}.SecurityGroupIds": GONE}, "the workers never join: head has no"
    ),
    Mistake(
        "aws",
        {f"{CONFIG}.SubnetIds": ["subnet-0123456789abcdef0"]},
        "Ray exits before it starts a100: SubnetIds stands beside NetworkInterfaces",
    ),
    Mistake(
        "aws",
        {"auth.ssh_private_key": "~/.ssh/id_rsa"},
        "Ray exits before it starts head: auth has",
    ),
    Mistake(
        "aws",
        {
            f"{HEAD_CONFIG}.SubnetIds": GONE,
            f"{HEAD_CONFIG}.SecurityGroupIds": GONE,
            f"{HEAD_CONFIG}.NetworkInterfaces": [CARD, {**CARD, "DeviceIndex": 1}],
        },
        "`ray up` waits for ever: a head with several NetworkInterfaces",
    ),
    Mistake(
        "aws",
        {f"{CONFIG}.NetworkInterfaces.0.AssociatePublicIpAddress": True},
        "AWS refuses a100: with several NetworkInterfaces",
    ),
    Mistake(
        "aws",
        {f"{CONFIG}.InstanceType": "g5.xlarge", f"{A100}.resources": {"CPU": 4, "GPU": 1}},
        "AWS refuses a100: a g5.xlarge has no EFA",
    ),
    Mistake(
        "aws",
        {f"{SPOT_CONFIG}.InstanceMarketOptions.SpotOptions": {"SpotInstanceType": "persistent"}},
        "a100-spot comes back after `ray down` and keeps costing money",
    ),
    Mistake(
        "aws",
        {
            f"{SPOT_CONFIG}.InstanceMarketOptions.SpotOptions": {
                "InstanceInterruptionBehavior": "stop"
            }
        },
        "AWS refuses a100-spot: a one-time spot request cannot stop",
    ),
    Mistake(
        "aws",
        {f"{CONFIG}.IamInstanceProfile.Arn": "arn:aws:iam::1:instance-profile/x"},
        "AWS refuses a100: IamInstanceProfile has an Arn and a Name",
    ),
    Mistake(
        "aws",
        {
            f"{CONFIG}.BlockDeviceMappings.0.Ebs.VolumeType": "gp2",
            f"{CONFIG}.BlockDeviceMappings.0.Ebs.Throughput": 500,
        },
        "AWS refuses a100: a gp2 disk takes no Throughput",
    ),
    Mistake(
        "aws",
        {f"{CONFIG}.BlockDeviceMappings.0.Ebs.VolumeType": "io2"},
        "AWS refuses a100: a io2 disk needs Iops",
    ),
    Mistake(
        "aws",
        {f"{HEAD}.resources": {"CPU": 4, "GPU": 1}},
        "machines are started in vain: head promises GPU: 1, and a m7i.xlarge has none",
    ),
    Mistake(
        "aws",
        {f"{A100}.max_workers": 0, f"{SPOT}.max_workers": 0},
        "no worker ever comes: every node type has max_workers: 0",
    ),
    Mistake("aws", {"idle_timeout_minutes": 0}, "machines are ended before a run can use them"),
    Mistake(
        "aws",
        {f"{CONFIG}.UserData": "#!/bin/sh\nexport AWS=AKIAABCDEFGHIJKLMNOP\n"},
        "everyone who may list the machines can read a secret",
    ),
    # Azure
    Mistake("azure", {f"{ARM}.evictionPolicy": "Delete"}, "Azure refuses a100: evictionPolicy"),
    Mistake("azure", {f"{ARM}.billingProfile": {"maxPrice": -1}}, "Azure refuses a100: billingPro"),
    Mistake(
        "azure", {"auth.ssh_public_key": GONE}, "Ray exits before it starts a machine: auth has no"
    ),
    Mistake("azure", {f"{A100}.resources": {"CPU": 96}}, "no a100 is ever started for a run"),
    # Login, addresses and files
    Mistake("onprem", {"auth.ssh_user": "ubuntu@192.168.1.10"}, "no machine is ever reached: SSH"),
    Mistake(
        "onprem", {"auth.ssh_private_key": "~/.ssh/id_rsa.pub"}, "no machine is ever reached: ~"
    ),
    Mistake("azure", {"auth.ssh_public_key": "~/.ssh/id_rsa"}, "~/.ssh/id_rsa goes to the cloud"),
    Mistake("onprem", {"provider.head_ip": "127.0.0.1"}, "the machines never find each other"),
    Mistake("onprem", {"provider.worker_ips.1": "localhost"}, "the machines never find each other"),
    Mistake(
        "aws", {"file_mounts": {"/home/ubuntu": "."}}, "/home/ubuntu of every machine is written"
    ),
    Mistake("aws", {"file_mounts": {"~/.ssh": "."}}, "nobody can log in to the machines any more"),
    Mistake("aws", {"file_mounts": {"~/code": "~"}}, "your whole home with its keys goes to every"),
    # ray start
    Mistake(
        "onprem",
        {
            WORKER_START: Text(
                "ray start --address=$RAY_HEAD_IP:6379", "ray start --head --port=6379"
            )
        },
        "every worker starts a cluster of its own and joins none",
    ),
    Mistake(
        "onprem",
        {WORKER_START: Text("--address", "--num-gpus=2 --address")},
        "2 GPUs of worker are never used: --num-gpus is 2",
    ),
    Mistake(
        "aws",
        {WORKER_START: Text("--address", "--num-gpus=4 --address")},
        "4 GPUs of a100 are never used: --num-gpus is 4",
    ),
    Mistake(
        "onprem",
        {WORKER_START: Text("--address", "--num-gpus=8 --address")},
        "workers get GPUs that worker does not have: --num-gpus is 8",
    ),
    Mistake(
        "aws",
        {WORKER_START: Text("RAY_AUTH_MODE=token", "RAY_AUTH_MODE=token CUDA_VISIBLE_DEVICES=0")},
        "7 GPUs of a100 are never used: CUDA_VISIBLE_DEVICES is 0",
    ),
    Mistake(
        "onprem",
        {WORKER_START: Text("--address", "--num-cpus=0 --address")},
        "no task is ever placed on a worker: --num-cpus is 0",
    ),
    Mistake(
        "aws",
        {HEAD_START: Text("--head", "--head --block")},
        "`ray up` never returns: --block keeps",
    ),
    Mistake(
        "aws",
        {HEAD_START: Text("--head", "--head --dashboard-port=6379")},
        "Ray does not start: --dashboard-port and --port are both 6379",
    ),
    Mistake(
        "aws",
        {HEAD_START: Text("--head", "--head --metrics-export-port=10050")},
        "Ray does not start: --metrics-export-port is 10050, among its workers' ports",
    ),
    Mistake(
        "aws",
        {WORKER_START: Text("--addr", "--min-worker-port=12000 --max-worker-port=11000 --addr")},
        "Ray does not start: its workers' ports are 12000 to 11000",
    ),
    Mistake(
        "onprem",
        {WORKER_START: Text("--address", "--temp-dir=scratch/ray --address")},
        "Ray does not start: --temp-dir is scratch/ray",
    ),
    Mistake(
        "onprem",
        {WORKER_START: Text("memory=1000000000", "memory=512000000000")},
        "Ray does not start: --object-store-memory is 512 GB",
    ),
    Mistake(
        "onprem",
        {WORKER_START: Text("GLOO_SOCKET_IFNAME=eth0", "GLOO_SOCKET_IFNAME=eth1")},
        "NCCL and gloo use different networks",
    ),
    Mistake(
        "onprem",
        {WORKER_START: Text("GLOO_SOCKET_IFNAME=eth0", "GLOO_SOCKET_IFNAME=^lo,docker")},
        "gloo fails to start: GLOO_SOCKET_IFNAME is ^lo,docker",
    ),
    Mistake(
        "onprem",
        {
            HEAD_START: Text(
                "IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0", "IFNAME=lo GLOO_SOCKET_IFNAME=lo"
            )
        },
        "workers of two machines never meet: NCCL_SOCKET_IFNAME is lo",
    ),
    # Other commands and containers
    Mistake("onprem", {"setup_commands": ["sudo apt-get install ffmpeg"]}, "`ray up` waits for an"),
    Mistake(
        "onprem", {"setup_commands": ["conda activate gpu"]}, "`conda activate gpu` has no effect"
    ),
    Mistake(
        "onprem", {"setup_commands": ["export HF_HOME=/data"]}, "`export HF_HOME=/data` has no"
    ),
    Mistake(
        "onprem",
        {
            "head_setup_commands": ["pip install 'ray[default]==2.60.0'"],
            "worker_setup_commands": ["pip install ray==2.59.1"],
        },
        "the workers never join: Ray is 2.60.0 here and 2.59.1 there",
    ),
    Mistake(
        "onprem",
        {"docker": {**DOCKER, "worker_image": "rayproject/ray:2.60.0-py312-gpu"}},
        "the workers never join: Python is 3.11 here and 3.12 there",
    ),
    Mistake(
        "onprem",
        {"docker": {**DOCKER, "disable_automatic_runtime_detection": True}},
        "torch sees no GPU: the container has no GPU runtime",
    ),
    Mistake(
        "onprem",
        {"docker": {**DOCKER, "disable_shm_size_detection": True}},
        "NCCL fails and Ray is slow: the container has Docker's 64 MB",
    ),
    Mistake(
        "onprem",
        {"docker": {**DOCKER, "run_options": ["--shm-size=256m"]}},
        "NCCL fails and Ray is slow: the container has 256m",
    ),
    # RayJob
    Mistake(
        "kuberay-job",
        {"spec.shutdownAfterJobFinishes": GONE},
        "KubeRay refuses the job: ttlSecondsAfterFinished is 300",
    ),
    Mistake(
        "kuberay-job",
        {"spec.activeDeadlineSeconds": 600},
        "the job is ended before its machines have come: activeDeadlineSeconds is 600",
    ),
    Mistake(
        "kuberay-job",
        {"spec.submissionMode": "SidecarMode"},
        "KubeRay refuses the job: in SidecarMode there is no pod that submits it",
    ),
    Mistake(
        "kuberay-job",
        {"spec.submissionMode": "InteractiveMode", "spec.entrypoint": GONE},
        "KubeRay refuses the job: InteractiveMode cannot be retried",
    ),
    Mistake(
        "kuberay-job",
        {"spec.rayClusterSpec": GONE, "spec.clusterSelector": {"ray.io/cluster": "x"}},
        "KubeRay refuses the job: on a cluster that exists it cannot be retried",
    ),
    Mistake(
        "kuberay-job",
        {"spec.entrypoint": Text("when_pending=end", "when_pending=end &")},
        "the job succeeds at once and its cluster goes while the run trains",
    ),
    Mistake(
        "kuberay-job",
        {"spec.entrypoint": Text("trireme train", "nohup trireme train")},
        "the job succeeds at once and its cluster goes while the run trains",
    ),
    Mistake(
        "kuberay-job",
        {"metadata": {"name": "gpt-" + "x" * 50}},
        "KubeRay refuses the RayJob: its name has 54 characters",
    ),
    Mistake(
        "kuberay-job", {"metadata": {"name": "7b-gpt"}}, "KubeRay refuses the RayJob: 7b-gpt cannot"
    ),
    Mistake(
        "kuberay-job",
        {"metadata.annotations": {"mlflow-password": "hunter2"}},
        "everyone who may list the machines can read a secret: mlflow-password",
    ),
    # Clusters on Kubernetes
    Mistake(
        "kuberay-cluster",
        {"spec.workerGroupSpecs.0.template.spec.restartPolicy": "Always"},
        "KubeRay refuses the cluster: with the autoscaler v2 restartPolicy is Always",
    ),
    Mistake(
        "kuberay-cluster",
        {"spec.autoscalerOptions.version": "v1"},
        "KubeRay refuses the cluster: a group's idleTimeoutSeconds needs the autoscaler v2",
    ),
    Mistake(
        "kuberay-cluster",
        {"spec.enableInTreeAutoscaling": GONE},
        "no worker ever comes or goes: autoscalerOptions stands without an autoscaler",
    ),
    Mistake(
        "kuberay-cluster",
        {"spec.enableInTreeAutoscaling": GONE},
        "no worker ever comes: replicas of h100 is 0",
    ),
    Mistake(
        "kuberay-cluster",
        {
            "spec.headGroupSpec.template.spec.containers.0.env": [
                {"name": "RAY_enable_autoscaler_v2", "value": "1"}
            ]
        },
        "KubeRay refuses the cluster: autoscalerOptions.version and RAY_enable_autoscaler_v2",
    ),
    Mistake(
        "kuberay-job",
        {f"{HEAD_CONTAINER}.env": [{"name": "RAY_enable_autoscaler_v2", "value": "true"}]},
        "KubeRay refuses the cluster: RAY_enable_autoscaler_v2 is set",
    ),
    Mistake(
        "kuberay-cluster",
        {"spec.workerGroupSpecs.0.suspend": True},
        "KubeRay refuses the cluster: a group cannot be suspended",
    ),
    Mistake(
        "kuberay-job",
        {f"{CONTAINER}.image": IMAGE.format("2.59.0", "311")},
        "the workers never join: their image has Ray 2.59.0 and the head's 2.60.0",
    ),
    Mistake(
        "kuberay-job",
        {f"{CONTAINER}.image": IMAGE.format("2.60.0", "312")},
        "the workers never join: their image has Python 3.12 and the head's 3.11",
    ),
    Mistake(
        "kuberay-job",
        {f"{CLUSTER}.rayVersion": "2.55.1"},
        "KubeRay starts Ray 2.60.0 in the way of Ray 2.55.1",
    ),
    Mistake(
        "kuberay-job",
        {f"{WORKERS}.rayStartParams": {"num-gpus": "4"}},
        "4 GPUs of each pod are never used: num-gpus is 4",
    ),
    Mistake(
        "kuberay-job",
        {f"{WORKERS}.rayStartParams": {"num-gpus": "16"}},
        "workers get GPUs that their pod does not have: num-gpus is 16",
    ),
    Mistake(
        "kuberay-job",
        {f"{WORKERS}.rayStartParams": {"num-cpus": "0"}},
        "no task is ever placed on a worker: num-cpus is 0",
    ),
    Mistake(
        "kuberay-job",
        {f"{WORKERS}.rayStartParams": {"object-store-memory": "4000000000000"}},
        "the pod is ended for its memory: object-store-memory is 4000 GB",
    ),
    Mistake(
        "kuberay-job",
        {f"{WORKERS}.rayStartParams": {"head": "true"}},
        "every pod of the group is a cluster of its own: rayStartParams has head",
    ),
    Mistake(
        "kuberay-job",
        {f"{WORKERS}.rayStartParams": {"labels": "a=b"}},
        "KubeRay refuses the cluster: rayStartParams has labels",
    ),
    Mistake(
        "kuberay-job",
        {f"{HEAD_GROUP}.resources": {"CPU": "4"}},
        "KubeRay refuses the cluster: num-cpus stands beside the group's resources",
    ),
    Mistake(
        "kuberay-job",
        {f"{HEAD_GROUP}.rayStartParams.dashboard-host": "127.0.0.1"},
        "no job is ever submitted: dashboard-host is the pod's own loopback",
    ),
    Mistake(
        "kuberay-job",
        {f"{CONTAINER}.livenessProbe.httpGet.port": 8265},
        "the pod restarts for ever: its livenessProbe asks port 8265, and 52365 answers",
    ),
    Mistake(
        "kuberay-job",
        {
            f"{CONTAINER}.readinessProbe": {
                "exec": {"command": ["wget", "-qO-", "localhost:8265/api/local_raylet_healthz"]}
            }
        },
        "the pod is never ready: its readinessProbe asks port 8265, and 52365 answers",
    ),
    Mistake(
        "kuberay-job",
        {f"{HEAD_CONTAINER}.livenessProbe.exec.command.2": Text(":6379", ":6380")},
        "the pod restarts for ever: its livenessProbe asks port 6380, and 6379 answers",
    ),
    Mistake(
        "kuberay-job",
        {f"{HEAD_CONTAINER}.startupProbe": {"tcpSocket": {"port": 8000}}},
        "the pod restarts for ever: its startupProbe asks port 8000, where nothing listens",
    ),
    Mistake(
        "kuberay-job",
        {f"{HEAD_CONTAINER}.startupProbe": {"tcpSocket": {"port": "gcs"}}},
        "the pod restarts for ever: its startupProbe asks the port 'gcs', which has no such name",
    ),
    Mistake(
        "kuberay-job",
        {f"{CONTAINER}.livenessProbe.successThreshold": 3},
        "Kubernetes refuses the pods: successThreshold of a livenessProbe is not 1",
    ),
    Mistake(
        "kuberay-job",
        {f"{CONTAINER}.env.1.value": "eth1"},
        "NCCL and gloo use different networks",
    ),
    Mistake(
        "kuberay-job",
        {f"{CONTAINER}.env.1": {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}},
        "pods use GPUs that they were not given",
    ),
    Mistake(
        "kuberay-job",
        {f"{CONTAINER}.env.1": {"name": "CUDA_VISIBLE_DEVICES", "value": "0"}},
        "GPUs of the pod are never used: CUDA_VISIBLE_DEVICES is 0",
    ),
    Mistake(
        "kuberay-job",
        {f"{POD}.tolerations.0.value": "present"},
        "Kubernetes refuses the pods: a toleration that Exists has a value",
    ),
    Mistake(
        "kuberay-job",
        {f"{POD}.tolerations.0": {"value": "present", "effect": "NoSchedule"}},
        "Kubernetes refuses the pods: a toleration without a key",
    ),
    Mistake(
        "kuberay-job",
        {f"{POD}.tolerations.0.tolerationSeconds": 60},
        "Kubernetes refuses the pods: tolerationSeconds is for the effect NoExecute",
    ),
    Mistake(
        "kuberay-job",
        {f"{POD}.hostNetwork": True},
        "the workers never find the head: with hostNetwork",
    ),
    Mistake(
        "kuberay-job",
        {f"{POD}.terminationGracePeriodSeconds": 0},
        "a pod that is taken back saves nothing",
    ),
    Mistake(
        "kuberay-job",
        {f"{POD}.volumes.1.emptyDir.sizeLimit": "4000Gi"},
        "the pod is ended when the volume fills: shm holds 4000Gi",
    ),
    Mistake(
        "kuberay-job",
        {f"{CONTAINER}.volumeMounts.0.mountPath": "/dev/shm/"},
        "Kubernetes refuses the pods: 2 volumes are mounted at /dev/shm",
    ),
    Mistake(
        "kuberay-job",
        {f"{POD}.volumes.0.name": "shm"},
        "Kubernetes refuses the pods: 2 volumes are called shm",
    ),
    Mistake(
        "kuberay-job",
        {f"{CONTAINER}.resources.limits": {"cpu": "180", "memory": "1900Gi"}},
        "Kubernetes refuses the pods: nvidia.com/gpu is requested and has no limit",
    ),
    Mistake(
        "kuberay-job",
        {f"{CONTAINER}.command": ["bash", "-c", "ray start --address head:6379"]},
        "Ray is started twice and the pod restarts for ever",
    ),
    Mistake(
        "kuberay-job",
        {f"{WORKERS}.template.metadata.annotations.trireme/gpu": "a100-80gb"},
        "plans are made for another GPU: trireme/gpu is a100-80gb",
    ),
]


@pytest.fixture(autouse=True)
def home_with_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home with the keys that the shipped files name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    for name in ("id_ed25519", "id_rsa", "id_rsa.pub"):
        (tmp_path / ".ssh" / name).touch()


def _changed(tree: Any, changes: Mapping[str, Any]) -> Any:
    """A copy of a tree with other values at some places."""
    tree = copy.deepcopy(tree)
    for place, value in changes.items():
        keys: list[Any] = [int(key) if key.isdigit() else key for key in place.split(".")]
        parent = functools.reduce(operator.getitem, keys[:-1], tree)
        key = keys[-1]
        if value is GONE:
            del parent[key]
        elif isinstance(value, Text):
            assert value.before in parent[key]
            parent[key] = parent[key].replace(value.before, value.after, 1)
        else:
            parent[key] = value
    return tree


def _problems(file: str, changes: Mapping[str, Any], folder: Path) -> list[str]:
    """What is said of one of our files with changes in its last document."""
    documents = list(yaml.safe_load_all((FOLDER / f"{file}.yaml").read_text()))
    documents[-1] = _changed(documents[-1], changes)
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return [problem.message for problem in validate_file(str(path))]


@pytest.mark.parametrize(
    "mistake", MISTAKES, ids=[f"{mistake.file}-{mistake.outcome[:50]}" for mistake in MISTAKES]
)
def test_a_mistake_is_named_as_what_would_happen(mistake: Mistake, tmp_path: Path) -> None:
    problems = _problems(mistake.file, mistake.changes, tmp_path)
    about = [problem for problem in problems if problem.startswith(mistake.outcome)]
    assert about, problems
    assert all(": write " in problem or ": leave " in problem for problem in about), about


RIGHT_THINGS: list[tuple[str, Mapping[str, Any]]] = [
    ("gcp", {f"{CONFIG}.scheduling": [{"onHostMaintenance": "TERMINATE"}]}),
    ("gcp", {f"{SPOT}.max_workers": 0}),
    (
        "aws",
        {"auth.ssh_private_key": "~/.ssh/id_rsa"}
        | {
            f"available_node_types.{name}.node_config.KeyName": "mine"
            for name in ("head", "a100", "a100-spot")
        },
    ),
    ("aws", {f"{CONFIG}.BlockDeviceMappings.0.Ebs.Throughput": 500}),
    (
        "aws",
        {
            WORKER_START: Text(
                "--address", "--min-worker-port=20000 --max-worker-port=20999 --address"
            )
        },
    ),
    ("onprem", {HEAD_START: Text("--head", "--head --num-cpus=0 --num-gpus=0")}),
    ("onprem", {WORKER_START: Text("NCCL_SOCKET_IFNAME=eth0", "NCCL_SOCKET_IFNAME==eth0")}),
    ("onprem", {WORKER_START: Text("NCCL_SOCKET_IFNAME=eth0", "NCCL_SOCKET_IFNAME=^lo,docker")}),
    ("onprem", {"docker": {**DOCKER, "run_options": ["--gpus=all", "--shm-size=64g"]}}),
    ("onprem", {"setup_commands": ["sudo apt-get install -y ffmpeg", "cd /data && ls"]}),
    ("kuberay-job", {f"{POD}.tolerations.0.operator": "Equal"}),
    ("kuberay-job", {f"{POD}.hostNetwork": True, f"{POD}.dnsPolicy": "ClusterFirstWithHostNet"}),
    ("kuberay-job", {f"{POD}.restartPolicy": "Always"}),
    ("kuberay-job", {"metadata.annotations": {"secret-name": "mlflow"}}),
    ("kuberay-job", {f"{HEAD_CONTAINER}.startupProbe": {"tcpSocket": {"port": "dashboard"}}}),
    (
        "kuberay-job",
        {
            f"{WORKERS}.rayStartParams": {"dashboard-agent-listen-port": "52400"},
            f"{CONTAINER}.livenessProbe.httpGet.port": 52400,
        },
    ),
]


@pytest.mark.parametrize(("file", "changes"), RIGHT_THINGS)
def test_what_only_looks_like_a_mistake_is_accepted(
    file: str, changes: Mapping[str, Any], tmp_path: Path
) -> None:
    assert _problems(file, changes, tmp_path) == []


@pytest.mark.parametrize("provider", ["aws", "gcp", "azure"])
def test_the_files_that_come_with_ray_are_silent(provider: str) -> None:
    """They ask for no token, which other rules report."""
    defaults = Path(ray.autoscaler.__file__).parent / provider / "defaults.yaml"
    data = yaml.safe_load(defaults.read_text())
    assert list(cloud_rules.mistakes(data)) == []
    assert list(command_rules.mistakes(data)) == []
