"""`Evaluator`: one pair from its files to its `Evaluation`, with a judge and a worker; and the words for a failure.

In the pytest process; imports no torch. The stages, in order: build (ahead of the device), then on a leased device the problem,
the check and, for a right candidate only, the timing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..build.cache import BuildCache
from ..build.toolchain import Toolchain, cuda_root
from ..cluster.leases import compile_jobs, lease, resolve_device, target_arch
from ..errors import EnvironmentFault
from ..settings import Settings
from ..suite.model import Pair
from ..timing import plan, statistics
from .judging import Judge, JudgeKey, StagingRefused
from .outcome import FINDING_VERDICTS, Record, Stop
from .processes import ForkServer
from .results import Check, Evaluation, Times, Timing, Verdict
from .running import Worker

TORCH_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
STAGING_SHARE = 0.25
"""Part of the free memory that the staging area may take; the rest is for two models and their intermediates."""
STAGING_LIMIT = {"cuda": 8 << 30, "cpu": 1 << 30}


@dataclasses.dataclass(frozen=True, slots=True)
class BuildStage:
    """What the build stage found; opaque to the caller but for `failed`."""

    record: Record
    failed: Evaluation | None


class Evaluator:
    """Evaluates pairs one after the other; keeps the fork server and, where told to, the judge.

    Use `close` when done; it leaves no process and no temporary file.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._server = ForkServer()
        self._judge: Judge | None = None
        self._place: tuple[str, list[str]] | None = None
        self._builder: tuple[BuildCache, Toolchain] | None = None
        self._init_inputs: dict[tuple[str, str], dict[str, Any] | None] = {}
        match = re.search(r"\d+$", os.environ.get("PYTEST_XDIST_WORKER", ""))
        self._preferred = int(match[0]) if match else 0

    def warm(self) -> None:
        """Start the fork server without waiting for it."""
        with contextlib.suppress(EnvironmentFault):
            self._server.start()

    def close(self) -> None:
        self._drop_judge()
        self._server.close()

    # ---- stages ----

    def build(self, pair: Pair, settings: Settings | None = None) -> BuildStage:
        """Build what the candidate asks for at import and in its constructor, without a device.

        Only a failure that no device could change ends here: a compiler's, a limit's, a crash's.
        """
        settings = settings or self._settings
        record = Record(pair=pair, settings=settings)
        try:
            record.read()
            record.device = self._device(settings)[0]
            if "cpp_extension" not in record.candidate_source:
                return BuildStage(record, None)
            record.stage = "build"
            self._run_builder(record)
        except Stop as stop:
            decisive = (Verdict.COMPILE_ERROR, Verdict.TIMEOUT, Verdict.CRASH, Verdict.CHEATING)
            if stop.verdict in decisive or stop.stage == "collect" or not record.candidate_source:
                return BuildStage(record, record.evaluation(stop))
        except EnvironmentFault as fault:
            return BuildStage(record, record.evaluation(_environment(fault, record.stage)))
        return BuildStage(record, None)

    def evaluate(
        self, pair: Pair, settings: Settings | None = None, *, build: BuildStage | None = None, keep_judge: bool = False
    ) -> Evaluation:
        """Everything, to the verdict. Raises nothing for a candidate's, a problem's or a machine's fault.

        Args:
            build: what `build` gave for this pair; it is built here otherwise.
            keep_judge: whether the next pair has the same problem.
        """
        settings = settings or self._settings
        build = build or self.build(pair, settings)
        if build.failed is not None:
            return build.failed
        record = build.record
        try:
            self._on_device(record)
            stop = Stop(Verdict.PASSED, "done", "")
        except Stop as caught:
            stop = caught
        except EnvironmentFault as fault:
            stop = _environment(fault, record.stage)
        finally:
            if not keep_judge:
                self._drop_judge()
        return record.evaluation(stop)

    def _on_device(self, record: Record) -> None:
        settings = record.settings
        device, tokens = self._device(settings)
        record.size = settings.size if settings.size != "auto" else ("full" if device == "cuda" else "smoke")
        waited = time.monotonic()
        with lease(tokens, self._preferred, record.pair.id) as place:
            record.spent("wait", waited)
            began = time.monotonic()
            record.stage = "problem"
            judge = self._judge_for(record, device, place.token)
            worker = self._worker(record, judge, device, place.token)
            try:
                worker.send(_start(record, device))
                if not judge.opened:
                    self._open(judge, record, device)
                record.environment = dict(judge.opened["environment"])
                record.device = f"{device} {record.environment['gpu']}" if "gpu" in record.environment else device
                record.stage = "check"
                ready = worker.answer("ready")
                record.isolation = tuple(ready["isolation"])
                stage = _Stage(record, judge, worker, device)
                try:
                    stage.prepare()
                except StagingRefused:
                    # The worker may have opened what the judge gives up now; a new one starts clean.
                    worker.close()
                    worker = self._worker(record, judge, device, place.token)
                    worker.ask(_start(record, device), "ready")
                    stage = _Stage(record, judge, worker, device, "pinned_host")
                    stage.prepare()
                record.spent("start", began)
                began = time.monotonic()
                stage.check()
                record.spent("check", began)
                began = time.monotonic()
                record.stage = "timing"
                stage.time()
                record.spent("timing", began)
            except StagingRefused as error:
                raise EnvironmentFault(f"memory cannot be shared between processes: {error}; try --kb-staging=pinned_host") from None
            finally:
                worker.close()
                self._park()
        gate = settings.min_speedup
        if gate is not None and record.timing is not None and record.timing.certified < gate:
            low, high = record.timing.interval
            raise Stop(
                Verdict.TOO_SLOW,
                "gate",
                f"{record.timing.speedup:.3f}x as fast as the reference; the gate wants {gate:g}x and {low:.3f}x is certain",
                (f"95 % interval {low:.3f} to {high:.3f}",),
            )

    # ---- the parts ----

    def _device(self, settings: Settings) -> tuple[str, list[str]]:
        if self._place is None:
            self._place = resolve_device(settings)
        return self._place

    def _build_layer(self, settings: Settings) -> tuple[BuildCache, Toolchain]:
        if self._builder is None:
            cache = BuildCache(build_folder(settings), compile_jobs(settings))
            self._builder = cache, Toolchain.from_facts(self._server.facts(), target_arch(settings))
        return self._builder

    def _run_builder(self, record: Record) -> None:
        settings = record.settings
        cache, toolchain = self._build_layer(settings)
        pretend = None
        if record.device == "cuda":
            pretend = [int(word) for word in re.findall(r"\d+", toolchain.arch or "9.0")[:2]]
        environment = self._environment(record, record.device, "") | {"CUDA_VISIBLE_DEVICES": ""}
        worker = Worker(self._server, record, cache, toolchain, environment, role="builder")
        try:
            worker.ask(_start(record, "cpu", pretend), "ready")
            loaded = worker.ask(_load(record), "loaded")
            record.model_line = loaded["line"]
            init = self._peek(record)
            if init is not None:
                worker.ask({"op": "construct", "init": init, "seed": 0}, "constructed")
        finally:
            worker.close()

    def _peek(self, record: Record) -> dict[str, Any] | None:
        """The constructor's arguments, from a short-lived judge; None when the problem does not give them."""
        key = (record.problem_source, record.settings.size)
        if key not in self._init_inputs:
            judge_key = JudgeKey(str(record.pair.problem.path), record.problem_source, "", ())
            judge = Judge(self._server, judge_key, {"CUDA_VISIBLE_DEVICES": ""}, record.settings.timeout)
            try:
                size = "smoke" if record.settings.size == "smoke" or record.device == "cpu" else "full"
                path = str(record.pair.problem.path)
                self._init_inputs[key] = judge.ask({"op": "peek", "path": path, "source": record.problem_source, "size": size})["init"]
            except Stop:
                self._init_inputs[key] = None
            finally:
                judge.close()
        return self._init_inputs[key]

    def _judge_for(self, record: Record, device: str, token: str) -> Judge:
        settings = record.settings
        decisive = (record.size, record.pair.dtype, settings.tf32, settings.eval_mode, settings.atol, settings.rtol)
        key = JudgeKey(str(record.pair.problem.path), record.problem_source, token, decisive)
        if self._judge is not None and self._judge.key == key:
            return self._judge
        self._drop_judge()
        environment = {"CUDA_VISIBLE_DEVICES": token if device == "cuda" else ""}
        self._judge = Judge(self._server, key, environment, settings.timeout)
        return self._judge

    def _open(self, judge: Judge, record: Record, device: str) -> None:
        settings = record.settings
        try:
            judge.open(
                record,
                path=str(record.pair.problem.path),
                source=record.problem_source,
                size=record.size,
                dtype=record.pair.dtype,
                device=device,
                threads=threads(),
                tf32=settings.tf32,
                eval_mode=settings.eval_mode,
                tolerance={
                    "atol": settings.atol,
                    "rtol": settings.rtol,
                    "atol_source": settings.source("atol"),
                    "rtol_source": settings.source("rtol"),
                },
            )
        except BaseException:
            self._drop_judge()
            raise

    def _worker(self, record: Record, judge: Judge, device: str, token: str) -> Worker:
        cache, toolchain = self._build_layer(record.settings)
        environment = self._environment(record, device, token)
        return Worker(self._server, record, cache, toolchain, environment, (judge.memory_fd,))

    def _environment(self, record: Record, device: str, token: str) -> dict[str, str]:
        """What a candidate's process is given beside the allow-list: its device and cache folders of its own."""
        cache, toolchain = self._build_layer(record.settings)
        # By the candidate's content: compiled once for all runs, and nobody else's kernels are found or spoilt there.
        import hashlib

        digest = hashlib.sha256(record.candidate_source.encode()).hexdigest()[:32]
        triton = cache.root / "triton" / digest
        with contextlib.suppress(OSError):
            triton.mkdir(parents=True, exist_ok=True)
        environment = {"CUDA_VISIBLE_DEVICES": token, "TRITON_CACHE_DIR": str(triton)}
        if device == "cuda":
            with contextlib.suppress(EnvironmentFault):
                environment["CUDA_HOME"] = str(cuda_root())
            if toolchain.arch is not None:
                environment["TORCH_CUDA_ARCH_LIST"] = toolchain.arch
        return environment

    def _park(self) -> None:
        if self._judge is None:
            return
        try:
            self._judge.ask({"op": "park"})
        except (Stop, StagingRefused, EnvironmentFault):
            self._drop_judge()

    def _drop_judge(self) -> None:
        if self._judge is not None:
            self._judge.close()
            self._judge = None


