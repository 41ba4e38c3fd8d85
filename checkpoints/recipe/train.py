"""Train k3-nano or its draft model: `python -m checkpoints.recipe.train --data DIR --out DIR`.

The schedule is in steps: a run that stops at its time limit (--minutes) goes on with --resume as if
it had not stopped, and one that is killed does so from its last line in log.csv. Everything follows
from --seed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.recipe.arrays import Split
from checkpoints.recipe.batches import Batch, Cursor, Stream, fill, held_rows, join
from checkpoints.recipe.judge_text import CHAT_DOCUMENTS, Loss, head
from checkpoints.recipe.model import SHAPES, model_config
from checkpoints.recipe.optimize import Schedule, make_optimizer
from checkpoints.recipe.saved import FINAL, LOG, RUN, STATE, Log, load_state, save_state
from checkpoints.recipe.start import start_params
from checkpoints.recipe.step import (
    TrainState,
    fresh_state,
    make_judge,
    make_step,
    split_bias,
)
from k3jax.config import K3Config

REPORT = 20  # steps between two lines on the terminal
FITTED = 100  # steps after which the schedule's length is chosen, if it is to be
UNKNOWN_STEPS = 1_000_000


@dataclass(frozen=True)
class Run:
    """What a training run is; written beside its state, and never changed by --resume."""

    model: str = "k3-nano"
    steps: int | None = None  # of the schedule; None: chosen once it is known what a step takes
    train_minutes: float | None = None  # that all steps shall take, if they are chosen
    seed: int = 0
    dtype: str = "bfloat16"
    length: int = 2048  # tokens of a row
    code_rows: int = 16  # of a batch
    chat_rows: int = 16
    warmup: int = 200
    cooldown: float = 0.4  # of the steps
    rate: float = 3e-3  # Muon's peak
    adam_rate: float = 3e-3
    decay: float = 0.1
    clip: float = 1.0
    bias_rate: float = 1e-3
    code_drop: float = 0.1  # of the sublayers' outputs; there is little code, and it is seen often
    chat_drop: float = 0.0
    judge_every: int = 250
    judge_rows: int = 32  # of code, and half as many of chat

    @property
    def schedule(self) -> Schedule:
        """The learning rates' course."""
        return Schedule(self.warmup, self.cooldown)


class Trainer:
    """A run with its data, its compiled step and its state."""

    def __init__(self, run: Run, data: Path, out: Path, config: K3Config, *, resume: bool):
        self.run, self.out = run, out
        params = jax.tree.map(jnp.asarray, start_params(config, run.seed))
        options = {"rate": run.rate, "adam_rate": run.adam_rate}
        moved, _ = split_bias(params)
        optimizer = make_optimizer(moved, decay=run.decay, clip=run.clip, **options)
        self.state: TrainState = fresh_state(params, optimizer)
        cursors: dict[str, Cursor] = {}
        if resume:
            self.state, cursors = load_state(out, self.state)
        self.done = int(self.state.step)
        self.saved = self.done if resume else -1  # the step of the state on disk
        self.log = Log(out / LOG, self.done)
        counts = {"code": run.code_rows, "chat": run.chat_rows}
        self.counts = {name: count for name, count in counts.items() if count}
        self.streams: dict[str, Stream] = {}
        self.held: dict[str, Split] = {}
        for name in self.counts:
            split, self.held[name] = (
                known_tokens(data / f"{name}_{part}.npz", config.vocab_size)
                for part in ("train", "held")
            )
            self.streams[name] = Stream(split, run.length, run.seed, cursors.get(name))
        drops = [run.code_drop] * run.code_rows + [run.chat_drop] * run.chat_rows
        self.drop = jnp.asarray(drops, jnp.float32)
        step = make_step(
            config, run.dtype, optimizer, run.schedule, seed=run.seed, bias_rate=run.bias_rate
        )
        self.step, self.judge = self._compile(step, make_judge(config, run.dtype))

    def _compile(self, step: Any, judge: Any) -> tuple[Any, Any]:
        """Both programs at a time: a machine with an accelerator has cores to spare."""
        batch = fill(next(iter(self.streams.values())).split, [[]] * self.size, self.run.length)
        state = self.state
        lowered = (
            step.lower(state, batch, self.drop, self.steps),
            judge.lower(state.params, state.bias, batch),
        )
        with ThreadPoolExecutor(2) as pool:
            compiled = pool.map(lambda each: each.compile(), lowered)
            return next(compiled), next(compiled)

    @property
    def size(self) -> int:
        """Rows of a batch."""
        return sum(self.counts.values())

    @property
    def steps(self) -> jax.Array:
        """Steps of the whole schedule, i32[]; those that are taken before it is known warm up."""
        return jnp.int32(UNKNOWN_STEPS if self.run.steps is None else self.run.steps)

    def choose_steps(self, each: float) -> None:
        """Fix the schedule by what a step takes, in seconds; written down, so that it stays."""
        steps = max(2 * FITTED, round(60 * (self.run.train_minutes or 0.0) / each))
        self.run = replace(self.run, steps=steps)
        write_run(self.out, self.run)
        print(f"{steps} steps, of {1000 * each:.1f} ms", flush=True)

    def batch(self) -> Batch:
        """The next batch: code's rows, then chat's."""
        return join(
            [
                fill(stream.split, stream.take(self.counts[name]), self.run.length)
                for name, stream in self.streams.items()
            ]
        )

    def save(self) -> None:
        """Write all that is needed to go on."""
        save_state(self.out, self.state, {k: stream.cursor for k, stream in self.streams.items()})
        self.saved = self.done

    def loss(self, split: Split, count: int) -> tuple[Loss, np.ndarray]:
        """The loss on up to `count` rows of a split, and the choices of each expert there."""
        rows = held_rows(split, self.run.length, count)
        size = self.size
        total, loads = Loss(0.0, 0.0), []
        for start in range(0, len(rows.tokens), size):
            part = Batch(*(padded(leaf[start : start + size], size) for leaf in rows))
            nll, load = self.judge(self.state.params, self.state.bias, part)
            total += Loss(float(nll.sum()), float(part.weights.sum()))
            loads.append(np.asarray(load))
        return total, np.sum(loads, axis=0)

    def judged(self) -> dict[str, float]:
        """Held-out losses in nats a token, bits a byte of code, and how even the experts' loads."""
        found: dict[str, float] = {}
        loads = np.zeros(())
        for name, split in self.held.items():
            rows = self.run.judge_rows // (1 if name == "code" else 2)
            loss, load = self.loss(split, rows)
            loads = loads + load
            found[f"held_{name}"] = loss.mean
            if name == "code":
                per_byte = float(split.weights.sum()) / float(split.bytes.sum())
                found["held_code_bits_per_byte"] = loss.mean * per_byte / math.log(2)
        share = loads / np.maximum(loads.sum(axis=1, keepdims=True), 1.0)
        found["load_least"] = float(share.min() * share.shape[1])
        found["load_most"] = float(share.max() * share.shape[1])
        return found

    def judge_all(self) -> None:
        """Write the losses that an exported checkpoint is compared with."""
        found = {}
        for name, split in self.held.items():
            split = split if name == "code" else head(split, CHAT_DOCUMENTS)
            loss, load = self.loss(split, len(split.tokens))
            found[name] = asdict(loss) | {"loads": load.tolist()}
        (self.out / FINAL).write_text(json.dumps(found), encoding="utf-8")


