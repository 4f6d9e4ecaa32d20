"""Cluster files: ours are valid and complete, and a mistake in one is found with its line.

So are mistakes that Ray, KubeRay and clouds would accept. Some mistakes are planted by hand, and
every kind of mistake is planted by rule.
"""

import copy
import functools
import operator
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

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

MEMORY_VOLUME = "{medium: Memory, sizeLimit: 200Gi}"
SHM = "\n                - {name: shm, mountPath: /dev/shm}"
EFA = (
    "        - {DeviceIndex: 1, NetworkCardIndex: 3, InterfaceType: efa, "
    "SubnetId: subnet-0123456789abcdef0, Groups: [sg-0123456789abcdef0]}\n"
)
SUBMITTER = "submissionMode: K8sJobMode\n  submitterConfig:\n    backoffLimit: 0"
BOOTSTRAP = "\n    --autoscaling-config=~/ray_bootstrap_config.yaml"

OWN_FILES = {
    "laptop": ("local", 0),
    "onprem": ("local", 12),
    "aws": ("aws", 64),
    "gcp": ("gcp", 64),
    "azure": ("azure", 64),
    "kuberay-cluster": ("kuberay", 64),
    "kuberay-job": ("kuberay", 16),
}
"""The provider and the most GPUs of each file that we ship."""


@pytest.fixture(autouse=True)
def home_with_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home with the keys that the shipped files name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    for name in ("id_ed25519", "id_rsa", "id_rsa.pub"):
        (tmp_path / ".ssh" / name).touch()


# --- our own files --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN_FILES)
def test_our_files_have_all_that_the_planner_needs(name: str) -> None:
    shape = read_cluster(name)
    assert (shape.provider, shape.max_gpus) == OWN_FILES[name]
    assert shape.head.price_per_hour is not None
    for kind in shape.workers:
        assert kind.gpu
        assert kind.gpus
        assert kind.cpus
        assert kind.memory_bytes
        assert kind.link_within
        assert kind.link_across
        assert kind.price_per_hour is not None
        assert 0 <= kind.min_nodes <= kind.max_nodes


