"""`memlab run`: predict or measure a training script as it is, without changing a line."""

import io
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path

from memlab.allocator.capacity import needed_bytes
from memlab.cli import run_report, terminal
from memlab.cli.advice import advice, why_not
from memlab.cli.errors import UsageError
from memlab.cli.parsing import choose_folder
from memlab.cli.requests import RunRequest
from memlab.cli.results import fill_font_cache, write_run
from memlab.cli.rows import Row
from memlab.cli.run_options import RunOptions, check_options, choose_room, choose_script
from memlab.cli.run_progress import announce, ended_by_a_signal, telling_where
from memlab.cli.script import as_usage_errors
from memlab.scripts.changes import changes_for
from memlab.scripts.running import Outcome, joins_others
from memlab.scripts.runs import ScriptRun, Trials, highest, outcomes_of, try_changes
from memlab.trace import Trace
from memlab.units import format_bytes
from memlab.world.confinement import unconfined_reason

_UNCONFINED = (
    "the operating system does not confine the script ({}); only functions that memlab replaces in "
    "Python keep it from files, programs and the network"
)


def run_script(request: RunRequest) -> int:
    """Run the script, print where its memory goes, write results; return 1 if it does not fit."""
    check_options(request)
    folder = choose_folder(request.out)
    memory, target = choose_room(request)
    script = choose_script(request, None if request.real else target)
    options = RunOptions(script, memory, target, request.advise, folder, request.confinement)
    return _run(options)


def _run(options: RunOptions) -> int:
    script, budget = options.script, options.budget_bytes
    began = time.monotonic()
    outcomes = _outcomes(options)
    seconds = time.monotonic() - began
    outcome = outcomes[highest(outcomes)]
    trace = outcome.trace
    assert trace is not None
    if script.is_real and outcome.rank > 0:
        return _write_another_rank(options, outcome.rank, outcome.ranks, trace)
    needed = 0 if budget is None else needed_bytes(trace, budget)
    fits = budget is None or needed <= budget
    terminal.show(run_report.of_step(options, outcomes, needed))
    name = str(script.launch)
    rows = [Row(name, trace)]
    if options.advise or (options.advise is None and not fits):
        trials = _trials(script, outcome, seconds)
        terminal.show(advice(trials, outcome, budget))
        rows += [Row(f"with {name}", each) for name, each in trials.traces.items()]
    elif not script.is_real:
        terminal.echo("\n--advise predicts changes that save memory, and prints their code")
    terminal.show(run_report.notes(trace))
    verdict = "measured" if budget is None else "fits" if fits else "does not fit"
    attempts = [attempt for each in outcomes.values() for attempt in each.attempts]
    title = name if script.is_real else f"{name}, predicted for {options.target}"
    write_run(rows, title, options.folder, verdict, attempts)
    return int(not fits)


def _outcomes(options: RunOptions) -> Mapping[int, Outcome]:
    """Run the script; return the outcomes by rank. What it prints goes to standard error."""
    script, confinement = options.script, options.confinement
    launch = script.launch
    if confinement is not None:
        fill_font_cache()
        confinement.begin(options.folder, network=joins_others(launch, real=script.is_real))
    announce(f"running {launch} until step {script.steps} has ended")
    if not script.allow_writes and confinement is None:
        announce(_UNCONFINED.format(unconfined_reason()))
    with (
        ended_by_a_signal(),
        telling_where(launch.folder),
        as_usage_errors(
            Path(launch.script), launch.folder, "a run without --real" if script.is_real else ""
        ),
        redirect_stdout(sys.stderr),
    ):
        outcomes = outcomes_of(script, announce)
    trace = outcomes[highest(outcomes)].trace
    if trace is None:
        raise UsageError(
            f"{launch} ended without a training step: no torch.optim optimizer stepped and "
            f"nothing called backward; give the arguments that make it train"
        )
    if not trace.peak_bytes:
        raise UsageError(f"the step of {launch} allocated nothing on {trace.device}")
    return outcomes


def _trials(script: ScriptRun, plain: Outcome, seconds: float) -> Trials:
    """Try changes that save memory. `seconds` is what the script took as it is."""
    assert plain.trace is not None
    changes = changes_for(script.device or "cuda", plain.trace, plain.models, plain.evaluation)
    announce(
        f"trying {len(changes)} changes, then combinations of the helpful ones, about "
        f"{max(1, round(seconds))} s for each; --no-advice leaves them out"
    )
    return try_changes(script, plain, changes, announce, why_not)


def _write_another_rank(options: RunOptions, rank: int, ranks: int | None, trace: Trace) -> int:
    """Print one line, so that the outputs of real ranks do not mix; write to an own folder."""
    which = f"rank {rank} of {ranks}"
    peak = f"peak {format_bytes(trace.peak_bytes)} in {trace.peak_phase}"
    folder = options.folder / f"rank{rank}"
    print(terminal.printable(f"{which}: {peak} ({folder}/run.json)"), flush=True)
    name = str(options.script.launch)
    with redirect_stdout(io.StringIO()):
        write_run([Row(name, trace)], f"{name}, {which}", folder, "measured")
    return 0