class _Stage:
    """Check and timing of one pair: judge and worker over one staging area."""

    def __init__(self, record: Record, judge: Judge, worker: Worker, device: str, kind: str | None = None) -> None:
        self._record = record
        self._judge = judge
        self._worker = worker
        self._device = device
        wanted = record.settings.staging
        auto = "cuda_ipc" if device == "cuda" else "shared_memory"
        self._kind = kind or (auto if wanted == "auto" or device == "cpu" else wanted)
        opened = judge.opened
        place = opened["in_room"] + opened["out_room"]
        most = min(opened["free_bytes"] * STAGING_SHARE, STAGING_LIMIT[device]) // max(place, 1)
        self._calls = plan.calls_per_block(opened["call_ns"], max(1, int(most)))
        self._size = max(opened["state_room"], self._calls * place, 1)
        self._overhead: dict[int, float] = {}
        self._spins = [0, 0]

    def prepare(self) -> None:
        """Share memory, learn what a block costs without a candidate, then load the candidate."""
        if self._kind != "cuda_ipc":
            self._judge.grow(self._size)
        staged = self._judge.ask({"op": "stage", "slots": self._calls, "kind": self._kind, "size": self._size})
        try:
            self._worker.ask({"op": "attach", "kind": self._kind, "size": self._size, "handle": staged["handle"]}, "done")
        except Stop as stop:
            if self._kind == "cuda_ipc" and self._record.settings.staging == "auto":
                raise StagingRefused(stop.reason) from None
            raise
        calls = self._fill(self._calls)
        self._overhead[self._calls] = statistics.median([self._block(calls, 0)[1] for _ in range(4)][1:])
        loaded = self._worker.ask(_load(self._record), "loaded")
        self._record.model_line = loaded["line"]
        self._construct(self._reweigh())

    def _reweigh(self) -> int:
        return int(self._judge.ask({"op": "reweigh"})["seed"])

    def _construct(self, seed: int) -> None:
        made = self._worker.ask({"op": "construct", "init": self._judge.opened["init"], "seed": seed}, "constructed")
        weights = self._judge.ask({"op": "weights", "state": made["state"]})
        if weights["entries"]:
            self._worker.ask({"op": "weights", "entries": weights["entries"]}, "done")
        self._weights = _weight_words(weights)

    def check(self) -> None:
        """Trials on contents never seen before, under two weight seeds; raises Stop for the first finding."""
        trials = self._record.settings.trials
        most = 0.0
        for trial in range(trials):
            self._record.check = self._checked(trial, most)
            if trial == (trials + 1) // 2:
                self._construct(self._reweigh())
            calls = self._fill(1)
            self._spins[0] = 0
            self._reference(1, 0)
            ran = self._worker.ask({"op": "run", "calls": calls, "spin_ns": 0}, "ran")
            most = max(most, self._compare(ran["calls"], f"trial {trial + 1} of {trials}"))
        self._record.check = self._checked(trials, most)

    def _checked(self, trials: int, most: float) -> Check:
        opened = self._judge.opened
        return Check(
            trials=trials,
            rtol=opened["rtol"],
            atol=opened["atol"],
            tolerance=opened["tolerance"],
            max_error=most,
            weights=self._weights,
        )

    def time(self) -> None:
        """Alternating blocks until the interval is narrow; raises Stop when no time can be trusted."""
        if not self._record.settings.time:
            raise Stop(Verdict.UNMEASURED, "timing", "timing is switched off (--kb-no-timing)")
        how = plan.PLANS[self._device]
        blocks: list[plan.Block] = []
        warm = [0, 0]
        warmed = 0
        began = time.monotonic()
        while True:
            block = self._pair_of_blocks(candidate_first=(len(blocks) + warmed) % 4 in (1, 2))
            if warmed < how.warm_blocks or (min(warm) < how.warm_ns and time.monotonic() - began < how.budget_s / 2):
                warmed += 1
                warm[0] += sum(block.reference_ns)
                warm[1] += sum(block.candidate_ns)
                continue
            blocks.append(block)
            ratios = _log_ratios(blocks)
            if len(blocks) >= how.max_blocks:
                break
            if len(blocks) >= statistics.MIN_BLOCKS and time.monotonic() - began > how.budget_s:
                break
            if len(blocks) >= how.min_blocks and statistics.half_width(ratios) <= how.half_width:
                break
            if time.monotonic() - began > 10 * how.budget_s:
                raise Stop(
                    Verdict.UNMEASURED,
                    "timing",
                    f"only {len(blocks)} pairs of blocks in {time.monotonic() - began:.0f} s; "
                    f"at least {statistics.MIN_BLOCKS} are needed",
                )
        doubt = plan.contradiction(blocks, self._overhead[self._calls], self._device)
        if doubt is not None:
            raise Stop(Verdict.UNMEASURED, "timing", doubt)
        speedup, interval = statistics.speedup(ratios, statistics.PROCESS_MARGIN[self._device])
        self._record.timing = Timing(
            candidate=_times([value for block in blocks for value in block.candidate_ns]),
            reference=_times([value for block in blocks for value in block.reference_ns]),
            baseline=self._record.settings.baseline,
            speedup=speedup,
            interval=interval,
            clock="cuda events" if self._device == "cuda" else "cpu clock",
        )

    def _pair_of_blocks(self, candidate_first: bool) -> plan.Block:
        count = self._calls
        calls = self._fill(count)
        spins = list(self._spins)
        reference: list[list[int]] = []
        if not candidate_first:
            reference = self._reference(count, spins[0])
        ran, wall = self._block(calls, spins[1])
        if candidate_first:
            reference = self._reference(count, spins[0])
        self._compare(ran, "while timing")
        if self._device == "cuda":
            self._spins = [
                plan.spin_for([host for _, host in reference]),
                plan.spin_for([call["wall_ns"] for call in ran]),
            ]
        candidate = tuple(call["device_ns"] for call in ran)
        if min(candidate) <= 0:
            raise Stop(Verdict.UNMEASURED, "timing", "it claims that a call took no time at all")
        return plan.Block(
            reference_ns=tuple(max(1, device) for device, _ in reference),
            candidate_ns=candidate,
            wall_ns=wall,
            spin_ns=spins[1],
        )

    def _fill(self, count: int) -> list[dict[str, Any]]:
        return list(self._judge.ask({"op": "fill", "slots": list(range(count))})["calls"])

    def _reference(self, count: int, spin_ns: int) -> list[list[int]]:
        return list(self._judge.ask({"op": "reference", "slots": list(range(count)), "spin_ns": spin_ns})["times"])

    def _block(self, calls: list[dict[str, Any]], spin_ns: int) -> tuple[list[dict[str, Any]], int]:
        """The worker's answers and pytest's own clock around them, in nanoseconds."""
        began = time.perf_counter_ns()
        ran = self._worker.ask({"op": "run", "calls": calls, "spin_ns": spin_ns}, "ran")
        wall = time.perf_counter_ns() - began
        if len(ran["calls"]) != len(calls):
            raise Stop(Verdict.CHEATING, self._record.stage, "its process answers for another number of calls than ordered")
        return ran["calls"], wall

    def _compare(self, ran: list[dict[str, Any]], when: str) -> float:
        answer = self._judge.ask(
            {
                "op": "compare",
                "slots": list(range(len(ran))),
                "outputs": [call["output"] for call in ran],
                "written": [call["bytes"] for call in ran],
            }
        )
        finding = answer["finding"]
        if finding is not None:
            raise Stop(FINDING_VERDICTS[finding["kind"]], "check", finding["message"], (when, *finding["details"]))
        return float(answer["max_error"])


