"""Day 8's checks let right answers of another make pass, and what they want is the library's."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from edited import each, verdict_on

import memlab
from memlab import optim
from memlab.course import bill, days
from memlab.course.bill import SETTING
from memlab.course.exercises import OK, WRONG, judge
from memlab.model import GPT, PRESETS
from memlab.optim.adamw import adamw_ as librarys_adamw_
from memlab.reference.adam_mini import adam_mini_, block_size
from memlab.reference.adamw import adamw_
from memlab.reference.lion import lion_
from memlab.reference.step_in_backward import in_backward
from memlab.train import Setting, combined, dry_trace
from memlab.units import format_bytes

ADAMW, LION, BLOCK_SIZE, ADAM_MINI, IN_BACKWARD = days.day(8).exercises


# ------------------------------------------------------------------ right in another way


def adamw_as_torch_writes_it(weight, gradient, state, lr, betas, eps=1e-8, weight_decay=0.01):
    """In place, lerp and addcdiv, a counter that is a tensor."""
    if "m" not in state:
        state["t"] = torch.tensor(0.0)
        state["m"], state["v"] = torch.zeros_like(weight), torch.zeros_like(weight)
    state["t"] += 1
    step = state["t"].item()
    weight.mul_(1 - lr * weight_decay)
    state["m"].lerp_(gradient, 1 - betas[0])
    state["v"].mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    root = (state["v"].sqrt() / (1 - betas[1] ** step) ** 0.5).add_(eps)
    weight.addcdiv_(state["m"], root, value=-lr / (1 - betas[0] ** step))


def adamw_in_one_update(weight, gradient, state, lr, betas, eps=1e-8, weight_decay=0.01):
    """The decay in the same line as the step; numbers for zeros."""
    m, v, t = (state.get(name, 0) for name in "mvt")
    m, v, t = betas[0] * m + (1 - betas[0]) * gradient, betas[1] * v, t + 1
    v = v + (1 - betas[1]) * gradient**2
    m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    weight.copy_(weight - lr * (m_hat / (v_hat.sqrt() + eps) + weight_decay * weight))
    state |= {"m": m, "v": v, "t": t}


def with_default_betas(step_):
    return lambda *args, betas=(0.9, 0.999), **settings: step_(*args, betas=betas, **settings)


def adamw_through_data(weight, gradient, state, **settings):
    """Past autograd's notes: `.data` is the weight, too."""
    adamw_(weight.data, gradient, state, **settings)


def lion_in_place(weight, gradient, state, lr, betas=(0.9, 0.99), weight_decay=0.0):
    m = state.setdefault("m", torch.zeros_like(gradient))
    mix = m.lerp(gradient, 1 - betas[0])
    weight.sub_(weight * (lr * weight_decay) + lr * mix.sign_())
    m.lerp_(gradient, 1 - betas[1])


def lion_by_comparing(weight, gradient, state, lr, betas=(0.9, 0.99), weight_decay=0.0):
    """Two comparisons for a sign."""
    m = state.get("m", 0.0)
    mix = betas[0] * m + (1 - betas[0]) * gradient
    weight -= lr * ((mix > 0).float() - (mix < 0).float() + weight_decay * weight)
    state["m"] = betas[1] * m + (1 - betas[1]) * gradient


def block_size_by_cases(name, shape, head_width):
    *_, layer, kind = name.split(".")
    match kind, layer:
        case "bias", _:
            return 1
        case _, "query" | "key" if shape[0] % head_width == 0:
            return head_width * shape[1]
        case _, "norm" | "mlp_norm" | "attention_norm":
            return shape[0]
        case _, "embedding" | "unembedding" | "value" | "output" | "gate" | "up" | "down":
            return shape[1]
    raise ValueError(name)


def by_the_librarys_rules(name, shape, head_width):
    """The rules as data."""
    rules = {**optim.adam_mini.GPT_RULES, "bias": "number"}
    ends = [end for end in rules if f".{name}".endswith(f".{end}")]
    if not ends:
        raise ValueError(name)
    return optim.adam_mini.block_size(rules[max(ends, key=len)], name, shape, head_width)


