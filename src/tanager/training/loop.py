"""Private training from start to finish, one story read from top to bottom."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from tanager import _validate as validate
from tanager._files import as_json
from tanager._heap import give_back
from tanager.clipping import Explanation
from tanager.data.loader import an_example
from tanager.measures import HEADLINES
from tanager.parallel import hosts
from tanager.privacy import accountant
from tanager.privacy.ledger import Ledger
from tanager.privacy.shown import format_epsilon
from tanager.seed import Seed
from tanager.training import (
    beginning,
    charging,
    class_weights,
    estimate,
    fingerprint,
    sizing,
    tuning,
)
from tanager.training.estimate import Estimate
from tanager.training.evaluate import Evaluation
from tanager.training.feed import Feed, can_hold, feeding
from tanager.training.interrupt import Interrupt
from tanager.training.metrics import Metrics
from tanager.training.problem import DPSGD, Problem, Runtime
from tanager.training.progress import Clock, TrainingProgress, measuring
from tanager.training.result import TrainResult, hand_over, scores
from tanager.training.resume import Position, resume
from tanager.training.run_folder import RunFolder, naming_full_disks
from tanager.training.state import Counts, State
from tanager.training.step import Step


# It moves data to devices by many calls, also where the caller forbids it.
@jax.transfer_guard("allow")
def train(
    problem: Problem,
    algorithm: DPSGD,
    runtime: Runtime | None = None,
    *,
    out: str | Path | None = None,
    seed: int | None = None,
    evaluate: Callable[[PyTree], Evaluation] | None = None,
    evaluate_every: int | None = None,
    on_metrics: Callable[[Mapping[str, Any]], None] | None = None,
    on_estimate: Callable[[Estimate], None] | None = None,
    description: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Train any JAX loss with DP-SGD under the guarantee of a mechanism.

    With `out`, the run is a folder (see `tanager.training.run_folder`): killed at any
    moment, the same call resumes it and ends with bit-identical parameters on the same
    machine and versions. In another environment (see `tanager.training.resume`), steps
    after the last checkpoint are dropped, and their charge stays.

    Args:
        problem: what is learned, from whose examples.
        algorithm: how, under which guarantee.
        runtime: how fast; None for `Runtime()`.
        out: the run's folder; None trains without files, and without resuming.
        seed: None draws the secret from the operating system; a number makes the run
            reproducible by anyone and therefore NOT private.
        evaluate: function of parameters, such as `tanager.Classification`; called
            with the parameters and with their average. It is also called once or twice
            before the first step: to time it, and so that its errors cost no privacy.
        evaluate_every: steps between evaluations, and between lines of metrics.jsonl
            also without `evaluate`; a twentieth of the run by default.
        on_metrics: called on every host with each line of metrics.jsonl once it is
            written: the step, ε so far, seconds, and what was evaluated. After a resume
            lines can come again. What it raises ends the run, once it is saved.
        on_estimate: called on every host, before anything is charged, with how long the
            run will take. What it raises ends the run.
        description: names and settings to put on record in config.json, as JSON; a
            change of them on resume is refused.

    Raises:
        ValueError: an argument is out of range, the loss cannot be made private,
            `out` holds another run, or the run cannot be charged to its account.
        KeyboardInterrupt: on Ctrl-C or SIGTERM, after a checkpoint was written; in the
            last step, after everything was.
        FloatingPointError: the parameters stopped being finite.
    """
    give_back()
    # 1. Refuse bad input before anything is made or spent.
    runtime = runtime or Runtime()
    remedy = "train(problem, algorithm, runtime)"
    validate.instance(Problem, remedy, problem=problem)
    validate.instance(DPSGD, remedy, algorithm=algorithm)
    validate.instance(Runtime, remedy, runtime=runtime)
    functions = {"on_metrics": on_metrics, "on_estimate": on_estimate}
    validate.function_or_none(evaluate=evaluate, **functions)
    if description is not None and out is None:
        rule = "does not apply without a folder, whose config.json would hold it"
        validate.refuse("description", description, rule, "give out, or leave it out")
    mechanism, delta = algorithm.mechanism, algorithm.delta
    source = problem.source()
    count = problem.size()
    public = algorithm.public_size(count)
    beginning.check(problem, algorithm, count, out)
    beginning.check_examples(source, evaluate)
    account = charging.account_of(problem)
    spent = algorithm.mechanisms()
    charging.require_room(account, spent, delta, out, seed)
    twentieth = max(1, mechanism.steps // 20)
    every = twentieth if evaluate_every is None else evaluate_every
    validate.whole(evaluate_every=every, at_least=1)
    layout = runtime.layout()
    size = sizing.least(runtime, layout)
    layout.check(size, public)
    described = beginning.as_description(description)
    one = an_example(source, problem.unreadable)
    held = can_hold(source, layout)
    step = Step(problem, algorithm, runtime, Seed.from_os(), len(source), layout, held)
    if runtime.physical_batch_size != "auto":
        size = sizing.enough(step.sampler, size, layout.count)
        runtime = dataclasses.replace(runtime, physical_batch_size=size)
    step.check(step.params, one, size)

    # 2. The run's folder, its secret, and where it stands: the newest checkpoint, else
    #    the beginning.
    alone, chief = hosts.count() == 1, hosts.is_chief()
    folder = None if out is None else hosts.chief_first(lambda: RunFolder(out))
    secret = Seed.from_os() if seed is None else Seed.from_int(seed)
    if folder is not None:
        secret = hosts.chief_first(lambda: folder.seed(seed, make=chief))
    step = step.with_seed(secret)
    size, clipping = _tuned(step, runtime, one, folder)
    runtime = dataclasses.replace(runtime, physical_batch_size=size)
    config = {
        **described,
        **problem.as_json(),
        **algorithm.as_json(public),
        **runtime.as_json(),
        **charging.record(out, secret),
        **_of_machine(step, clipping),
    }
    balances = algorithm.class_counts is not None
    if balances:
        config |= hosts.from_chief(lambda: class_weights.recorded(out))
    if folder is not None:
        config["began"] = folder.began()
    config = as_json(config)
    state = step.start(step.params)
    if folder is None:
        position = Position(state, Ledger())
    else:
        prints = fingerprint.fingerprints(secret, step, source, one)
        position = resume(folder, secret, config, prints, state)
    begun, state = position.begun, position.state

    # 3. Charge, sample, clip, add noise, update; evaluate and checkpoint on the way.
    with (
        naming_full_disks(out),
        closing(position),
        closing(Metrics(folder if chief else None, begun)) as metrics,
        feeding(problem, runtime, source, one, step, begun) as feed,
    ):
        shown = TrainingProgress(mechanism.steps, begun, runtime.progress and chief)
        clock = Clock(metrics.released)
        bound = _epsilon_ahead(algorithm, begun, every)
        evaluations = None
        if begun:
            shown.say(f"{begun} of {mechanism.steps} steps were made before, in {out}")
        if not secret.private:
            shown.say("NOT PRIVATE: whoever knows the seed can compute the noise")
        if begun < mechanism.steps:
            beginning.try_out(step.models(state)[0], evaluate, problem.finish)
            asked = on_estimate is not None
            if hosts.from_chief(lambda: asked or runtime.progress):
                found = _estimate(step, state, feed, evaluate, begun, every, size)
                shown.say(found.sentence())
                if on_estimate is not None:
                    on_estimate(found)
        own = charging.charge_of(account, spent, delta, out, secret)
        charging.charge(account, own)
        if balances:
            step = class_weights.release(
                problem, algorithm, position, secret, config, step
            )
        with shown.bar, Interrupt() as interrupt:
            for number in range(begun, mechanism.steps):
                if interrupt and alone:
                    _stop(position, number, state)
                position.charge(mechanism, number)
                total, skipped = step.zero(), 0
                key = step.augmentation_key(number)
                for batch, unreadable in clock.waiting(feed.batches(number)):
                    if interrupt and alone:
                        _stop(position, number, state)
                    given = state.params, total, batch, key, state.clip_norm
                    total = clock.running(step.accumulate(*given))
                    skipped += unreadable
                drawn = step.draw(number)
                state, counts, sums = step.apply(state, total, drawn, np.int32(number))
                position.require_same(number, sums)
                done = number + 1
                due = chief and position.save_is_due(runtime.checkpoint_seconds)
                stop = bool(interrupt) and not alone
                skipped, due, stop = hosts.total(skipped, due, stop)
                metrics.keep(_private_line(done, jax.device_get(counts), skipped))
                clock.tick()
                shown.step(done, bound)
                if done % every == 0 or done == mechanism.steps:
                    _require_finite(state, done)
                    line = {"step": done, "epsilon": bound, "seconds": clock.seconds()}
                    evaluations = _evaluate(evaluate, step, state)
                    line |= _released(state, evaluations)
                    metrics.release(line)
                    if on_metrics is not None:
                        with _saved_on_error(position, done, state, alone):
                            on_metrics(line)
                    shown.say(_sentence(line, mechanism.steps, algorithm.ema_decay > 0))
                    bound = _epsilon_ahead(algorithm, done, every)
                if done == mechanism.steps or due or stop:
                    position.save(done, state)
                if stop and done < mechanism.steps:
                    raise hosts.Stopped

        # 4. Hand over: the guarantee from the ledger, the models, the report.
        evaluations = evaluations or _evaluate(evaluate, step, state)
        params, average = map(problem.finish, layout.whole(step.models(state)))
        models, speed = (params, average), clock.speed(step.sampler.expected_batch_size)
        total = charging.total(account, own)
        result = hand_over(
            position, config, models, evaluations, secret.private, speed, total
        )
        (stop,) = hosts.total(bool(interrupt))
        if stop:
            raise hosts.Stopped
        return result


@contextlib.contextmanager
def _saved_on_error(
    position: Position, done: int, state: State, alone: bool
) -> Iterator[None]:
    """Save first if what is called raises; several hosts would wait for each other."""
    try:
        yield
    except Exception:
        if alone:
            position.save(done, state)
        raise


def _stop(position: Position, done: int, state: State) -> NoReturn:
    """Save, and say in `KeyboardInterrupt` what was saved."""
    position.save(done, state)
    words = "nothing was saved: train was called without out"
    if position.folder is not None:
        path = position.folder.path
        words = f"{done} steps were saved in {path}: the same call trains the others"
    raise KeyboardInterrupt(words)


def _tuned(
    step: Step, runtime: Runtime, one: PyTree, folder: RunFolder | None
) -> tuple[int, Explanation]:
    """Return the size of a physical batch, and how one is clipped.

    A run that measured more when it resumed would clip by other methods.
    """
    size, share = runtime.physical_batch_size, runtime.measure_share
    began = folder is not None and folder.config.exists()
    with measuring(runtime.progress and hosts.is_chief()) as report:
        if size == "auto":
            known = sizing.recorded(folder, step.layout)
            size = known or sizing.choose(step, one, share, report)
        updates = 0 if began else step.sampler.mechanism.steps
        worth = share * updates * estimate.physical_batches(step.sampler, size)
        clipping = tuning.sync_clipping(step, one, size, report, worth)
    return size, clipping


def _of_machine(step: Step, clipping: Explanation) -> dict[str, Any]:
    """Return what config.json records of the model and of what computes on it."""
    trained, frozen = map(jax.tree.leaves, (step.params, step.frozen))
    return {
        "devices": step.layout.count,
        "hosts": hosts.count(),
        "clipping": clipping.fingerprint,
        "parameters": sum(leaf.size for leaf in trained),
        "frozen_parameters": sum(leaf.size for leaf in frozen),
        "versions": fingerprint.versions(),
    }


def _estimate(
    step: Step,
    state: State,
    feed: Feed,
    evaluate: Callable | None,
    begun: int,
    every: int,
    size: int,
) -> Estimate:
    updates = step.sampler.mechanism.steps - begun
    batches = estimate.physical_batches(step.sampler, size)
    update = estimate.time_update(step, state, begun, feed.empty(), batches)
    evaluation = 0.0
    if evaluate is not None:
        evaluation = estimate.time_evaluation(evaluate, step.models(state)[0])
    evaluations = 0 if evaluate is None else -(-updates // every)
    held = estimate.memory_bytes()
    return Estimate(updates, update, evaluations, evaluation, held)


def _epsilon_ahead(algorithm: DPSGD, done: int, every: int) -> float:
    """Return ε at the next evaluation: a bound on what is spent until then."""
    mechanism, delta, by = algorithm.mechanism, algorithm.delta, algorithm.accountant
    steps = min((done // every + 1) * every, mechanism.steps)
    coarseness = 1.0 if steps == mechanism.steps else 8.0
    spent = [*algorithm.mechanisms()[:-1], dataclasses.replace(mechanism, steps=steps)]
    return accountant.composed_epsilon(spent, delta, by, coarseness)


def _private_line(done: int, drawn: Counts, skipped: int) -> dict[str, Any]:
    examples = int(drawn.examples)
    usable = examples - int(drawn.dropped)
    return {
        "step": done,
        "examples": examples,
        "loss": float(drawn.losses) / usable if usable else None,
        "clipped": int(drawn.clipped) / usable if usable else None,
        "dropped": int(drawn.dropped),
        "unreadable": skipped,
        "norms": drawn.norms.tolist(),
    }


def _released(
    state: State, evaluations: tuple[Evaluation, Evaluation] | None
) -> dict[str, Any]:
    """Return what a line of metrics.jsonl says of the state."""
    found = {name: of for name, of in scores(evaluations).items() if of is not None}
    norm = {} if state.clip_norm is None else {"clip_norm": float(state.clip_norm)}
    return norm | found


def _require_finite(state: State, done: int) -> None:
    if not _all_finite(state.params):
        raise FloatingPointError(
            f"the parameters are not finite after step {done}: lower the learning rate "
            "and train into another folder"
        )


@jax.jit
def _all_finite(tree: PyTree) -> jax.Array:
    leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(leaves))


def _evaluate(
    evaluate: Callable | None, step: Step, state: State
) -> tuple[Evaluation, Evaluation] | None:
    if evaluate is None:
        return None
    raw, average = step.models(state)
    return evaluate(raw), evaluate(average)


def _sentence(line: dict[str, Any], steps: int, averaged: bool) -> str:
    spent = f"ε = {format_epsilon(line['epsilon'])}"
    if math.isinf(line["epsilon"]):
        spent = "NOT PRIVATE"
    text = f"step {line['step']}/{steps}  {spent}"
    for name, words in HEADLINES.items():
        if (value := line.get(f"test_{name}")) is not None:
            average = 100 * line.get(f"test_{name}_ema", math.nan)
            text += f"  test {words} {100 * value:.1f} %"
            text += f" (average of parameters {average:.1f} %)" * averaged
    return text