@pytest.mark.parametrize("name", [name for name in OWN_FILES if name != "laptop"])
def test_our_clusters_of_several_machines_ask_for_a_token(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    has_token_of_ray = "RAY_AUTH_MODE=token" in text and "--dashboard-host=127.0.0.1" in text
    assert "mode: token" in text or has_token_of_ray


@pytest.mark.parametrize("name", OWN_FILES)
def test_our_files_replace_the_probes_of_kuberay(name: str) -> None:
    """KubeRay's own probes run wget, which a slim image does not have."""
    text = (FOLDER / f"{name}.yaml").read_text()
    pods = 2 if name.startswith("kuberay") else 0
    assert text.count("livenessProbe:") == pods
    assert text.count("readinessProbe:") == pods


def test_a_head_knows_the_file_that_started_it(tmp_path: Path) -> None:
    assert bootstrap_config() is None
    aws = FOLDER / "aws.yaml"
    assert "~/ray_bootstrap_config.yaml" in aws.read_text()
    shutil.copy(aws, tmp_path / "ray_bootstrap_config.yaml")
    config = bootstrap_config()
    assert config is not None
    _, max_gpus = OWN_FILES["aws"]
    assert config.max_gpus == max_gpus


# --- mistakes made by hand ------------------------------------------------------------------------


MISTAKES = [
    ("onprem", "head_ip: 192", "head_ipp: 192", "did you mean 'head_ip'"),
    ("onprem", "gpu: rtx-4090", "gpu: rtx-9999", "rtx-9999"),
    ("onprem", "link_across: 10Gb", "link_across: quick", "a link of 'quick'"),
    ("aws", "type: aws", "type: awss", "the provider 'awss' is not supported: did you mean 'aws'?"),
    (
        "aws",
        "Ebs: {VolumeSize: 100,",
        "Ebs: {VolumeSize: large,",
        "VolumeSize: 'large' is not of type 'integer'",
    ),
    ("aws", "GPU: 8}", "GPU: 4}", "a p4d.24xlarge has 8"),
    ("aws", "min_workers: 0", "min_workers: 9", "more than its max_workers"),
    ("aws", ", Groups: [sg-0123456789abcdef0]}", "}", "lacks the key 'Groups'"),
    ("gcp", "machineType: n2-standard-4", "machineType: {a: b}", "write a machine such as"),
    ("aws", "CPU: 96, GPU: 8", "CPU: 96, GPUS: 8", "did you mean 'GPU'"),
    ("aws", "CPU: 96, GPU: 8", "CPU: 960, GPU: 8", "a p4d.24xlarge has 96"),
    ("kuberay-cluster", 'Gi, nvidia.com/gpu: "8", vpc', 'Gi, gpu: "8", vpc', "nvidia.com/gpu"),
    (
        "onprem",
        "min_workers: 2",
        "min_workers: 3",
        "min_workers is 3: write a whole number of at most 2",
    ),
    ("onprem", "max_workers: 2", "max_workers: 1", "worker_ips names 2 machines: write 2"),
    ("onprem", "- 192.168.1.12", "- 192.168.1.312", "write an address or a host name"),
    ("aws", "max_workers: 8 # GPU", "max_workers: 0 # GPU", "no worker ever comes"),
    ("onprem", "~/.ssh/id_ed25519", "~/.ssh/no_such_key", "which is not on this machine"),
    (
        "gcp",
        "availability_zone: us-central1-a",
        "availability_zone: us-east1-b",
        "write us-central1-a",
    ),
    ("gcp", "regions/us-central1/subnet", "regions/us-east1/subnet", "is of the region us-east1"),
    ("aws", EFA, EFA + EFA.replace("Index: 3", "Index: 4"), "has 4 network cards, counted from 0"),
    ("aws", "ami-0123456789abcdef0", "ami-xyz", "write an image such as ami-"),
    ("gcp", "global/images/ubuntu-2204", "global/images/Ubuntu 2204", "write an image such as"),
    (
        "azure",
        "imageVersion: 22.04.2025041101",
        "imageVersion: newest",
        "write latest or a version",
    ),
    (
        "kuberay-job",
        "image: registry.example.com/trireme:",
        "image: Registry.example.com/trireme::",
        "write an image",
    ),
    ("gcp", "provisioningModel: SPOT", "provisioningModel: SPOTT", "did you mean 'SPOT'"),
    ("gcp", "diskSizeGb: 100", "diskSizeGb: -100", "write at least 10"),
    ("kuberay-job", 'requests: {cpu: "180"', 'requests: {cpu: "190"', "above its limit of 180"),
    (
        "kuberay-cluster",
        "matchLabels: {trireme/group: h100}",
        "matchLabels: {trireme/group: h200}",
        "no pod here has",
    ),
    ("kuberay-cluster", SHM, "", "/dev/shm, where Kubernetes gives 64 MiB"),
    ("aws", "$RAY_HEAD_IP:6379", "$RAY_HEAD_IP:6380", "the head listens on 6379"),
    ("aws", BOOTSTRAP, "", "write --autoscaling-config="),
    ("onprem", "memory_gb: 256", "memory_gb: 262144", "write at most 65536"),
    (
        "kuberay-job",
        "memory: 16Gi}\n                req",
        "memory: 16}\n                req",
        "a unit such as 16Gi",
    ),
    ("onprem", "--dashboard-host=127.0.0.1", "--dashboard-host=0.0.0.0", "write 127.0.0.1"),
    ("kuberay-cluster", "serviceType: ClusterIP", "serviceType: LoadBalancer", "write ClusterIP"),
    ("onprem", "export RAY_AUTH_MODE=token", "export", "write export RAY_AUTH_MODE=token"),
    ("kuberay-cluster", "    mode: token", "    mode: disabled", "write token"),
    (
        "kuberay-job",
        'OMP_NUM_THREADS: "8"',
        "HF_TOKEN: hf_abcdefghijklmnop",
        "into a Kubernetes Secret",
    ),
    (
        "onprem",
        "ulimit -n 65536 |",
        "export WANDB_API_KEY=0a1b2c; ulimit -n 65536 |",
        "trireme submit --env",
    ),
    ("kuberay-job", "  entrypoint: >-\n    trireme", "  # trireme", "lacks the key 'entrypoint'"),
    ("kuberay-job", "    trireme train", "    triremee train", "did you mean 'trireme'"),
    ("kuberay-job", "    trireme train", "    trireme trian", "did you mean 'train'"),
    ("kuberay-job", "workers=16", "workers=32", "room for 16 at most"),
    (
        "kuberay-job",
        "run.storage=/mnt/shared/runs",
        "run.storage=/tmp/runs",
        "write run.storage=/mnt/shared/runs",
    ),
    ("kuberay-job", " run.storage=/mnt/shared/runs", "", "write run.storage=/mnt/shared/runs"),
    (
        "kuberay-job",
        "    trireme train",
        "    'trireme train",
        "a quotation mark without its partner",
    ),
    ("kuberay-job", "medium: Memory", "medium: ''", "is not in memory"),
    ("kuberay-job", MEMORY_VOLUME, "{}", "is not in memory"),
    (
        "kuberay-job",
        "sizeLimit: 200Gi",
        "sizeLimit: 200GB",
        "is '200GB': write an amount such as 2, 500m or 16Gi",
    ),
    ("kuberay-job", "trireme/gpu:", "trireme/gpus:", "there is no annotation 'trireme/gpus'"),
    ("kuberay-cluster", "minReplicas: 0", "minReplicas: 5", "write minReplicas the smallest"),
    (
        "kuberay-cluster",
        "claimName: trireme-shared",
        "claimName: trireme-sharde",
        "did you mean 'trireme-shared'",
    ),
    ("kuberay-job", 'nvidia.com/gpu: "8"', 'nvidia.com/gpu: "7.5"', "write a whole number"),
    (
        "kuberay-job",
        'nvidia.com/gpu: "8"}\n',
        'nvidia.com/gpu: "16"}\n',
        "and of a device they must be the same",
    ),
    ("aws", "ssh_user: ubuntu", "ssh_user: ''", "write the user of the machines"),
    ("aws", "HopLimit: 2", "HopLimit: 200", "write at most 64"),
    (
        "kuberay-cluster",
        "[ReadWriteMany]",
        "[ReadWriteOnce]",
        "9 pods mount the claim 'trireme-shared'",
    ),
    ("kuberay-job", "generateName: gpt-", "generateName: GPT_", "write small letters"),
    (
        "kuberay-job",
        "value: http://mlflow",
        "value: http:/mlflow",
        "write an address such as http://",
    ),
]
"""(file, what is replaced once, by what, what the sentence must say)."""
REPORTED_ELSEWHERE = (SHM, MEMORY_VOLUME, "medium: Memory", "[ReadWriteMany]")
"""Mistakes that are reported on the line of what lacks or mounts something."""


def _problems(text: str, folder: Path) -> list[Problem]:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return validate_file(str(file))


@pytest.mark.parametrize(("name", "before", "after", "words"), MISTAKES)
def test_a_mistake_is_found_with_its_line(
    tmp_path: Path, name: str, before: str, after: str, words: str
) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    assert before in text
    if "entrypoint" in before:
        text = re.sub(r"\n    cluster.wait_seconds.*", "", text)
    problems = _problems(text.replace(before, after, 1), tmp_path)
    for problem in problems:
        assert "\n" not in problem.message
    lines = [problem.line for problem in problems if words in problem.message]
    assert lines, f"{after!r} is not found: {problems}"
    if before not in REPORTED_ELSEWHERE:
        line = text[: text.index(before)].count("\n") + 1
        assert any(abs(reported - line) <= 5 for reported in lines), (line, problems)


VALID_CHANGES: list[tuple[str, dict[str, str]]] = [
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
    (
        "kuberay-cluster",
        {"{trireme/group: h100}}": "{app: x}}\n                  namespaces: [y]"},
    ),
    ("kuberay-job", {'OMP_NUM_THREADS: "8"': "TOKENIZERS_PARALLELISM: 'false'"}),
    ("kuberay-job", {"workers=16": "workers=auto"}),
    ("kuberay-job", {"value: http://mlflow": "value: databricks"}),
    ("kuberay-job", {'OMP_NUM_THREADS: "8"': "REDIS_URL: redis:6379"}),
    ("kuberay-job", {"run.storage=/mnt/shared/runs": "run.storage=s3://bucket/runs"}),
    ("kuberay-job", {"    trireme train": "    python mine.py"}),
    ("kuberay-job", {SUBMITTER: "submissionMode: SidecarMode"}),
]


@pytest.mark.parametrize(("name", "changes"), VALID_CHANGES)
def test_a_valid_file_is_accepted(tmp_path: Path, name: str, changes: dict[str, str]) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after, 1)
    assert _problems(text, tmp_path) == []


