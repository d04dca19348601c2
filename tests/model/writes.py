"""Rules that write: puts, reservations, deletes, epochs."""

from __future__ import annotations

import time
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import precondition

from model.counting import (
    any_spans,
    computed_by,
    counted,
    faces,
    large,
    naps,
    seeds,
    spaces,
    spans,
)
from model.oracle import EVER
from model.side import (
    CHAINS,
    DEPTH,
    LAYOUTS,
    RESERVATION_TTL_S,
    SPACES,
    Side,
    Span,
    cancelled,
    next_of,
)
from model.stores import Reserved, Stores
from tiered_kv import InvalidArgumentError, Reservation

SHORT_S = 0.2
"""Deadline of deletes while a drive is away: its journal cannot be emptied then."""


ends = st.sampled_from(["publish", "publish", "too old", "abandon", "drop", "expire"])


class Writes(Stores):
    """Rules that store blocks and delete them."""

    def store_blocks(
        self, side: Side, face: str, span: Span, contents: list[bytes], options: dict[str, Any]
    ) -> list[str]:
        ns, packed = side.spaces[span.space], b"".join(self.span_keys(span))
        options = {"parent": self.parent(span), **options}
        if face == "channel":
            with side.channel() as channel:
                channel.submit_put(ns, packed, contents, **options)
                done = next_of(channel)
            stored = [done.done(index) for index in range(len(contents))]
            assert done.ok == all(stored)
            # What is there is "stored" to a channel, whoever stored it.
            return [
                "refused" if not bit else "exists" if self.is_kept(key, options) else "stored"
                for key, bit in zip(self.span_keys(span), stored, strict=True)
            ]
        if face == "asyncio":
            return list(side.run(side.store.put(ns, packed, contents, **options)).statuses)
        return list(side.calls.put(ns, packed, contents, **options).statuses)

    def is_kept(self, key: bytes, options: dict[str, Any]) -> bool:
        """Whether a put would leave the block of a key as it is."""
        known = self.oracle.known.get(key)
        return known is not None and not (
            known.version.computed == "decode" and options["computed"] == "prefill"
        )

    @counted(face=faces, span=any_spans, seed=seeds, computed=computed_by)
    def put(self, face: str, span: Span, seed: int, computed: str) -> None:
        self.put_one(face, span, seed, {"computed": computed})

    def put_one(self, face: str, span: Span, seed: int, options: dict[str, Any]) -> None:
        known = [self.oracle.known.get(key) for key in self.span_keys(span)]
        if any(block is not None and block.off_drive for block in known):
            # A channel does not tell what was stored from what was there, and these may go
            # while the call is made.
            face = "blocking"
        puts = self.put_all(
            span,
            seed,
            options["computed"],
            lambda side, contents: self.store_blocks(side, face, span, contents, options),
        )
        self.meet(span, puts)

    @counted(face=st.sampled_from(["asyncio", "blocking"]), span=any_spans, seed=seeds)
    def put_in_time(self, face: str, span: Span, seed: int) -> None:
        """One that may wait for room, and one whose time is over: nothing of that is stored."""
        self.put_one(face, span, seed, {"computed": "prefill", "wait": 0.001})
        late = {"computed": "prefill", "timeout": 0.0}
        self.put_one(face, span._replace(chain=(span.chain + 1) % CHAINS), seed, late)

    @counted(space=spaces, chain=st.integers(0, CHAINS - 1))
    def fill(self, space: int, chain: int) -> None:
        """More than memory holds, and in time more than the drives do."""
        for number in range(chain, chain + 4):
            span = Span(space, number % CHAINS, 0, DEPTH)
            self.put_one("blocking", span, number, {"computed": "prefill"})

    @counted(space=spaces, chain=st.integers(0, CHAINS - 1))
    def fill_beside_a_hold(self, space: int, chain: int) -> None:
        """More than the drives hold, while what was used the longest ago is held."""
        held = Span(space, chain, 0, DEPTH)
        self.put_one("blocking", held, chain, {"computed": "prefill"})
        self.make_room_for_a_hold()
        self.make_hold(held, False)
        for number in range(1, 2 * CHAINS):
            chains, at = divmod(chain + number, CHAINS)
            span = Span((space + chains) % SPACES, at, 0, DEPTH)
            self.put_one("blocking", span, number, {"computed": "prefill"})

    @counted(span=st.one_of(large, spans), seed=seeds, computed=computed_by, naps=naps)
    def cancelled_put(self, span: Span, seed: int, computed: Any, naps: int) -> None:
        contents = self.new_contents(span, seed)
        begun = time.time()
        buffers = [[bytearray(content) for content in contents] for _ in self.sides]
        for side, blocks in zip(self.sides, buffers, strict=True):
            ns, packed = side.spaces[span.space], b"".join(self.span_keys(span))
            call = side.store.put(ns, packed, blocks, parent=self.parent(span), computed=computed)
            EVER["cancelled put"] += side.run(cancelled(call, naps)) is None
            # The core has captured them, or never will.
            for block in blocks:
                block[:] = bytes(len(block))
        puts = self.puts(span, contents, computed, begun, ["stored"] * len(contents))
        self.meet_loosely({put.key: [put.version] for put in puts}, self.superseded(puts))

    def superseded(self, puts: list[Any]) -> set[bytes]:
        """Keys whose block may have been replaced, and the new one lost since."""
        known = self.oracle.known
        return {
            put.key
            for put in puts
            if put.key in known
            and (known[put.key].version.computed, put.version.computed) == ("decode", "prefill")
        }

    # Reservations.

    @counted(span=any_spans, seed=seeds)
    def reserve(self, span: Span, seed: int) -> None:
        if len(self.reserved) == 2:
            self.reserved.pop(0)
        self.make_reservation(span, seed)

    def make_reservation(self, span: Span, seed: int) -> None:
        span = span._replace(length=min(span.length, 3))
        contents = self.new_contents(span, seed)
        packed = b"".join(self.span_keys(span))
        made, reservations = [], []
        for side in self.sides:
            before = time.monotonic()
            reservation = side.store.reserve(
                side.spaces[span.space], packed, parent=self.parent(span)
            )
            made.append((before, time.monotonic()))
            self.write_in_place(reservation, span, contents)
            reservations.append(reservation)
        refused = [list(reservation.statuses) for reservation in reservations]
        assert all(statuses == refused[0] for statuses in refused)
        for key, status in zip(self.span_keys(span), refused[0], strict=True):
            assert status in {None, "exists", "throttled"}
            assert status != "exists" or key in self.oracle.known
        epoch = self.epochs[span.space]
        self.reserved.append(Reserved(span, reservations, contents, refused[0], epoch, made))
        self.meet()

    def write_in_place(self, reservation: Reservation, span: Span, contents: list[bytes]) -> None:
        for index, content in enumerate(contents):
            at = 0
            for slab, size in enumerate(LAYOUTS[span.space].slab_bytes):
                view = reservation.slab(index, slab)
                assert (view is None) == (reservation.statuses[index] is not None)
                if view is not None:
                    view[:] = content[at : at + size]
                    view.release()
                at += size

    @counted(how=ends, span=any_spans, seed=seeds)
    def end_reservation(self, how: str, span: Span, seed: int) -> None:
        if not self.reserved:
            self.make_reservation(span, seed)
        if how == "expire":
            time.sleep(RESERVATION_TTL_S)
        if how == "too old":
            self.reserved.clear()
            self.delete("blocking", span)
            self.make_reservation(span, seed)
            self.delete_namespace(span.space, seed % 2 == 0)
        reserved = self.reserved.pop(0)
        if how in {"publish", "expire", "too old"}:
            self.publish(reserved)
        else:
            if how == "abandon":
                for reservation in reserved.reservations:
                    reservation.abandon()
            del reserved
            self.meet()

    def publish(self, reserved: Reserved) -> None:
        """Makes blocks visible: unless a new epoch has begun, or the time is over."""
        span, begun = reserved.span, time.time()
        sure = True
        rows: list[list[str]] = []
        for side, reservation, made in zip(
            self.sides, reserved.reservations, reserved.made, strict=True
        ):
            at_least = time.monotonic() - made[1]
            try:
                statuses = list(side.run(side.store.publish(reservation)).statuses)
                assert at_least <= RESERVATION_TTL_S, "an expired reservation was published"
            except InvalidArgumentError as error:
                if "expired" not in str(error):
                    raise
                statuses = []
                at_most = time.monotonic() - made[0]
                assert at_most > RESERVATION_TTL_S, "a reservation expired too soon"
                EVER["expired"] += 1
            rows.append(statuses)
            sure &= rows[0] == statuses
        reserved.reservations.clear()
        if not sure:
            # The time was over between the two.
            puts = self.puts(span, reserved.contents, "prefill", begun, rows[0] or rows[-1])
            return self.meet_loosely(
                {put.key: [put.version] for put in puts}, self.superseded(puts)
            )
        if not rows[0]:
            return self.meet()
        # What was refused then may be anything by now.
        ended = [
            None if refused is not None else status
            for refused, status in zip(reserved.refused, rows[0], strict=True)
        ]
        if reserved.epoch != self.epochs[span.space]:
            assert set(ended) <= {None, "ended"}, "begun before the new epoch, published after it"
            EVER["publish too old"] += "ended" in ended
        self.meet(span, self.puts(span, reserved.contents, "prefill", begun, ended))
        return None

    # Deletes.

    def ask_delete(self, side: Side, call: Any) -> tuple[int, bool]:
        timeout = {} if self.lost is None else {"timeout": SHORT_S}
        report = side.run(call(side, **timeout))
        return report.removed, report.durable

    def was_deleted(self, durable: bool, is_meant: Any) -> int:
        """It is gone at once, and when the delete is durable for ever; how many there were."""
        assert durable or self.lost is not None, "a delete is not durable"
        EVER["deleted durably" if durable else "deleted for now"] += 1
        return self.oracle.deleted(is_meant, durable)

    def delete_keys(self, keys: set[bytes], call: Any) -> None:
        removed, durable = self.both(lambda side: self.ask_delete(side, call))
        there = self.was_deleted(durable, lambda key, _: key in keys)
        assert removed == there, f"{removed} were deleted, {there} were there"
        self.meet()

    @counted(face=faces, span=any_spans)
    def delete(self, face: str, span: Span) -> None:
        keys = set(self.span_keys(span))
        packed = b"".join(self.span_keys(span))
        if face == "asyncio":
            return self.delete_keys(
                keys,
                lambda side, **late: side.store.delete(side.spaces[span.space], packed, **late),
            )
        timeout = None if self.lost is None else SHORT_S

        def ask(side: Side) -> tuple[bool, int]:
            ns = side.spaces[span.space]
            if face == "blocking":
                report = side.calls.delete(ns, packed, timeout)
                return report.durable, report.removed
            with side.channel() as channel:
                channel.submit_delete(ns, packed, timeout)
                done = next_of(channel)
            gone = sum(done.done(index) for index in range(len(self.span_keys(span))))
            assert gone == len(self.span_keys(span)), "gone it is in any case"
            return done.ok, gone

        durable, removed = self.both(ask)
        there = self.was_deleted(durable, lambda key, _: key in keys)
        assert face == "channel" or removed == there
        return self.meet()

    @counted(space=spaces, epoch=st.booleans())
    def delete_namespace(self, space: int, epoch: bool) -> None:
        """The whole of it, as such or as a new epoch: what was reserved before is too late."""
        self.epochs[space] += 1

        def call(side: Side, **late: Any) -> Any:
            delete = side.store.new_epoch if epoch else side.store.delete_namespace
            return delete(side.spaces[space], **late)

        EVER["new epoch"] += epoch
        self.delete_keys(set(self.all_keys(space)), call)

    @precondition(lambda self: len(self.marks) < 3)
    @counted()
    def mark(self) -> None:
        """A moment for `delete_older_than`, a while after one put and before the next."""
        time.sleep(0.002)
        self.marks.append(time.time())
        time.sleep(0.01)
        self.meet()

    @counted(space=spaces, number=st.integers(0, 3))
    def delete_older_than(self, space: int, number: int) -> None:
        """What was stored before a mark; or, without one, what is an hour old: nothing."""
        marked = number < len(self.marks)
        mark = self.marks.pop(number) if marked else time.time() - 3600
        keys = set(self.all_keys(space))
        rows, late = [], 0.0
        for side in self.sides:
            begun = time.time()
            rows.append(
                self.ask_delete(
                    side,
                    lambda s, **late: s.store.delete_older_than(
                        s.spaces[space], time.time() - mark, **late
                    ),
                )
            )
            late = max(late, time.time() - begun)
        there = self.was_deleted(
            all(durable for _, durable in rows), lambda k, v: k in keys and v.ended < mark
        )
        # The core reads the clock after the caller did: what was stored in between may be gone.
        unclear = {
            key: [known.version]
            for key, known in self.oracle.known.items()
            if key in keys and known.version.begun <= mark + late
        }
        for key, away in self.oracle.away.items():
            away.doubtful |= key in keys and away.version.begun <= mark + late
        if unclear:
            return self.meet_loosely(unclear, unclear)
        EVER["deleted by age"] += there
        assert {removed for removed, _ in rows} == {there}, f"{rows} deleted, {there} were there"
        return self.meet()
