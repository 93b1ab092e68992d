"""Day 16's checks beyond what all days' have: other right answers, other wrong ones, and that what
the lesson says of seven billion weights is so."""

import random
import re
from dataclasses import replace

import pytest
from edited import each, verdict_on

from memlab import train
from memlab.course import bill, days
from memlab.course.checks import day16
from memlab.course.checks.day16 import (
    ADAMW,
    DAY,
    LION_8_BIT,
    Block,
    Candidate,
    Step,
    activations,
    fastest,
    lacks,
    of_a_rank,
    peak,
)
from memlab.course.exercises import OK, WRONG, judge
from memlab.model import PRESETS
from memlab.planner import CARDS, Recipe, measured, memory_named, training_bytes
from memlab.planner.cards import CONTEXT_BYTES
from memlab.units import parse_bytes

EXERCISES = {exercise.id: exercise for exercise in DAY.exercises}
SEVEN = PRESETS["llama-2-7b"]
FOUND = Recipe(optimizer="lion8bit", checkpointing="checkpointing", step_in_backward=True)


def verdict(number, answer):
    return judge(EXERCISES[f"16.{number}"], answer)


# ------------------------------------------------------------------ other right answers


def by_a_list_of_moments(sizes, itemsize, o, activations):
    held = sum(n * itemsize for n in sizes) + sum(n * o.moments * o.moment_bytes for n in sizes)
    made = [4 * o.scratch * (n if o.piece is None else min(n, o.piece)) for n in sizes]
    left = itemsize * (max(sizes) if o.in_backward else sum(sizes))
    found = [(held + activations, "backward"), (held + left + max(made), "optimizer")]
    count, moment = max(found)
    return [moment, count]


def block_by_block(block, layers, tokens, itemsize, checkpointed, ends):
    """As the bytes come and go."""
    alive = 0
    for _ in range(layers):
        numbers = block.width if checkpointed else block.numbers
        alive += tokens * (itemsize * numbers + (0 if checkpointed else 4 * block.floats))
    most = alive + ends
    if checkpointed:
        alive += tokens * (itemsize * (block.numbers - block.width) + 4 * block.floats)
    return max(most, alive + tokens * itemsize * block.gradients)


def by_the_last_letters(memory, step):
    """Units by their letters, in a table of its own."""
    factors = {"k": 1, "M": 2, "G": 3}
    if memory in CARDS:
        total = CARDS[memory].total_bytes
    else:
        number, prefix, binary = re.match(r"([\d.]+) ?([kMG])(i?)B$", memory).groups()
        total = round(float(number) * (1024 if binary else 1000) ** factors[prefix])
    missing = step.reserved_bytes - (total - CONTEXT_BYTES[1])
    return missing if missing > 0 else 0


def by_turns(candidates, room, measure):
    """Takes the fastest out of a copy, again and again."""
    left = [c for c in candidates if not c.formula_bytes * 0.95 > room]
    while left:
        first = min(left, key=lambda c: c.seconds)
        if measure(first) <= room:
            return first
        left.remove(first)


def a_stage_after_the_other(block, end, layers, cut, stage, each, kept):
    """All stages of the line, and the fullest of them."""
    t, p, d = cut
    found = []
    for number in range(p):
        blocks = len(range(number, layers, p))
        numbers = blocks * block + (number == 0) * end + (number == p - 1) * end
        mine = (numbers + t - 1) // t
        shard = (mine + d - 1) // d
        w, g, s = (shard if stage >= at else mine for at in (3, 2, 1))
        states = w * each[0] + g * each[1] + s * each[2]
        found.append(states + (p - number) * blocks * kept // t)
    return float(found[0])


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        (1, by_a_list_of_moments),
        (2, block_by_block),
        (3, by_the_last_letters),
        (4, by_turns),
        (5, a_stage_after_the_other),
    ],
)
def test_other_right_answers_pass(number, answer):
    found = verdict(number, answer)
    assert found.status == OK, found.text


# ------------------------------------------------------------------ other wrong ones


def sorts_what_it_is_given(sizes, itemsize, optimizer, activations):
    sizes.sort()
    return peak(sizes, itemsize, optimizer, activations)


def only_bytes(sizes, itemsize, optimizer, activations):
    return peak(sizes, itemsize, optimizer, activations)[1]


def always_in_the_optimizer(sizes, itemsize, optimizer, activations):
    return "optimizer", peak(sizes, itemsize, optimizer, activations)[1]


def a_copy(candidates, room, measure):
    found = fastest(candidates, room, measure)
    return found and replace_name(found)


def replace_name(candidate):
    return Candidate("made up", candidate.seconds, candidate.formula_bytes)


def asks_for_none(candidates, room, measure):
    measure(None)


