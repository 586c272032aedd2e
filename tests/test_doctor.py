"""hetccl doctor, and GPUs as the vendors' bindings show them (twins of the bindings stand for them here)."""

from __future__ import annotations

import enum
import json
import resource
import sys
import types
from typing import Any

import pytest

from jax_hetccl import cli, gpus
from jax_hetccl.doctor import BAD, GOOD, NOTE, examine, host, software
from jax_hetccl.doctor import gpu as gpu_doctor


class Status(enum.IntEnum):
    SUCCESS = 0
    INVALID_VALUE = 1
    NO_DEVICE = 100


@pytest.fixture
def cuda_twin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A twin of ``cuda.bindings.driver`` with two devices, the second without stream memory operations."""
    names = ["HOST_NUMA_ID", "CAN_USE_64_BIT_STREAM_MEM_OPS", "DMA_BUF_SUPPORTED", "GPU_DIRECT_RDMA_SUPPORTED"]
    names += ["GPU_DIRECT_RDMA_WRITES_ORDERING"]  # the flush options are missing, as in an older driver
    attributes = types.SimpleNamespace(**{f"CU_DEVICE_ATTRIBUTE_{n}": n for n in names})
    values = {"HOST_NUMA_ID": 1, "DMA_BUF_SUPPORTED": 1, "GPU_DIRECT_RDMA_SUPPORTED": 1}
    values["GPU_DIRECT_RDMA_WRITES_ORDERING"] = 100

    def attribute(which: Any, device: int) -> tuple[Any, ...]:
        if which is None:
            raise TypeError("no such attribute")
        return Status.SUCCESS, int(device == 0) if which == "CAN_USE_64_BIT_STREAM_MEM_OPS" else values[which]

    module: Any = types.ModuleType("cuda.bindings.driver")
    module.CUdevice_attribute = attributes
    module.cuInit = lambda flags: (Status.SUCCESS,)
    module.cuDeviceGetCount = lambda: (Status.SUCCESS, 2)
    module.cuDeviceGet = lambda ordinal: (Status.SUCCESS, ordinal) if ordinal < 2 else (Status.INVALID_VALUE, None)
    module.cuDeviceGetPCIBusId = lambda length, device: (Status.SUCCESS, f"FFFF:{device:02X}:00.0\0".encode())
    module.cuDeviceGetAttribute = attribute
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", module)
    return module


def test_cuda_devices(cuda_twin):
    first, second = gpus.describe("cuda")
    assert first == gpus.Gpu(0, "ffff:00:00.0", 1, 1, 1, 1, 100, None)
    assert (second.ordinal, second.stream_memops) == (1, 0)
    assert gpus.describe("cuda", [1]) == [second]
    check = gpu_doctor.device_check("cuda", second)
    assert check.state == NOTE and "stream memory operations no" in check.found and "host functions" in check.fix


def test_what_the_driver_refuses_is_one_error(cuda_twin):
    with pytest.raises(gpus.BindingsError, match="cuda-python cannot use the driver: INVALID_VALUE"):
        gpus.describe("cuda", [2])
    cuda_twin.cuInit = lambda flags: (Status.NO_DEVICE,)
    with pytest.raises(gpus.BindingsError, match="NO_DEVICE"):
        gpus.describe("cuda")


def test_rocm_devices(monkeypatch):
    attributes = {"CanUseStreamWaitValue": 1, "DmaBufSupported": 0, "HostNumaId": 0}
    module: Any = types.ModuleType("hip")
    module.hip = types.SimpleNamespace(
        hipDeviceAttribute_t=types.SimpleNamespace(**{f"hipDeviceAttribute{k}": k for k in attributes}),
        hipGetDeviceCount=lambda: (Status.SUCCESS, 1),
        hipDeviceGetPCIBusId=lambda length, ordinal: (Status.SUCCESS, "ffff:c1:00.0"),
        hipDeviceGetAttribute=lambda which, ordinal: (Status.SUCCESS, attributes[which]),
    )
    monkeypatch.setitem(sys.modules, "hip", module)
    assert gpus.describe("rocm") == [gpus.Gpu(0, "ffff:c1:00.0", 0, 1, 0)]


@pytest.mark.parametrize(("platform", "fix"), [("cuda", "jax-hetccl[cuda]"), ("rocm", "jax-hetccl[rocm]")])
def test_missing_bindings_name_the_extra(monkeypatch, platform, fix):
    for name in ("cuda.bindings.driver", "hip"):
        monkeypatch.setitem(sys.modules, name, None)  # as if not installed
    with pytest.raises(gpus.BindingsError) as caught:
        gpus.describe(platform)
    assert fix in str(caught.value)


def test_limits():
    assert host.memlock_check(resource.RLIM_INFINITY).state == GOOD
    assert "8192 KB" in host.memlock_check(8 << 20).found and "ulimit -l" in host.memlock_check(8 << 20).fix
    assert host.shared_memory_check(64 << 20).state == NOTE and "--shm-size" in host.shared_memory_check(64 << 20).fix
    assert host.shared_memory_check(8 << 30).state == GOOD and host.shared_memory_check(None).state == NOTE
    assert host.files_check(1024, 4096).state == NOTE and host.files_check(65536, 65536).state == GOOD
    assert host.interfaces_check({"lo": ["127.0.0.1"]}).state == NOTE
    assert "eth0 10.0.0.1" in host.interfaces_check({"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]}).found


def test_versions():
    assert (
        software.jax_check("0.10.2", "0.10.2").state == GOOD and software.jax_check("0.12.0.1", "0.12.0").state == GOOD
    )
    for version in ("0.9.1", "0.13.0", None):
        assert software.jax_check(version, "x").state == BAD
    assert software.plugin_check({}, "0.11.2").state == NOTE
    assert software.plugin_check({"jax-cuda13-plugin": "0.11.2"}, "0.11.2").state == GOOD
    assert software.plugin_check({"jax-cuda13-plugin": "0.10.2"}, "0.11.2").state == BAD


def test_a_library_that_is_missing_and_one_that_does_not_load():
    missing = gpu_doctor.library_check("cuda", "libcuda.so.1", gpu_doctor.loads("libno-such-driver.so.1"))
    assert missing.state == NOTE and "is not there" in missing.found
    broken = gpu_doctor.library_check("rocm", "libamdhip64.so", "libamdhip64.so: undefined symbol: x")
    assert broken.state == BAD and "undefined symbol" in broken.found
    assert gpu_doctor.library_check("cuda", "libcuda.so.1", None).state == GOOD


def test_hardware_queues():
    assert gpu_doctor.queues_check("cuda", {}).state == GOOD
    assert gpu_doctor.queues_check("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}).state == GOOD
    few = gpu_doctor.queues_check("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert few.state == NOTE and "CUDA_DEVICE_MAX_CONNECTIONS=1" in few.found and "unset" in few.fix


def test_the_command(capsys):
    expected = [c.name for c in examine()]
    assert {"jax", "native module", "memlock", "shared memory", "transports", "cuda driver", "rocm driver"} <= set(
        expected
    )
    status = cli.main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [c["name"] for c in found] == expected
    assert status == int(any(c["state"] == BAD for c in found))
    cli.main(["doctor", "--plain"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(expected) and all(name in line for name, line in zip(expected, lines, strict=True))
    cli.main(["doctor"])
    assert "what to do" in capsys.readouterr().out