# --- commands -------------------------------------------------------------------------------------

RunCluster = Callable[..., Ended]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCluster:
    """`trireme cluster` in this process."""
    return functools.partial(here, monkeypatch, capsys, "cluster")


def _write_changed(folder: Path, name: str, before: str, after: str) -> str:
    """The path of a copy of one of our files, with a change."""
    file = folder / "mine.yaml"
    file.write_text((FOLDER / f"{name}.yaml").read_text().replace(before, after))
    return str(file)


def test_list_shows_our_files(cluster: RunCluster) -> None:
    assert set(cluster("list", "--json").json["clusters"]) == {f"{name}.yaml" for name in OWN_FILES}


def test_show_prints_the_nodes_of_a_file(cluster: RunCluster) -> None:
    shown = cluster("show", "aws").expect(0)
    assert "8 x a100-40gb" in shown.out
    assert "a100-spot (spot)" in shown.out


def test_validate_checks_several_files(cluster: RunCluster, tmp_path: Path) -> None:
    wrong = _write_changed(tmp_path, "onprem", "- 192.168.1.12", "- 192.168.1.11")
    checked = cluster("validate", "laptop", "kuberay-job", wrong).expect(2)
    assert "laptop is valid" in checked.out
    assert "kuberay-job is valid" in checked.out
    assert f"{wrong}:19: the host 192.168.1.11 is named twice" in checked.err


