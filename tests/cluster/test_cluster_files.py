"""What is wrong in a cluster file though Ray, KubeRay and clouds take it: planted by hand, then by rule."""

import copy
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.loaders import Loader

from app.cli import COMMANDS
from cluster import files, kuberay_rules
from cluster.document import Document, mistaken, schemas
from cluster.files import FOLDER, own_files, validate_file

SHM = "\n                - {name: shm, mountPath: /dev/shm}"
EFA = "        - {DeviceIndex: 1, NetworkCardIndex: 3, InterfaceType: efa, SubnetId: subnet-0123456789abcdef0, "
EFA += "Groups: [sg-0123456789abcdef0]}\n"
BOOTSTRAP = "\n    --autoscaling-config=~/ray_bootstrap_config.yaml"

# File, what is replaced (once) by what, and what the sentence must say.
PLANTED = [
    ("aws", "CPU: 96, GPU: 8", "CPU: 96, GPUS: 8", "did you mean 'GPU'"),
    ("aws", "CPU: 96, GPU: 8", "CPU: 960, GPU: 8", "a p4d.24xlarge has 96"),
    (
        "kuberay-cluster",
        'Gi, nvidia.com/gpu: "8", vpc',
        'Gi, nvidia.com/gpus: "8", vpc',
        "did you mean 'nvidia.com/gpu'",
    ),
    ("kuberay-cluster", 'Gi, nvidia.com/gpu: "8", vpc', 'Gi, gpu: "8", vpc', "nvidia.com/gpu"),
    ("onprem", "min_workers: 2", "min_workers: 3", "min_workers is 3: write a whole number of at most 2"),
    ("onprem", "max_workers: 2", "max_workers: 1", "worker_ips names 2 machines: write 2"),
    ("onprem", "- 192.168.1.12", "- 192.168.1.312", "write an address or a host name"),
    ("aws", "max_workers: 8 # GPU", "max_workers: 0 # GPU", "no worker ever comes"),
    ("onprem", "~/.ssh/id_ed25519", "~/.ssh/no_such_key", "which is not on this machine"),
    ("aws", "availability_zone: us-east-1a", "availability_zone: us-west-2a", "not of the region us-east-1"),
    ("gcp", "availability_zone: us-central1-a", "availability_zone: us-east1-b", "write us-central1-a"),
    ("gcp", "regions/us-central1/subnet", "regions/us-east1/subnet", "is of the region us-east1"),
    ("aws", EFA, EFA + EFA.replace("Index: 3", "Index: 4"), "has 4 network cards, counted from 0"),
    ("aws", "ami-0123456789abcdef0", "ami-xyz", "write an image such as ami-"),
    ("gcp", "global/images/ubuntu-2204", "global/images/Ubuntu 2204", "write an image such as"),
    ("azure", "imageVersion: 22.04.2025041101", "imageVersion: newest", "write latest or a version"),
    ("kuberay-job", "image: registry.example.com/trireme:", "image: Registry.example.com/trireme::", "write an image"),
    ("gcp", "provisioningModel: SPOT", "provisioningModel: SPOTT", "did you mean 'SPOT'"),
    ("azure", "priority: Spot", "priority: Spott", "did you mean 'Spot'"),
    ("kuberay-cluster", "operator: Exists", "operator: Exist", "did you mean 'Exists'"),
    ("kuberay-cluster", "effect: NoSchedule", "effect: NoSchedul", "did you mean 'NoSchedule'"),
    ("kuberay-cluster", "medium: Memory", "medium: Memroy", "did you mean 'Memory'"),
    ("kuberay-job", "submissionMode: K8sJobMode", "submissionMode: K8sJobMod", "did you mean 'K8sJobMode'"),
    ("aws", "VolumeSize: 100", "VolumeSize: -100", "write at least 1"),
    ("gcp", "diskSizeGb: 100", "diskSizeGb: -100", "write at least 10"),
    ("azure", "osDiskSize: 100", "osDiskSize: -1", "write at least 30"),
    ("kuberay-job", 'requests: {cpu: "180"', 'requests: {cpu: "190"', "above its limit of 180"),
    ("kuberay-cluster", "matchLabels: {trireme/group: h100}", "matchLabels: {trireme/group: h200}", "no pod here has"),
    ("kuberay-cluster", SHM, "", "/dev/shm, where Kubernetes gives 64 MiB"),
    ("aws", "$RAY_HEAD_IP:6379", "$RAY_HEAD_IP:6380", "the head listens on 6379"),
    ("aws", BOOTSTRAP, "", "write --autoscaling-config="),
    ("onprem", "  trireme:\n", "  triremee:\n", "did you mean 'trireme'"),
    ("onprem", "memory_gb: 256", "memory_gb: 262144", "write at most 65536"),
    (
        "kuberay-job",
        "memory: 16Gi}\n                requests",
        "memory: 16}\n                requests",
        "a unit such as 16Gi",
    ),
    ("onprem", "--dashboard-host=127.0.0.1", "--dashboard-host=0.0.0.0", "write 127.0.0.1"),
    ("kuberay-cluster", "serviceType: ClusterIP", "serviceType: LoadBalancer", "write ClusterIP"),
    ("onprem", "export RAY_AUTH_MODE=token", "export", "write export RAY_AUTH_MODE=token"),
    ("gcp", "RAY_AUTH_MODE=token", "RAY_AUTH_MODE=disabled", "write export RAY_AUTH_MODE=token"),
    ("kuberay-cluster", "    mode: token", "    mode: disabled", "write token"),
    ("kuberay-job", 'OMP_NUM_THREADS: "8"', "HF_TOKEN: hf_abcdefghijklmnop", "into a Kubernetes Secret"),
    ("onprem", "ulimit -n 65536 |", "export WANDB_API_KEY=0a1b2c; ulimit -n 65536 |", "trireme submit --env"),
    ("kuberay-job", "  entrypoint: >-\n    trireme", "  # trireme", "lacks the key 'entrypoint'"),
    ("kuberay-job", "    trireme train", "    triremee train", "did you mean 'trireme'"),
    ("kuberay-job", "    trireme train", "    trireme trian", "did you mean 'train'"),
    ("kuberay-job", "workers=16", "workers=32", "room for 16 at most"),
    ("kuberay-job", "run.storage=/mnt/shared/runs", "run.storage=/tmp/runs", "write run.storage=/mnt/shared/runs"),
    ("kuberay-job", " run.storage=/mnt/shared/runs", "", "write run.storage=/mnt/shared/runs"),
    ("aws", "ssh_user: ubuntu", "ssh_user: ''", "write the user of the machines"),
    ("aws", "HopLimit: 2", "HopLimit: 200", "write at most 64"),
    ("kuberay-cluster", "[ReadWriteMany]", "[ReadWriteOnce]", "9 pods mount the claim 'trireme-shared'"),
    ("kuberay-job", "generateName: gpt-", "generateName: GPT_", "write small letters"),
    ("kuberay-job", "value: http://mlflow", "value: http:/mlflow", "write an address such as http://"),
    ("kuberay-job", 'OMP_NUM_THREADS: "8"', "MLFLOW_TRACKING_URI: http//mlflow", "write an address such as http://"),
    ("onprem", "ulimit -n 65536 |", "export MLFLOW_TRACKING_URI=http:mlflow; ulimit -n 65536 |", "write an address"),
]


