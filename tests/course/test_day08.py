"""Day 8's checks accept right answers written differently, and agree with the library."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from close import assert_close
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


# ------------------------------------------------------------------ right, written differently


def adamw_as_torch_writes_it(weight, gradient, state, lr, betas, eps=1e-8, weight_decay=0.01):
    """In place, with lerp and addcdiv, and a tensor that counts."""
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
    """Decay and step in one line; m and v start as the number 0."""
    m, v, t = (state.get(name, 0) for name in "mvt")
    m, v, t = betas[0] * m + (1 - betas[0]) * gradient, betas[1] * v, t + 1
    v = v + (1 - betas[1]) * gradient**2
    m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    weight.copy_(weight - lr * (m_hat / (v_hat.sqrt() + eps) + weight_decay * weight))
    state |= {"m": m, "v": v, "t": t}


def with_default_betas(step_):
    return lambda *args, betas=(0.9, 0.999), **settings: step_(*args, betas=betas, **settings)


def adamw_through_data(weight, gradient, state, **settings):
    """`.data` shares the weight's memory."""
    adamw_(weight.data, gradient, state, **settings)


def lion_in_place(weight, gradient, state, lr, betas=(0.9, 0.99), weight_decay=0.0):
    m = state.setdefault("m", torch.zeros_like(gradient))
    mix = m.lerp(gradient, 1 - betas[0])
    weight.sub_(weight * (lr * weight_decay) + lr * mix.sign_())
    m.lerp_(gradient, 1 - betas[1])


def lion_by_comparing(weight, gradient, state, lr, betas=(0.9, 0.99), weight_decay=0.0):
    """A sign from two comparisons."""
    m = state.get("m", 0.0)
    mix = betas[0] * m + (1 - betas[0]) * gradient
    weight -= lr * ((mix > 0).float() - (mix < 0).float() + weight_decay * weight)
    state["m"] = betas[1] * m + (1 - betas[1]) * gradient


def block_size_by_cases(name, shape, head_dim):
    *_, layer, kind = name.split(".")
    match kind, layer:
        case "bias", _:
            return 1
        case _, "query" | "key" if shape[0] % head_dim == 0:
            return head_dim * shape[1]
        case _, "norm" | "mlp_norm" | "attention_norm":
            return shape[0]
        case _, "embedding" | "unembedding" | "value" | "output" | "gate" | "up" | "down":
            return shape[1]
    raise ValueError(name)


def by_the_librarys_rules(name, shape, head_dim):
    """By a table of rules."""
    rules = {**optim.adam_mini.GPT_RULES, "bias": "element"}
    ends = [end for end in rules if f".{name}".endswith(f".{end}")]
    if not ends:
        raise ValueError(name)
    return optim.adam_mini.block_size(rules[max(ends, key=len)], name, shape, head_dim)


def adam_mini_flat(
    weight, gradient, state, size, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01
):
    """v of one dimension; its root is repeated for each weight."""
    squares = gradient.flatten().square().unflatten(0, (-1, size)).mean(1)  # (blocks,)
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = betas[0] * state.get("m", 0.0) + (1 - betas[0]) * gradient
    state["v"] = betas[1] * state.get("v", 0.0) + (1 - betas[1]) * squares
    root = (state["v"] / (1 - betas[1] ** t)).sqrt().add(eps).repeat_interleave(size)
    weight.sub_(lr * weight_decay * weight)
    weight.sub_(lr / (1 - betas[0] ** t) * state["m"] / root.view_as(weight))


def in_backward_with_flags(weights, update):
    """A list of flags, two hooks per weight, and a refusal before `.grad` is set."""
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
def test_a_right_answer_written_differently_passes(exercise, answer):
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


def by_a_fused_kernel(weight, gradient, state, lr, **settings):
    torch._fused_sgd_(
        [weight],
        [gradient],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    )


def with_other_keys(names, step_):
    """The right step, with other keys in the state."""

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


def lion_flat(weight, gradient, state, **settings):
    lion_(weight.view(-1), gradient.reshape(-1), state, **settings)


def lion_decayed_in_place(weight, gradient, state, lr, betas=(0.9, 0.99), weight_decay=0.0):
    """The decay is in place, the step is not."""
    weight *= 1 - lr * weight_decay
    lion_(weight.clone(), gradient, state, lr, betas)


