"""Scheduler: turns the sequences it knows into a plan for the next step."""

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from ..prefix_cache import Node, PrefixCache
from ..segment import CacheKind, Segment
from ..sequence import ScheduledSequence, Sequence, SequenceStatus
from .gathering import Gathering
from .leaders import Leaders
from .placement import Placement, Stage, known_tokens
from .plan import Commit, StepPlan
from .prefill import PrefillBudget, fixed_chunks, share_out
from .rows import Rows
from .settings import SchedulerSettings
from .waiting import WaitingQueue

S = TypeVar("S", bound=Segment)


class Scheduler(Generic[S]):
    """Who gets a row, who computes how much, whose keys and values are kept.

    `schedule` runs before the last step's tokens are read back (`num_unread_tokens`). Its cost
    depends on the batch, not on how many sequences wait: those are looked at when it is their
    turn, and the parked ones when their leader gets there.
    """

    def __init__(
        self,
        cache: PrefixCache[S],
        settings: SchedulerSettings | None = None,
        model_key: Hashable = None,
        adapter_keys: Mapping[str, Hashable] | None = None,
    ) -> None:
        """Schedule over *cache*, whose entries are those of the model that *model_key* names.

        *adapter_keys* name the model with each of its adapters, by alias.
        """
        settings = settings or SchedulerSettings()
        self._cache = cache
        self._settings = settings
        self._model_keys: dict[str | None, Hashable] = {None: model_key}
        self._model_keys.update(adapter_keys or {})
        self._placements: dict[Sequence, Placement] = {}
        self._waiting = WaitingQueue(settings.max_wait_s, settings.lookahead)
        self._leaders = Leaders(cache.kind, settings.min_shared_tokens)
        self._rows = Rows(cache, settings)
        self._budget = PrefillBudget(settings.target_itl_ms, settings.max_prefill_tokens)
        self._gathering = Gathering(self._budget)
        self._is_crowded = False
        """Whether the engine held too much for its rows, of which none has ended since."""
        self._num_arrived = 0
        # These take effect at the next schedule, when the last plan has been carried out:
        self._returning: list[Placement] = []
        """Go back to the front of the queue."""
        self._ended: list[tuple[Placement, bool]] = []
        """Lose their rows, and whether their keys and values are good."""

    @property
    def num_running(self) -> int:
        """Sequences with a row."""
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        """Sequences without a row, parked ones included."""
        return len(self._waiting) + self._leaders.num_parked + len(self._returning)

    @property
    def num_parked(self) -> int:
        """Sequences that wait for another's prefix."""
        return self._leaders.num_parked

    @property
    def cache(self) -> PrefixCache[S]:
        """The prefix cache."""
        return self._cache

    @property
    def max_bytes(self) -> int | None:
        """Budget of rows and prefix cache together; None is unlimited."""
        return self._settings.max_bytes

    @property
    def cache_nbytes(self) -> int:
        """Bytes that the prefix cache holds."""
        return self._cache.nbytes

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do, and nothing left of what was done."""
        return not (self._placements or self._ended or self._rows.has_leftovers)

    def add(self, sequence: Sequence, now: float) -> None:
        """Take a sequence, with or without output of an earlier attempt, into the queue.

        Raises ValueError when it may not sample any more token: end it instead.
        """
        if sequence.num_remaining_tokens <= 0:
            raise ValueError(f"{sequence.job.job_id} has all its {sequence.job.max_tokens} tokens")
        sequence.arrival_s = now
        root_key = self.root_key(sequence)
        placement = Placement(sequence, root_key, self._num_arrived, known_tokens(sequence))
        self._num_arrived += 1
        self._placements[sequence] = placement
        self._waiting.push(placement)

    def finish(self, sequence: Sequence) -> None:
        """Forget an ended or cancelled sequence; its keys and values may be kept.

        Those who waited for its prefix go on without it. Unknown sequences are ignored.
        """
        self._forget(sequence, is_sound=True)

    def drop(self, sequence: Sequence) -> None:
        """Forget a failed sequence; what it put into the cache is dropped with it."""
        self._forget(sequence, is_sound=False)

    def schedule(
        self,
        now: float,
        save: Callable[[Commit], object] | None = None,
        held_nbytes: int = 0,
    ) -> StepPlan[S]:
        """Plan the next step.

        *held_nbytes* is what the engine holds of the rows, whatever it needs that memory for.

        *save* carries out the commits of rows that have ended, so that whoever is admitted in
        this step finds them; without it they are among the plan's early commits.
        """
        plan: StepPlan[S] = StepPlan()
        self._settle()
        self._rows.begin(self._max_prefill_tokens(), held_nbytes)
        self._detach_ended(plan)
        if save is not None:
            for commit in plan.early_commits:
                save(commit)
            plan.early_commits.clear()
            self._rows.memory.committed()
        if self._make_room(plan):
            self._admit(plan, now)
        plan.rebase += self._rows.cut()
        self._compute(plan, now)
        return plan

    def commit(self, commit: Commit, segment: S) -> list[S]:
        """Put a segment that the plan asked for into the cache.

        Returns the segments that now hold the row's first tokens, for the engine to rebase its
        row on; empty when there is no row any more, or when rows keep copies of their own.
        """
        sequence = commit.sequence
        root_key = self.root_key(sequence)
        tokens = sequence.tokens(0, commit.end)
        node = self._cache.insert(root_key, tokens, commit.start, segment)
        placement = self._placements.get(sequence)
        if placement is None or placement not in self._rows:
            return []
        self._returning += self._leaders.committed(placement, commit.end)
        return self._rows.committed(placement, node)

    def insert(
        self, root_key: Hashable, token_ids: tuple[int, ...], start: int, segment: S
    ) -> Node[S] | None:
        """Put tokens that were computed elsewhere into the cache; None where there is no room.

        None, too, when what comes before *start* is not there any more.
        """
        if self._cache.num_held(root_key, token_ids) < start:
            return None
        if not self._rows.memory.make_free(segment.nbytes):
            return None
        return self._cache.insert(root_key, token_ids, start, segment)

    def root_key(self, sequence: Sequence) -> tuple[Hashable, str]:
        """Return the prefix cache's root for a sequence: its model or adapter, and namespace."""
        return self._model_keys[sequence.job.adapter], sequence.job.namespace

    def observe(self, seconds: float, num_prefill_tokens: int, num_decode_rows: int) -> None:
        """Learn from the measured time of one step."""
        self._budget.observe(seconds, num_prefill_tokens, num_decode_rows)

    # The parts of a schedule, in their order.

    def _settle(self) -> None:
        """Draw the conclusions from the last plan, which has been carried out by now."""
        self._rows.settle()
        for leader in self._leaders.done():
            self._returning += self._leaders.remove(leader)
        returning = [one for one in self._returning if one.stage is not Stage.GONE]
        self._waiting.push_front(returning)
        self._returning.clear()

    def _max_prefill_tokens(self) -> int:
        if self._settings.prefill_chunk is not None:
            return self._settings.max_prefill_tokens
        return self._budget.num_tokens(len(self._rows))

    def _detach_ended(self, plan: StepPlan[S]) -> None:
        for placement, is_sound in self._ended:
            self._detach(placement, plan, is_sound=is_sound)
            self._is_crowded = False
        self._ended.clear()

    def _make_room(self, plan: StepPlan[S]) -> bool:
        """Let the running rows grow: evict, then preempt; return whether others may come."""
        while len(self._rows) > 1 and self._rows.memory.is_over:
            self._preempt(self._rows.next_victim(), plan)
        if len(self._rows) > 1 and not plan.num_preempted and self._rows.memory.holds_too_much:
            # One: what the engine holds is known again when it has gone.
            self._preempt(self._rows.next_victim(), plan)
            self._is_crowded = True
        self._rows.memory.evict()
        return not (plan.num_preempted or self._is_crowded)

    def _admit(self, plan: StepPlan[S], now: float) -> None:
        if any(placement.is_solo for placement in self._rows):
            return
        unread: list[Placement] = []
        for _ in range(self._settings.lookahead):
            if len(self._rows) >= self._settings.max_batch:
                break
            placement = self._waiting.pop(now)
            if placement is None:
                break
            if placement.sequence.num_unread_tokens:
                # Preempted in the last step: what it sampled there is not known yet.
                unread.append(placement)
            elif not self._place(placement, plan):
                unread.append(placement)
                break
            elif placement.is_solo and placement.stage is Stage.RUNNING:
                break
        self._waiting.push_front(unread)

    def _place(self, placement: Placement, plan: StepPlan[S]) -> bool:
        """Give a row or a leader to a waiting sequence; return whether there was room."""
        placement.refresh_tokens()
        if placement.is_solo:
            self._clear_for(placement.sequence, plan)
        tokens = placement.tokens
        most = placement.sequence.max_reused_tokens
        match = self._cache.match(placement.root_key, tokens, most)
        shared = self._leaders.find(placement, match.num_tokens)
        if shared is not None:
            if placement.num_held_when_parked is None:
                placement.num_held_when_parked = match.num_tokens
            self._leaders.park(placement, shared)
            return True
        # Alone it may have everything: a job too large for the budget is not refused for ever.
        is_alone = placement.is_solo or not (self._rows or plan.early_commits)
        if not is_alone and not self._rows.memory.fits(placement.sequence, match.num_tokens):
            return False
        self._start(placement, self._cache.pin(match), plan)
        return True

    def _clear_for(self, sequence: Sequence, plan: StepPlan[S]) -> None:
        """Preempt all for one that runs alone; what they leave in the cache must let it fit."""
        self._rows.memory.add_row(sequence)
        for other in list(self._rows):
            self._preempt(other, plan)
        self._rows.memory.remove_row(sequence)

    def _start(self, placement: Placement, node: Node[S] | None, plan: StepPlan[S]) -> None:
        plan.admit.append(self._rows.start(placement, node))
        self._leaders.add(placement, self._waiting.successors(placement))

    def _compute(self, plan: StepPlan[S], now: float) -> None:
        ready: list[Placement] = []
        wanted: list[tuple[Placement, int]] = []
        for placement in self._rows:
            sequence = placement.sequence
            if sequence.num_remaining_tokens <= 0 or sequence.num_pending_tokens == 0:
                continue  # Its last token, or what was read off its prompt, is on its way back.
            if sequence.num_pending_tokens == 1 and not sequence.ends_with_prompt:
                ready.append(placement)
            else:
                wanted.append((placement, self._num_wanted(placement)))
        granted, ready = self._gather(wanted, ready, now)
        for placement in ready:
            plan.decode.append(placement.sequence)
            plan.commits += self._rows.due(placement, 1)
        for placement, num_tokens in granted:
            plan.prefill.append(ScheduledSequence(placement.sequence, num_tokens))
            plan.commits += self._rows.due(placement, num_tokens)

    def _gather(
        self, wanted: list[tuple[Placement, int]], ready: list[Placement], now: float
    ) -> tuple[list[tuple[Placement, int]], list[Placement]]:
        """Return who computes how much of its prompt, and who decodes."""
        rows = [*ready, *(placement for placement, _ in wanted)]
        if self._settings.prefill_chunk is not None or not self._gathering.is_open(rows, now):
            return self._grant(wanted, len(ready)), ready
        granted = self._grant(wanted, 0)
        num_parked = self._leaders.num_parked
        return self._gathering.hold_back(wanted, granted, ready, num_parked, now)

    def _grant(
        self, wanted: list[tuple[Placement, int]], num_decode_rows: int
    ) -> list[tuple[Placement, int]]:
        if self._settings.prefill_chunk is not None:
            limit = self._settings.max_prefill_tokens
            return fixed_chunks(wanted, self._settings.prefill_chunk, limit)
        return share_out(wanted, self._budget.num_tokens(num_decode_rows))

    def _num_wanted(self, placement: Placement) -> int:
        """Pending tokens; up to the next boundary where only a whole state can be stored."""
        sequence = placement.sequence
        if self._cache.kind is CacheKind.SNAPSHOTS and placement.boundaries:
            return placement.boundaries[0] - sequence.num_computed_tokens
        return sequence.num_pending_tokens

    # What happens to single sequences.

    def _preempt(self, placement: Placement, plan: StepPlan[S]) -> None:
        """Take the row; the sequence returns to the queue with its tokens."""
        self._detach(placement, plan, is_sound=True)
        placement.sequence.status = SequenceStatus.WAITING
        placement.stage = Stage.WAITING
        self._returning.append(placement)
        plan.num_preempted += 1

    def _detach(self, placement: Placement, plan: StepPlan[S], *, is_sound: bool) -> None:
        """Take the row from a sequence, and save its keys and values if they fit."""
        sequence = placement.sequence
        self._returning += self._leaders.remove(placement)
        plan.early_commits += self._rows.stop(placement, is_sound=is_sound)
        plan.detach.append(sequence)
        # A solo sequence can send away what this very plan has just admitted.
        plan.admit = [row for row in plan.admit if row.sequence is not sequence]

    def _forget(self, sequence: Sequence, *, is_sound: bool) -> None:
        placement = self._placements.pop(sequence, None)
        if placement is None:
            return
        sequence.status = SequenceStatus.FINISHED
        if placement in self._rows:
            self._ended.append((placement, is_sound))
        elif placement.stage is Stage.PARKED:
            self._leaders.leave(placement)
        elif placement not in self._returning:
            self._waiting.forget(placement)
        placement.stage = Stage.GONE