def known_tokens(file: Path, vocabulary: int) -> Split:
    """A split; ValueError if it is of another tokenizer, with tokens that the model has not."""
    split = Split.load(file)
    if (largest := int(split.tokens.max())) >= vocabulary:
        raise ValueError(f"{file} has token {largest}, and the model only {vocabulary}")
    return split


def padded(rows: np.ndarray, size: int) -> np.ndarray:
    """Rows filled up with empty ones to the size that is compiled."""
    return np.pad(rows, ((0, size - len(rows)), (0, 0)))


def train(trainer: Trainer, deadline: float, stop_after: int | None = None) -> bool:
    """Take steps until the schedule ends or time is up; whether the schedule ended.

    The state is saved in either case, and whenever it is judged. deadline: by time.monotonic().
    stop_after: stop when so many steps were taken, counted from the run's start. Losses are read a
    report late: the device never waits for the host. RuntimeError if two reports in a row are of
    steps that were skipped.
    """
    pace = Pace(trainer.done)
    flying: deque[tuple[int, Any]] = deque()
    while trainer.done != trainer.run.steps and time.monotonic() < deadline:
        if trainer.done == stop_after:
            break
        batch = trainer.batch()
        trainer.state, metrics = trainer.step(trainer.state, batch, trainer.drop, trainer.steps)
        trainer.done += 1
        if trainer.run.steps is None and trainer.done >= max(FITTED, pace.first + 1):
            jax.block_until_ready(metrics)
            trainer.choose_steps(pace.each(trainer.done))
        ended = trainer.done in (trainer.run.steps, stop_after)
        if trainer.done % REPORT == 0 or pace.began is None:
            flying.append((trainer.done, metrics))
        if trainer.done % trainer.run.judge_every == 0 or ended:
            while flying:
                report(trainer, pace, *flying.popleft())
            jax.block_until_ready(metrics)
            paused = time.monotonic()
            row = summary(trainer, trainer.done, metrics) | trainer.judged()
            trainer.log.add(row)
            print("  ".join(f"{key} {value:.5g}" for key, value in row.items()), flush=True)
            trainer.save()
            pace.pause(time.monotonic() - paused)
        elif len(flying) > (pace.began is not None):
            report(trainer, pace, *flying.popleft())
    if trainer.saved != trainer.done:
        trainer.save()
    if trainer.done == trainer.run.steps:
        trainer.judge_all()
    return trainer.done == trainer.run.steps