@pytest.fixture(autouse=True)
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home with the keys that the shipped files name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    for name in ("id_ed25519", "id_rsa", "id_rsa.pub"):
        (tmp_path / ".ssh" / name).touch()


def problems(text: str, folder: Path) -> list[str]:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return [problem.message for problem in validate_file(str(file))]


@pytest.mark.parametrize(("name", "before", "after", "said"), PLANTED)
def test_a_planted_mistake_is_caught(tmp_path: Path, name: str, before: str, after: str, said: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    assert before in text
    if "entrypoint" in before:
        text = re.sub(r"\n    cluster.wait_seconds.*", "", text)
    found = problems(text.replace(before, after, 1), tmp_path)
    assert any(said in message for message in found), found
    assert all("\n" not in message for message in found)


RIGHT = [  # other values that are right
    ("onprem", "- 192.168.1.12", "- node-3.example.com", 1),
    ("onprem", "- 192.168.1.12", "- fe80::2", 1),
    ("onprem", "--port=6379", "--port 6380", "6379"),
    ("aws", "region: us-east-1\n", "region: us-east-3\n", 1),
    ("aws", "InstanceType: m7i.xlarge", "InstanceType: u7i-12tb.224xlarge", 1),
    ("aws", "CPU: 96, GPU: 8", "CPU: 96, GPU: 8, my_disk: 2", 1),
    ("gcp", "availability_zone: us-central1-a", "availability_zone: us-central1-f", 1),
    ("azure", "location: eastus", "location: newzealandnorth", 1),
    ("laptop", "worker_ips: []", "worker_ips: []\nmax_workers: 0", 1),
    ("kuberay-cluster", "effect: NoSchedule", "effect: NoExecute, tolerationSeconds: 60", 1),
    (
        "kuberay-cluster",
        "{matchLabels: {trireme/group: h100}}",
        "{matchLabels: {app: x}}\n                  namespaces: [y]",
        1,
    ),
    ("kuberay-job", 'OMP_NUM_THREADS: "8"', "TOKENIZERS_PARALLELISM: 'false'", 1),
    ("kuberay-job", "workers=16", "workers=auto", 1),
    ("kuberay-job", "value: http://mlflow", "value: databricks", 1),
    ("kuberay-job", 'OMP_NUM_THREADS: "8"', "REDIS_URL: redis:6379", 1),
    ("kuberay-job", "run.storage=/mnt/shared/runs", "run.storage=s3://bucket/runs", 1),
    ("kuberay-job", "    trireme train", "    python mine.py", 1),
    ("kuberay-job", "submissionMode: K8sJobMode", "submissionMode: SidecarMode", 1),
]


@pytest.mark.parametrize(("name", "before", "after", "also"), RIGHT)
def test_a_right_file_is_let_through(tmp_path: Path, name: str, before: str, after: str, also: object) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    assert before in text
    text = text.replace(before, after, 1)
    if name == "aws" and "region" in before:
        text = text.replace("availability_zone: us-east-1a", "availability_zone: us-east-3a")
    if also == "6379":
        text = text.replace("$RAY_HEAD_IP:6379", "$RAY_HEAD_IP:6380")
    assert problems(text, tmp_path) == []


# --- by rule: every key, word, number and switch of every shipped file ------------------------------------------------

FREE_KEYS = re.compile(
    r"(^|\.)(file_mounts|matchLabels|labels|annotations|env_vars)\.[^.]+$|nodes\.[^.]+$|available_node_types\.[^.]+$"
)
"""Keys that are names: any is right, as far as one file tells."""
FREE_WORDS = re.compile(
    r"cluster_name|(^|\.)ssh_user|resource_group|project_id|_mounts|rsync|setup_commands|GroupName|IamInstanceProfile"
    r"|storage$|storageClassName|serviceAccount|market|groupName|labels|generateName|trireme_run|email|containers\[\d\]\.name"
    r"|ports\[\d\]\.name|env\[\d\]\.value$|secretKeyRef|command|DeviceName|nodeSelector|accessConfigs\[\d\]\.name"
    r"|metadata\.items|key_pair|imageOffer|imagePublisher|sourceImage|resourcePolicies|subnetwork|metadata\.name|image$"
    r"|claimName|location|host|_ip|ImageId|imageSku|Subnet|Groups|containers\[\d\]\.name|Containers\[\d\]\.name"
)
"""Texts of which any is right, or that no file tells to be wrong (a bucket, a person, a path, an image's name)."""


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key), each
        yield from leaves(each, (*path, key))