def adam_mini_flat(
    weight, gradient, state, size, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01
):
    """v without a second dimension, and the block's root repeated when it is used."""
    squares = gradient.flatten().square().unflatten(0, (-1, size)).mean(1)  # (blocks,)
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = betas[0] * state.get("m", 0.0) + (1 - betas[0]) * gradient
    state["v"] = betas[1] * state.get("v", 0.0) + (1 - betas[1]) * squares
    root = (state["v"] / (1 - betas[1] ** t)).sqrt().add(eps).repeat_interleave(size)
    weight.sub_(lr * weight_decay * weight)
    weight.sub_(lr / (1 - betas[0] ** t) * state["m"] / root.view_as(weight))


def in_backward_with_flags(weights, update):
    """A list of flags, a hook of its own for each weight, a check that comes before `.grad`."""
    done = [False] * len(weights)

    def refuse(gradient, n):
        if done[n]:
            raise RuntimeError("twice")

    def step(weight, n):
        update(weight)
        done[n], weight.grad = True, None

    for n, weight in enumerate(weights):
        weight.register_hook(partial(refuse, n=n))
        weight.register_post_accumulate_grad_hook(partial(step, n=n))

    def end_step():
        done[:] = [False] * len(weights)

    return end_step


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (ADAMW, with_default_betas(adamw_as_torch_writes_it)),
        (ADAMW, with_default_betas(adamw_in_one_update)),
        (ADAMW, adamw_through_data),
        (LION, lion_in_place),
        (LION, lion_by_comparing),
        (BLOCK_SIZE, block_size_by_cases),
        (BLOCK_SIZE, by_the_librarys_rules),
        (ADAM_MINI, adam_mini_flat),
        (IN_BACKWARD, in_backward_with_flags),
    ],
)
def test_another_right_answer_passes(exercise, answer):
    verdict = judge(exercise, answer)
    assert verdict.status == OK, verdict


# ------------------------------------------------------------------ wrong in another way