def _start(record: Record, device: str, pretend: list[int] | None = None) -> dict[str, Any]:
    return {
        "op": "start",
        "device": device,
        "threads": threads(),
        "tf32": record.settings.tf32,
        "dtype": TORCH_DTYPES[record.pair.dtype] if record.pair.dtype else None,
        "eval_mode": record.settings.eval_mode,
        "pretend": pretend,
    }


def _load(record: Record) -> dict[str, Any]:
    return {"op": "load", "path": str(record.pair.candidate.path), "source": record.candidate_source}


def _environment(fault: EnvironmentFault, stage: str) -> Stop:
    return Stop(Verdict.ENVIRONMENT_ERROR, stage, str(fault))


def _weight_words(weights: dict[str, Any]) -> str:
    copied, ours = len(weights["entries"]), weights["ours"]
    if not ours and not weights["unmatched"]:
        return "none"
    words = f"{copied} of {ours} copied from the reference by name and shape"
    if weights["left"]:
        words += f"; not in the candidate: {_some(weights['left'])} (constructed under the same seed)"
    if weights["unmatched"]:
        words += f"; its own: {_some(weights['unmatched'])} (same seed)"
    return words


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _log_ratios(blocks: list[plan.Block]) -> list[float]:
    import math

    return [math.log(sum(block.reference_ns) / sum(block.candidate_ns)) for block in blocks]


