"""vLLM's tiered offloading with a worker on the CPU, which vLLM itself has only for accelerators.

Copies between the engine's cache and host memory are made here; all else is vLLM's own.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tiered_kv import UnsupportedError


class CpuWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM's classes are Any here
    """Copies when it is asked to, and says so afterwards."""

    def __init__(self, kv_caches: Any, region: Any) -> None:
        self._region = region
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for one in kv_caches.tensors:
            size = one.page_size_bytes
            blocks = one.tensor.view(torch.int8).view((-1, size))
            self._pairs.append((blocks, region.create_next_worker_view(size)))
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copies blocks of the engine into host memory."""
        blocks, chunks = _ids(src_spec), _ids(dst_spec)
        return self._copied(job_id, [(two, chunks, one, blocks) for one, two in self._pairs])

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copies blocks out of host memory into the engine's."""
        chunks, blocks = _ids(src_spec), _ids(dst_spec)
        return self._copied(job_id, [(one, blocks, two, chunks) for one, two in self._pairs])

    def _copied(self, job_id: int, copies: list[tuple[Any, Any, Any, Any]]) -> bool:
        begun_s = perf_counter()
        size = 0
        with torch.inference_mode():
            for target, to, source, start in copies:
                target[to] = source[start]
                size += to.numel() * target.shape[1]
        self._done.append(TransferResult(job_id, True, size, perf_counter() - begun_s))
        return True

    def get_finished(self) -> list[TransferResult]:
        """All that was copied since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for."""

    def shutdown(self) -> None:
        """Lets go of host memory."""
        self._pairs.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM's classes are Any here
    """vLLM's, with that worker. A chunk is a block."""

    _worker: CpuWorker | None

    def get_worker(self, kv_caches: Any) -> CpuWorker:
        """The worker of this rank."""
        if self._worker is None:
            if self.blocks_per_chunk != 1 or self.config.canonical_layout:
                message = (
                    "kv_connector_extra_config: on CPUs a chunk is one block, laid out as the "
                    "engine has it: leave `blocks_per_chunk`, `block_size` and `canonical_layout` "
                    "out"
                )
                raise UnsupportedError(message, op="engines")
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuWorker(kv_caches, region)
        return self._worker


def _ids(spec: Any) -> torch.Tensor:
    return torch.as_tensor(spec.block_ids, dtype=torch.int64)
