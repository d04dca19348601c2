"""vLLM's connector: `KVConnectorBase_V1` on a store a rank."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger

from tiered_kv import ConfigError, UnsupportedError
from tiered_kv.engines._record import Recorder
from tiered_kv.engines.vllm.groups import Group, groups_of, is_plain, main_of
from tiered_kv.engines.vllm.identity import base_spec, place_of, refuse_model
from tiered_kv.engines.vllm.messages import Owner, Saved, Step
from tiered_kv.engines.vllm.metrics import PromMetrics, Stats
from tiered_kv.engines.vllm.options import Options
from tiered_kv.engines.vllm.paged import PagedCache
from tiered_kv.engines.vllm.scheduler import SchedulerSide
from tiered_kv.engines.vllm.within import Within, why_beside
from tiered_kv.engines.vllm.worker import Cached, WorkerSide

_LOG = init_logger("vllm.tiered_kv")


# vLLM's classes are Any here.
class TieredKVConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Keeps the KV blocks of vLLM in host memory and on NVMe, and gives them back.

    vLLM makes one in its scheduler and one in each worker. A worker owns the store of its rank; the
    scheduler attaches to all of them. What arguments and results are is vLLM's matter; see its
    `KVConnectorBase_V1`.

    Args:
        vllm_config: vLLM's configuration.
        role: Which of the two.
        kv_cache_config: Groups and blocks of the cache.

    Raises:
        ConfigError: An option of `kv_connector_extra_config` is missing, unknown or wrong.
        UnsupportedError: The model or its configuration is not served; the message names it.
    """

    # What the caller was handling already when a step began.
    _handled: BaseException | None = None

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options = Options.parse(transfer.kv_connector_extra_config)
        if transfer.kv_role != "kv_both":
            message = f"kv_transfer_config: `kv_role` is {transfer.kv_role!r}: give kv_both"
            raise ConfigError(message, op="engines")
        self._groups = groups_of(vllm_config, kv_cache_config)
        self._within: Within | None = None
        beside = "" if not self._options.layerwise else why_beside(vllm_config, self._groups)
        if self._options.layerwise and not beside:
            self._within = Within()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            recorder = None
            if self._options.record is not None:
                name = f"dp{vllm_config.parallel_config.data_parallel_index}"
                tokens = self._groups[main_of(self._groups)].tokens
                recorder = Recorder(self._options.record, name, tokens)
            self._scheduler = SchedulerSide(self._options, self._groups, recorder, self._within)
            if beside:
                _LOG.warning("`layerwise` saves by layers, and loads beside the steps: %s", beside)
            if transfer.kv_load_failure_policy != "recompute":
                _LOG.warning(
                    "kv_load_failure_policy is %r: a block that cannot be read back ends its "
                    'request with an error; set "recompute", and it is computed again',
                    transfer.kv_load_failure_policy,
                )

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is a later miss: nothing waits for one."""
        return False

    def stats(self) -> dict[str, Any]:
        """What a worker's store counts; empty in the scheduler."""
        return self._worker.stats() if self._worker is not None else {}

    # The worker's side.

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Opens the store of this rank, and tries it."""
        config = self._vllm_config
        ranks = get_pp_group().rank_in_group, get_tp_group().rank_in_group
        place = place_of(config, *ranks, self._options.sharers)
        cached = []
        for group in self._groups:
            paged = PagedCache(self._caches_of(group, kv_caches), self._kv_cache_config.num_blocks)
            if not paged.block_bytes:
                raise UnsupportedError(
                    f"vllm: rank {place.rank} has no layer of the group {group.name!r}: divide the "
                    "layers among pipeline stages in another way, or leave "
                    "`--kv-transfer-config` out",
                    op="engines",
                )
            weights = self._options.weights
            spec = base_spec(config, paged, group.tokens, place, weights, group.name)
            cached.append(Cached(spec, paged, group.tokens))
        directory = self._options.make_directory(place.replica, place.rank)
        store = self._options.store_config(directory, place.sharers)
        timeout = self._options.load_timeout_s
        self._worker = WorkerSide(
            store,
            cached,
            place.rank,
            timeout,
            is_plain=is_plain(self._groups),
            is_layered=self._options.layerwise,
            agree=_failed_anywhere if self._within is not None else None,
        )

    def get_handshake_metadata(self) -> Owner | None:
        """Tells the scheduler where this rank's store is."""
        return self._worker.owner if self._worker is not None else None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Takes what is to be done in a step, which begins here."""
        super().bind_connector_metadata(connector_metadata)
        # An engine in the caller's own process may be called where an exception is being handled.
        self._handled = sys.exc_info()[1]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begins the loads of the step."""
        step = self._step()
        if self._worker is not None and step is not None:
            self._worker.start(step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Waits for a layer of what the step loads; nothing, where loads are beside the steps."""
        if self._worker is not None:
            self._worker.wait_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,  # noqa: ARG002
        attn_metadata: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Copies a layer of what the step saves, where that is done by layers."""
        step = self._step()
        if self._options.layerwise and self._worker is not None and step is not None:
            self._worker.save_layer(step, layer_name)

    def wait_for_save(self) -> None:
        """Saves what the step has computed; the engine may overwrite it when this returns.

        vLLM calls it also when the step has raised, and then nothing is what it should be.
        """
        handled, self._handled = self._handled, None
        step = self._step()
        if self._worker is not None and step is not None:
            self._worker.save(step, is_good=sys.exc_info()[1] is handled)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads have ended."""
        if self._worker is None:
            return None, None
        self._worker.finished(finished_req_ids)
        return None, self._worker.ended() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose loads have ended, and those of them that lack a part."""
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            results.failed_recving |= self._worker.take_failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that a load which has just ended did not fill."""
        return self._worker.take_failed() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> Saved | None:
        """Tells the scheduler how many steps with saves are done."""
        return self._worker.take_saved() if self._worker is not None else None

    def get_kv_connector_stats(self) -> Stats | None:
        """What has been counted lately, None for nothing new to tell."""
        side = self._worker or self._scheduler
        return side.report() if side is not None else None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Any layout will do; but vLLM asks early, when it has taken up no memory yet.

        Raises:
            UnsupportedError: The model or an option is not served; the message names it.
        """
        refuse_model(vllm_config)
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether layers must call, which they do not from within a graph of the whole model."""
        return extra_config.get("layerwise") is True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Makes an object of what came from a worker."""
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """Puts the counters into vLLM's `/metrics`."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _caches_of(
        self, group: Group, caches: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """The caches of a group's layers: of a model with one group all, whoever shares them."""
        if is_plain(self._groups):
            return caches
        return {name: caches[name] for name in group.layers if name in caches}

    def _step(self) -> Step | None:
        step = self._connector_metadata
        return step if isinstance(step, Step) else None

    # The scheduler's side.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Any, Owner]) -> None:
        """Attaches to the stores of all ranks."""
        if self._scheduler is not None:
            self._scheduler.attach(metadata)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens can be loaded beyond those that the engine has; None: ask again."""
        tokens = self._side().matched(request, num_computed_tokens)
        return tokens, bool(tokens) and self._within is None

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Takes what forgets blocks that could not be loaded."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._within is not None:
            self._within.evict = kv_cache_manager.evict_blocks

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Notes where the blocks to be loaded go."""
        self._side().allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        """What the workers load and save in this step."""
        return self._side().step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Notes what the workers have done."""
        side = self._side()
        done = connector_output.kv_connector_worker_meta
        cuts = None
        if isinstance(done, Saved):
            side.saved(done.steps)
            cuts = done.cuts
        side.loaded(
            connector_output.finished_recving or (),
            connector_output.invalid_block_ids or set(),
            cuts,
        )

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forgets a request, whose blocks are free at once: saves have copied them."""
        self._side().finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, of a request with blocks of several groups."""
        return self.request_finished(request, block_ids[0])

    def reset_cache(self) -> bool | None:
        """Forgets every block of this model, as when its weights are updated."""
        return self._side().reset()

    def shutdown(self) -> None:
        """Closes the store, or lets go of the stores attached to."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._scheduler is not None:
            self._scheduler.close()

    def _side(self) -> SchedulerSide:
        if self._scheduler is None:
            message = "this connector is a worker's"
            raise RuntimeError(message)
        return self._scheduler


def _failed_anywhere(failed: bool) -> bool:
    """Whether something has failed on any rank: all of them compute on what each of them loads."""
    group = get_tp_group()
    if group.world_size == 1:
        return failed
    told = torch.tensor(int(failed))
    torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, group.cpu_group)
    return bool(told)
