"""Teams: several groups of threads that work on one item of a kernel of the SIMD language.

A kernel in groups (`lanes.py`) gives each item to one group of eight threads. A team runs the same code in many
groups. Its loops over independent iterations (`Code.each`, `several`, `singles`) are divided among them; `join` is a
barrier. All else is computed by every group, so that the groups take the same branches. Sums whose order matters are
computed by the first group, from a row in shared memory.

A team is one group, one warp, or a block of several warps. A block may have several teams of the first two kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

from llamado.devices.cuda.lanes import GROUP, GROUPS, HIDDEN, LaneCode
from llamado.devices.cuda.simt import I1, S32, WARP, Register, SimtCode, Trace
from llamado.devices.kernel import Kernel
from llamado.devices.simd import F32, I64, Turn, Value, Work

_MAXIMA = 16
"""Offset of the maxima of a team's warps in the shared memory of the team, after two numbers of `once`."""
CELLS_BYTES = _MAXIMA + 4 * 32 + 16
"""Shared memory of a team for numbers that its groups exchange."""
_LINE = 128
"""Bytes of a cache line."""
_AHEAD = 16
"""Vectors that the first group loads before it uses them in order."""


class Team(NamedTuple):
    """The shape of teams."""

    groups: int
    """Groups of a team: 1, 4 (a warp), or another multiple of 4."""
    turns: int = 1
    """Iterations of `Code.several` that run together."""
    row_bytes: int = 0
    """Shared memory for `Code.team_scratch`; 0: global memory."""

    @property
    def threads(self) -> int:
        return self.groups * GROUP

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a team."""
        return CELLS_BYTES + self.row_bytes


class TeamKernel(Kernel):
    """A kernel of the SIMD language whose items are given to teams: it has the parameter `team` besides its own."""


class TeamCode(LaneCode):
    """A kernel of the SIMD language under construction, for teams."""

    fused = False

    def __init__(self, simt: SimtCode, stack: Register, stack_step: Register, team: Team) -> None:
        super().__init__(simt, GROUPS, stack, stack_step)
        self._team = team
        thread = simt.thread()
        number = thread // team.threads
        self._thread = thread - number * team.threads
        """Number of the thread in its team."""
        self._group = (self._thread // GROUP).to(I64)
        n_teams = simt.threads() // team.threads
        own = simt.block().to(I64) * n_teams.to(I64) + number.to(I64)
        self.work = Work(*(self.value(I64, [v]) for v in (own, simt.blocks().to(I64) * n_teams.to(I64), stack, stack)))
        self._cells = simt.shared() + number * team.shared_bytes
        self._next_cell = 0

    # --- loops -------------------------------------------------------------------------------------------------------
    @contextmanager
    def each(self, start: Value | int, stop: Value | int, step: int = 1) -> Iterator[Value]:
        first = self._index(start) + self._group * step
        with self.range(self.value(I64, [first]), stop, step * self._team.groups) as i:
            yield i

    @contextmanager
    def several(self, start: Value | int, stop: Value | int, step: int) -> Iterator[list[Turn]]:
        if step == 1:
            with self.singles(start, stop) as i:
                yield [Turn(i, nullcontext())]
            return
        apart, last = step * self._team.groups, self._index(stop)
        first = self.value(I64, [self._index(start) + self._group * step])
        with self.no_exchange(), self.range(first, stop, apart * self._team.turns) as i:
            turns = [Turn(i, nullcontext())]
            for turn in range(1, self._team.turns):
                index = i + turn * apart
                inside = self.value(I1, [index.ir[0] < last])
                # an index outside is that of the first iteration: other groups may store elsewhere
                turns.append(Turn(self.select(inside, index, i), self.when(inside)))
            yield turns

    def _index(self, number: Value | int) -> Register:
        register: Register = number.ir[0] if isinstance(number, Value) else self.simt.i64(number)
        return register

    @contextmanager
    def singles(self, start: Value | int, stop: Value | int) -> Iterator[Value]:
        with self.apart(start, stop, self._thread, self.simt.i32(self._team.threads)) as i:
            yield i

    def in_order(
        self, start: Value, stop: Value, step: int, load: Callable[[Value], Value], use: Callable[[Value], None]
    ) -> None:
        if step == 1:
            super().in_order(start, stop, step, load, use)
            return
        whole = start + (stop - start) // (_AHEAD * step) * (_AHEAD * step)
        with self.no_exchange(), self.when(whole > start):
            held = [self.var(load(start + step * k)) for k in range(_AHEAD)]
            with self.range(start + _AHEAD * step, whole, _AHEAD * step) as i:
                ahead = [load(i + step * k) for k in range(_AHEAD)]
                for variable in held:
                    use(variable.value)
                for variable, value in zip(held, ahead, strict=True):
                    variable.value = value
            for variable in held:
                use(variable.value)
        super().in_order(whole, stop, step, load, use)

    @contextmanager
    def shares(self, work: Work, n: Value, share: Value) -> Iterator[Value]:
        with super().shares(work, n, share) as item:
            yield item
            self.join()  # the next item has the same scratch

    # --- the team ----------------------------------------------------------------------------------------------------
    def join(self) -> None:
        if self._team.groups == 1:
            return  # the threads of a group wait for each other between stores and loads
        if self._team.threads == WARP:
            self.simt.sync()
        else:
            self.simt.barrier()
        self._stored = self._loaded = False

    def once(self, compute: Callable[[], Value]) -> Value:
        if self._team.groups == 1:
            return compute()
        # two cells in turn: the first group cannot be two joins ahead of groups that still read one
        cell = self._cells + 8 * self._next_cell
        self._next_cell = 1 - self._next_cell
        with self.when(self.value(I1, [self._group.equals(0)])):
            computed = compute()
            self.simt.store(cell, computed.ir[0])
        self.join()
        return self.value(computed.type, [self.simt.load(computed.type, cell)])

    def greatest(self, eight: Value, one: Value) -> Value:
        """Adding 0.0 makes zeros positive: otherwise threads could differ in the sign of theirs."""
        simt = self.simt
        found = simt.max(eight.ir[0], one.ir[0]) + 0.0
        for distance in (1, 2, 4) if self._team.groups == 1 else (1, 2, 4, 8, 16):
            width = GROUP if self._team.groups == 1 else WARP
            found = simt.max(simt.shuffle_xor(found, distance, width), found)
        warps = self._team.threads // WARP
        if warps > 1:
            maxima = self._cells + _MAXIMA
            simt.store(maxima + self._thread // WARP * 4, found)
            self.join()
            found = simt.load(F32, maxima)
            for warp in range(1, warps):
                found = simt.max(simt.load(F32, maxima + 4 * warp), found)
            self.join()
        return self.value(F32, [found])

    def announce(self, address: Value, n_bytes: Value) -> None:
        with self.singles(0, (n_bytes + (_LINE - 1)) // _LINE) as line:
            self.simt.prefetch((address + line * _LINE).ir[0])

    def team_scratch(self, scratch: Value, step: Value, work: Work) -> Value:
        if not self._team.row_bytes:
            return super().team_scratch(scratch, step, work)
        return self.value(S32, [self._cells + CELLS_BYTES])


def trace_of(kernel: TeamKernel, done: Callable[[LaneCode], None]) -> tuple[tuple[str, ...], Trace]:
    """Return the fields and the SIMT trace of a kernel. `done` gets its code at the end."""

    def trace(simt: SimtCode, given: SimpleNamespace, *, team: Team, **parameters: Any) -> None:
        code = TeamCode(simt, given.stack, given.stack_step, team)
        own = SimpleNamespace(**{name: code.value(I64, [getattr(given, name)]) for name in kernel.fields})
        kernel.trace(code, own, code.work, **parameters)
        done(code)

    return (*kernel.fields, *HIDDEN), trace