def mini_with_a_numpy_v(weight, gradient, state, size, lr, betas=(0.9, 0.999), **rest):
    """Keeps v for every weight in a numpy array, whose bytes belong to no tensor."""
    array = state.pop("v", None)
    before = 0 * gradient if array is None else torch.from_numpy(array)
    own = {name: state[name] for name in "mt" if name in state}
    if own:
        own["v"] = before.reshape(-1, size).mean(1, keepdim=True)
    adam_mini_(weight, gradient, own, size, lr, betas, **rest)
    each = betas[1] * before + (1 - betas[1]) * gradient**2
    state.update(own, v=each.numpy().copy())


HIDDEN = []


def with_a_copy_elsewhere(weight, gradient, state, **settings):
    """Right weights, and a copy of the gradient in a list."""
    lion_(weight, gradient, state, **settings)
    HIDDEN[:] = [gradient.double()]


def sign_of_the_new_momentum(weight, gradient, state, lr, betas=(0.9, 0.99), weight_decay=0.0):
    """Updates the momentum in place before it uses it."""
    m = state.setdefault("m", torch.zeros_like(gradient))
    m.mul_(betas[1]).add_(gradient, alpha=1 - betas[1])
    weight.mul_(1 - lr * weight_decay)
    weight.add_((betas[0] * m + (1 - betas[0]) * gradient).sign(), alpha=-lr)


def rows_for_all(name, shape, head_dim):
    return shape[-1] if len(shape) > 1 else shape[0] if name.endswith("norm.weight") else 1


def refused_when_all_were_stepped(weights, update):
    """Counts, and refuses a gradient after the update."""
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
    """Refuses only if all weights were stepped."""
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


def by_the_librarys_hooks(weights, update):
    return optim.step_in_backward(torch.optim.SGD(weights)).step


@pytest.mark.parametrize(
    ("exercise", "answer", "message"),
    [
        (ADAMW, by_torch, "Your answer calls torch.optim."),
        (ADAMW, by_the_library, "Your answer calls memlab.optim.adamw.adamw_"),
        (ADAMW, by_a_fused_kernel, "Your answer calls torch._fused_sgd_"),
        (ADAMW, with_other_keys(TORCHS, adamw_), "'exp_avg_sq', 'step'], wanted ['m', 't'"),
        (ADAMW, adamw_in_a_tuple, "state['all'] is a tuple; keep tensors and numbers in"),
        (ADAMW, adamw_flat, "state['m'] has the shape (6000,), wanted the weight's, (100, 60)."),
        (LION, with_other_keys({"m": "exp_avg"}, lion_), "has the keys ['exp_avg'], wanted ['m']"),
        (LION, lion_flat, "state['m'] has the shape (6000,), wanted the weight's, (100, 60)."),
        (LION, lion_decayed_in_place, "two steps do not change the weight."),
        (ADAM_MINI, with_other_keys(TORCHS, adam_mini_), "wanted ['m', 't', 'v']: later cells use"),
        (ADAM_MINI, mini_with_a_numpy_v, "state['v'] is a ndarray; keep tensors and numbers"),
        (LION, with_a_copy_elsewhere, "72,000 bytes are kept between steps, wanted 24,000."),
        (LION, sign_of_the_new_momentum, "updated before its use"),
        (BLOCK_SIZE, rows_for_all, "query.weight', (32, 32), 8) gave 32, wanted 256."),
        (IN_BACKWARD, refused_when_all_were_stepped, "changed 1 of 13 weights before"),
        (IN_BACKWARD, refused_by_a_full_set, "not use the last weight, and another before end_ste"),
        (IN_BACKWARD, by_the_librarys_hooks, "Your answer calls torch.optim."),
    ],
)
def test_another_mistake_is_refused_with_its_message(exercise, answer, message):
    verdict = judge(exercise, answer)
    assert verdict.status == WRONG
    assert message in verdict.text


# ------------------------------------------------------------------ the solution, edited

BETAS = "beta1, beta2 = betas"
LAYER = 'layer, kind = name.split(".")[-2:]'
NORMS = '    if layer in ("attention_norm", "mlp_norm", "norm"):\n        return shape[0]\n'
DECAY = "1 - lr * weight_decay"
DECAYED = f"    weight *= {DECAY}\n"
COUNTED = 'state["t"] += 1'
T = '    t = state["t"]\n'
MEAN = "squares.mean(1, keepdim=True)"
MIX = "beta1 * m + (1 - beta1) * gradient"
STEP = '(state["m"].reshape(-1, size) / (1 - beta1**t) / root).view_as(weight)'
END = "    return stepped.clear"
ONLY_IF_ALL = """    def end_step():
        if len(stepped) < len(weights):
            raise RuntimeError("some were not stepped")
        stepped.clear()

    return end_step"""
