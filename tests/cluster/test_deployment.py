"""The files in deploy/: manifests against the schema of the operator, the batch script with a fake Slurm, and the
instructions of the Dockerfile. Kubernetes, Slurm and Docker are not run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import dask
import jsonschema
import pytest
import yaml
from distributed.security import Security

from staleflow.pipeline.cluster.certificates import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE
from tests.jobs.test_jobs import DRY
from tests.support import fake_nvml

DEPLOY = Path("deploy")
SCRIPT, MANIFESTS, DOCKERFILE = DEPLOY / "slurm.sbatch", DEPLOY / "kubernetes.yaml", DEPLOY / "Dockerfile"
UID = 10001


# -- Kubernetes --------------------------------------------------------------------------------------------------


def exact_schema(required: str = "", **properties: Any) -> dict[str, Any]:
    """Return a schema of an object with exactly these properties."""
    return {
        "type": "object", "properties": properties, "required": required.split(), "additionalProperties": False,
    }  # fmt: skip


def list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
QUANTITIES = {"type": "object", "additionalProperties": TEXT}
CONTAINER = exact_schema(
    "name", name=TEXT, image=TEXT, command=list_of(TEXT), args=list_of(TEXT), workingDir=TEXT,
    env=list_of(exact_schema("name", name=TEXT, value=TEXT)),
    envFrom=list_of(exact_schema(configMapRef=exact_schema(name=TEXT))),
    ports=list_of(exact_schema("containerPort", name=TEXT, containerPort=NUMBER, protocol=TEXT)),
    readinessProbe=exact_schema(exec=exact_schema(command=list_of(TEXT)), periodSeconds=NUMBER),
    resources=exact_schema(limits=QUANTITIES, requests=QUANTITIES),
    volumeMounts=list_of(exact_schema("name mountPath", name=TEXT, mountPath=TEXT, readOnly=FLAG)),
)  # fmt: skip
VOLUME = exact_schema(
    "name", name=TEXT, persistentVolumeClaim=exact_schema("claimName", claimName=TEXT),
    secret=exact_schema(secretName=TEXT, defaultMode=NUMBER), emptyDir=exact_schema(medium=TEXT, sizeLimit=TEXT),
)  # fmt: skip
POD = exact_schema(
    "containers", containers=list_of(CONTAINER), volumes=list_of(VOLUME),
    securityContext=exact_schema(runAsNonRoot=FLAG, runAsUser=NUMBER, runAsGroup=NUMBER, fsGroup=NUMBER),
)  # fmt: skip
SERVICE = exact_schema(
    type=TEXT, selector=QUANTITIES,
    ports=list_of(
        exact_schema("port", name=TEXT, port=NUMBER, targetPort={"type": ["integer", "string"]}, protocol=TEXT)
    ),
)  # fmt: skip
WORKER = exact_schema("spec", replicas=NUMBER, spec=POD)
SCHEMAS = {
    "DaskCluster": exact_schema(
        "scheduler worker", scheduler=exact_schema("spec service", spec=POD, service=SERVICE), worker=WORKER
    ),
    "DaskWorkerGroup": exact_schema("cluster worker", cluster=TEXT, worker=WORKER),
}
"""Schemas of the manifest fields, as in the custom resources of dask-kubernetes at 1daa175f (2025-07):
dask_kubernetes/operator/deployment/helm/dask-kubernetes-operator/crds/."""


@pytest.fixture(scope="module")
def manifests() -> dict[str, dict[str, Any]]:
    """The manifests by kind."""
    documents = list(yaml.safe_load_all(MANIFESTS.read_text()))
    assert len({d["kind"] for d in documents}) == len(documents)
    return {document["kind"]: document for document in documents}


def pods(manifests: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    cluster = manifests["DaskCluster"]["spec"]
    return {
        "scheduler": cluster["scheduler"]["spec"],
        "gpus": cluster["worker"]["spec"],
        "light": manifests["DaskWorkerGroup"]["spec"]["worker"]["spec"],
    }


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


@pytest.mark.parametrize("kind", SCHEMAS)
def test_manifests_have_the_fields_of_the_operators_resources(kind: str, manifests: dict[str, dict[str, Any]]) -> None:
    manifest = manifests[kind]
    assert manifest["apiVersion"] == "kubernetes.dask.org/v1"
    assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
    jsonschema.validate(manifest["spec"], SCHEMAS[kind])
    wrong = json.loads(json.dumps(manifest["spec"]).replace('"8"', "8"))
    if kind == "DaskCluster":
        with pytest.raises(jsonschema.ValidationError, match="8 is not of type 'string'"):
            jsonschema.validate(wrong, SCHEMAS[kind])


def test_names_in_the_manifests_refer_to_each_other(manifests: dict[str, dict[str, Any]]) -> None:
    cluster = manifests["DaskCluster"]["metadata"]["name"]
    assert manifests["DaskWorkerGroup"]["spec"]["cluster"] == cluster
    service = manifests["DaskCluster"]["spec"]["scheduler"]["service"]
    assert service["selector"] == {"dask.org/cluster-name": cluster, "dask.org/component": "scheduler"}
    address = f"tls://{cluster}-scheduler:{service['ports'][0]['port']}"  # as the operator names the service
    for name, pod in pods(manifests).items():
        (container,) = pod["containers"]
        # Without it, the operator would set an address with tcp://.
        assert {"name": "DASK_SCHEDULER_ADDRESS", "value": address} in container["env"]
        assert container["envFrom"] == [{"configMapRef": {"name": manifests["ConfigMap"]["metadata"]["name"]}}]
        assert name == "scheduler" or container["args"][1] == address
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert {volume["name"] for volume in pod["volumes"]} == set(mounted)
        claims = [v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
        assert claims == [manifests["PersistentVolumeClaim"]["metadata"]["name"]]
        assert container["workingDir"] == mounted["shared"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == UID
    scheduler = manifests["DaskCluster"]["spec"]["scheduler"]["spec"]["containers"][0]
    assert {port["name"] for port in scheduler["ports"]} == {port["targetPort"] for port in service["ports"]}


def test_a_node_has_a_worker_per_gpu_and_shared_memory(manifests: dict[str, dict[str, Any]]) -> None:
    by_name = {name: pod["containers"][0] for name, pod in pods(manifests).items()}
    resources = by_name["gpus"]["resources"]
    count = option(by_name["gpus"]["args"], "--nworkers")
    assert resources["limits"] == {"nvidia.com/gpu": count}, "no limit of memory"
    assert resources["requests"]["nvidia.com/gpu"] == count
    shared = next(volume for volume in pods(manifests)["gpus"]["volumes"] if volume["name"] == "shm")
    assert shared["emptyDir"]["medium"] == "Memory"
    assert {"name": "shm", "mountPath": "/dev/shm"} in by_name["gpus"]["volumeMounts"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in by_name["light"]["env"]
    assert not [key for key in by_name["light"]["resources"]["requests"] if "gpu" in key]
    for name in ("gpus", "light"):
        assert option(by_name[name]["args"], "--memory-limit") == "0"


def test_the_dask_configuration_requires_tls(manifests: dict[str, dict[str, Any]]) -> None:
    settings = dask.config.collect_env(manifests["ConfigMap"]["data"])
    with dask.config.set(dask.config.merge(dask.config.config, settings)):
        security = Security()
        assert security.require_encryption
        for role in ("scheduler", "worker", "client"):
            tls = security.get_tls_config_for_role(role)
            assert [tls["ca_file"], tls["cert"], tls["key"]] == [
                f"/certs/{n}" for n in (AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE)
            ]
        assert dask.config.get("distributed.comm.default-scheme") == "tls"
        assert dask.config.get("distributed.worker.daemon") is False
    mounts = [mount for pod in pods(manifests).values() for mount in pod["containers"][0]["volumeMounts"]]
    assert sum(mount["mountPath"] == "/certs" for mount in mounts) == 3


# -- Slurm -------------------------------------------------------------------------------------------------------

SRUN = """#!/usr/bin/env bash
echo srun "$@" >> "$CALLS"
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
"""Runs the command of a step once on this machine."""


