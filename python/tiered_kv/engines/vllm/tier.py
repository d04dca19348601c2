"""vLLM's secondary tier: `SecondaryTierManager` on one store a replica."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable
from itertools import takewhile
from time import monotonic
from typing import Any, ClassVar

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from tiered_kv import KEY_BYTES, IoFaultError, Namespace, StoreConfig
from tiered_kv.blocking import BlockingStore
from tiered_kv.engines._record import Recorder
from tiered_kv.engines._self_test import self_test
from tiered_kv.engines.vllm.options import TierOptions
from tiered_kv.engines.vllm.tenancy import RESET_S, Tenancy, forget_model
from tiered_kv.engines.vllm.tier_identity import SHA_BYTES, config_of, sharers_of, tier_spec
from tiered_kv.engines.vllm.tier_jobs import Job, Jobs
from tiered_kv.engines.vllm.tier_metrics import TierStats, definitions
from tiered_kv.engines.vllm.tier_requests import GROUP_BYTES, ahead_of

_LOG = init_logger("vllm.tiered_kv")

_MOST_MISSING = 1 << 16
# Least of the memory through which blocks are written, in blocks: a batch's, twice.
_STAGED_BLOCKS = 32
_SHUTDOWN_S = 3.0
_WRITING = 255
# What is asked for is shared and never changed.
_BY_CHUNK = RequestOffloadingContext()
# Asked for by each lookup of each chunk.
_HIT = LookupResult.HIT


class TieredKV(SecondaryTierManager):  # type: ignore[misc]  # vLLM's classes are Any here
    """Keeps the chunks of vLLM's primary tier on NVMe, and gives them back.

    It runs in vLLM's scheduler: a call submits, looks up in memory or drains, and waits for
    nothing. The drives read into the primary tier itself. What arguments and results are is vLLM's
    matter; see its `SecondaryTierManager`.

    Args:
        offloading_spec: vLLM's `OffloadingSpec`.
        primary_kv_view: The primary tier, a row a chunk.
        tier_type: The name of the tier.
        backpressure_detector: vLLM's own.
        **options: Those of `TierOptions`.

    Raises:
        ConfigError: An option is missing, unknown or wrong; the message names it.
        UnsupportedError: vLLM's configuration is not served; the message names what of it.
        TieredKvError: The store cannot be opened, or does not give back what is written.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._options = TierOptions.parse(options)
        self.locality = Locality(self._options.locality)
        size = self.block_size_bytes
        config = config_of(offloading_spec)
        self._spec = tier_spec(offloading_spec, config, self._options, size)
        self._tokens = self._spec.layout.tokens_per_block
        replica = offloading_spec.config.parallel.data_parallel_index
        directory = self._options.make_directory(replica, None)
        sharers = sharers_of(offloading_spec, config, self._options)
        store = _with_staging(self._options.store_config(directory, sharers), self._options, size)
        self._directory = directory
        # Shorter keys are of a hash that is weak.
        weak = bool(self._options.weak_hash)
        self._least_key = GROUP_BYTES + (1 if weak else SHA_BYTES)
        self._store = BlockingStore.open(store)
        try:
            self_test(self._store, size)
            self._ns: Namespace = self._store.namespace(self._spec)
            self._recorder = None
            if self._options.record is not None:
                self._recorder = Recorder(self._options.record, f"dp{replica}", self._tokens)
            self._stats = TierStats(self.stats, {**self._store.stats(), "adapter": {}})
            self._jobs = Jobs(
                self._store,
                primary_kv_view,
                tokens=self._tokens,
                groups=len(offloading_spec.config.groups),
                look=self._count,
                least_key=self._least_key,
                recorder=self._recorder,
                put_wait_s=store.put_timeout_s,
                load_timeout_s=self._options.load_timeout_s,
            )
        except BaseException:
            self._store.close()
            raise
        # Requests that have not finished; those of them of before a reset, and recorded ones.
        self._open: set[str] = set()
        self._stale: set[str] = set()
        self._recorded: set[str] = set()
        # What lookups of this step have found.
        self._found: set[bytes] = set()
        # Keys of which a load has failed, the oldest first.
        self._missing: dict[bytes, None] = {}
        self.out_of_service = ""
        self.lookup_faults = 0
        self.failed_loads = 0
        drive = self._store.stats()["nvme"]
        _LOG.info("tiered-kv serves replica %d from %s: %s", replica, directory, drive)

    def stats(self) -> dict[str, Any]:
        """What the store counts, and `adapter`: faults, and loads that lacked something."""
        faults = self._jobs.faults + self.lookup_faults
        ours = {"faults": faults, "cut_loads": self.failed_loads}
        if self._recorder is not None:
            ours["record_lost"] = self._recorder.lost
        return {**self._store.stats(), "adapter": ours}

    # Requests.

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Notes a request."""
        self._open.add(req_context.req_id)
        return _BY_CHUNK

    def on_request_finished(self, req_context: Any) -> None:
        """Counts the accesses of a request."""
        name = req_context.req_id
        self._open.discard(name)
        self._recorded.discard(name)
        stale = name in self._stale
        self._stale.discard(name)
        self._jobs.finish(req_context, None if stale else self._ns)

    # Lookups.

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Whether a chunk is on the drive; the index is in memory and answers at once."""
        if key in self._found and (not self._stale or req_context.req_id not in self._stale):
            return _HIT
        if self._goes_without(req_context) or len(key) < self._least_key:
            return LookupResult.MISS
        if self._recorder is not None and req_context.req_id not in self._recorded:
            self._recorded.add(req_context.req_id)
            self._jobs.begin_record(req_context, self._ns)
        if key in self._missing:
            return LookupResult.MISS
        try:
            return self._look(key, req_context)
        except Exception as error:  # noqa: BLE001 - it would stop the engine
            self.lookup_faults += 1
            if self.lookup_faults == 1:
                _LOG.warning("a lookup failed and counts as a miss, as others will: %s", error)
            return LookupResult.MISS

    def _look(self, key: bytes, req_context: Any) -> LookupResult:
        """Looks a chunk up, and those behind it, which vLLM asks for next, for this step."""
        ahead = ahead_of(key, req_context, self._tokens)
        if self._missing:
            ahead = list(takewhile(lambda one: one not in self._missing, ahead))
        keys = self._ns.keys_from_opaque(b"".join(ahead), len(key))
        hits = self._store.lookup(self._ns, keys).hits
        if hits:
            self._found.update(ahead if hits == len(ahead) else ahead[:hits])
            return _HIT
        if self._jobs.storing:
            found = self._store.lookup(self._ns, keys[:KEY_BYTES], "each")
            if found.tiers[0] == _WRITING:
                return LookupResult.RETRY
        return LookupResult.MISS

    # Transfers.

    def submit_store(self, job_metadata: Any) -> None:
        """Begins to write chunks of the primary tier to the drive."""
        without = self._goes_without(job_metadata.req_context)
        self._jobs.submit(Job(job_metadata, is_load=False), None if without else self._ns)

    def submit_load(self, job_metadata: Any) -> None:
        """Begins to read chunks from the drive into the primary tier."""
        without = self._goes_without(job_metadata.req_context)
        self._jobs.submit(Job(job_metadata, is_load=True), None if without else self._ns)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that have ended: nothing touches their chunks any more."""
        ended = self._jobs.ended()
        now_s = monotonic() if ended else 0.0
        return [self._result(job, now_s) for job in ended]

    def on_schedule_end(self, context: Any) -> None:  # noqa: ARG002
        """Hands over what has come since the last step, when nothing more comes in this one."""
        self._found.clear()
        self._jobs.hand_over()

    def has_pending_work(self) -> bool:
        """Whether jobs have not been told to have ended."""
        return self._jobs.open > 0

    def drain_jobs(self) -> None:
        """Waits until no job is in progress; then what is stored is of weights that may be gone."""
        self._jobs.drain()
        if self._options.on_reset == "new_epoch":
            self._reset()

    # Metrics.

    @classmethod
    def build_metric_definitions(
        cls,
        extra_config: dict[str, Any],  # noqa: ARG003
    ) -> dict[str, Any]:
        """What `get_stats` tells."""
        return definitions()

    def get_stats(self) -> Any:
        """What has been counted lately, None for nothing new to tell."""
        return self._stats.take()

    def _count(self, idle: bool) -> None:
        self._stats.look(idle=idle)

    def shutdown(self) -> None:
        """Ends the jobs and closes the store."""
        if self._store.closed:
            return
        self._jobs.close(_SHUTDOWN_S)
        if self._recorder is not None:
            self._recorder.close()
        self._store.close()

    def _goes_without(self, req_context: Any) -> bool:
        """Whether a request goes without the store."""
        if self._stale and req_context.req_id in self._stale:
            return True
        return bool(self.out_of_service)

    def _result(self, job: Job, now_s: float) -> JobResult:
        """What vLLM is told of a job, and what later lookups are."""
        told, lacking = job.told, job.lacking
        seconds = now_s - told.submit_time
        self._stats.took("load_seconds" if job.is_load else "save_seconds", seconds)
        partly = None
        if lacking and job.is_load:
            self.failed_loads += 1
            self._missing.update(dict.fromkeys(lacking))
            while len(self._missing) > _MOST_MISSING:
                del self._missing[next(iter(self._missing))]
            lost = set(lacking)
            partly = tuple(key for key in told.keys if key not in lost) or None
        elif self._missing and not job.is_load:
            lost = set(lacking)
            for key in told.keys:
                if key not in lost:
                    self._missing.pop(key, None)
        return JobResult(told.job_id, not lacking, partly, seconds, job.moved)

    def _reset(self) -> None:
        """Forgets, durably, every chunk of this model.

        What is computed from now on has a name that no other process knows, so that one which loads
        the files again does not find it; and what has begun before goes on without the store.
        """
        epoch = uuid.uuid4().hex
        self._stale |= self._open
        self._missing.clear()
        self._found.clear()
        try:
            self._ns = self._store.namespace(Tenancy("", "", epoch).of(self._spec))
            if not forget_model(self._directory, self._spec, monotonic() + RESET_S):
                message = "a drive did not answer in time"
                raise IoFaultError(message, op="reset")
        except Exception as error:  # noqa: BLE001 - it would stop the engine
            self.out_of_service = str(error) or type(error).__name__
            _LOG.error(
                "chunks of before the reset could not be deleted durably, and the tier goes out of "
                "service: %s. Delete %s before vLLM starts again",
                error,
                self._directory,
            )


def _with_staging(config: StoreConfig, options: TierOptions, size: int) -> StoreConfig:
    """Gives a store without memory of its own enough of it to write through."""
    if "staging_capacity" in options.store:
        return config
    staging = max(int(config.staging_capacity), _STAGED_BLOCKS * size)
    return dataclasses.replace(config, staging_capacity=staging)
