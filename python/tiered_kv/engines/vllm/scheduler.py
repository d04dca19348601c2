"""The scheduler's side: what of a prompt is stored, and which blocks to load and to save."""

from __future__ import annotations

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
    TieredKvError,
)
from tiered_kv._core import blake3
from tiered_kv.engines._record import Recorder
from tiered_kv.engines.vllm.groups import NULL_BLOCK, Group, is_plain, main_of, runs, step_of
from tiered_kv.engines.vllm.identity import Adapters
from tiered_kv.engines.vllm.messages import Blocks, Owner, Step, part
from tiered_kv.engines.vllm.metrics import Stats, of_scheduler
from tiered_kv.engines.vllm.options import Options
from tiered_kv.engines.vllm.rank import Rank
from tiered_kv.engines.vllm.tenancy import RESET_S, Tenancy, forget_model, request_context
from tiered_kv.engines.vllm.tracked import Tracked, blocks_of
from tiered_kv.engines.vllm.within import Within

_LOG = init_logger("vllm.tiered_kv")


class SchedulerSide:
    """Decides nothing but which blocks: where they are and what is evicted is the stores' matter.

    Args:
        options: The options of the flag.
        groups: The parts that a block of tokens has.
        recorder: What writes down the requests, None for nothing.
        within: Where steps wait for their loads, what keeps others from them; None where loads are
            beside the steps.
    """

    def __init__(
        self,
        options: Options,
        groups: Sequence[Group],
        recorder: Recorder | None = None,
        within: Within | None = None,
    ) -> None:
        self._options = options
        self._within = within
        self.recorder = recorder
        self._groups = tuple(groups)
        self._is_plain = is_plain(groups)
        self._step = step_of(groups)
        self._main = main_of(groups)
        self._ranks: list[Rank] = []
        self._requests: dict[str, Tracked] = {}
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
        self._ranks = [Rank(owners[at]) for at in sorted(owners)]

    def matched(self, request: Any, computed: int) -> int | None:
        """Tokens of a request that can be loaded beyond those that the engine has.

        None where this is not known yet: an adapter's files are being read, or the step that is
        being made up loads what the engine says it has. vLLM asks again.

        All ranks must have a block for it to count, and all parts that the next token needs. It may
        be asked again and again, with no effect but that the blocks are held. Of a prompt that is
        stored whole the last token is left to be computed, since its output is what the engine
        needs; the whole last block where a state of its end would be of no use for that.
        """
        if not self.adapters.ready(request.lora_request):
            return None
        tracked = self._track(request)
        tracked.saved = [0] * len(self._groups)
        if self._within is not None and self._loads and self._awaits(tracked, computed):
            return None
        if tracked.tenancy is None or computed % self._step or request.skip_reading_prefix_cache:
            return 0
        left: int = request.num_tokens - 1 - computed
        last = (request.num_tokens - (not self._is_plain)) // self._step * self._step
        if tracked.limit is not None:
            last = min(last, tracked.limit // self._step * self._step)
        try:
            hits = self._hold(tracked, tracked.tenancy, computed, last)
        except TieredKvError as error:
            self._fault(error)
            return 0
        return max(0, min(hits, left))

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external: int) -> None:
        """Notes that the engine has made room for `external` tokens to be loaded.

        Args:
            request: vLLM's own.
            block_ids: For each of vLLM's groups where the request's blocks are.
            external: How many tokens.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.tenancy is None:
            return
        if not external:
            if not tracked.loading:
                tracked.release()
            return
        loading: list[int] = []
        for at, group in enumerate(self._groups):
            first = tracked.first // group.tokens
            last = -(-(tracked.first + external) // group.tokens)
            # Of what the next token needs no more, the engine has no blocks.
            for begin, ids in runs(first, block_ids[group.index][first:last]):
                self._loads.append(blocks_of(tracked, tracked.tenancy, at, begin, ids))
                loading += ids
        tracked.loading = tuple(loading)

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
            states = state.boundary_state_offloads.get(request_id, ())
            try:
                for at, group in enumerate(self._groups):
                    if group.kind == "state":
                        self._save_states(step, tracked, at, tokens, states)
                    else:
                        self._save_filled(step, tracked, at, tokens, block_ids[group.index])
            except TieredKvError as error:
                self._fault(error)
        self._unsaved_steps += bool(step.saves)
        if self._within is not None:
            self._within.begin(step.loads, state)
        return step

    def saved(self, steps: int) -> None:
        """Notes that all workers have done steps with saves."""
        self._unsaved_steps -= steps

    def loaded(
        self,
        request_ids: Iterable[str],
        failed: set[int],
        cuts: Mapping[str, int] | None = None,
    ) -> None:
        """Notes that loads have ended, and which of the engine's blocks were not filled.

        A rank tells at once what it could not fill; a load has ended when all ranks have said so,
        which may be some steps later.

        Args:
            request_ids: Whose loads have ended.
            failed: Block ids, where there is but one group.
            cuts: By request, up to how many tokens a load of several parts may be tried again.
        """
        if self._within is not None:
            request_ids = self._within.end(failed)
            for each in self._requests.values() if failed else ():
                # The workers have stored nothing of the step.
                each.saved = [0] * len(self._groups)
        for request_id, tokens in (cuts or {}).items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.cut(tokens)
        for tracked in self._requests.values() if failed else ():
            bad = [at for at, block in enumerate(tracked.loading) if block in failed]
            if bad:
                tracked.cut(tracked.first + bad[0] * self._step)
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

    def _awaits(self, tracked: Tracked, computed: int) -> bool:
        """Whether the engine counts blocks as a request's that the step has yet to load.

        Of one whose keys nobody knows, any may be.
        """
        if tracked.tenancy is None:
            return computed > 0
        blocks = computed // self._step
        try:
            self._extend(tracked, tracked.tenancy, self._main, blocks)
        except TieredKvError as error:
            self._fault(error)
            return computed > 0
        keys = part(tracked.keys[self._main][0], 0, blocks)
        return any(load.is_in(keys) for load in self._loads)

    def _record_begin(self, tracked: Tracked) -> None:
        request, tenancy = tracked.request, tracked.tenancy
        if self.recorder is None or tenancy is None:
            return
        tokens = request.num_prompt_tokens
        try:
            self._extend(tracked, tenancy, self._main, tokens // self._groups[self._main].tokens)
        except TieredKvError as error:
            self._fault(error)
            return
        keys = tracked.keys[self._main][0]
        self.recorder.begin(request.request_id, tracked.context, tokens, keys)

    def _record_end(self, tracked: Tracked) -> None:
        request, tenancy = tracked.request, tracked.tenancy
        if self.recorder is None:
            return
        keys = b""
        if tenancy is not None:
            # Of the last token nobody has computed keys and values.
            blocks = max(0, request.num_tokens - 1) // self._groups[self._main].tokens
            try:
                self._extend(tracked, tenancy, self._main, blocks)
                keys = part(tracked.keys[self._main][0], 0, blocks)
            except TieredKvError as error:
                self._fault(error)
        self.recorder.end(request.request_id, request.num_tokens, keys)

    def _track(self, request: Any) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.epoch != self._epoch:
            if tracked is not None:
                tracked.release()
            keys = [[b""] * len(self._ranks) for _ in self._groups]
            saved = [0] * len(self._groups)
            context = request_context(request.kv_transfer_params, request.session_id)
            tracked = Tracked(request, self._tenancy(request), context, keys, saved, self._epoch)
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

    def _save_filled(
        self, step: Step, tracked: Tracked, at: int, tokens: int, block_ids: Sequence[int]
    ) -> None:
        """Has what blocks of a group the step fills saved, but those that windows have left."""
        first, last = tracked.saved[at], tokens // self._groups[at].tokens
        if last <= first or tracked.tenancy is None:
            return
        self._extend(tracked, tracked.tenancy, at, last)
        tracked.saved[at] = last
        for begin, ids in runs(first, block_ids[first:last]):
            step.saves.append(blocks_of(tracked, tracked.tenancy, at, begin, ids))

    def _save_states(
        self,
        step: Step,
        tracked: Tracked,
        at: int,
        tokens: int,
        states: Sequence[tuple[int, int, int]],
    ) -> None:
        """Has those states saved that are at a block's end when the step ends.

        In which block one is only vLLM knows: it moves them about, and tells.
        """
        group = self._groups[at]
        for index, block, boundary in states:
            whole = boundary > 0 and boundary % group.tokens == 0
            if index == group.index and block != NULL_BLOCK and whole and boundary <= tokens:
                place = boundary // group.tokens
                if tracked.tenancy is not None:
                    self._extend(tracked, tracked.tenancy, at, place)
                    step.saves.append(blocks_of(tracked, tracked.tenancy, at, place - 1, [block]))

    def _hold(self, tracked: Tracked, tenancy: Tenancy, first: int, last: int) -> int:
        """Holds what all ranks have from a token on; returns how many tokens these are.

        Where a block is gone between the lookup and its hold, all of it is a miss.
        """
        end = last if self._is_plain else self._whole(tracked, tenancy, first, last)
        held: list[AttachedHold] = []
        hits = max(0, end - first)
        for at, group in enumerate(self._groups if hits else ()):
            self._extend(tracked, tenancy, at, end // group.tokens)
            begin = max(first // group.tokens, group.needed(end))
            for rank, keys in zip(self._ranks, tracked.keys[at], strict=True):
                wanted = part(keys, begin, end // group.tokens)
                hold = rank.hold(tenancy, at, wanted)
                held.append(hold)
                if self._is_plain:
                    hits = min(hits, hold.hits * group.tokens)
                elif hold.hits < end // group.tokens - begin:
                    hits = 0
        # What was held before goes only now, so that nothing is let go in between.
        tracked.release()
        tracked.first, tracked.holds = first, held
        if not hits:
            tracked.release()
        return hits

    def _whole(self, tracked: Tracked, tenancy: Tenancy, first: int, last: int) -> int:
        """Up to which token all ranks have every part that the next one needs.

        Each group may lower the end, and has to have what a lower one needs.
        """
        order = [self._main, *(at for at in range(len(self._groups)) if at != self._main)]
        asked = [(at, rank) for at in order for rank in range(len(self._ranks))]
        end, agreed, turn = last, 0, 0
        while end > first and agreed < len(asked):
            at, number = asked[turn]
            group, rank = self._groups[at], self._ranks[number]
            self._extend(tracked, tenancy, at, end // group.tokens)
            wanted = part(tracked.keys[at][number], first // group.tokens, end // group.tokens)
            exact = first + rank.lookup(tenancy, at, wanted, group.rule) * group.tokens
            if exact < end:
                end = exact // self._step * self._step
                # It agrees to what it has said; to less, it has to be asked again.
                agreed = 0 if end == exact else -1
            agreed += 1
            turn = (turn + 1) % len(asked)
        return end

    def _extend(self, tracked: Tracked, tenancy: Tenancy, group: int, blocks: int) -> None:
        """Makes the keys of so many blocks of a group, for each rank."""
        size = self._groups[group].tokens
        for at, rank in enumerate(self._ranks):
            keys = tracked.keys[group][at]
            have = len(keys) // KEY_BYTES
            if have < blocks:
                tokens = tracked.request.all_token_ids[have * size : blocks * size]
                parent = keys[-KEY_BYTES:] if have else None
                more = rank.namespace(tenancy, group).keys_from_tokens(tokens, parent)
                tracked.keys[group][at] = keys + more

    def _fault(self, error: TieredKvError) -> None:
        """Counts a fault, which is a miss, and tells of the first one."""
        self.faults += 1
        if self.faults == 1:
            _LOG.warning("a lookup failed and counts as a miss, as others will: %s", error)


def _forget(rank: Rank, end_s: float) -> bool:
    return all(forget_model(rank.directory, spec, end_s) for spec in rank.specs)
