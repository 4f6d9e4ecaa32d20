"""Cluster files: each of ours is valid and read whole; what is wrong in one is found with its line, also where Ray,
KubeRay and clouds take it: planted by hand, then by rule."""

import copy
import functools
import operator
import re
import shutil
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
from cluster.document import Document, Problem, dotted, mistaken, schemas
from cluster.files import FOLDER, bootstrap_config, own_files, read_cluster, validate_file
from tests.running import Ended, here

pytestmark = pytest.mark.pure

MEMORY = "{medium: Memory, sizeLimit: 200Gi}"
SHM = "\n                - {name: shm, mountPath: /dev/shm}"
EFA = "        - {DeviceIndex: 1, NetworkCardIndex: 3, InterfaceType: efa, SubnetId: subnet-0123456789abcdef0, "
EFA += "Groups: [sg-0123456789abcdef0]}\n"
BOOTSTRAP = "\n    --autoscaling-config=~/ray_bootstrap_config.yaml"

OWN = {
    "laptop": ("local", 0),
    "onprem": ("local", 12),
    "aws": ("aws", 64),
    "gcp": ("gcp", 64),
    "azure": ("azure", 64),
    "kuberay-cluster": ("kuberay", 64),
    "kuberay-job": ("kuberay", 16),
}


@pytest.mark.parametrize("name", OWN)
def test_own_files_are_valid_and_complete(name: str) -> None:
    shape = read_cluster(name)
    assert (shape.provider, shape.max_gpus) == OWN[name]
    assert shape.head.price_per_hour is not None
    text = (FOLDER / f"{name}.yaml").read_text()
    token = "mode: token" in text or ("RAY_AUTH_MODE=token" in text and "--dashboard-host=127.0.0.1" in text)
    assert token or name == "laptop", "a cluster of several machines asks for a token"
    for kind in shape.workers:
        assert kind.gpu and kind.gpus and kind.cpus and kind.memory_bytes, "the planner needs all of it"
        assert kind.link_within and kind.link_across and kind.price_per_hour is not None
        assert 0 <= kind.min_nodes <= kind.max_nodes
    probes = [text.count(f"{probe}Probe:") for probe in ("liveness", "readiness")]
    assert probes == [2 * name.startswith("kuberay")] * 2, "KubeRay's own run wget, which a slim image has not"


def test_a_head_knows_the_file_that_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert bootstrap_config() is None
    shutil.copy(FOLDER / "aws.yaml", tmp_path / "ray_bootstrap_config.yaml")  # as the files' `ray start` lines name it
    assert "~/ray_bootstrap_config.yaml" in (FOLDER / "aws.yaml").read_text()
    assert getattr(bootstrap_config(), "max_gpus", 0) == OWN["aws"][1]


