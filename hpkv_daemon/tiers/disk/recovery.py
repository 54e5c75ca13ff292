"""What lies in the directory: found when the tier starts, and compared with the index after a process died."""

from __future__ import annotations

from collections.abc import Callable

from hpkv_daemon.tiers.base import Outcome, Recovered
from hpkv_daemon.tiers.disk.format import Record
from hpkv_daemon.tiers.disk.segments import FileState, Found
from hpkv_daemon.tiers.disk.shared import Shared, place_of
from hpkv_daemon.tiers.disk.table import Phase, Segment
from hpkv_daemon.tiers.host import Reply

RESUME_SHARE = 0.05
"""Of a segment must be free, for more to be appended to it."""


class Recovery:
    """Not thread-safe: the control loop is its only user. ``on_writable`` is called when writes may be ordered."""

    def __init__(self, shared: Shared, on_writable: Callable[[], None]) -> None:
        self._shared = shared
        self._index = shared.index
        self._on_writable = on_writable
        self._pending: dict[int, Segment] = {}
        """Segments whose records are not known yet, by number."""
        self._unsealed: set[int] = set()
        self._total = 0
        self._newest = 0
        """Life of the segment that may be written on."""
        self.settled = False
        """The index says which files there are; not so from the end of a process until the next one has looked."""
        self.known = False
        """It was known at least once: sequences can be given out."""
        self.over = False

    def begin(self) -> None:
        """A process is there: look at the files."""
        # Files beyond the budget go, and there must be one to write on: while nothing is open yet, a whole one.
        index = self._index
        spare = 0 if self.known else index.segment_bytes
        self._shared.process.ask(self._found_files, "survey", index.budget_bytes, spare)

    def process_ended(self) -> None:
        """What the process was doing is unknown."""
        self.settled = False

    def _found_files(self, reply: Reply) -> None:
        health = self._shared.health
        if reply.outcome is Outcome.DIED:
            return
        if not reply.ok:
            health.fail(reply.outcome, reply.problem, self._shared.clock())
            return
        if not self.known and health.reason:
            health.heal()
        files = [Found(*found) for found in reply.result]
        self._index.foreign = {file.number for file in files if file.state == FileState.FOREIGN}
        ours = [file for file in files if file.state != FileState.FOREIGN]
        for file in ours:
            self._index.next_life = max(self._index.next_life, file.life + 1)
        if self.known:
            self._compare([file for file in ours if file.state == FileState.LIVE])
        else:
            self._take_over([file for file in ours if file.state == FileState.LIVE])
        self._index.spares.clear()
        for file in ours:
            if file.state == FileState.SPARE:
                self._take_spare(file)
        self.known = self.settled = True
        if self._index.open is not None:
            self._shared.process.ask(self._resumed, "resume", place_of(self._index.open))
        self._load()

    def _take_over(self, files: list[Found]) -> None:
        for file in files:
            self._pending[file.number] = self._index.recover(file.number, file.life, file.size)
        self._total = len(self._pending)
        self._newest = max((file.life for file in files), default=0)

    def _take_spare(self, file: Found) -> None:
        if file.size == self._index.segment_bytes:
            self._index.spares[file.number] = file.size
        else:
            self._shared.process.ask(_ignore, "retire", [file.number, file.life, file.size], 0)

    def _compare(self, files: list[Found]) -> None:
        """Make the index true again: a process died between order and reply, or files were removed."""
        lives = {file.number: file.life for file in files}
        for segment in list(self._index.segments.values()):
            if lives.get(segment.number) == segment.life:
                continue
            if segment is self._index.open:
                self._index.open = None
            self._pending.pop(segment.number, None)
            segment.phase = Phase.LEAVING
            self._shared.counters["evicted_blocks"] += self._index.leave(segment)
            self._index.retired(segment.number, spare=False)
        for file in files:
            if file.number not in self._index.segments:
                # Begun, and nothing of it was acknowledged; or to be retired, and it was not.
                self._shared.process.ask(_ignore, "retire", [file.number, file.life, file.size], 0)

    def _resumed(self, reply: Reply) -> None:
        if not reply.ok and reply.outcome is not Outcome.DIED and self._index.open is not None:
            self._index.seal()

    def _load(self) -> None:
        """Read the records of what is pending: the newest first, because it may be written on."""
        for segment in sorted(self._pending.values(), key=lambda segment: -segment.life):
            self._ask(segment)
        for number in self._unsealed & self._index.segments.keys():
            self._seal(self._index.segments[number])
        if not self._pending:
            self._finish()

    def _ask(self, segment: Segment) -> None:
        def found(records: list[list[object]]) -> None:
            self._index.recovered(segment, [Record(*record) for record in records])  # type: ignore[arg-type]

        self._shared.process.ask(lambda reply: self._loaded(segment, reply), "load", place_of(segment), on_found=found)

    def _loaded(self, segment: Segment, reply: Reply) -> None:
        if reply.outcome is Outcome.DIED or self._pending.pop(segment.number, None) is None:
            return
        segment.trim()
        newest = segment.life == self._newest
        if newest and reply.ok and self._may_resume(segment):
            self._index.resume(segment.number)
            self._shared.process.ask(self._resumed, "resume", place_of(segment))
        elif not reply.ok:
            self._shared.counters["bad_records"] += 1
        elif not reply.result:
            self._seal(segment)
        if newest:
            self._on_writable()
        done = self._total - len(self._pending)
        self._shared.tell(Recovered(done, self._total, self._index.blocks))
        if not self._pending:
            self._finish()

    def _may_resume(self, segment: Segment) -> bool:
        room = segment.size == self._index.segment_bytes and segment.fits(int(segment.size * RESUME_SHARE))
        return room and self._index.open is None

    def _seal(self, segment: Segment) -> None:
        self._unsealed.add(segment.number)

        def sealed(reply: Reply) -> None:
            if reply.outcome is not Outcome.DIED:
                self._unsealed.discard(segment.number)

        self._shared.process.ask(sealed, "seal", place_of(segment))

    def _finish(self) -> None:
        if not self.over:
            self.over = True
            self._index.end_recovery()
            if not self._total:
                self._shared.tell(Recovered(0, 0, 0))
        self._on_writable()


def _ignore(_reply: Reply) -> None:
    """Whatever became of it, the next survey sees it."""
