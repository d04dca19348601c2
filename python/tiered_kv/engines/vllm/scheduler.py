"""The scheduler's side: what of a prompt is stored, and which blocks to load and to save."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import Any

from vllm.logger import init_logger

from tiered_kv import (
    KEY_BYTES,
    AttachedHold,
    Namespace,
    NamespaceSpec,
    RequestContext,
    TieredKvError,
)
from tiered_kv._core import blake3
from tiered_kv.attached import BlockingAttachedStore
from tiered_kv.blocking import BlockingStore
from tiered_kv.engines._record import Recorder
from tiered_kv.engines.vllm.identity import Adapters
from tiered_kv.engines.vllm.messages import Blocks, Owner, Step, part
from tiered_kv.engines.vllm.metrics import Stats, of_scheduler
from tiered_kv.engines.vllm.options import Options
from tiered_kv.engines.vllm.tenancy import RESET_S, Tenancy, forget_model, request_context

_LOG = init_logger("vllm.tiered_kv")

_HOLD_S = 60.0
_NAMESPACES_KEPT = 1024


@dataclasses.dataclass
class _Tracked:
    """A request.

    Attributes:
        request: vLLM's own.
        tenancy: Whose blocks it uses; None for one that goes without the store.
        context: What is known of it.
        keys: Packed keys for each rank, of as many of its blocks as were asked for.
        epoch: The epoch in which it began, or began anew.
        first: The first block that the engine lacks, by the last lookup.
        limit: Blocks that are worth a lookup; fewer after a load has failed.
        saved: Blocks that were given to the workers to save.
        holds: What keeps the blocks of the last lookup.
        loading: Block ids that are being loaded, from block `first` on.
    """

    request: Any
    tenancy: Tenancy | None
    context: RequestContext
    keys: list[bytes]
    epoch: str = ""
    first: int = 0
    limit: int | None = None
    saved: int = 0
    holds: list[AttachedHold] = dataclasses.field(default_factory=list)
    loading: tuple[int, ...] = ()

    def release(self) -> None:
        """Lets go of what was held."""
        for hold in self.holds:
            hold.release()
        self.holds = []


class _Rank:
    """The store of a rank, seen from the scheduler."""

    def __init__(self, owner: Owner) -> None:
        self.directory = owner.directory
        self.spec: NamespaceSpec = owner.spec
        self.store: BlockingAttachedStore = BlockingStore.attach(owner.directory)
        self._namespaces: dict[Tenancy, Namespace] = {}

    def namespace(self, tenancy: Tenancy) -> Namespace:
        """The namespace of a tenancy; handles are cheap to make again."""
        found = self._namespaces.get(tenancy)
        if found is None:
            if len(self._namespaces) >= _NAMESPACES_KEPT:
                self._namespaces.clear()
            found = self._namespaces[tenancy] = self.store.namespace(tenancy.of(self.spec))
        return found


class SchedulerSide:
    """Decides nothing but which blocks: where they are and what is evicted is the stores' matter.

    Args:
        options: The options of the flag.
        tokens: Tokens of a block.
        recorder: What writes down the requests, None for nothing.
    """

    def __init__(self, options: Options, tokens: int, recorder: Recorder | None = None) -> None:
        self._options = options
        self.recorder = recorder
        self._tokens = tokens
        self._ranks: list[_Rank] = []
        self._requests: dict[str, _Tracked] = {}
        self.adapters = Adapters()
        self._loads: list[Blocks] = []
        self._unsaved_steps = 0
        self._epoch = ""
        self.faults = 0
        self._reported: dict[str, int] = {}

    def attach(self, owners: Mapping[Any, Owner]) -> None:
        """Attaches to the stores of all workers, in the order of their ranks.

        Raises:
            TieredKvError: One cannot be attached to.
        """
        self._ranks = [_Rank(owners[at]) for at in sorted(owners)]

    def matched(self, request: Any, computed: int) -> int | None:
        """Tokens of a request that can be loaded beyond those that the engine has.

        None where this is not known yet, since an adapter's files are being read: vLLM asks again.

        All ranks must have a block for it to count. It may be asked again and again, with no effect
        but that the blocks are held. Of a prompt that is stored whole the last token is left to be
        computed, since its output is what the engine needs.
        """
        if not self.adapters.ready(request.lora_request):
            return None
        tracked = self._track(request)
        tracked.saved = 0
        if tracked.tenancy is None or computed % self._tokens or request.skip_reading_prefix_cache:
            return 0
        first = computed // self._tokens
        last = request.num_tokens // self._tokens
        if tracked.limit is not None:
            last = min(last, tracked.limit)
        try:
            hits = self._hold(tracked, tracked.tenancy, first, last)
        except TieredKvError as error:
            self._fault(error)
            return 0
        left: int = request.num_tokens - 1 - computed
        return max(0, min(hits * self._tokens, left))

    def allocated(self, request: Any, block_ids: Sequence[int], external: int) -> None:
        """Notes that the engine has made room for `external` tokens to be loaded."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.tenancy is None:
            return
        if not external:
            if not tracked.loading:
                tracked.release()
            return
        first, last = tracked.first, tracked.first + -(-external // self._tokens)
        tracked.loading = tuple(block_ids[first:last])
        self._loads.append(_blocks(tracked, tracked.tenancy, first, tracked.loading))

    def step(self, output: Any) -> Step:
        """What the workers do in a step that vLLM has scheduled, by its `SchedulerOutput`."""
        step = Step(loads=self._loads)
        self._loads = []
        state = output.kv_connector_block_state
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            block_ids = state.get_block_ids(request_id) if state is not None else None
            if tracked is None or tracked.tenancy is None or block_ids is None:
                continue
            request = tracked.request
            if self.adapters.identity(request.lora_request) != tracked.tenancy.lora:
                tracked.tenancy = None  # for it may go on with another adapter
                continue
            # Drafts may be refused, and a token that is being sampled is not known yet: only what
            # is known by now is what will have been computed when the step ends.
            tokens = min(request.num_computed_tokens + scheduled, request.num_tokens)
            first, last = tracked.saved, tokens // self._tokens
            if last <= first:
                continue
            try:
                self._extend(tracked, tracked.tenancy, last)
            except TieredKvError as error:
                self._fault(error)
                continue
            tracked.saved = last
            step.saves.append(_blocks(tracked, tracked.tenancy, first, block_ids[0][first:last]))
        self._unsaved_steps += bool(step.saves)
        return step

    def saved(self, steps: int) -> None:
        """Notes that all workers have done steps with saves."""
        self._unsaved_steps -= steps

    def loaded(self, request_ids: Iterable[str], failed: set[int]) -> None:
        """Notes that loads have ended, and which of the engine's blocks were not filled.

        A rank tells at once what it could not fill; a load has ended when all ranks have said so,
        which may be some steps later.
        """
        for tracked in self._requests.values() if failed else ():
            bad = [at for at, block in enumerate(tracked.loading) if block in failed]
            if bad:
                # Whatever a lookup says of them: these are computed now, and stored again.
                worth = tracked.first + bad[0]
                tracked.limit = worth if tracked.limit is None else min(tracked.limit, worth)
        for request_id in request_ids:
            done = self._requests.get(request_id)
            if done is not None:
                done.loading = ()
                done.release()

    def report(self) -> Stats | None:
        """What was counted since the last report, None for nothing."""
        lost = self.recorder.lost if self.recorder is not None else 0
        now = {"events/lookup_faults": self.faults, "events/record_lost": lost}
        grown = {name: count - self._reported.get(name, 0) for name, count in now.items()}
        self._reported = now
        return of_scheduler(grown) if any(grown.values()) else None

    def finished(self, request_id: str) -> None:
        """Forgets a request."""
        tracked = self._requests.pop(request_id, None)
        if tracked is not None:
            tracked.release()
            self._record_end(tracked)

    def reset(self) -> bool:
        """Forgets, durably, every block of this model in whatever tenancy.

        It may mean that the weights in memory are no longer those of the files. What is computed
        from now on has a name that no other process knows, so that one which loads the files again
        does not find it; and what has begun before goes on without the store.

        Returns:
            Whether all is forgotten. Steps that still save or load something, and a drive that
            fails, are the reasons why not: it may be tried again.
        """
        if self._options.on_reset == "keep":
            return True
        self._epoch = uuid.uuid4().hex
        for tracked in self._requests.values():
            tracked.tenancy = None
            if not tracked.loading:
                tracked.release()
        loading = any(tracked.loading for tracked in self._requests.values())
        if not self._ranks or self._unsaved_steps > 0 or loading:
            _LOG.warning("a reset must wait: steps that save or load blocks are in progress")
            return False
        try:
            # The engine waits: one limit for all of them.
            forget = partial(_forget, end_s=monotonic() + RESET_S)
            with ThreadPoolExecutor(len(self._ranks)) as ranks:
                forgotten = all(ranks.map(forget, self._ranks))
        except TieredKvError as error:
            _LOG.warning("blocks of before the reset are still there: %s", error)
            return False
        if not forgotten:
            _LOG.warning("not all blocks of before the reset are gone yet: try again")
        return forgotten

    def close(self) -> None:
        """Lets go of everything."""
        for tracked in self._requests.values():
            tracked.release()
        self._requests.clear()
        self.adapters.close()
        for rank in self._ranks:
            rank.store.close()
        if self.recorder is not None:
            self.recorder.close()
            if self.recorder.lost or self.recorder.fault:
                why = self.recorder.fault or "the drive could not follow"
                _LOG.warning("%d requests were not recorded: %s", self.recorder.lost, why)

    def _record_begin(self, tracked: _Tracked) -> None:
        request, tenancy = tracked.request, tracked.tenancy
        if self.recorder is None or tenancy is None:
            return
        tokens = request.num_prompt_tokens
        try:
            self._extend(tracked, tenancy, tokens // self._tokens)
        except TieredKvError as error:
            self._fault(error)
            return
        self.recorder.begin(request.request_id, tracked.context, tokens, tracked.keys[0])

    def _record_end(self, tracked: _Tracked) -> None:
        request, tenancy = tracked.request, tracked.tenancy
        if self.recorder is None:
            return
        keys = b""
        if tenancy is not None:
            # Of the last token nobody has computed keys and values.
            blocks = max(0, request.num_tokens - 1) // self._tokens
            try:
                self._extend(tracked, tenancy, blocks)
                keys = part(tracked.keys[0], 0, blocks)
            except TieredKvError as error:
                self._fault(error)
        self.recorder.end(request.request_id, request.num_tokens, keys)

    def _track(self, request: Any) -> _Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.epoch != self._epoch:
            if tracked is not None:
                tracked.release()
            keys = [b""] * len(self._ranks)
            context = request_context(request.kv_transfer_params, request.session_id)
            tracked = _Tracked(request, self._tenancy(request), context, keys, self._epoch)
            self._requests[request.request_id] = tracked
            self._record_begin(tracked)
        return tracked

    def _tenancy(self, request: Any) -> Tenancy | None:
        # Neither images nor embeddings are in the tokens that keys are made of.
        if request.mm_features or request.prompt_embeds is not None or request.resumable:
            return None
        if not self._ranks:
            return None
        lora = self.adapters.identity(request.lora_request)
        if lora is None:
            return None
        salt = request.cache_salt
        # Of any length and of any characters, since it is a stranger's.
        digest = blake3(salt.encode("utf-8", "surrogatepass")) if salt else ""
        return Tenancy(lora, digest, self._epoch)

    def _hold(self, tracked: _Tracked, tenancy: Tenancy, first: int, last: int) -> int:
        """Holds what all ranks have of some blocks; returns how many these are."""
        held: list[AttachedHold] = []
        if first < last:
            self._extend(tracked, tenancy, last)
            for rank, keys in zip(self._ranks, tracked.keys, strict=True):
                wanted = part(keys, first, last)
                held.append(rank.store.hold(rank.namespace(tenancy), wanted, _HOLD_S))
        # What was held before goes only now, so that nothing is let go in between.
        tracked.release()
        tracked.first, tracked.holds = first, held
        hits = min((hold.hits for hold in held), default=0)
        if not hits:
            tracked.release()
        return hits

    def _extend(self, tracked: _Tracked, tenancy: Tenancy, blocks: int) -> None:
        """Makes the keys of so many blocks, for each rank."""
        for at, rank in enumerate(self._ranks):
            keys = tracked.keys[at]
            have = len(keys) // KEY_BYTES
            if have < blocks:
                tokens = tracked.request.all_token_ids[have * self._tokens : blocks * self._tokens]
                parent = keys[-KEY_BYTES:] if have else None
                more = rank.namespace(tenancy).keys_from_tokens(tokens, parent)
                tracked.keys[at] = keys + more

    def _fault(self, error: TieredKvError) -> None:
        """Counts a fault, which is a miss, and tells of the first one."""
        self.faults += 1
        if self.faults == 1:
            _LOG.warning("a lookup failed and counts as a miss, as others will: %s", error)


def _forget(rank: _Rank, end_s: float) -> bool:
    return forget_model(rank.directory, rank.spec, end_s)


def _blocks(tracked: _Tracked, tenancy: Tenancy, first: int, block_ids: Sequence[int]) -> Blocks:
    last = first + len(block_ids)
    return Blocks(
        request_id=tracked.request.request_id,
        tenancy=tenancy,
        context=tracked.context,
        first=first,
        keys=tuple(part(keys, first, last) for keys in tracked.keys),
        parents=tuple(part(keys, first - 1, first) if first else b"" for keys in tracked.keys),
        block_ids=tuple(block_ids),
    )