@pytest.mark.parametrize(
    ("number", "answer", "said"),
    [
        (1, sorts_what_it_is_given, "changed the list of sizes"),
        (1, only_bytes, "wanted a moment and bytes"),
        (1, always_in_the_optimizer, "says the peak is in 'optimizer'"),
        (2, lambda *given: str(activations(*given)), "wanted"),
        (2, lambda *given: 1.001 * activations(*given), "bytes; wanted"),
        (3, lambda memory, step: lacks(memory, step) > 0, "gave bool"),
        (3, lambda memory, step: step.reserved_bytes > 0, "gave bool"),
        (4, a_copy, "wanted one of the candidates"),
        (4, asks_for_none, "was asked for"),
        (5, lambda *given: of_a_rank(*given) // 10**9, "bytes; wanted"),
        (5, lambda *given: of_a_rank(*given[:3], given[3][::-1], *given[4:]), "bytes; wanted"),
    ],
)
def test_other_wrong_answers_fail(number, answer, said):
    found = verdict(number, answer)
    assert found.status == WRONG
    assert said in found.text


FORMULA, CUT = "0.95 * candidate.formula_bytes <= room", "-(-(blocks * block + ends) // tensor)"
LOOP = "    for candidate in sorted(candidates, key=lambda c: c.seconds):\n"
SURE = """        if 1.05 * candidate.formula_bytes <= room:
            return candidate
"""

REFUSED = [
    (
        "16.1",
        "activations while it steps",
        ("gradients + scratch", "gradients + scratch + activations"),
    ),
    ("16.2", "ends beside the block", ("max(ends, again +", "(ends + again +")),
    ("16.3", "whole numbers alone", ("float(memory", "int(memory")),
    ("16.4", "believed where it may not fit", (LOOP, f"{LOOP}{SURE.replace('1.05', '1.0')}")),
    (
        "16.4",
        "recipes compared",
        ("key=lambda c: c.seconds", "key=lambda c: (c.seconds, c.recipe)"),
    ),
    ("16.5", "rounded down over t", (CUT, "(blocks * block + ends) // tensor")),
]
ACCEPTED = [
    (
        "16.1",
        "pairs",
        ("max(moments, key=moments.get)", "max((b, m) for m, b in moments.items())[1]"),
    ),
    ("16.4", "sure without a measurement", (LOOP, f"{LOOP}{SURE}")),
    (
        "16.4",
        "nothing to choose from",
        (LOOP, f"    if not candidates:\n        return None\n{LOOP}"),
    ),
    ("16.5", "by ceil", (CUT, "(blocks * block + ends + tensor - 1) // tensor")),
]


@each(REFUSED)
def test_what_is_wrong_is_refused(edit, tmp_path):
    assert verdict_on(edit, tmp_path).status == WRONG


@each(ACCEPTED)
def test_what_is_right_is_accepted(edit, tmp_path):
    verdict = verdict_on(edit, tmp_path)
    assert verdict.status == OK, verdict


@pytest.mark.parametrize("call", [parse_bytes, lambda text: memory_named(text).total_bytes])
def test_who_asks_the_library_how_much_a_memory_has_is_told_so(call):
    verdict = judge(days.day(16).exercises[2], lambda memory, step: call(memory))
    assert "which this exercise rebuilds" in verdict.text


# ------------------------------------------------------------------ formulas against the meter


def sizes_of(config):
    C, F, V = config.width, config.hidden, config.vocab_size
    Q, K = config.heads * config.head_width, config.kv_heads * config.head_width
    block = [C * Q, C * K, C * K, Q * C, C * F, C * F, F * C, C, C]
    return [V * C] * (1 if config.tied else 2) + block * config.layers + [C]


def block_of(config, norms):
    C, F = config.width, config.hidden
    Q, K = config.heads * config.head_width, config.kv_heads * config.head_width
    return Block(C, (2 + norms) * C + 2 * Q + 2 * K + 4 * F, config.heads + 2, 2 * F + C)


@pytest.mark.parametrize(("batch", "length", "moment"), [(1, 4, "optimizer"), (4, 64, "backward")])
def test_a_plain_steps_peak_is_the_meters_to_the_byte(batch, length, moment):
    config = PRESETS["tiny"]
    tokens = batch * length
    ends = 4 * tokens * (3 * config.width + 1 + 3 * config.vocab_size)
    kept = activations(block_of(config, norms=4), config.layers, tokens, 4, False, ends)
    counters, tables = 4 * len(sizes_of(config)), 4 * config.seq_len * config.head_width
    losses = 2 * 4  # the loss, and its gradient or what was made of it
    trace = train.dry_trace(train.Setting("tiny", batch, length), train.combined("plain"))
    found = peak(sizes_of(config), 4, ADAMW, kept)
    assert found[0] == moment
    assert trace.peak_bytes == found[1] + counters + tables + 16 * tokens + losses


def test_a_checkpointed_backward_is_the_librarys():
    moments = training_bytes(SEVEN, FOUND, 1, 2048).moments["backward"]
    wanted = moments["blocks_kept"] + moments["block_temporaries"]
    assert activations(block_of(SEVEN, norms=2), SEVEN.layers, 2048, 2, True, 0) == wanted


def test_an_optimizers_moment_is_the_librarys():
    stepped = training_bytes(SEVEN, replace(FOUND, step_in_backward=False), 1, 2048)
    terms = stepped.moments["optimizer"]
    others = sum(terms[name] for name in ("inputs", "rotary_tables", "workspace"))
    wanted = sum(terms.values()) - others
    assert peak(sizes_of(SEVEN), 2, LION_8_BIT, 0) == ("optimizer", wanted)


def test_a_rank_is_the_librarys_but_for_the_last_norm():
    config = PRESETS["llama-3-405b"]
    recipe = Recipe(checkpointing="checkpointing", zero_stage=1, tensor_parallel=8)
    terms = training_bytes(config, recipe, 1, 8192, gpus=32).moments["optimizer"]
    end = config.vocab_size * config.width
    block = (config.parameters - 2 * end - config.width) // config.layers
    found = of_a_rank(block, end, config.layers, (8, 1, 4), 1, (2, 2, 4), 0)
    wanted = terms["weights"] + terms["gradients"] + terms["optimizer_state"]
    assert 0 <= wanted - found <= 5 * config.width


@pytest.mark.parametrize("memory", ["24GB", "24GiB", "900 MiB", *CARDS])
def test_nothing_is_lacking_up_to_the_planners_budget_and_a_byte_beyond_it(memory):
    budget = memory_named(memory).budget_bytes
    assert lacks(memory, Step(0, budget)) == 0
    assert lacks(memory, Step(0, budget + 1)) == 1


def test_the_search_finds_what_measuring_all_would_find_with_as_few_as_can_prove_it():
    random_ = random.Random(0)
    for _ in range(200):
        candidates = [
            Candidate(str(n), random_.random(), random_.randrange(50, 200)) for n in range(12)
        ]
        taken = {c: c.formula_bytes * random_.uniform(0.951, 1.049) for c in candidates}
        room, asked = random_.randrange(40, 220), []

        def measure(candidate, taken=taken, asked=asked):
            asked.append(candidate)
            return taken[candidate]

        found = fastest(candidates, room, measure)
        fitting = [c for c in candidates if taken[c] <= room]
        assert found == min(fitting, key=lambda c: c.seconds, default=None)
        limit = float("inf") if found is None else found.seconds
        in_doubt = {c for c in candidates if c.seconds <= limit and 0.95 * c.formula_bytes <= room}
        assert set(asked) == in_doubt
        assert len(asked) == len(in_doubt)


# ------------------------------------------------------------------ what the lesson says


def notebook():
    return days.notebook(16, "solutions").with_suffix(".py").read_text(encoding="utf-8")


def in_the_lesson():
    """Batch, allocated and reserved bytes of its table."""
    rows = re.findall(r"(\d): Predicted\(([\d_]+), ([\d_]+)\)", notebook())
    return {int(batch): (int(allocated), int(reserved)) for batch, allocated, reserved in rows}


def test_the_lessons_context_is_the_planners():
    mib = re.search(r"^CONTEXT = (\d+) \* 2\*\*20\b", notebook(), re.M)
    assert int(mib[1]) * 2**20 == CONTEXT_BYTES[1] == day16.CONTEXT


def test_the_lessons_table_has_three_batches():
    assert sorted(in_the_lesson()) == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_the_lessons_table_is_what_is_predicted(batch):
    recipe = replace(FOUND, chunked_loss=True)
    found = measured(train.Setting(SEVEN, batch, 2048, recipe.dtype, "cuda"), recipe.techniques)
    assert in_the_lesson()[batch] == (found.allocated_bytes, found.reserved_bytes)


@pytest.mark.slow
def test_chunked_logits_allocate_more_of_one_sequence_and_reserve_less():
    def of(recipe):
        setting = train.Setting(SEVEN, 1, 2048, recipe.dtype, "cuda")
        return measured(setting, recipe.techniques)

    whole, chunked = of(FOUND), of(replace(FOUND, chunked_loss=True))
    assert f"{(chunked.allocated_bytes - whole.allocated_bytes) / 2**30:.2f}" == "0.33"
    assert f"{(whole.reserved_bytes - chunked.reserved_bytes) / 2**30:.2f}" == "0.05"


@pytest.mark.slow
def test_the_guides_recipe_takes_six_bytes_a_weight_before_it_accumulates():
    recipe = Recipe(optimizer="adam8bit", checkpointing="checkpointing")
    found = measured(train.Setting(SEVEN, 1, 2048, recipe.dtype, "cuda"), recipe.techniques)
    assert (found.allocated_bytes, found.reserved_bytes) == (40_990_962_688, 42_867_884_032)
    assert found.peak_phase == "optimizer"
    assert 6 < found.allocated_bytes / SEVEN.parameters < 6.1


def test_todays_bill_is_below_yesterdays():
    before, now = (bill.stored(days.day(n).bill).peak_bytes for n in (15, 16))
    assert now < before


@pytest.mark.slow
def test_todays_bill_still_has_the_averages(monkeypatch):
    """Without their updates the line would be the same; they are made."""
    updates = []
    update = train.PostHocEMA.update

    def noted(self, step):
        updates.append(step)
        return update(self, step)

    monkeypatch.setattr(train.PostHocEMA, "update", noted)
    day16.everything_elsewhere()
    assert updates == [1, 2]