ONE_STATE = "    if len(state) == 0:\n        state.update(STATE)\n    STATE.update(state)"

REFUSED = [
    (
        "8.3",
        "fewer rows than a head",
        ("if shape[0] % head_dim:", "if shape[0] > head_dim and shape[0] % head_dim:"),
    ),
    ("8.1", "the smaller beta first", (BETAS, "beta1, beta2 = sorted(betas)")),
    (
        "8.1",
        "no step where the gradient is 0",
        ("weight -= lr * state", "weight -= (gradient != 0) * lr * state"),
    ),
    (
        "8.1",
        "always the first lr",
        (BETAS, f"{BETAS}\n    lr = LR_OF.setdefault(id(state), lr)"),
        ("def adamw_(", "LR_OF = {}\n\n\ndef adamw_("),
    ),
    (
        "8.1",
        "one state for all weights",
        (BETAS, f"{BETAS}\n    state = STATES.setdefault(tuple(weight.shape), state)"),
        ("def adamw_(", "STATES = {}\n\n\ndef adamw_("),
    ),
    ("8.1", "t is reset", (COUNTED, 'state["t"] = state["t"] % 5_000 + 1')),
    ("8.1", "t is reset once", (COUNTED, 'state["t"] += 1 - 1_000 * (state["t"] == 1_000)')),
    ("8.1", "t is capped", (COUNTED, 'state["t"] = min(state["t"] + 1, 2_000)')),
    ("8.1", "t is used as if capped", (T, '    t = min(state["t"], 2_000)\n')),
    ("8.1", "t is 0 first", ("t=0", "t=-1")),
    ("8.1", "v of m's squares", ("gradient**2", 'state["m"] ** 2')),
    ("8.1", "eps before v is corrected", ("sqrt() + eps", "sqrt() + eps / (1 - beta2**t) ** 0.5")),
    ("8.1", "clears the gradient", (DECAYED, f"{DECAYED}    gradient.zero_()\n")),
    ("8.1", "eps of at least 1e-6", ("+ eps", "+ max(eps, 1e-6)")),
    ("8.1", "other memory", (DECAYED, f"    weight.data = weight * ({DECAY})\n")),
    ("8.2", "other memory", (DECAYED, f"    weight.data = weight * ({DECAY})\n")),
    ("8.2", "u near 0 is no sign", (f"torch.sign({MIX})", f"({MIX}) / (({MIX}).abs() + 1e-8)")),
    ("8.2", "the sign of the old momentum", (MIX, "m")),
    ("8.2", "betas of its own", (BETAS, "beta1, beta2 = 0.9, 0.99")),
    ("8.2", "decay without lr", (DECAY, "1 - weight_decay")),
    ("8.2", "decay after the step", (DECAYED, ""), ("lr * u\n", f"lr * u\n{DECAYED}")),
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
    ("8.3", "any bias at the end", ('kind == "bias"', 'kind.endswith("bias")')),
    ("8.3", "bias in any word", ('kind == "bias"', '"bias" in name')),
    (
        "8.3",
        "any norm but one",
        (
            'layer in ("attention_norm", "mlp_norm", "norm")',
            '"norm" in layer and layer != "q_norm"',
        ),
    ),
    (
        "8.3",
        "any layer of the MLP",
        ('"gate", "up", "down")', '"gate", "up", "down") or ".mlp." in name'),
    ),
    ("8.3", "the number of heads", ("head_dim * shape[1]", "shape[0] // head_dim")),
    ("8.3", "one v per matrix", ("head_dim * shape[1]", "shape.numel()")),
    ("8.4", "t is reset", (COUNTED, 'state["t"] = state["t"] % 5_000 + 1')),
    ("8.4", "betas of its own", (BETAS, "beta1, beta2 = 0.9, 0.999")),
    ("8.4", "no decay of single weights", (DECAY, f"{DECAY} * (size > 1)")),
    ("8.4", "eps of at least 1e-6", ("+ eps", "+ max(eps, 1e-6)")),
    ("8.4", "the largest square", ("squares.mean(1", "squares.amax(1")),
    ("8.4", "the variance", (MEAN, "squares.sqrt().var(1, keepdim=True, correction=0)")),
    (
        "8.4",
        "m in the shape of blocks",
        (
            "squares = gradient.reshape(-1, size) ** 2",
            "gradient = gradient.reshape(-1, size)\n    squares = gradient ** 2",
        ),
    ),
    ("8.4", "v of each weight beside", (T, f'{T}    state["each"] = gradient**2\n')),
    (
        "8.5",
        "a refusal ends the step",
        (
            "            weight.grad = None\n",
            "            stepped.clear()\n            weight.grad = None\n",
        ),
    ),
    ("8.5", "all must be stepped", (END, ONLY_IF_ALL)),
    (
        "8.5",
        "one set for all models",
        ("    stepped = set()", '    stepped = in_backward.__dict__.setdefault("stepped", set())'),
    ),
    ("8.5", "another error", ("RuntimeError", "ValueError")),
    (
        "8.5",
        "ends the step after the last weight",
        (
            "stepped.add(weight)",
            "stepped.add(weight) if len(stepped) < len(weights) - 1 else stepped.clear()",
        ),
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
        "state['t'] is the number of the next step",
        ("t=0, m", "t=torch.tensor(1.0), m"),
        (f"    {COUNTED}\n{T}", f'    t = state["t"].item()\n    {COUNTED}\n'),
    ),
    ("8.3", "by numel", ("head_dim * shape[1]", "shape.numel() // (shape[0] // head_dim)")),
    ("8.3", "by the ending", ('kind == "bias"', 'name.endswith(".bias")')),
    (
        "8.4",
        "into a reshaped weight",
        (f"weight -= lr * {STEP}", f"weight.reshape(-1, size).sub_(lr * {STEP[1:-17]})"),
    ),
    ("8.5", "another function", (END, "    return lambda: stepped.clear()")),
]