def _times(values: list[int]) -> Times:
    return Times(
        median_ms=statistics.median(values) / 1e6,
        min_ms=min(values) / 1e6,
        p10_ms=statistics.quantile(values, 0.1) / 1e6,
        p90_ms=statistics.quantile(values, 0.9) / 1e6,
        samples=len(values),
    )


def threads() -> int:
    """Threads that judge and worker compute with on the CPU: the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def build_folder(settings: Settings) -> Path:
    """Where builds are kept: `--kb-build-dir` or the user's cache folder."""
    if settings.build_dir is not None:
        return settings.build_dir
    import platformdirs

    return Path(platformdirs.user_cache_dir("pytest-kernelbench")) / "builds"


def lines(evaluation: Evaluation) -> list[str]:
    """The text of a failure: the cause in plain words first, then where and how to see it again."""
    words = [f"{evaluation.verdict.value.replace('_', ' ')}: {evaluation.reason}".rstrip(": ")]
    words += [f"  {line}" for line in evaluation.details]
    if evaluation.check is not None and evaluation.check.weights not in ("", "none"):
        words.append(f"  weights: {evaluation.check.weights}")
    place = f":{evaluation.line}" if evaluation.line else ""
    words.append(f"  candidate  {evaluation.candidate_path}{place}")
    words.append(f"  problem    {evaluation.problem_path}")
    return words


@contextlib.contextmanager
def evaluator(settings: Settings) -> Iterator[Evaluator]:
    """An `Evaluator` that is closed at the end."""
    made = Evaluator(settings)
    try:
        yield made
    finally:
        made.close()
