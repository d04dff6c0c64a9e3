"""Finding local GPUs and assigning them to roles; NVIDIA's library is simulated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from staleflow.pipeline.config import loading, local_gpus
from staleflow.pipeline.config.size_plan import place_locally
from staleflow.pipeline.placement.devices import GB, Device, describe_devices
from staleflow.stores.errors import ConfigError
from tests.commands import command
from tests.support.fake_nvml import pynvml


@pytest.fixture(autouse=True)
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> tuple[Device, ...]:
    monkeypatch.setenv("FAKE_GPUS", "8xH100-80")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return local_gpus.read_devices()


def test_devices_have_memory_and_a_link_domain(eight: tuple[Device, ...]) -> None:
    assert describe_devices(eight) == "8 x H100 80 GB"
    assert [device.visible_id for device in eight] == [str(n) for n in range(8)]
    assert {device.link_domain for device in eight} == {"nvlink-0"}
    assert eight[3].uuid == "GPU-host-3" and eight[3].memory_bytes == 80 * GB


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [("3,4,5,6,7,0,1,2", "34567012"), ("GPU-host-2,0", "20"), ("", ""), ("1,9,2", "1"), ("-1", "")],
)
def test_cuda_visible_devices_is_respected(
    eight: tuple[Device, ...], monkeypatch: pytest.MonkeyPatch, visible: str, numbers: str
) -> None:
    """Rotated lists as of dask-cuda, UUIDs, an empty list, and lists that end at the first invalid entry, as in
    CUDA."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert "".join(device.visible_id for device in local_gpus.read_devices()) == numbers


def test_devices_are_those_that_the_process_was_started_with(
    eight: tuple[Device, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that was restarted asks the workers of an earlier run again, which use only a part of them."""
    monkeypatch.setattr(local_gpus, "_INITIAL_VISIBLE", {})
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    for visible in ("4", ""):
        local_gpus.restrict_devices(visible)
        assert [device.visible_id for device in local_gpus.read_devices()] == ["3", "4"]


def test_without_nvlink_a_host_is_one_domain_and_mig_slices_are_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPUS", "4xL4-24-pcie")
    assert {device.link_domain for device in local_gpus.read_devices()} == {"pcie"}
    monkeypatch.setenv("FAKE_GPUS", "MIG-7xA100-10")
    slices = local_gpus.read_devices()
    assert len({device.link_domain for device in slices}) == 7
    assert slices[2].visible_id == slices[2].uuid == "MIG-host-2"
    monkeypatch.delenv("FAKE_GPUS")
    assert local_gpus.read_devices() == ()


def test_a_gpu_in_mig_mode_without_slices_or_without_a_size_is_not_used(
    eight: tuple[Device, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", lambda handle: (int(handle == 1), 0))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMaxMigDeviceCount", lambda handle: 0)
    memory = pynvml.nvmlDeviceGetMemoryInfo

    def memory_of_others(handle: int) -> pynvml.Memory:
        if handle == 2:
            raise pynvml.NVMLError("GPU is lost")
        return memory(handle)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory_of_others)
    assert [device.visible_id for device in local_gpus.read_devices()] == ["0", "3", "4", "5", "6", "7"]
    assert caplog.messages == ["GPU 2 is not used: the driver does not describe it (GPU is lost)"]


def test_each_role_of_a_local_run_has_a_separate_gpu(job: Path, eight: tuple[Device, ...]) -> None:
    config = loading.load(job, ("rollout.instances=6", "training.ranks=2"))
    visible, picture = place_locally(config, eight)
    heavy = ["trainer", "trainer-1", *(f"rollout-{n}" for n in range(6))]
    assert sorted(visible[name] for name in heavy) == [str(n) for n in range(8)]
    assert visible["server"] == visible["reward-0"] == ""
    assert "| t0 t1 r0 r1 r2 r3 r4 r5 |" in picture
    assert place_locally(config, ()) == ({}, "")
    assert place_locally(loading.load(job, ("model.device=cpu",)), eight) == ({}, "")


def test_an_instance_of_several_gpus_sees_them_all(job: Path, eight: tuple[Device, ...]) -> None:
    vllm = ("rollout.engine.name=vllm", "rollout.engine.tensor_parallel=4")
    visible, _ = place_locally(loading.load(job, vllm), eight)
    assert len(visible["rollout-0"].split(",")) == 4
    assert visible["trainer"] not in visible["rollout-0"].split(",")


def test_with_one_gpu_all_roles_share_it(job: Path, eight: tuple[Device, ...]) -> None:
    visible, _ = place_locally(loading.load(job, ("cluster.gpus=1",)), eight)
    assert visible["trainer"] == visible["rollout-0"] == "0"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("cluster.gpus=9",), "cluster.gpus = 9: this machine has 8 x H100 80 GB; set it to 8 or less"),
        (("rollout.instances=8",), "needs 9 GPUs (1 for training, 8 for rollout); 8 of 8 are free"),
        (("rollout.instances=2", "cluster.gpus=2"), "needs 3 GPUs"),
    ],
)
def test_too_few_gpus_give_a_one_line_error(
    job: Path, eight: tuple[Device, ...], overrides: tuple[str, ...], line: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        place_locally(loading.load(job, overrides), eight)
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_nine_gpus_of_eight_end_a_run_before_it_starts(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPUS", "8xH100-80")
    end = command("run", job, "--set", "cluster.gpus=9")
    assert end.returncode == 2
    assert end.stderr.strip().splitlines()[-1].endswith("set it to 8 or less, or 0 for all")
    assert not (job.parent / "runs").exists()


def test_use_devices_fails_once_cuda_is_initialized() -> None:
    script = (
        "import os, sys, types; from staleflow.pipeline.config.local_gpus import restrict_devices\n"
        "restrict_devices('2,3'); assert os.environ['CUDA_VISIBLE_DEVICES'] == '2,3'\n"
        "assert 'torch' not in sys.modules\n"
        "cuda = types.SimpleNamespace(is_initialized=lambda: True)\n"
        "sys.modules['torch'] = types.SimpleNamespace(cuda=cuda)\n"
        "restrict_devices('2,3')\n"
        "try: restrict_devices('4')\n"
        "except RuntimeError as error: print(error)\n"
    )
    end = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "uses GPUs already" in end.stdout
