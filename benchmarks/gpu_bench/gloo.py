"""PyTorch's Gloo with CUDA tensors, as a child: one of two processes that share the GPU.

``{"op", "bytes", "reps"}`` gives seconds. "send_plain" is what users write (``dist.send(x.cpu(), 1)``), "send_pinned"
copies through pinned buffers made once.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from typing import Any

from gpu_bench.children import serve

OPS = ("all_reduce", "all_gather", "send_plain", "send_pinned")


def missing() -> str | None:
    """Why it cannot be measured here, or None."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return f"PyTorch is not installed ({error})"
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return "this PyTorch has no Gloo"
    return None


class Member:
    """Rank ``GLOO_RANK`` of two."""

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._dist: Any = importlib.import_module("torch.distributed")
        self._rank = int(os.environ["GLOO_RANK"])
        self._device = os.environ["GLOO_DEVICE"]
        self._dist.init_process_group("gloo", init_method=os.environ["GLOO_MEET"], rank=self._rank, world_size=2)

    def facts(self) -> dict[str, Any]:
        return {"torch": self._torch.__version__}

    def _wait(self) -> None:
        if self._device != "cpu":
            self._torch.cuda.synchronize()

    def _program(self, op: str, n: int) -> Callable[[], Any]:
        torch, dist = self._torch, self._dist
        x = torch.full((n,), 1.0 + self._rank, device=self._device)
        if op == "all_reduce":
            return lambda: dist.all_reduce(x)
        if op == "all_gather":
            parts = [torch.empty_like(x) for _ in range(2)]
            return lambda: dist.all_gather(parts, x)
        if op == "send_plain":
            if self._rank == 0:
                return lambda: dist.send(x.cpu(), 1)

            def receive() -> None:
                y = torch.empty(n)
                dist.recv(y, 0)
                y.to(self._device)

            return receive
        pinned = torch.empty(n, pin_memory=self._device != "cpu")

        def pinned_send() -> None:
            pinned.copy_(x, non_blocking=True)
            self._wait()
            dist.send(pinned, 1)

        def pinned_receive() -> None:
            dist.recv(pinned, 0)
            x.copy_(pinned, non_blocking=True)

        return pinned_send if self._rank == 0 else pinned_receive

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        run, times = self._program(request["op"], request["bytes"] // 4), []
        for i in range(request["reps"] + 2):
            self._dist.barrier()
            self._wait()
            begin = time.perf_counter()
            run()
            self._wait()
            if i >= 2:
                times.append(time.perf_counter() - begin)
        return {"times": times}


def main() -> None:
    member = Member()
    serve(member.facts(), member.handle)


if __name__ == "__main__":
    main()
