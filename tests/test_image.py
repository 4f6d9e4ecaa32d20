"""The image, as far as can be told without Docker: what it pins, what it leaves out, what KubeRay's files name."""

import re
import tomllib

from cluster.files import FOLDER
from tests.running import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_the_image_is_pinned_and_not_roots() -> None:
    assert re.search(r"^FROM python:3\.\d+\.\d+-slim-\w+$", DOCKERFILE, re.MULTILINE)
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE) == ["1000"]
    installs = [line for line in DOCKERFILE.splitlines() if "pip install" in line]
    assert installs and all("--constraint" in line for line in installs)
    assert not re.search(r"curl|apt-get|latest", DOCKERFILE)


def test_it_copies_the_packages_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = set(re.findall(r"^COPY (\w+) \1$", DOCKERFILE, re.MULTILINE))
    assert found == {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert {".git", "runs", ".venv*"} <= set((ROOT / ".dockerignore").read_text().split())


def test_the_files_for_kubernetes_name_the_image_of_these_versions() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    ray = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert ray
    tag = f"{version}-ray{ray[1]}-py311-cuda"
    for name in ("kuberay-cluster", "kuberay-job"):
        text = (FOLDER / f"{name}.yaml").read_text()
        assert set(re.findall(r"image: \S+:(\S+)", text)) == {tag} and f"rayVersion: {ray[1]}" in text
    assert f"trireme:{tag} ." in DOCKERFILE