def test_up_refuses_a_missing_file_and_one_for_kubernetes(
    cluster: RunCluster, tmp_path: Path
) -> None:
    missing = cluster("up", str(tmp_path / "no.yaml")).expect(2)
    assert "there is no file" in missing.err
    kubernetes = cluster("up", "kuberay-job", "--json").expect(2)
    assert "kubectl apply" in kubernetes.json["error"]


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (
            "workers=16",
            "wrokers=16",
            "there is no key 'wrokers' (on the command line); did you mean 'workers'?",
        ),
        (
            "strategy=fsdp",
            "strategy=fspd",
            "strategy 'fspd' is not known: did you mean fsdp?",
        ),
    ],
)
def test_validate_checks_the_entrypoint_of_a_job(
    cluster: RunCluster, tmp_path: Path, before: str, after: str, sentence: str
) -> None:
    file = _write_changed(tmp_path, "kuberay-job", before, after)
    checked = cluster("validate", file).expect(2)
    assert checked.err.strip().endswith(f"its entrypoint: {sentence}")


# --- mistakes made by rule, at every place of every shipped file ----------------------------------

FREE_KEYS = re.compile(
    r"(^|\.)(file_mounts|matchLabels|labels|annotations|env_vars)\.[^.]+$"
    r"|nodes\.[^.]+$|available_node_types\.[^.]+$"
)
"""Keys that are names: any is right, as far as a single file shows."""
FREE_WORDS = re.compile(
    r"cluster_name|(^|\.)ssh_user|resource_group|project_id|_mounts|rsync|setup_commands|GroupName"
    r"|IamInstanceProfile|storage$|storageClassName|serviceAccount|market|groupName|labels"
    r"|generateName|trireme_run|email|containers\[\d\]\.name|ports\[\d\]\.name|env\[\d\]\.value$"
    r"|secretKeyRef|command|DeviceName|nodeSelector|accessConfigs\[\d\]\.name|metadata\.items"
    r"|key_pair|imageOffer|imagePublisher|sourceImage|resourcePolicies|subnetwork|metadata\.name"
    r"|image$|claimName|location|host|_ip|ImageId|imageSku|Subnet|Groups|containers\[\d\]\.name"
    r"|Containers\[\d\]\.name"
)
"""Texts of which any is right, or which no file shows to be wrong (a bucket, a person, a path)."""
MAY_BE_RIGHT = re.compile(
    r"word .*(SecurityGroupIds|vmSize)|quantity .*imageSku|type .*httpGet\.port|laptop\.yaml port"
)
"""What a rule makes that may be right: unknown machines and ids, names, an unused port."""

TreePath = tuple[Any, ...]
"""The keys and indices that lead to a value."""


