"""What `shardwise submit` writes, taken by Kubernetes's and Kubeflow's own schemas; runs by sshd; the examples."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_nodes import STEPS, curve, job_of

from shardwise.train.run_folder import RunFolder

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parent.parent
POD = ["submit", "job.toml", "--k8s", "--image", "registry/shardwise:1", "--nodes", "2", "--gpus-per-node", "2"]


def shardwise(folder: Path, *words: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "shardwise", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(job_of(Path("runs/job")).to_toml())
    return tmp_path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as door:
        return int(door.getsockname()[1])


@pytest.mark.parametrize("options", [[], ["--volume", "team"], ["trainjob"], ["trainjob", "--volume", "team"]])
def test_kubernetes_takes_what_is_written(folder: Path, options: list[str]) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    shardwise(folder, *POD, *options, "--set", "seed=7", "--dry-run")
    assert stat.S_IMODE((folder / "job.yaml").stat().st_mode) == 0o600
    found = list(yaml.safe_load_all((folder / "job.yaml").read_text()))
    kinds = ["Secret", "ConfigMap", *["Service"] * ("trainjob" not in options)]
    kinds += ["PersistentVolumeClaim"] * ("--volume" not in options) + ["TrainJob" if "trainjob" in options else "Job"]
    assert [one["kind"] for one in found] == kinds
    for one in found:
        if one["kind"] != "TrainJob":
            validate.validate(one, "1.31", strict=True)
    assert found[1]["data"]["job.toml"] == (folder / "job.toml").read_text()
    if "trainjob" in options:
        check_train_job(found[-1])
        return
    pod = found[-1]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["command"][-9:-5] == ["--set", "seed=7", "--set", "run.folder=/workspace/runs/job"]
    assert container["args"] == ["--node", "$(JOB_COMPLETION_INDEX)/2", "--address", "job-0.job:29400"]
    assert pod["subdomain"] == "job" and container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    found[-1]["spec"]["completion"] = 2
    with pytest.raises(validate.ValidationError):
        validate.validate(found[-1], "1.31", strict=True)


@pytest.mark.parametrize("options", [[], ["trainjob"]])
def test_a_run_in_an_object_store_needs_no_volume(folder: Path, options: list[str]) -> None:
    shardwise(folder, *POD, *options, "--set", "run.folder=s3://bucket/job", "--dry-run")
    text = (folder / "job.yaml").read_text()
    assert '"run.folder=s3://bucket/job"' in text and "workspace" not in text and "VolumeClaim" not in text
    assert "claimName: team" in text if "--volume" in options else "{name: job, configMap: {name: job}}" in text


def check_train_job(job: dict[str, Any]) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    parsed = models.TrainerV1alpha1TrainJob.from_dict(job)
    assert parsed.spec.trainer.num_nodes == 2 and parsed.spec.runtime_ref.name == "torch-distributed"
    assert known_keys(parsed.to_dict()) >= known_keys(job)  # none was dropped as unknown
    with pytest.raises(ValueError):
        models.TrainerV1alpha1TrainJob.from_dict({**job, "spec": {**job["spec"], "trainer": {"numNodes": "two"}}})


def known_keys(value: Any, path: str = "") -> set[str]:
    """Every key of nested values, with those above it."""
    if isinstance(value, list):
        return {key for one in value for key in known_keys(one, path)}
    if not isinstance(value, dict):
        return set()
    return {f"{path}.{key}" for key in value} | {k for key in value for k in known_keys(value[key], f"{path}.{key}")}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "choose where to submit: one of --slurm, --k8s, --ray and --ssh HOSTS"),
        (["--slurm", "--ray"], "choose where to submit"),
        (["--k8s"], "--k8s needs --image"),
        (["--ssh", ","], "--ssh , names no host; list hosts in a file"),
        (["--ssh", "hosts.txt"], "--ssh hosts.txt cannot be read: No such file or directory."),
        (["--ssh", "./"], "--ssh ./ cannot be read: Is a directory."),
        (["--ssh", sys.executable], "cannot be read: it is no text."),
        (["trainjob", "--slurm"], "'trainjob' is not known here; `--k8s trainjob` submits"),
        (["--slurm", "--sweep", "seed"], "--sweep seed is not of the form KEY=VALUE,VALUE, such as"),
        (["--slurm", "--set", "step=1"], "did you mean 'steps'"),
        (["--slurm", "--nodes", "3"], "has 4 processes, which do not fill 3 nodes; change the layout."),
        (["--slurm", "--nodes", "2", "--gpus-per-node", "8"], "do not fill 2 nodes of 8 GPUs; change the layout."),
        (["--slurm", "--set", "layout=shard=4 micro_batch=3"], "cannot run a global batch of"),
        (["--slurm", "--nodes", "2", "--time", "24hours"], "--time 24hours: write 90m, 24h or 2d"),
        (["--slurm", "--nodes", "2", "--gpus-per-node", "1"], "which do not fill 2 nodes of 1 GPU; use --nodes 4."),
    ],
)
def test_what_cannot_be_submitted_is_a_sentence(folder: Path, words: list[str], sentence: str) -> None:
    assert sentence in shardwise(folder, "submit", "job.toml", *words, code=2)
    assert [path.name for path in folder.iterdir()] == ["job.toml"]


def test_a_run_is_continued_only_in_a_folder_that_is_named(folder: Path) -> None:
    assert "--continue needs the folder of the run; set run.folder." in shardwise(folder, "train", "--continue", code=2)


def test_without_the_scheduler_the_file_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "kubectl was not found here; take job.yaml to where it is: kubectl apply" in shardwise(folder, *POD, code=2)
    assert (folder / "job.yaml").is_file()


@pytest.fixture
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server on loopback, and an `ssh` whose hosts 127.0.0.1 and localhost it is."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if server is None or shutil.which("ssh-keygen") is None:
        pytest.skip("sshd is not installed; Debian has it in openssh-server")
    home, port = tmp_path / "ssh", free_port()
    home.mkdir(mode=0o700)
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f", str(home / name)], check=True)
    (home / "config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {home}/host\nAuthorizedKeysFile {home}/user.pub\n"
        f"PermitRootLogin yes\nStrictModes no\nUsePAM no\nPidFile {home}/pid\nSetEnv PYTHONPATH={ROOT}\n"
    )
    options = f"-p {port} -i {home}/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    (home / "bin").mkdir()
    (home / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {options} "$@"\n')
    (home / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")
    process = subprocess.Popen([server, "-D", "-f", str(home / "config"), "-E", str(home / "log")])
    time.sleep(0.5)
    yield
    process.terminate()
    process.wait(10)


def test_a_run_by_ssh_is_stopped_and_continued(sshd: None, folder: Path) -> None:
    run, plain = RunFolder(folder / "runs" / "job"), RunFolder(folder / "plain")
    (folder / "hosts.txt").write_text("127.0.0.1\nlocalhost\n")
    submit = [sys.executable, "-m", "shardwise", "submit", "job.toml", "--ssh", "hosts.txt"]
    submit += ["--address", f"127.0.0.1:{free_port()}"]
    with (folder / "log").open("wb") as log:
        first = subprocess.Popen(submit, cwd=folder, stdout=log, stderr=log)
    deadline = time.monotonic() + 150
    while len(curve(run)) < 8:
        assert first.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.1)
    first.terminate()
    assert first.wait(60) == 75, (folder / "log").read_text()
    assert 8 <= len(curve(run)) < STEPS
    done = subprocess.run(submit, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run folder: runs/job (it has a run, which is continued)" in done.stdout
    shardwise(folder, "train", "job.toml", "--set", f"run.folder={plain.path}")
    assert curve(run) == curve(plain) and len(curve(run)) == STEPS


def test_the_examples_for_skypilot_and_torchrun_train(folder: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    task = yaml.safe_load((ROOT / "examples" / "clusters" / "skypilot.yaml").read_text())
    assert task["num_nodes"] == 2 and list(task["secrets"]) == ["SHARDWISE_SECRET"]
    python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    base = {**os.environ, "PATH": python, "PYTHONPATH": str(ROOT), "SHARDWISE_SECRET": "s" * 32}
    sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_GPUS_PER_NODE": "0"}
    command = task["run"].replace("/runs/first", "runs/sky") + " --set steps=3"
    start_all(folder, [(command, {**base, **sky, "SKYPILOT_NODE_RANK": str(rank)}) for rank in range(2)])
    torchrun = {"NODES": "2", "PROCESSES": "2", "MASTER": f"127.0.0.1:{free_port()}", "FOLDER": "runs/torchrun"}
    job = (folder / "job.toml").read_text().replace(f"steps = {STEPS}", "steps = 3")
    (folder / "job.toml").write_text(job)
    start_all(folder, [(f"bash {ROOT}/examples/clusters/torchrun.sh", {**base, **torchrun})] * 2)
    curves = [curve(RunFolder(folder / "runs" / name)) for name in ("sky", "torchrun")]
    assert len(curves[0]) == 3 and curves[0] == curves[1]


def start_all(folder: Path, commands: list[tuple[str, dict[str, str]]]) -> None:
    """Runs commands at the same time, to their end."""
    done = list[subprocess.CompletedProcess[str]]()

    def start(command: str, variables: dict[str, str]) -> None:
        options: dict[str, Any] = {"cwd": folder, "env": variables, "capture_output": True, "text": True}
        done.append(subprocess.run(["bash", "-c", command], timeout=200, **options))

    threads = [threading.Thread(target=start, args=one) for one in commands]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.returncode for one in done] == [0] * len(commands), [one.stdout + one.stderr for one in done]