@each(REFUSED)
def test_a_wrong_answer_is_refused(edit, tmp_path):
    assert verdict_on(edit, tmp_path).status == WRONG


@each(ACCEPTED)
def test_a_right_answer_is_accepted(edit, tmp_path):
    verdict = verdict_on(edit, tmp_path)
    assert verdict.status == OK, verdict


OF_MATRICES = ((f"weight *= {DECAY}", f"weight *= {DECAY} * (weight.ndim > 1)"),)


@pytest.mark.parametrize(
    ("id_", "changes", "message"),
    [
        ("8.1", OF_MATRICES, "Weights of one dimension must decay, too"),
        ("8.2", OF_MATRICES, "Weights of one dimension must decay, too"),
        ("8.4", OF_MATRICES, "Weights of one dimension must decay, too"),
        ("8.1", ((COUNTED, 'state["t"] = state["t"] % 100 + 1'),), "never reset it"),
        ("8.2", ((BETAS, "beta1, beta2 = 0.9, 0.99"),), "take them from `betas`"),
        ("8.4", ((BETAS, "beta1, beta2 = 0.9, 0.999"),), "take them from `betas`"),
        (
            "8.2",
            ((f"sign({MIX})", f"sign(mix := {MIX})"), ("beta2 * m", "beta2 * mix")),
            "Compute both mixes from the old m",
        ),
        (
            "8.2",
            (('state["m"] =', 'state["u"], state["m"] = u,'),),
            "The state has: u of 24,000, m of 24,000.",
        ),
        (
            "8.5",
            (
                (
                    "update(weight)\n        weight.grad = None",
                    "weight.grad = None\n        update(weight)",
                ),
            ),
            "of 13 when its .grad was None: it was freed before. Going on",
        ),
        ("8.3", (("raise ValueError(f", "{}[layer], (f"),), "raised KeyError ('qkv'), wanted a"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_has_its_remark(id_, changes, message, tmp_path):
    verdict = verdict_on((id_, changes), tmp_path, named=True)
    assert verdict.status == WRONG
    assert message in str(verdict)


def test_one_beta_of_two_that_is_fixed_has_no_remark(tmp_path):
    edit = ("8.2", ((BETAS, "beta1, beta2 = betas[0], 0.99"),))
    verdict = verdict_on(edit, tmp_path, named=True)
    assert verdict.status == WRONG
    assert "take them from `betas`" not in verdict.text


# ------------------------------------------------------------------ compared with the library

TINY = replace(PRESETS["tiny"], layers=2, tied=False)
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


def trained(make_update) -> GPT:
    """A model after five steps; make_update(model) returns the step."""
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
                size = (sizes(name, weight.shape, TINY.head_dim),) if sizes else ()
                step_(weight, weight.grad, states[name], *size, **SETTINGS)

        return update

    return make


def mini(model):
    partition = optim.gpt_partition(TINY.head_dim)
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
def test_the_references_step_as_the_library_does(ours, librarys):
    pairs = zip(trained(ours).parameters(), trained(librarys).parameters(), strict=True)
    for mine, other in pairs:
        assert_close(mine, other)


def test_the_partition_is_the_librarys():
    partition = optim.gpt_partition(TINY.head_dim)
    for name, weight in GPT(TINY).named_parameters():
        assert block_size(name, weight.shape, TINY.head_dim) == partition(name, weight.shape)


def test_a_refused_gradient_is_not_added_to_the_next():
    weight, gradients = torch.nn.Parameter(torch.ones(1)), []
    end_step = in_backward([weight], lambda w: gradients.append(w.grad.item()))
    weight.sum().backward()
    with pytest.raises(RuntimeError):
        weight.sum().backward()
    end_step()
    weight.sum().backward()
    assert gradients == [1.0, 1.0]


def test_in_backward_steps_each_weight_and_drops_its_gradient():
    torch.manual_seed(0)
    model, order = GPT(TINY), []
    end_step = in_backward(list(model.parameters()), order.append)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model(tokens, tokens).backward()
    end_step()
    assert len(order) == len(list(model.parameters()))
    assert all(weight.grad is None for weight in model.parameters())


# ------------------------------------------------------------------ claims of the lesson


def dry_peak(optimizer, setting, technique="checkpointing"):
    return dry_trace(setting, replace(combined(technique), optimizer=optimizer)).at_peak


@pytest.mark.slow
@pytest.mark.parametrize("in_turn", [False, True])
def test_every_block_of_a_7b_model_adds_the_same_bytes(monkeypatch, in_turn):
    """The lesson extrapolates from one and two blocks to 32."""

    def lion(model):
        optimizer = optim.Lion(model.parameters())
        return optim.step_in_backward(optimizer) if in_turn else optimizer

    def peak(layers):
        config = replace(PRESETS["llama-2-7b"], layers=layers)
        monkeypatch.setitem(PRESETS, "of so many blocks", config)
        setting = Setting("of so many blocks", 1, 2048, torch.bfloat16)
        return dry_peak(lion, setting)

    one, two, measured = peak(1), peak(2), peak(32)
    extrapolated = {kind: one.get(kind, 0) + 31 * (two[kind] - one.get(kind, 0)) for kind in two}
    assert extrapolated == measured


@pytest.mark.slow
def test_the_step_inside_backward_saves_nothing_if_the_peak_is_the_start_of_backward():
    """The bill's plain step, whose peak is at the logits."""

    def inside(model):
        return optim.step_in_backward(optim.AdamW(model.parameters()))

    def after(model):
        return optim.AdamW(model.parameters())

    assert dry_peak(inside, SETTING, "plain") == dry_peak(after, SETTING, "plain")


def test_the_bill_halves_the_state_of_day_7():
    today, before = (bill.stored(days.day(number).bill) for number in (8, 7))
    assert 2 * today.at_peak["optimizer_state"] == before.at_peak["optimizer_state"]
    assert format_bytes(today.peak_bytes) == "1.14 GiB"


def test_adam_mini_with_a_bfloat16_momentum_uses_as_many_bytes_as_lion():
    """Beside the v of each block."""

    def state_bytes(make):
        with memlab.dry_run():
            model = GPT(PRESETS["25m"], dtype=torch.bfloat16)
            optimizer = make(model)
            for weight in model.parameters():
                weight.grad = torch.zeros_like(weight)
            trace = memlab.measure(optimizer.step, model=model, optimizer=optimizer)
        return trace.at_end["optimizer_state"] / PRESETS["25m"].parameters

    bfloat16 = {"moment_dtype": torch.bfloat16}
    partition = optim.gpt_partition(PRESETS["25m"].head_dim)
    assert state_bytes(lambda model: optim.Lion(model.parameters(), **bfloat16)) == 2
    of_mini = state_bytes(
        lambda model: optim.AdamMini(model.named_parameters(), partition=partition, **bfloat16)
    )
    assert 2 < of_mini < 2.01