def by_torch(weight, gradient, state, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    if not state:
        parameter = torch.nn.Parameter(weight)
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        state["optimizer"] = torch.optim.AdamW([parameter], foreach=False, **settings), parameter
    optimizer, parameter = state["optimizer"]
    parameter.grad = gradient
    optimizer.step()


def by_the_library(weight, gradient, state, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    if not state:
        state.update(t=0, m=torch.zeros_like(weight), v=torch.zeros_like(weight))
    state["t"] += 1
    settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    librarys_adamw_(weight, gradient, state["m"], state["v"], step=state["t"], **settings)


def through_the_gradient(weight, gradient, state, **settings):
    adamw_(weight, gradient, state, **settings)
    gradient.zero_()


def under(names, step_):
    """The right step, kept under other names."""

    def renamed_(weight, gradient, state, *rest, **settings):
        own = {name: state[other] for name, other in names.items() if other in state}
        step_(weight, gradient, own, *rest, **settings)
        state.update((names[name], value) for name, value in own.items())

    return renamed_


TORCHS = {"m": "exp_avg", "v": "exp_avg_sq", "t": "step"}


def adamw_in_a_tuple(weight, gradient, state, **settings):
    own = dict(zip("mvt", state.get("all", ()), strict=False))
    adamw_(weight, gradient, own, **settings)
    state["all"] = tuple(own[name] for name in "mvt")


def adamw_flat(weight, gradient, state, **settings):
    adamw_(weight.view(-1), gradient.reshape(-1), state, **settings)


def lion_decayed_in_place(weight, gradient, state, lr, betas=(0.9, 0.99), weight_decay=0.0):
    """The decay is in place, the step is not."""
    weight *= 1 - lr * weight_decay
    lion_(weight.clone(), gradient, state, lr, betas)


def mini_with_each_v_in(key):
    """A v for every weight, as an array of numpy, whose bytes no tensor has."""

    def step_(weight, gradient, state, size, lr, betas=(0.9, 0.999), **rest):
        array = state.pop(key, None)
        before = 0 * gradient if array is None else torch.from_numpy(array)
        own = {name: state[name] for name in "mt" if name in state}
        if own:
            own["v"] = before.reshape(-1, size).mean(1, keepdim=True)
        adam_mini_(weight, gradient, own, size, lr, betas, **rest)
        each = betas[1] * before + (1 - betas[1]) * gradient**2
        state.update(own)
        state[key] = each.numpy().copy()

    return step_


HIDDEN = []


def with_a_copy_elsewhere(weight, gradient, state, **settings):
    """Right weights; a copy of the gradient lies in a list."""
    lion_(weight, gradient, state, **settings)
    HIDDEN[:] = [gradient.double()]


def sign_of_the_new_momentum(weight, gradient, state, lr, betas=(0.9, 0.99), weight_decay=0.0):
    """In place, so that the momentum is new before it is looked at."""
    m = state.setdefault("m", torch.zeros_like(gradient))
    m.mul_(betas[1]).add_(gradient, alpha=1 - betas[1])
    weight.mul_(1 - lr * weight_decay)
    weight.add_((betas[0] * m + (1 - betas[0]) * gradient).sign(), alpha=-lr)


def rows_for_all(name, shape, head_width):
    return shape[-1] if len(shape) > 1 else shape[0] if name.endswith("norm.weight") else 1


def refused_when_all_were_stepped(weights, update):
    """It counts: the first gradient too many is found after it was stepped by."""
    count = [0]

    def hook(weight):
        update(weight)
        weight.grad = None
        count[0] += 1
        if count[0] > len(weights):
            raise RuntimeError("too many")

    for weight in weights:
        weight.register_post_accumulate_grad_hook(hook)
    return lambda: count.__setitem__(0, 0)


def refused_by_a_full_set(weights, update):
    """It knows the weights, and looks only whether all were stepped."""
    stepped = set()

    def hook(weight):
        gradient, weight.grad = weight.grad, None
        if len(stepped) == len(weights):
            raise RuntimeError("again")
        stepped.add(weight)
        weight.grad = gradient
        update(weight)
        weight.grad = None

    for weight in weights:
        weight.register_post_accumulate_grad_hook(hook)
    return stepped.clear


@pytest.mark.parametrize(
    ("exercise", "answer", "said"),
    [
        (ADAMW, by_torch, "of torch.optim"),
        (ADAMW, by_the_library, "of memlab.optim.adamw; wanted your own lines."),
        (ADAMW, through_the_gradient, "changed the gradient; leave it as it is."),
        (ADAMW, under(TORCHS, adamw_), "keys ['exp_avg', 'exp_avg_sq', 'step'], wanted ['m', 't'"),
        (ADAMW, adamw_in_a_tuple, "state['all'] is a tuple; wanted tensors, and numbers,"),
        (ADAMW, adamw_flat, "state['m'] is of shape (6000,), wanted the weight's, (100, 60)."),
        (LION, under({"m": "exp_avg"}, lion_), "has the keys ['exp_avg'], wanted ['m']: what"),
        (LION, lion_decayed_in_place, "left them as they were."),
        (ADAM_MINI, under(TORCHS, adam_mini_), "wanted ['m', 't', 'v']: what comes later looks"),
        (ADAM_MINI, mini_with_each_v_in("each"), "state['each'] is a ndarray; wanted tensors,"),
        (ADAM_MINI, mini_with_each_v_in("v"), "state['v'] is a ndarray; wanted tensors,"),
        (LION, with_a_copy_elsewhere, "72,000 bytes are kept between steps, wanted 24,000."),
        (LION, sign_of_the_new_momentum, "brought up to date before its use"),
        (BLOCK_SIZE, rows_for_all, "query.weight', (32, 32), 8) gave 32, wanted 256."),
        (IN_BACKWARD, refused_when_all_were_stepped, "but had changed 1 of 13 weights by then."),
        (IN_BACKWARD, refused_by_a_full_set, "one weight, a further backward before end_step()"),
        (
            IN_BACKWARD,
            lambda weights, update: optim.step_in_backward(torch.optim.SGD(weights)).step,
            "of torch.optim",
        ),
    ],
)
def test_a_mistake_of_another_make_is_told(exercise, answer, said):
    verdict = judge(exercise, answer)
    assert verdict.status == WRONG
    assert said in verdict.text


# ------------------------------------------------------------------ the solution, edited

BETAS = "beta1, beta2 = betas"
LAYER = 'layer, kind = name.split(".")[-2:]'
BIAS = '    if kind == "bias":\n        return 1\n'
NORMS = '    if layer in ("attention_norm", "mlp_norm", "norm"):\n        return shape[0]\n'
DECAY = "1 - lr * weight_decay"
COUNTED = 'state["t"] += 1'
T = '    t = state["t"]\n'
END = "    return stepped.clear"
ONLY_IF_ALL = """    def end_step():
        if len(stepped) < len(weights):
            raise RuntimeError("some were not stepped")
        stepped.clear()

    return end_step"""

REFUSED = [
    ("8.1", "the smaller beta first", (BETAS, "beta1, beta2 = sorted(betas)")),
    (
        "8.1",
        "no step where no gradient",
        ("weight -= lr * state", "weight -= (gradient != 0) * lr * state"),
    ),
    (
        "8.1",
        "the first lr for ever",
        (BETAS, f"{BETAS}\n    lr = LR_OF.setdefault(id(state), lr)"),
        ("def adamw_(", "LR_OF = {}\n\n\ndef adamw_("),
    ),
    ("8.1", "t begins again", (COUNTED, 'state["t"] = state["t"] % 5_000 + 1')),
    (
        "8.1",
        "t begins again at a number",
        (COUNTED, 'state["t"] += 1 - 1_000 * (state["t"] == 1_000)'),
    ),
    ("8.1", "t is held", (COUNTED, 'state["t"] = min(state["t"] + 1, 2_000)')),
    ("8.1", "t is used as if held", (T, '    t = min(state["t"], 2_000)\n')),
    ("8.4", "t begins again", (COUNTED, 'state["t"] = state["t"] % 5_000 + 1')),
    ("8.2", "betas of its own", (BETAS, "beta1, beta2 = 0.9, 0.99")),
    ("8.3", "norms before biases", (LAYER, f"{LAYER}\n{NORMS}".rstrip())),
    (
        "8.3",
        "the fourth word",
        (LAYER, 'layer, kind = (name.split(".") * 2)[3], name.split(".")[-1]'),
    ),
    (
        "8.3",
        "the fourth word of blocks alone",
        (
            LAYER,
            f'{LAYER}\n    if name.startswith("blocks") and name.count(".") > 3:\n'
            f'        layer = name.split(".")[3]',
        ),
    ),
    ("8.3", "bias by letters", ('kind == "bias"', '"bias" in name')),
    ("8.4", "betas of its own", (BETAS, "beta1, beta2 = 0.9, 0.999")),
    ("8.4", "no decay of single weights", (DECAY, f"{DECAY} * (size > 1)")),
    (
        "8.5",
        "a refusal ends the step",
        (
            "            weight.grad = None\n",
            "            stepped.clear()\n            weight.grad = None\n",
        ),
    ),
    ("8.5", "all have to be stepped", (END, ONLY_IF_ALL)),
    (
        "8.5",
        "one set for all models",
        ("    stepped = set()", '    stepped = in_backward.__dict__.setdefault("stepped", set())'),
    ),
]
ACCEPTED = [
    (
        "8.1",
        "by lerp",
        ('beta1 * state["m"] + (1 - beta1) * gradient', 'state["m"].lerp(gradient, 1 - beta1)'),
    ),
    (
        "8.1",
        "the number of the next step is kept",
        ("t=0, m", "t=torch.tensor(1.0), m"),
        (f"    {COUNTED}\n{T}", f'    t = state["t"].item()\n    {COUNTED}\n'),
    ),
    ("8.3", "by numel", ("head_width * shape[1]", "shape.numel() // (shape[0] // head_width)")),
    ("8.3", "by the ending", ('kind == "bias"', 'name.endswith(".bias")')),
    ("8.5", "a function of its own", (END, "    return lambda: stepped.clear()")),
]


@each(REFUSED)
def test_what_is_wrong_is_refused(edit, tmp_path):
    assert verdict_on(edit, tmp_path).status == WRONG


@each(ACCEPTED)
def test_what_is_right_is_accepted(edit, tmp_path):
    verdict = verdict_on(edit, tmp_path)
    assert verdict.status == OK, verdict


@pytest.mark.parametrize(
    ("id_", "change", "remark"),
    [
        ("8.2", (BETAS, "beta1, beta2 = 0.9, 0.99"), True),
        ("8.4", (BETAS, "beta1, beta2 = 0.9, 0.999"), True),
        ("8.2", (BETAS, "beta1, beta2 = betas[0], 0.99"), False),
    ],
    ids=["Lion's", "Adam-mini's", "one of them"],
)
def test_betas_that_are_not_looked_at_are_named(id_, change, remark, tmp_path):
    verdict = verdict_on((id_, (change,)), tmp_path, named=True)
    assert verdict.status == WRONG
    assert ("take them from `betas`" in verdict.text) == remark


ONE_DIMENSION = "Weights of one dimension decay, too"


OF_MATRICES = (f"weight *= {DECAY}", f"weight *= {DECAY} * (weight.ndim > 1)")
MIX = "beta1 * m + (1 - beta1) * gradient"


@pytest.mark.parametrize(
    ("id_", "changes", "said"),
    [
        ("8.1", (OF_MATRICES,), ONE_DIMENSION),
        ("8.2", (OF_MATRICES,), ONE_DIMENSION),
        ("8.4", (OF_MATRICES,), ONE_DIMENSION),
        ("8.1", ((COUNTED, 'state["t"] = state["t"] % 100 + 1'),), "and never begins again"),
        (
            "8.2",
            ((f"sign({MIX})", f"sign(mix := {MIX})"), ("beta2 * m", "beta2 * mix")),
            "mixed once more",
        ),
        (
            "8.2",
            (('state["m"] =', 'state["u"], state["m"] = u,'),),
            "In the state are: u of 24,000, m of 24,000.",
        ),
        ("8.3", (("raise ValueError(f", "{}[layer], (f"),), "raised KeyError ('qkv'), wanted a"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_told_in_words(id_, changes, said, tmp_path):
    verdict = verdict_on((id_, changes), tmp_path, named=True)
    assert verdict.status == WRONG
    assert said in verdict.text


# ------------------------------------------------------------------ held against the library

TINY = replace(PRESETS["tiny"], layers=2, tied=False)
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


def trained(make_update) -> GPT:
    """After five steps; make_update(model) gives what steps one named weight."""
    torch.manual_seed(0)
    model = GPT(TINY)
    update = make_update(model)
    for seed in range(5):
        tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(seed))
        model.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        update()
    return model


def by_hand(step_, sizes=None):
    def make(model):
        states = {name: {} for name, _ in model.named_parameters()}

        @torch.no_grad()
        def update():
            for name, weight in model.named_parameters():
                size = (sizes(name, weight.shape, TINY.head_width),) if sizes else ()
                step_(weight, weight.grad, states[name], *size, **SETTINGS)

        return update

    return make


def mini(model):
    partition = optim.gpt_partition(TINY.head_width)
    return optim.AdamMini(model.named_parameters(), partition=partition, **SETTINGS).step


@pytest.mark.parametrize(
    ("ours", "librarys"),
    [
        (by_hand(adamw_), lambda model: optim.AdamW(model.parameters(), **SETTINGS).step),
        (by_hand(lion_), lambda model: optim.Lion(model.parameters(), **SETTINGS).step),
        (by_hand(adam_mini_, block_size), mini),
    ],
    ids=["AdamW", "Lion", "Adam-mini"],
)
def test_what_is_built_steps_as_the_library_does(ours, librarys):
    pairs = zip(trained(ours).parameters(), trained(librarys).parameters(), strict=True)
    assert max((a - b).abs().max().item() for a, b in pairs) < 1e-6


def test_the_partition_is_the_librarys():
    partition = optim.gpt_partition(TINY.head_width)
    for name, weight in GPT(TINY).named_parameters():
        assert block_size(name, weight.shape, TINY.head_width) == partition(name, weight.shape)


def test_a_refused_gradient_does_not_come_into_the_next():
    weight, gradients = torch.nn.Parameter(torch.ones(1)), []
    end_step = in_backward([weight], lambda w: gradients.append(w.grad.item()))
    weight.sum().backward()
    with pytest.raises(RuntimeError):
        weight.sum().backward()
    end_step()
    weight.sum().backward()
    assert gradients == [1.0, 1.0]


def test_what_is_built_steps_inside_backward():
    torch.manual_seed(0)
    model, order = GPT(TINY), []
    end_step = in_backward(list(model.parameters()), order.append)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model(tokens, tokens).backward()
    end_step()
    assert len(order) == len(list(model.parameters()))
    assert all(weight.grad is None for weight in model.parameters())


# ------------------------------------------------------------------ what the lesson says


def dry_peak(optimizer, setting, technique="checkpointing"):
    return dry_trace(setting, replace(combined(technique), optimizer=optimizer)).at_peak


@pytest.mark.slow
@pytest.mark.parametrize("in_turn", [False, True])
def test_two_blocks_of_a_7b_model_tell_of_all(monkeypatch, in_turn):
    """The lesson measures models of one and of two blocks, and goes on to 32."""

    def lion(model):
        optimizer = optim.Lion(model.parameters())
        return optim.step_in_backward(optimizer) if in_turn else optimizer

    def peak(layers):
        config = replace(PRESETS["llama-2-7b"], layers=layers)
        monkeypatch.setitem(PRESETS, "of so many blocks", config)
        setting = Setting("of so many blocks", 1, 2048, torch.bfloat16)
        return dry_peak(lion, setting)

    one, two, all_of_them = peak(1), peak(2), peak(32)
    told = {kind: one.get(kind, 0) + 31 * (two[kind] - one.get(kind, 0)) for kind in two}
    assert told == all_of_them


@pytest.mark.slow
def test_the_step_inside_backward_saves_nothing_where_backward_begins_at_the_peak():
    """The bill's plain step: its peak is that of the logits."""

    def inside(model):
        return optim.step_in_backward(optim.AdamW(model.parameters()))

    def after(model):
        return optim.AdamW(model.parameters())

    assert dry_peak(inside, SETTING, "plain") == dry_peak(after, SETTING, "plain")


def test_the_bill_halves_the_state_of_day_7():
    today, before = (bill.stored(days.day(number).bill) for number in (8, 7))
    assert 2 * today.at_peak["optimizer_state"] == before.at_peak["optimizer_state"]
    assert format_bytes(today.peak_bytes) == "1.14 GiB"


def test_adam_mini_with_a_bfloat16_momentum_takes_as_much_as_lion():
    """Why the bill has one and not the other is not bytes: they differ by the v's of the blocks."""

    def state_bytes(make):
        with memlab.dry_run():
            model = GPT(PRESETS["25m"], dtype=torch.bfloat16)
            optimizer = make(model)
            for weight in model.parameters():
                weight.grad = torch.zeros_like(weight)
            trace = memlab.measure(optimizer.step, model=model, optimizer=optimizer)
        return trace.at_end["optimizer_state"] / PRESETS["25m"].parameters

    brain = {"moment_dtype": torch.bfloat16}
    partition = optim.gpt_partition(PRESETS["25m"].head_width)
    assert state_bytes(lambda model: optim.Lion(model.parameters(), **brain)) == 2
    of_mini = state_bytes(
        lambda model: optim.AdamMini(model.named_parameters(), partition=partition, **brain)
    )
    assert 2 < of_mini < 2.01