def fake_programs(folder: Path, commands: dict[str, str]) -> dict[str, str]:
    """Return an environment in which these scripts come first on the path, as on a node with two GPUs."""
    programs = folder / "programs"
    programs.mkdir()
    for name, text in commands.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {
        **os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "CALLS": str(folder / "calls"),
        "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_CPUS_ON_NODE": "64", "SLURM_GPUS_ON_NODE": "2",
    }  # fmt: skip


def test_the_batch_script_requests_whole_nodes() -> None:
    assert subprocess.run(["bash", "-n", SCRIPT], capture_output=True, text=True).stderr == ""
    asked = re.findall(r"^#SBATCH (--\S+)$", SCRIPT.read_text(), flags=re.MULTILINE)
    assert {"--exclusive", "--mem=0", "--gpus-per-node=8"} <= set(asked)


def test_the_commands_of_the_batch_script(tmp_path: Path) -> None:
    """Recorded by scripts that replace the programs."""
    record = '#!/usr/bin/env bash\necho "$(basename "$0")" "${@//$\'\\n\'/ }" >> "$CALLS"\n'
    started = 'if [ "$1" = cluster ]; then mkdir "$2"; touch "$2/key.pem" "$2/dask.yaml"; exec sleep 60; fi\n'
    submitted = 'if [ "$1" = submit ]; then echo demo-1; fi\n'
    environment = fake_programs(
        tmp_path, {"srun": SRUN, "dask": record, "python": record, "staleflow": record + started + submitted}
    )
    run = subprocess.run(
        ["bash", SCRIPT.resolve(), "submit", "job.toml"], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    host = socket.gethostname()
    address, certs = f"tls://{host}:8786", tmp_path / "certs-7"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == f"staleflow cluster {certs} --host {host} --port 8786 --workers 1"
    (step,) = (shlex.split(call) for call in calls if call.startswith("srun"))
    assert {"--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=64", "--mem=0"} <= set(step)
    worker = step[step.index("dask") :]
    assert worker[:3] == ["dask", "worker", address]
    assert (option(worker, "--nworkers"), option(worker, "--memory-limit")) == ("2", "0")
    (waiting,) = (call for call in calls if call.startswith("python"))
    assert "wait_for_workers(7," in waiting, "two on each of three nodes, and one without a GPU"
    commands = [call for call in calls if call.startswith("staleflow")]  # `srun` is recorded whenever it gets to run
    assert commands[1:] == [f"staleflow submit job.toml --scheduler {address}", "staleflow logs demo-1 --follow"]
    assert not (certs / "key.pem").exists()
    assert (certs / "dask.yaml").exists()


def test_a_batch_script_without_gpus_ends_with_one_line(tmp_path: Path) -> None:
    environment = fake_programs(tmp_path, {})
    del environment["SLURM_GPUS_ON_NODE"]
    run = subprocess.run(["bash", SCRIPT.resolve()], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (run.returncode, "the job has no GPUs: sbatch --gpus-per-node 8" in run.stderr) == (1, True)


@pytest.mark.slow
def test_a_job_runs_by_the_batch_script_on_simulated_gpus(tmp_path: Path) -> None:
    """Scheduler, nannies and workers are real; Slurm and NVIDIA's library are fake, and the engine is emulated."""
    programs = {
        name: f'#!/usr/bin/env bash\nexec {shlex.quote(sys.executable)} -m {module} "$@"\n'
        for name, module in (("staleflow", "staleflow.cli.main"), ("dask", "dask"))
    }
    environment = fake_programs(
        tmp_path, {"srun": SRUN, "python": f'#!/usr/bin/env bash\nexec {shlex.quote(sys.executable)} "$@"\n'} | programs
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "job.toml").write_text(DRY.format(runs=tmp_path / "runs"))
    environment |= {
        "SLURM_JOB_NUM_NODES": "1", "STALEFLOW_PORT": str(port), "FAKE_GPUS": "2xH100-80",
        "PYTHONPATH": f"{Path(fake_nvml.__file__).parent}{os.pathsep}{Path.cwd()}",
        "DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "False",  # Dask's own monitor asks that library for more
    }  # fmt: skip
    words = ["submit", "job.toml", "--set", "rollout.instances=1"]
    run = subprocess.run(
        ["bash", SCRIPT.resolve(), *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert list((tmp_path / "runs").iterdir())
    assert not (tmp_path / "certs-7" / KEY_FILE).exists()


# -- Docker ------------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile in order."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def test_the_image_is_pinned_and_runs_as_a_user() -> None:
    steps = instructions()
    assert {word for word, _ in steps} <= {"FROM", "ARG", "RUN", "ENV", "COPY", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
    by_word = dict(steps)
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-base-ubuntu24\.04", by_word["FROM"])
    assert json.loads(by_word["ENTRYPOINT"]) == ["staleflow"]
    assert by_word["USER"] == str(UID)
    words = [word for word, _ in steps]
    assert words.index("USER") > max(at for at, word in enumerate(words) if word in ("RUN", "COPY"))
    assert f"--uid {UID} " in next(rest for word, rest in steps if word == "RUN")
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(by_word["ARG"].removeprefix("EXTRAS=").split(",")) <= set(extras)
    for word, rest in steps:
        if word == "RUN":
            assert subprocess.run(["bash", "-n", "-c", rest], capture_output=True, text=True).stderr == ""
    assert "--constraint /src/constraints.txt" in by_word["RUN"]


def test_the_image_copies_all_files_that_a_wheel_needs(tmp_path: Path) -> None:
    for word, rest in instructions():
        if word == "COPY":
            *sources, target = rest.split()
            destination = tmp_path / target.lstrip("/")
            for source in sources:
                if Path(source).is_dir():
                    shutil.copytree(source, destination, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    destination.mkdir(exist_ok=True)
                    shutil.copy(source, destination)
    copied = tmp_path / "src"
    project = tomllib.loads((copied / "pyproject.toml").read_text())["project"]
    assert (copied / project["readme"]).is_file()
    links = [path for path in (copied / "staleflow").iterdir() if path.is_symlink()]
    assert len(links) == 4
    assert all((link.resolve() / "__init__.py").is_file() and copied in link.resolve().parents for link in links)