class Pace:
    """What a step takes, since the second one of this process."""

    def __init__(self, done: int) -> None:
        self.first = done + 1
        self.began: float | None = None
        self.skipped = False  # the step of the last report

    def start(self) -> None:
        """The first step has run."""
        self.began = time.monotonic()

    def pause(self, seconds: float) -> None:
        """Leave out what was no training."""
        if self.began is not None:
            self.began += seconds

    def each(self, done: int) -> float:
        """Seconds a step, when so many are taken; 0 as long as nothing is known."""
        if self.began is None or done <= self.first:
            return 0.0
        return (time.monotonic() - self.began) / (done - self.first)


def report(trainer: Trainer, pace: Pace, done: int, metrics: Any) -> None:
    """One line on the terminal; waits until that step has run."""
    row = summary(trainer, done, metrics)
    if row["skipped"] and pace.skipped:
        raise RuntimeError(f"step {done}: no finite gradient again; step {trainer.saved} is saved")
    pace.skipped = bool(row["skipped"])
    if pace.began is None:
        pace.start()
    each = pace.each(done)
    rate = trainer.size * trainer.run.length / each if each else 0.0
    left = "?" if trainer.run.steps is None else f"{(trainer.run.steps - done) * each / 60:.1f}"
    print(
        f"step {done}/{trainer.run.steps}  code {row['code']:.4f}  chat {row['chat']:.4f}  "
        f"gradient {row['gradient']:.3f}  {rate:,.0f} tokens/s  {1000 * each:.1f} ms  "
        f"{left} min left",
        flush=True,
    )


def summary(trainer: Trainer, done: int, metrics: Any) -> dict[str, float]:
    """A step's losses in nats a token, and how it went."""
    nll, count = np.asarray(metrics.nll), np.asarray(metrics.count)
    code = trainer.run.code_rows
    parts = {"code": slice(0, code), "chat": slice(code, None)}
    losses = {
        name: float(nll[part].sum() / max(count[part].sum(), 1.0)) for name, part in parts.items()
    }
    rate = float(trainer.run.schedule(done - 1, trainer.steps))
    norm, skipped = float(metrics.gradient), float(metrics.skipped)
    return {"step": done, "rate": rate, **losses, "gradient": norm, "skipped": skipped}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m checkpoints.recipe.train", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="what prepare wrote")
    parser.add_argument("--out", type=Path, required=True, help="state, log and loads")
    parser.add_argument("--model", choices=tuple(SHAPES))
    parser.add_argument("--steps", type=int, help="of the whole schedule")
    parser.add_argument(
        "--train-minutes", type=float, help="instead: as many as fit, by the pace of the first 100"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="then save and stop")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    for name in ("seed", "length", "code_rows", "chat_rows", "warmup"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    for name in ("rate", "adam_rate", "decay", "code_drop", "chat_drop", "cooldown"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    return parser.parse_args(arguments)


def write_run(out: Path, run: Run) -> None:
    """Write what a run is, beside its state."""
    (out / RUN).write_text(json.dumps(asdict(run), indent=2), encoding="utf-8")


def chosen_run(options: argparse.Namespace) -> Run:
    """The run of the command line, or with --resume the one that was begun."""
    out, known = options.out, Run.__dataclass_fields__
    wishes = {k: v for k, v in vars(options).items() if k in known and v is not None}
    if options.resume:
        if not (out / STATE).is_file():
            raise SystemExit(f"error: {out} holds no {STATE} to go on from: leave --resume out")
        run = Run(**json.loads((out / RUN).read_text(encoding="utf-8")))
        if (others := {k: v for k, v in wishes.items() if v != getattr(run, k)}) != {}:
            raise SystemExit(f"error: --resume changes nothing of {out / RUN}, but got {others}")
        return run
    if (out / STATE).is_file():
        raise SystemExit(f"error: {out} holds a run: go on with --resume, or choose another --out")
    if (options.steps is None) == (options.train_minutes is None):
        raise SystemExit("error: a new run needs either --steps or --train-minutes")
    run = Run(**wishes)
    write_run(out, run)
    return run


def main(arguments: list[str] | None = None) -> int:
    """Train; 0 if the schedule ended, 3 if there is more to do."""
    began = time.monotonic()
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str((options.out / "compiled").absolute()))
    run = chosen_run(options)
    print(f"{jax.devices()[0].device_kind}: {run}", flush=True)
    trainer = Trainer(
        run, options.data, options.out, model_config(run.model), resume=options.resume
    )
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    ended = train(trainer, began + 60 * options.minutes)
    left = "the end" if ended else "go on with --resume"
    print(f"{trainer.done} of {trainer.run.steps} steps: {left}")
    return 0 if ended else 3


if __name__ == "__main__":
    raise SystemExit(main())