# File, what is replaced (once) by what, and what the sentence must say.
PLANTED = [
    ("onprem", "head_ip: 192", "head_ipp: 192", "did you mean 'head_ip'"),
    ("onprem", "gpu: rtx-4090", "gpu: rtx-9999", "rtx-9999"),
    ("onprem", "link_across: 10Gb", "link_across: quick", "a link of 'quick'"),
    ("aws", "type: aws", "type: awss", "the provider 'awss' is not supported: did you mean 'aws'?"),
    ("aws", "Ebs: {VolumeSize: 100,", "Ebs: {VolumeSize: large,", "VolumeSize: 'large' is not of type 'integer'"),
    ("aws", "GPU: 8}", "GPU: 4}", "a p4d.24xlarge has 8"),
    ("aws", "min_workers: 0", "min_workers: 9", "more than its max_workers"),
    ("aws", ", Groups: [sg-0123456789abcdef0]}", "}", "lacks the key 'Groups'"),
    ("gcp", "machineType: n2-standard-4", "machineType: {a: b}", "write a machine such as"),
    ("aws", "CPU: 96, GPU: 8", "CPU: 96, GPUS: 8", "did you mean 'GPU'"),
    ("aws", "CPU: 96, GPU: 8", "CPU: 960, GPU: 8", "a p4d.24xlarge has 96"),
    ("kuberay-cluster", 'Gi, nvidia.com/gpu: "8", vpc', 'Gi, gpu: "8", vpc', "nvidia.com/gpu"),
    ("onprem", "min_workers: 2", "min_workers: 3", "min_workers is 3: write a whole number of at most 2"),
    ("onprem", "max_workers: 2", "max_workers: 1", "worker_ips names 2 machines: write 2"),
    ("onprem", "- 192.168.1.12", "- 192.168.1.312", "write an address or a host name"),
    ("aws", "max_workers: 8 # GPU", "max_workers: 0 # GPU", "no worker ever comes"),
    ("onprem", "~/.ssh/id_ed25519", "~/.ssh/no_such_key", "which is not on this machine"),
    ("gcp", "availability_zone: us-central1-a", "availability_zone: us-east1-b", "write us-central1-a"),
    ("gcp", "regions/us-central1/subnet", "regions/us-east1/subnet", "is of the region us-east1"),
    ("aws", EFA, EFA + EFA.replace("Index: 3", "Index: 4"), "has 4 network cards, counted from 0"),
    ("aws", "ami-0123456789abcdef0", "ami-xyz", "write an image such as ami-"),
    ("gcp", "global/images/ubuntu-2204", "global/images/Ubuntu 2204", "write an image such as"),
    ("azure", "imageVersion: 22.04.2025041101", "imageVersion: newest", "write latest or a version"),
    ("kuberay-job", "image: registry.example.com/trireme:", "image: Registry.example.com/trireme::", "write an image"),
    ("gcp", "provisioningModel: SPOT", "provisioningModel: SPOTT", "did you mean 'SPOT'"),
    ("gcp", "diskSizeGb: 100", "diskSizeGb: -100", "write at least 10"),
    ("kuberay-job", 'requests: {cpu: "180"', 'requests: {cpu: "190"', "above its limit of 180"),
    ("kuberay-cluster", "matchLabels: {trireme/group: h100}", "matchLabels: {trireme/group: h200}", "no pod here has"),
    ("kuberay-cluster", SHM, "", "/dev/shm, where Kubernetes gives 64 MiB"),
    ("aws", "$RAY_HEAD_IP:6379", "$RAY_HEAD_IP:6380", "the head listens on 6379"),
    ("aws", BOOTSTRAP, "", "write --autoscaling-config="),
    ("onprem", "memory_gb: 256", "memory_gb: 262144", "write at most 65536"),
    ("kuberay-job", "memory: 16Gi}\n                req", "memory: 16}\n                req", "a unit such as 16Gi"),
    ("onprem", "--dashboard-host=127.0.0.1", "--dashboard-host=0.0.0.0", "write 127.0.0.1"),
    ("kuberay-cluster", "serviceType: ClusterIP", "serviceType: LoadBalancer", "write ClusterIP"),
    ("onprem", "export RAY_AUTH_MODE=token", "export", "write export RAY_AUTH_MODE=token"),
    ("kuberay-cluster", "    mode: token", "    mode: disabled", "write token"),
    ("kuberay-job", 'OMP_NUM_THREADS: "8"', "HF_TOKEN: hf_abcdefghijklmnop", "into a Kubernetes Secret"),
    ("onprem", "ulimit -n 65536 |", "export WANDB_API_KEY=0a1b2c; ulimit -n 65536 |", "trireme submit --env"),
    ("kuberay-job", "  entrypoint: >-\n    trireme", "  # trireme", "lacks the key 'entrypoint'"),
    ("kuberay-job", "    trireme train", "    triremee train", "did you mean 'trireme'"),
    ("kuberay-job", "    trireme train", "    trireme trian", "did you mean 'train'"),
    ("kuberay-job", "workers=16", "workers=32", "room for 16 at most"),
    ("kuberay-job", "run.storage=/mnt/shared/runs", "run.storage=/tmp/runs", "write run.storage=/mnt/shared/runs"),
    ("kuberay-job", " run.storage=/mnt/shared/runs", "", "write run.storage=/mnt/shared/runs"),
    ("kuberay-job", "    trireme train", "    'trireme train", "a quotation mark without its partner"),
    ("kuberay-job", "medium: Memory", "medium: ''", "is not in memory"),
    ("kuberay-job", MEMORY, "{}", "is not in memory"),
    ("kuberay-job", "sizeLimit: 200Gi", "sizeLimit: 200GB", "is '200GB': write an amount such as 2, 500m or 16Gi"),
    ("kuberay-job", "trireme/gpu:", "trireme/gpus:", "there is no annotation 'trireme/gpus'"),
    ("kuberay-cluster", "minReplicas: 0", "minReplicas: 5", "write minReplicas the smallest"),
    ("kuberay-cluster", "claimName: trireme-shared", "claimName: trireme-sharde", "did you mean 'trireme-shared'"),
    ("kuberay-job", 'nvidia.com/gpu: "8"', 'nvidia.com/gpu: "7.5"', "write a whole number"),
    ("kuberay-job", 'nvidia.com/gpu: "8"}\n', 'nvidia.com/gpu: "16"}\n', "and of a device they must be the same"),
    ("aws", "ssh_user: ubuntu", "ssh_user: ''", "write the user of the machines"),
    ("aws", "HopLimit: 2", "HopLimit: 200", "write at most 64"),
    ("kuberay-cluster", "[ReadWriteMany]", "[ReadWriteOnce]", "9 pods mount the claim 'trireme-shared'"),
    ("kuberay-job", "generateName: gpt-", "generateName: GPT_", "write small letters"),
    ("kuberay-job", "value: http://mlflow", "value: http:/mlflow", "write an address such as http://"),
]