def _leaves(value: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Any]]:
    """All values inside a value, with their paths."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        items = []
    for key, child in items:
        yield (*path, key), child
        yield from _leaves(child, (*path, key))


def _misspell(word: str) -> str:
    """Exchange two letters near the middle, or double the last letter of a short word."""
    middle = len(word) // 2
    positions = [*range(middle, len(word) - 1), *range(1, middle)] if len(word) > 4 else []
    for i in positions:
        if word[i : i + 2].isalpha() and word[i] != word[i + 1]:
            return word[:i] + word[i + 1] + word[i] + word[i + 2 :]
    return word + word[-1]


class Mutation(NamedTuple):
    """A mistake.

    Attributes:
        kind: The kind of mistake. Each stands for a class of mistakes: a misspelt key or word, a
            number below what it counts, a switch that is none, a reference to nothing.
        place: Where it is, for messages.
        path: Where it is.
        value: What is put there; for a key, the new key.
    """

    kind: str
    place: str
    path: TreePath
    value: Any


def _mutations(tree: Any) -> Iterator[Mutation]:
    for path, value in _leaves(tree):
        place = dotted(path)
        key = path[-1]
        if isinstance(key, str) and not FREE_KEYS.search(place):
            yield Mutation("key", place, path, _misspell(key))
        for kind, wrong_value in _wrong_values(place, value):
            yield Mutation(kind, place, path, wrong_value)
        if isinstance(value, str) and "_start_ray_commands[" in place:
            yield from _mutations_of_command(place, path, value)


QUANTITY = re.compile(r"\d+(\.\d+)?([mKMGT]i?)?")
WORD = re.compile(r"[A-Za-z][\w./:-]*")


def _wrong_values(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(kind of mistake, value) to put in place of a value."""
    if isinstance(value, bool):
        yield "switch", "treu"
    elif isinstance(value, int):
        yield "number", -7
        yield "type", "several"
    elif isinstance(value, dict):
        yield "type", "text"
    elif isinstance(value, str):
        if QUANTITY.fullmatch(value):
            yield "quantity", value + "Bytes"
        elif WORD.fullmatch(value) and not FREE_WORDS.search(place):
            yield "word", _misspell(value)


def _mutations_of_command(place: str, path: TreePath, command: str) -> Iterator[Mutation]:
    """Mistakes in a command line that starts Ray."""
    for option in re.findall(r"--([a-z-]+)", command):
        wrong = command.replace(f"--{option}", f"--{_misspell(option)}")
        yield Mutation("option", f"{place} {option}", path, wrong)
    for port in re.findall(r"(?:port=|IP:)(\d+)", command):
        yield Mutation("port", f"{place} {port}", path, command.replace(port, f"{port}0"))


def _apply(mutation: Mutation, tree: Any) -> Any:
    """A copy of a tree with a mistake."""
    mutant = copy.deepcopy(tree)
    *parents, key = mutation.path
    parent = functools.reduce(operator.getitem, parents, mutant)
    if mutation.kind == "key":
        parent[mutation.value] = parent.pop(key)
    else:
        parent[key] = mutation.value
    return mutant


def test_mistakes_made_by_rule_are_found() -> None:
    """Of mistakes that are alike in the files of a provider, one is tried.

    They are alike if the same value is put at a key of the same name.
    """
    counts: Counter[str] = Counter()
    missed = []
    tried = set()
    for name, file in own_files().items():
        provider = name.removesuffix(".yaml").partition("-")[0]
        trees = list(yaml.load_all(file.read_text(), Loader=yaml.CSafeLoader))
        for number, tree in enumerate(trees):
            for mutation in _mutations(tree):
                likeness = (provider, mutation.kind, mutation.path[-3:], str(mutation.value))
                description = f"{name} {mutation.kind} {mutation.place}"
                if likeness in tried or MAY_BE_RIGHT.search(description):
                    continue
                tried.add(likeness)
                counts[mutation.kind] += 1
                mutants = [*trees]
                mutants[number] = _apply(mutation, tree)
                documents = [Document("", mutant, {(): 1}, []) for mutant in mutants]
                if not files._problems(documents, ""):
                    missed.append(f"{description}: {mutation.value}")
    assert min(counts.values()) >= 5, counts
    assert counts.total() >= 500, counts
    assert not missed


# --- names that clouds have -----------------------------------------------------------------------


def test_no_region_of_aws_is_a_mistake() -> None:
    session = boto3.Session(region_name="us-east-1")
    regions = set()
    for partition_name in session.get_available_partitions():
        regions.update(session.get_available_regions("ec2", partition_name))
    assert len(regions) > 30
    schema = schemas("providers.yaml")["aws"]["properties"]["provider"]["properties"]["region"]
    for region in regions:
        assert not mistaken(region, schema["near"]), region


def test_no_machine_of_aws_is_a_mistake() -> None:
    shapes = Loader().load_service_model("ec2", "service-2")["shapes"]
    machines = shapes["InstanceType"]["enum"]
    assert len(machines) > 700
    node_types = schemas("providers.yaml")["aws"]["properties"]["available_node_types"]
    node = node_types["additionalProperties"]["properties"]["node_config"]["properties"]
    pattern = node["InstanceType"]["pattern"]
    for machine in machines:
        assert re.search(pattern, machine), machine


def test_kuberay_rules_know_all_our_commands() -> None:
    """A command that is missing there would be reported as a mistake."""
    assert set(kuberay_rules.VERBS) == set(COMMANDS)
