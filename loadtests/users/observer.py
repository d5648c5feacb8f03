"""Record production requests from the splitter's access log as they end, and an account as a load process keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from tailgate.analysis.records.documents import write_document
from tailgate.analysis.records.schemas import REQUESTS
from tailgate.analysis.records.tables import RecordWriter
from tailgate.loadtests.external.log_tail import LogTail
from tailgate.loadtests.generator.histogram import ArmTally
from tailgate.loadtests.generator.record import SERVED_COLUMNS, RequestRecord, request_batch
from tailgate.servers.splitter.admin import SAME_START_S, Admin, SplitterError, ended_requests
from tailgate.servers.splitter.request_log import LoggedRequest, parse_line

_REQUESTS, _ACCOUNT = "requests-0.arrow", "generator-0.json"
# The figures of a replica whose columns have other names, or that are no columns.
_NAMES = {"recv_ns": "server_recv_ns", "end_ns": "server_end_ns"}
# A line is in the file half a second after the event at the latest, and a disk may take its time.
_LATE_NS = 2_000_000_000
_NEVER_NS = 1 << 62
MOST_LINES = 4_000  # in a step: some .2 s, in which no alarm is seen


class UnderWay:
    """Requests that came and have not ended, by the lines of their beginning and their end. One that has lasted
    `longest_ns` is not waited for any more."""

    def __init__(self, *, longest_ns: int) -> None:
        self._longest_ns = longest_ns
        self._arms: dict[tuple[int, int], list[str]] = {}

    def begun(self, start_ns: int, connection: int, arm: str) -> None:
        """Count one more at the arm, "" where that is not known or does not count."""
        self._arms.setdefault((start_ns, connection), []).append(arm)

    def ended(self, start_ns: int, connection: int, arm: str) -> None:
        """Count one less; one whose begin is not recorded changes nothing."""
        arms = self._arms.get((start_ns, connection), [])
        if arms:
            arms.remove(arm if arm in arms else arms[-1])
        if not arms:
            self._arms.pop((start_ns, connection), None)

    def at(self, arm: str, *, until_ns: int | None = None) -> int:
        """Return how many are under way at the arm, of those that came before `until_ns`."""
        return sum(
            arms.count(arm) for (start_ns, _), arms in self._arms.items() if until_ns is None or start_ns < until_ns
        )

    def lost(self) -> int:
        """Forget all, of which none will end because the splitter is gone, and return how many they were."""
        count = sum(map(len, self._arms.values()))
        self._arms.clear()
        return count

    def settled_ns(self, now_ns: int) -> int:
        """Return the instant before which all that came has ended and been read, as far as it was waited for."""
        waited = (start_ns for start_ns, _ in self._arms if start_ns > now_ns - self._longest_ns)
        return min(min(waited, default=now_ns), now_ns - _LATE_NS)


@dataclass(slots=True)
class _Counts:
    """What the log held. `pinned` requests were sent to an arm by its name, `others` are no inference or had no arm;
    `unplaced` ones were under way when the splitter ended. Nothing else is known of these three. `passed` have ended,
    whatever they were."""

    started: int = 0
    finished: int = 0
    failed: int = 0
    pinned: int = 0
    others: int = 0
    unplaced: int = 0
    passed: int = 0


class Observer:
    """Follows into `folder` the requests that begin at `since_ns` or later, by the access log from byte `log_at` on.

    `arms` are {arm: {address: replica}}. A request of `timeout_s` is not waited for any more.
    """

    def __init__(
        self,
        folder: Path,
        *,
        log: Path,
        log_at: int = 0,
        admin: Admin | None,
        arms: Mapping[str, Mapping[str, str]],
        timeout_s: float,
        since_ns: int,
    ) -> None:
        self.arms, self.timeout_s, self.since_ns = arms, timeout_s, since_ns
        self._folder, self._path, self._log_at, self._admin = folder, log, log_at, admin
        self._until_ns = _NEVER_NS  # what comes then or later is not recorded
        self._tallies = {arm: ArmTally() for arm in arms}
        self._counts = _Counts()
        self._under_way = UnderWay(longest_ns=int(timeout_s * 1e9))
        self._log: LogTail | None = None
        self._reading: Iterator[str] = iter(())
        self._read_ns = since_ns  # when all that was logged had been read
        self.is_behind = False  # whether lines wait for the next step
        self._writer = RecordWriter(folder / _REQUESTS, REQUESTS)
        self._counted: int | None = None  # requests by the splitter's own count since the first reading
        self._counted_from = 0
        self._start_s = 0.0  # of the splitter

    def step(self, now_ns: int, *, complete: bool = False) -> None:
        """Record what was logged until now, up to `MOST_LINES` unless `complete`, and write the account. Raises
        OSError."""
        rows: list[RequestRecord] = []
        if not complete:
            self._count_at_the_source()  # before the lines are read, so that they hold what was counted
        read = 0
        for line in islice(self._lines(), None if complete else MOST_LINES):
            read += 1
            logged = parse_line(line)
            if logged is None:
                continue
            if logged.ended and logged.start_ns + logged.end_ns >= self.since_ns:
                self._counts.passed += 1
            if not self.since_ns <= logged.start_ns < self._until_ns:
                continue
            if not logged.ended:
                if logged.inference:
                    self._counts.started += 1
                    arm = "" if logged.pinned else logged.arm
                    self._under_way.begun(logged.start_ns, logged.connection, arm)
                continue
            self._under_way.ended(logged.start_ns, logged.connection, logged.arm)
            if (record := self._record(logged)) is not None:
                rows.append(record)
                if record.status != "CANCELLED":  # its user went away: no failure of the arm
                    self._tallies[logged.arm].add(record)
        if rows:
            self._writer.append_batch(request_batch(rows))
        self.is_behind = not complete and read == MOST_LINES
        if not self.is_behind:
            self._read_ns = now_ns
        self._write(now_ns, complete=complete)

    def end(self, at_ns: int) -> None:
        """Record nothing that comes at the instant or later."""
        self._until_ns = at_ns

    def settled(self, now_ns: int) -> bool:
        """Return whether all that came before the end has ended, or lasted for too long."""
        return self._under_way.settled_ns(min(now_ns, self._read_ns)) >= self._until_ns

    def close(self, now_ns: int) -> None:
        """Complete the records, as far as the log is complete."""
        self.step(now_ns, complete=True)
        self._writer.close()
        if self._log is not None:
            self._log.close()

    def _lines(self) -> Iterator[str]:
        if self._log is None:
            try:
                self._log = LogTail(self._path, at=self._log_at)
            except FileNotFoundError:
                return  # the splitter has not begun it yet
        # No `yield from`, which would end what is read when a step stops before the last line.
        for line in self._reading:
            yield line
        self._reading = self._log.lines()
        for line in self._reading:
            yield line

    def _record(self, logged: LoggedRequest) -> RequestRecord | None:
        """Count a request that has ended, and return its record; None for one that is not compared.

        Latencies count from the time at which the splitter received the request; the time at which the user meant to
        send it is unknown. The first token came with the first byte of the answer; of the other tokens no times are
        known.
        """
        counts = self._counts
        if not logged.inference or logged.arm not in self.arms:
            counts.others += 1
            return None
        if logged.pinned:
            counts.pinned += 1
            return None
        counts.finished += 1
        counts.failed += logged.status != "OK"
        identity = f"user-{counts.finished}"
        figures = {_NAMES.get(name, name): value for name, value in logged.figures.items()}
        output_tokens, first_ns = figures.get("output_tokens"), logged.first_ns
        return RequestRecord(
            request_id=identity,
            session_id=logged.session_id or identity,
            trial=1,
            arm=logged.arm,
            # Not by its own name: replicas of separate starts may have the same one.
            replica=self.arms[logged.arm].get(logged.address, logged.address),
            pair_id=identity,
            scheduled_ns=logged.start_ns,
            sent_ns=logged.start_ns,
            first_token_ns=logged.start_ns + first_ns if first_ns is not None and output_tokens else None,
            end_ns=logged.start_ns + logged.end_ns,
            status=logged.status,
            error=logged.error or None,
            prompt_tokens=figures.get("prompt_tokens", 0),
            max_tokens=None,
            output_tokens=output_tokens,
            token_ns=None,
            phase="measure",
            served=[figures.get(name) for name in SERVED_COLUMNS],
        )

    def _count_at_the_source(self) -> None:
        """Read what the splitter has counted. What was under way in one that is gone is not waited for."""
        if self._admin is None:
            return
        try:
            count, start_s = ended_requests(self._admin)
        except SplitterError:
            return  # the weight controller reports it
        if self._counted is None:
            self._counted_from, self._start_s = count, start_s
        elif abs(start_s - self._start_s) > SAME_START_S:
            self._counts.unplaced += self._under_way.lost()
            self._counted_from, self._start_s = -self._counted, start_s
        self._counted = count - self._counted_from

    def _write(self, now_ns: int, *, complete: bool) -> None:
        counts = self._counts
        late_ns = self._read_ns - int(self.timeout_s * 1e9)
        account = {
            "worker": 0,
            **asdict(counts),
            "records": {"written": counts.finished},
            "start_ns": self.since_ns,
            "settled_ns": self._under_way.settled_ns(self._read_ns),
            # what has lasted for too long to be waited for, and may be hurt
            "unfinished": {arm: self._under_way.at(arm, until_ns=late_ns) for arm in self.arms},
            "splitter": None if self._counted is None else {"count": self._counted},
            "complete": complete,
            "t_s": round((now_ns - self.since_ns) / 1e9, 3),
            "arms": {
                arm: {**tally.summary(now_ns), "inflight": self._under_way.at(arm)}
                for arm, tally in self._tallies.items()
            },
            "histograms": {arm: tally.histograms() for arm, tally in self._tallies.items()},
        }
        write_document(self._folder / _ACCOUNT, account)
