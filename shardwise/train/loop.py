"""The training loop of one rank: reads batches, takes steps, logs metrics, validates, saves and rolls back."""

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise.comm.collectives import broadcast_json
from shardwise.console import pluralize, signal_name
from shardwise.data.input_files import BadRecords
from shardwise.data.loader import Loader
from shardwise.data.sample_stream import Samples, job_stream
from shardwise.errors import DataError, RunError
from shardwise.integrity.detectors import AnomalyPolicy, CorruptionDetector, Rollback
from shardwise.layout import AUTO_SCHEDULES
from shardwise.models.lora import AdaptedWeights
from shardwise.optim.lr_schedule import job_learning_rate, set_learning_rate
from shardwise.parallel.engine import Engine
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import Prepared, forward_flops
from shardwise.parallel.torch_pipelining import PipelineOrder
from shardwise.planner.plan import auto_schedule_order
from shardwise.step import CudaGraphStep, StepResult, make_step_fn
from shardwise.train.base_weights import check_base
from shardwise.train.checkpoint import CheckpointManager
from shardwise.train.checkpoint_folder import shared_list
from shardwise.train.local_machine import local_cluster
from shardwise.train.metrics_processor import MetricsProcessor, Progress, StopFlag, json_number
from shardwise.train.run_folder import RunFolder, check_none_lost, check_state, defining_values
from shardwise.train.validate import (
    open_validation_sets,
    refresh_copies,
    score_pairs,
    try_metrics,
    validate_sets,
    validation_set_names,
)
from shardwise.train.validation_history import ValidationHistory, is_lower
from shardwise.train.warm_start import load_start, run_weights
from shardwise.workers.repeated_failures import MAX_REPEATS

# The phase of the step timer, by the phase that a rank reports in its heartbeat.
PHASES = {"data": "data", "computing": "compute", "validating": "validation", "saving": "checkpoint"}


def make_engine(prepared: Prepared, device: torch.device) -> Engine:
    """Builds this rank's engine; rank 0 broadcasts a synthesized pipeline order, so that all ranks run the same."""
    job, layout = prepared.job, prepared.layout
    if isinstance(adapted := prepared.model.initial, AdaptedWeights):  # adapters, maybe beside the weights of a run
        adapted.base = run_weights(job) or adapted.base
    order: PipelineOrder | None = None
    if layout.pipeline > 1 and layout.schedule in AUTO_SCHEDULES:
        if dist.get_rank() == 0:
            local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", layout.world))
            order = auto_schedule_order(job, layout, local_cluster(job, local_world_size)[0])
        order = dict(broadcast_json(order and list(order.items())) or [])
    return parallelize(prepared, device, order=order)