@pytest.fixture(autouse=True)
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home with the keys that the shipped files name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    for name in ("id_ed25519", "id_rsa", "id_rsa.pub"):
        (tmp_path / ".ssh" / name).touch()


def problems(text: str, folder: Path) -> list[Problem]:
    (folder / "cluster.yaml").write_text(text)
    return validate_file(str(folder / "cluster.yaml"))


@pytest.mark.parametrize(("name", "before", "after", "said"), PLANTED)
def test_a_planted_mistake_is_named_on_its_line(tmp_path: Path, name: str, before: str, after: str, said: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    assert before in text
    if "entrypoint" in before:
        text = re.sub(r"\n    cluster.wait_seconds.*", "", text)
    found = problems(text.replace(before, after, 1), tmp_path)
    named = [problem for problem in found if said in problem.message]
    assert named, f"{after!r} is let through: {found}"
    assert all("\n" not in problem.message for problem in found)
    line = text[: text.index(before)].count("\n") + 1
    elsewhere = before in (SHM, MEMORY, "medium: Memory", "[ReadWriteMany]")  # at what lacks it, or mounts it
    assert elsewhere or any(abs(problem.line - line) <= 5 for problem in named), (line, found)


RIGHT: list[tuple[str, dict[str, str]]] = [  # other values that are right
    ("onprem", {"- 192.168.1.12": "- node-3.example.com"}),
    ("onprem", {"- 192.168.1.12": "- fe80::2"}),
    ("onprem", {"--port=6379": "--port 6380", "$RAY_HEAD_IP:6379": "$RAY_HEAD_IP:6380"}),
    ("aws", {"region: us-east-1\n": "region: us-east-3\n", "zone: us-east-1a": "zone: us-east-3a"}),
    ("aws", {"InstanceType: m7i.xlarge": "InstanceType: u7i-12tb.224xlarge"}),
    ("aws", {"CPU: 96, GPU: 8": "CPU: 96, GPU: 8, my_disk: 2"}),
    ("gcp", {"availability_zone: us-central1-a": "availability_zone: us-central1-f"}),
    ("azure", {"location: eastus": "location: newzealandnorth"}),
    ("laptop", {"worker_ips: []": "worker_ips: []\nmax_workers: 0"}),
    ("kuberay-cluster", {"effect: NoSchedule": "effect: NoExecute, tolerationSeconds: 60"}),
    ("kuberay-cluster", {"{trireme/group: h100}}": f"{{app: x}}}}\n{' ' * 18}namespaces: [y]"}),
    ("kuberay-job", {'OMP_NUM_THREADS: "8"': "TOKENIZERS_PARALLELISM: 'false'"}),
    ("kuberay-job", {"workers=16": "workers=auto"}),
    ("kuberay-job", {"value: http://mlflow": "value: databricks"}),
    ("kuberay-job", {'OMP_NUM_THREADS: "8"': "REDIS_URL: redis:6379"}),
    ("kuberay-job", {"run.storage=/mnt/shared/runs": "run.storage=s3://bucket/runs"}),
    ("kuberay-job", {"    trireme train": "    python mine.py"}),
    ("kuberay-job", {"submissionMode: K8sJobMode": "submissionMode: SidecarMode"}),
]


@pytest.mark.parametrize(("name", "changes"), RIGHT)
def test_a_right_file_is_let_through(tmp_path: Path, name: str, changes: dict[str, str]) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after, 1)
    assert problems(text, tmp_path) == []


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def cluster(*words: str) -> Ended:
        return here(monkeypatch, capsys, "cluster", *words)

    def changed(name: str, before: str, after: str) -> str:
        (tmp_path / "mine.yaml").write_text((FOLDER / f"{name}.yaml").read_text().replace(before, after))
        return str(tmp_path / "mine.yaml")

    assert set(cluster("list", "--json").json) == {f"{name}.yaml" for name in OWN}
    shown = cluster("show", "aws")
    assert shown.code == 0 and "8 x a100-40gb" in shown.out and "a100-spot (spot)" in shown.out
    bad = changed("onprem", "- 192.168.1.12", "- 192.168.1.11")
    checked = cluster("validate", "laptop", "kuberay-job", bad)
    assert checked.code == 2 and "laptop is valid" in checked.out and "kuberay-job is valid" in checked.out
    assert f"{bad}:19: the host 192.168.1.11 is named twice" in checked.err
    gone = cluster("up", str(tmp_path / "no.yaml"))
    assert gone.code == 2 and "there is no file" in gone.err
    kubernetes = cluster("up", "kuberay-job", "--json")
    assert kubernetes.code == 2 and "kubectl apply" in kubernetes.json["error"]
    for before, after, said in [
        ("workers=16", "wrokers=16", "there is no key 'wrokers' (on the command line); did you mean 'workers'?"),
        ("strategy=fsdp", "strategy=fspd", "strategy 'fspd' is not known: did you mean fsdp?"),
    ]:
        job = cluster("validate", changed("kuberay-job", before, after))
        assert job.code == 2 and job.err.strip().endswith(f"its entrypoint: {said}")


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
MAY_BE = re.compile(r"word .*(SecurityGroupIds|vmSize)|quantity .*imageSku|type .*httpGet\.port|laptop\.yaml port")
"""What is made by rule and may be right: machines and ids that we do not know, names, a port that nobody asks for."""


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key), each
        yield from leaves(each, (*path, key))