def dotted(path: tuple[Any, ...]) -> str:
    return re.sub(r"\.\[", "[", ".".join(f"[{part}]" if isinstance(part, int) else str(part) for part in path))


def misspelt(word: str) -> str:
    """Two letters near the middle exchanged; of a short word, one doubled."""
    letters = list(word)
    for at in [*range(len(word) // 2, len(word) - 1), *range(1, len(word) // 2)]:
        if word[at : at + 2].isalpha() and word[at] != word[at + 1] and len(word) > 4:
            letters[at : at + 2] = word[at + 1], word[at]
            return "".join(letters)
    return word + word[-1]


def mutants(tree: Any) -> Iterator[tuple[str, str, Any, Any]]:
    """Kind, place, key (or "") and value that is put there. A value is wrong as a whole class of mistakes is: a key or
    an enumerated word misspelt, a number below what it counts, a switch that is no switch, a reference to nothing."""
    for path, value in leaves(tree):
        where, key = dotted(path), path[-1]
        if isinstance(key, str) and not FREE_KEYS.search(where):
            yield "key", where, path, misspelt(key)
        if isinstance(value, bool):
            yield "switch", where, path, "treu"
        elif isinstance(value, int):
            yield "number", where, path, -7
            yield "type", where, path, "several"
        elif isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?([mKMGT]i?)?", value):
            yield "quantity", where, path, value + "Bytes"
        elif isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./:-]*", value) and not FREE_WORDS.search(where):
            yield "word", where, path, misspelt(value)
        elif isinstance(value, dict):
            yield "type", where, path, "text"
        elif "_start_ray_commands[" in where:
            for option in re.findall(r"--([a-z-]+)", value):
                yield "option", f"{where} {option}", path, value.replace(f"--{option}", f"--{misspelt(option)}")
            for number in re.findall(r"(?:port=|IP:)(\d+)", value):
                yield "port", f"{where} {number}", path, value.replace(number, f"{number}0")


def put(tree: Any, kind: str, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(tree)
    at = changed
    for part in path[:-1]:
        at = at[part]
    if kind == "key":
        at[value] = at.pop(path[-1])
    else:
        at[path[-1]] = value
    return changed


def test_mistakes_made_by_rule_are_caught() -> None:
    made, missed = Counter[str](), []
    for name, file in own_files().items():
        trees = list(yaml.safe_load_all(file.read_text()))
        assert files._problems([Document("", copy.deepcopy(t), {(): 1}, []) for t in trees], "") == []
        for number, tree in enumerate(trees):
            for kind, where, path, value in mutants(tree):
                changed = [put(t, kind, path, value) if n == number else t for n, t in enumerate(trees)]
                made[kind] += 1
                if not files._problems([Document("", t, {(): 1}, []) for t in changed], ""):
                    missed.append(f"{name} {kind} {where}: {value}")
    caught = 1 - len(missed) / made.total()
    print(f"{made.total()} mistakes ({dict(made)}), {caught:.1%} caught; missed:", *missed, sep="\n")
    assert min(made.values()) >= 5 and made.total() >= 500
    assert caught >= 0.95, missed


def test_no_name_of_a_cloud_is_taken_for_a_mistake() -> None:
    """Every region and machine that AWS has; every command that we have."""
    provider, session = schemas("providers.yaml")["aws"]["properties"], boto3.Session(region_name="us-east-1")
    regions = {r for p in session.get_available_partitions() for r in session.get_available_regions("ec2", p)}
    known = provider["provider"]["properties"]["region"]["near"]
    assert len(regions) > 30 and not {region: mistaken(region, known) for region in regions if mistaken(region, known)}
    node = provider["available_node_types"]["additionalProperties"]["properties"]["node_config"]["properties"]
    shapes = Loader().load_service_model("ec2", "service-2")["shapes"]
    machines = shapes["InstanceType"]["enum"]
    assert len(machines) > 700
    assert not [name for name in machines if not re.search(node["InstanceType"]["pattern"], name)]
    assert set(kuberay_rules.VERBS) <= set(COMMANDS)