@dataclass
class TrainingLoop:
    prepared: Prepared
    folder: RunFolder
    device: torch.device
    resume: bool = False
    stop: StopFlag = field(default_factory=StopFlag)
    set_phase: Callable[[str, int], None] = lambda phase, step: None  # called whenever this rank enters a phase
    prebuilt_engine: Engine | None = None  # an engine that a standby worker has already built; None builds one
    snapshots: str = ""  # folder of in-memory snapshots that outlive this process; empty disables them

    def __post_init__(self) -> None:
        self.job, self.layout = self.prepared.job, self.prepared.layout
        self.engine = self.prebuilt_engine or make_engine(self.prepared, self.device)
        self.compiled = self.job.should_compile(self.device.type, self.layout)
        self.optimizer = self.engine.make_optimizer(self.job)
        self.step = self._make_step_fn()
        self.overlaps_host = isinstance(self.step, CudaGraphStep)  # reads data and writes metrics during GPU work
        is_watched = not self.engine.has_tables and not self.overlaps_host
        flops = is_watched * 3 * sum(forward_flops(self.job.model)) * self.job.samples / self.layout.world
        watched = self.engine, self.optimizer, self.folder.path, flops
        self.corruption_detector = CorruptionDetector(self.job, *watched, self._log_event)
        task = self.job.family.task(self.job.model)
        self.callbacks = () if task is None else task.callbacks
        self.is_rank_zero = self.engine.mesh.rank == 0
        keep, asynchronous = self.job.checkpoint.keep, self.job.checkpoint.asynchronous
        takes_snapshots = self.job.checkpoint.snapshot_every and not self.engine.has_tables  # tables are too large
        snapshots = Path(self.snapshots) if self.snapshots and takes_snapshots else None
        self.checkpoints = CheckpointManager(self.folder.checkpoints, keep, asynchronous, snapshots, str(self.layout))
        self.checkpoints.on_wait = lambda: self.set_phase("loading", 0)
        self.progress = Progress(self.job.total_steps, self.is_rank_zero, self.job.model.throughput_unit)
        # While opening the sources, every rank finds the same bad records, so only rank 0 logs them; later, each does.
        log_path = self.folder.bad_records_path if self.is_rank_zero else None
        self.bad_records = BadRecords(self.job.data.on_bad_record == "skip", log_path)
        record = self.folder.data_record()
        record.choose_sets(validation_set_names(self.job))
        refresh_copies(self.job)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:  # copies on other nodes may have other times
            record.check(self.folder.path, compare_times=self.is_rank_zero)
            if self.resume:
                check_base(self.folder, self.job, is_quick=True)
        sources = self.folder.sources(self.job, record, self.bad_records)
        if record.is_new and self.is_rank_zero:
            self.folder.write_data(record, *sources)
        self.training, self.held_out, self.tokenizer = sources
        if self.job.validation.sets and self.engine.mesh["world"].size > 1:
            dist.barrier()  # rank 0 has written the tokenizer
        own = self.folder.tokenizer if self.job.data.tokenizer != "bytes" and self.folder.tokenizer.exists() else None
        self.validation_sets = open_validation_sets(self.job, own, record)
        if record.has_other_sets and self.is_rank_zero:
            self.folder.save_data_record(record)
        has_best = self.checkpoints.group.on_rank_zero(self.folder.best.is_dir)  # maybe of a part that kept one
        keeps_best = self.job.validation.keep_best
        self.best = CheckpointManager(self.folder.best, 1, False) if keeps_best or has_best else None
        self.validations = ValidationHistory()
        self.best_loss: float | None = None  # of the checkpoint in the folder `best`; None if there is none
        self.bad_records.log_path = self.folder.bad_records_path
        self.rollbacks: Counter[str] = Counter()  # by reason
        self.metrics = MetricsProcessor(self.job, self.engine, self.optimizer, self.folder, self.progress,
                                        self.corruption_detector, self.stop,
                                        writes_later=self.overlaps_host)  # fmt: skip
        can_replay = not (self.compiled or self.engine.has_tables or self.job.gradient.compress)  # without side effects
        count_skipped = lambda: len(self._skipped_batches())  # noqa: E731
        self.anomaly_policy = AnomalyPolicy(self.job, self.engine, can_replay, count_skipped, self._log_event)

    def _make_step_fn(self) -> Callable[[Samples], StepResult]:
        captures = self.compiled and not self.job.offload_activations
        return make_step_fn(self.engine, self.optimizer, self.job.optimizer.clip, captures,
                            on_grads_ready=lambda outcome: self.corruption_detector.before_update(),
                            on_capture_failure=lambda message: self._log_event("capture_failed", message))  # fmt: skip

    def run(self) -> None:
        first = self._restore()
        with closing(self.progress):
            while True:
                try:
                    self.corruption_detector.reset()
                    return self._train(first)
                except Rollback as reason:
                    first = self._roll_back(reason)

    def _train(self, first: int) -> None:
        """Takes all steps after step `first`, or until a signal asks it to stop."""
        last, every = self.job.total_steps, self.job.checkpoint.every
        self.validations = ValidationHistory.of_rows(self.checkpoints.group.on_rank_zero(self.folder.validations))
        self._settle_best(first)
        self._tell("on_start", first)
        if first < last and self._is_out_of_patience():
            self._end(first, self._patience_text(is_news=False))
            return
        if first < last:
            self._set_phase("validating", first)
            try_metrics(self.engine, self.job, self.held_out, self.tokenizer)
        stream = job_stream(self.job, self.training)
        data = self.engine.mesh["loader"]
        loader = Loader(stream, self.job.samples, data.size, data.index, first, workers=self.job.data.workers,
                        prefetch=self.job.data.prefetch, device=self.device,
                        skipped_batches=self._skipped_batches())  # fmt: skip
        self.engine.begin_stream(self.job, stream)
        batches = iter(loader)
        self.metrics.ranks.reset()
        next_samples: Samples | None = None
        try:
            for number in range(first, last):
                self.metrics.ranks.begin(number)
                begin, waited = time.perf_counter(), loader.wait_seconds
                if next_samples is None:
                    self._set_phase("data", number + 1)
                    next_samples = next(batches)[1].to(self.device)
                samples, next_samples = next_samples, None
                self._set_phase("computing", number + 1)
                rate = job_learning_rate(self.job, number, last)
                set_learning_rate(self.optimizer, rate)
                self.engine.data.compression_paused = number < self.job.gradient.uncompressed_steps(last)
                self.corruption_detector.before_step(number + 1, samples)
                outcome = self.step(samples)
                done = number + 1
                if number == first:  # the optimizer has its state now
                    self.checkpoints.reserve(self.engine, self.optimizer)
                if self.engine.outer_optimizer is not None:
                    self.engine.outer_optimizer.after_step(done, last)
                self.corruption_detector.after_step()
                if self.overlaps_host:
                    self.metrics.flush()
                    if done < last:
                        self._set_phase("data", done, overlapped=True)
                        with suppress(DataError):  # the next step raises it again, once this one is logged
                            next_samples = next(batches)[1].to(self.device)
                        self._set_phase("computing", done, overlapped=True)
                verdict = self.metrics.log_step(done, outcome, rate, begin, loader.wait_seconds - waited)
                self._tell("on_step", done, lambda: {"loss": float(outcome.loss), "grad_norm": float(outcome.grad_norm),
                                                     "lr": rate})  # fmt: skip
                self.corruption_detector.evaluate(done, verdict.is_corrupt)
                self.anomaly_policy.evaluate(done, verdict, samples)
                stops_early = self.job.is_validated_after(done) and self._validate(done)
                if (every and done % every == 0) or done == last or verdict.stop_signal or stops_early:
                    self._save(done)
                if stops_early:
                    self._end(done, self._patience_text(is_news=True))
                    break
                if done < last and self.checkpoints.can_snapshot(done, self.job.checkpoint.snapshot_every):
                    self._snapshot(done)
                if verdict.stop_signal and done < last:
                    reason = signal_name(verdict.stop_signal)
                    self._log_event("stopped", f"{reason}, checkpoint saved at step {done}.", step=done)
                    break
            else:
                if first == last:
                    self._validate(last)
                self._end(last, "all steps are done.")
            self.checkpoints.finish()
            self.metrics.ranks.finish()
        finally:
            loader.close()
            self.metrics.flush()

    def _skipped_batches(self) -> list[tuple[int, int]]:
        """Returns the list of rank 0, on every rank: other nodes may have no copy of it."""
        return [(step, count) for step, count in broadcast_json(self.is_rank_zero and self.folder.skipped_batches())]

    def _end(self, step: int, reason: str) -> None:
        self._set_phase("saving", step)
        self.checkpoints.finish()
        if summary := self.bad_records.summary():
            self._log_event("bad_records", summary, step=step)
        self._log_event("finished", reason, step=step)
        self._tell("on_end", step)

    def _restore(self) -> int:
        """Loads the newest checkpoint when resuming. Returns the step to continue from."""
        if self.job.loss.dpo_beta:
            self._score_pairs()
        if not self.resume:
            load_start(self.job, self.engine, self.optimizer, self.checkpoints.group)
            self._log_event("started", f"training in layout '{self.layout}'.", layout=str(self.layout), step=0)
            return 0
        self._set_phase("loading", 0)
        state = self.checkpoints.load(self.engine, self.optimizer)
        for message in self.checkpoints.damaged:
            self._log_event("checkpoint_corrupt", message)
        if state is None:
            load_start(self.job, self.engine, self.optimizer, self.checkpoints.group)
        first = 0 if state is None else int(state["step"])
        if self.checkpoints.store is not None:  # what could not be loaded here must not turn up elsewhere later
            self.checkpoints.rewind(first)
        stream = getattr(self.training, "stream", None)
        if stream is not None and state is not None and state["dataset"] is not None:
            index, stream.states[index] = state["dataset"]
        if self.is_rank_zero:
            check_none_lost(self.folder) if state is None else check_state(self.folder, self.job, state)
            self.folder.discard_after(first)
        message = f"from step {first} in layout '{self.layout}'."
        self._log_event("resumed", message, layout=str(self.layout), step=first, source=self.checkpoints.source)
        return first

    def _score_pairs(self) -> None:
        """Asks the model that training starts from which answers it prefers; the run keeps what it says."""
        opened: list[Any] = [self.training, self.held_out, *self.validation_sets.values()]
        sources = [source for source in opened if len(source) and hasattr(source, "reference")]
        data = [f"{source.tokens.path.parent.name}: {len(source)}" for source in sources]
        kept = self.checkpoints.group.on_rank_zero(lambda: self.folder.preferences(data))
        if kept is None:
            self._set_phase("validating", 0)
            load_start(self.job, self.engine, self.optimizer, self.checkpoints.group)
            kept = [score_pairs(self.engine, self.job, source).tolist() for source in sources]
            if self.is_rank_zero:
                self.folder.write_preferences(data, kept)
        for source, scores in zip(sources, kept, strict=True):
            source.reference = np.array(scores)

    def _snapshot(self, done: int) -> None:
        self._set_phase("saving", done)
        self.metrics.flush()
        if problem := self.checkpoints.snapshot(done, self.engine, self.optimizer, self._state(done)):
            self._log_event("snapshot_failed", problem, step=done)
        self.corruption_detector.check_saved_state(done)

    def _state(self, done: int) -> dict[str, Any]:
        stream, samples = getattr(self.training, "stream", None), done * self.job.samples
        dataset = stream.state_before(samples) if stream is not None else None
        return {"step": done, "samples": samples, "layout": str(self.layout), "seed": self.job.seed, "dataset": dataset,
                "job": defining_values(self.job)}  # fmt: skip

    def _save(self, done: int) -> None:
        begin = time.perf_counter()
        self._set_phase("saving", done)
        self.metrics.flush()
        try:
            self.checkpoints.finish()
        except RunError as error:  # from the previous save
            self._log_event("checkpoint_failed", f"{error} The run continues.", step=done)
        try:
            self.checkpoints.save(done, self.engine, self.optimizer, self._state(done))
        except RunError as error:
            if done == self.job.total_steps:
                raise
            self._log_event("checkpoint_failed", f"{error} The run continues.", step=done)
            return
        self.corruption_detector.check_saved_state(done)
        stall = round(time.perf_counter() - begin, 4)
        self._log_event("checkpoint", f"saving step {done}.", step=done, stall_seconds=stall)
        self._tell("on_checkpoint", done)

    def _validate(self, done: int) -> bool:
        """Validates; keeps the best checkpoint. Returns whether the run ends because the loss no longer falls."""
        self._set_phase("validating", done)
        begin = time.perf_counter()
        result = validate_sets(self.engine, self.job, self.held_out, self.validation_sets, self.tokenizer)
        if result is None:
            self.metrics.flush()
            return False
        bits = f", {result['bits_per_byte']:.3f} bits per byte" if "bits_per_byte" in result else ""
        accuracy = f", {100 * result['accuracy']:.1f}% accuracy" if "accuracy" in result else ""
        task = self.job.family.task(self.job.model)
        own = "".join(f", {name} {result[name]:.4g}" for name in (() if task is None else task.metrics))
        sets = ", ".join(f"{name} {part['loss']:.4f}" for name, part in result.items() if isinstance(part, dict))
        message = f"loss {result['loss']:.4f}{f' ({sets})' if sets else ''}{bits}{accuracy}{own} after step {done}."
        seconds = round(time.perf_counter() - begin, 4)
        values = {key: {name: json_number(number) for name, number in value.items()} if isinstance(value, dict)
                  else json_number(value) for key, value in result.items()}  # fmt: skip
        self.metrics.add_validation(values)
        self.metrics.flush()
        self._log_event("validation", message, step=done, seconds=seconds, **values)
        self._tell("on_validation", done, lambda: result)
        self.validations.add(done, result["loss"])
        if self.best_loss is None or is_lower(result["loss"], self.best_loss):
            self._save_best(done, result["loss"])
        return done < self.job.total_steps and self._is_out_of_patience()

    def _is_out_of_patience(self) -> bool:
        return self.validations.is_out_of_patience(self.job.validation.patience)

    def _patience_text(self, is_news: bool) -> str:
        """Says why the run ends before its last step, and how to train on all the same."""
        count = self.validations.since_lowest
        reason = f"no lower validation loss in {pluralize(count, 'validation')}"
        if not is_news:
            reason = f"this run has ended already, with {reason}, and takes no more steps"
        return (
            f"{reason}. To train on, set validation.patience to 0, or to more than {count}: "
            f"shardwise train --resume {self.folder.place} --set validation.patience=0"
        )

    def _save_best(self, step: int, loss: float) -> None:
        """Saves the state that was validated as the best checkpoint, in place of the one before, if one is kept."""
        if self.best is None or not self.job.validation.keep_best:
            return
        try:
            self.best.save(step, self.engine, self.optimizer, self._state(step))
            self.best_loss = loss
        except RunError as error:
            self._log_event("checkpoint_failed", f"{error} The run continues.", step=step)

    def _settle_best(self, first: int) -> None:
        """Makes the folder `best` fit a run that goes on from step `first`: the steps after it did not happen.

        A best checkpoint of those steps is removed. The one before, which it had replaced, is gone, unless it is the
        state that the run goes on from: then it is saved again. Otherwise the best of what comes is kept."""
        if self.best is None:
            return
        self.best.rewind(first)
        saved_steps = [step for step, _ in shared_list(self.best.folder, self.best.group)]
        self.best_loss = self.validations.loss_at(saved_steps[0]) if saved_steps else None

        lowest = self.validations.lowest
        if lowest is None or lowest[0] in saved_steps:
            return
        step, loss = lowest
        if step == first:
            self._set_phase("saving", first)
            self._save_best(step, loss)
        elif not saved_steps and self.job.validation.keep_best:
            message = (
                f"the lowest validation loss so far is {loss:.4f} after step {step}, but {self.folder.best} has no "
                "checkpoint of it: none was kept then, or that of a step that is taken again had replaced it. "
                "From here on, the best of the validations to come is kept."
            )
            self._log_event("best_lost", message, step=step)

    def _roll_back(self, reason: Rollback) -> int:
        """Loads the last checkpoint. Returns the step to continue from. Raises RunError if it has done so for the same
        reason before, again and again: a wrong result that each replay repeats is no passing fault."""
        self.rollbacks[str(reason)] += 1
        if self.rollbacks[str(reason)] > MAX_REPEATS:
            raise RunError(
                f"{reason}: the run was rolled back {MAX_REPEATS} times for this at step {reason.step} and came to the "
                "same again, so it ends; replace the device or remove the cause, and continue the run with "
                f"`shardwise train --resume {self.folder.place}`."
            )
        if reason.state_is_corrupt:
            self.checkpoints.rewind(reason.step - 1)
        state = None if self.engine.has_tables else self.checkpoints.load(self.engine, self.optimizer)
        if state is None and reason.state_is_corrupt:
            raise RuntimeError(f"{reason}, and there is no checkpoint to roll back to")  # launchers restart all ranks
        # Without a checkpoint, a step whose update was skipped is retried; one with a loss spike is kept.
        first = int(state["step"]) if state is not None else reason.step - (not reason.skip_batches)
        action = f"rolling back to step {first}" if state is not None else f"no checkpoint, resuming from step {first}"
        if reason.skip_batches and state is not None:
            action += f" and skipping the {pluralize(reason.step - first, 'batch')} since"
            if self.is_rank_zero:
                self.folder.add_skip(first, reason.step - first)
        if self.is_rank_zero:
            self.folder.discard_after(first)
        self._log_event("rollback", f"{reason}; {action}.", step=reason.step)
        self.step = self._make_step_fn()
        return first

    def _tell(self, what: str, step: int, metrics: Callable[[], Any] | None = None) -> None:
        """Calls the user's callbacks on rank 0."""
        if self.is_rank_zero:
            for callback in self.callbacks:
                getattr(callback, what)(step, *([] if metrics is None else [metrics()]))

    def _set_phase(self, phase: str, step: int, overlapped: bool = False) -> None:
        self.set_phase(phase, step)
        self.engine.timer.begin_phase(PHASES.get(phase, ""), overlapped)

    def _log_event(self, kind: str, message: str, **facts: Any) -> None:
        if self.is_rank_zero:
            self.folder.log_event(kind, message, **facts)
            self.progress.print_event(kind, message)