def misspelt(word: str) -> str:
    """Two letters near the middle exchanged; of a short word, one doubled."""
    middle = len(word) // 2
    for at in [*range(middle, len(word) - 1), *range(1, middle)] if len(word) > 4 else []:
        if word[at : at + 2].isalpha() and word[at] != word[at + 1]:
            return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
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


def test_mistakes_made_by_rule_are_caught() -> None:
    """One of each that are alike in a provider's files: the same value at a key of the same name."""
    made, missed, seen = Counter[str](), [], set[Any]()
    for name, file in own_files().items():
        trees = list(yaml.load_all(file.read_text(), Loader=yaml.CSafeLoader))
        for number, tree in enumerate(trees):
            for kind, where, path, value in mutants(tree):
                alike = (name.removesuffix(".yaml").partition("-")[0], kind, path[-3:], str(value))
                if alike in seen or MAY_BE.search(f"{name} {kind} {where}"):
                    continue
                seen.add(alike)
                made[kind] += 1
                changed = [copy.deepcopy(t) if n == number else t for n, t in enumerate(trees)]
                around = functools.reduce(operator.getitem, path[:-1], changed[number])
                if kind == "key":
                    around[value] = around.pop(path[-1])
                else:
                    around[path[-1]] = value
                if not files._problems([Document("", t, {(): 1}, []) for t in changed], ""):
                    missed.append(f"{name} {kind} {where}: {value}")
    assert min(made.values()) >= 5 and made.total() >= 500, made
    assert not missed


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
    assert set(kuberay_rules.VERBS) == set(COMMANDS), "one that is left out is called a mistake"
