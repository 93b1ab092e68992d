"""Replaced functions, attributes and kernels act only in the threads that asked."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from beside import another_thread

from memlab.internals.replacing import registered, replaced
from memlab.internals.threads import asked, measurement, scope

SOURCE = """
value = "old value"

class Kind:
    name = "old class"

def function():
    return "old function"

def through_its_own_name():
    return function(), value, Kind.name
"""


class Owner:
    shared = "old attribute"

    def __init__(self):
        self.own = "own attribute"

    def method(self):
        return "old method"

    @property
    def read(self):
        return "old property"

    @classmethod
    def of_class(cls):
        return "old class method"

    @staticmethod
    def static():
        return "old static method"


class NewKind:
    name = "new class"


@pytest.fixture
def module():
    made = ModuleType("a_module")
    exec(SOURCE, made.__dict__)
    return made


@pytest.fixture
def elsewhere():
    with another_thread() as call:
        yield call


def attributes(module):
    thing = Owner()
    return {
        "function": module.function(),
        "value": module.value,
        "class": module.Kind.name,
        "method": thing.method(),
        "property": thing.read,
        "class method": Owner.of_class(),
        "static method": thing.static(),
        "shared attribute": Owner.shared,
        "own attribute": thing.own,
    }


def replacements(module):
    return {
        (module, "function"): lambda real: lambda: "new function",
        (module, "value"): lambda real: "new value",
        (module, "Kind"): lambda real: NewKind,
        (Owner, "method"): lambda real: lambda self: "new method",
        (Owner, "read"): lambda real: property(lambda self: "new property"),
        (Owner, "of_class"): lambda real: classmethod(lambda cls: "new class method"),
        (Owner, "static"): lambda real: staticmethod(lambda: "new static method"),
        (Owner, "shared"): lambda real: "new attribute",
        (Owner, "own"): lambda real: property(lambda self: "new attribute", lambda self, _: None),
    }


def test_every_kind_of_attribute_is_replaced_for_the_thread_that_asked_alone(module, elsewhere):
    old = attributes(module)
    with replaced(replacements(module)):
        new = attributes(module)
        assert elsewhere(lambda: attributes(module)) == old
    assert all(value.startswith("new") for value in new.values())
    assert attributes(module) == old


def test_nothing_is_left_of_a_replacement(module):
    before, kind = dict(vars(module)), dict(vars(Owner))
    with replaced(replacements(module)):
        pass
    assert vars(module) == before
    assert vars(Owner) == kind
    assert type(module) is ModuleType


def test_a_module_finds_replaced_functions_itself(module):
    with replaced(replacements(module)):
        assert module.through_its_own_name() == ("new function", "old value", "old class")


def test_a_replacement_gets_the_one_before(module):
    twice = {(module, "function"): lambda real: lambda: f"new {real()}"}
    with replaced(twice), replaced(twice):
        assert module.function() == "new new old function"


def test_replacements_may_end_in_any_order(module):
    first, second = ExitStack(), ExitStack()
    with scope():
        first.enter_context(replaced({(module, "function"): lambda real: lambda: "first"}))
        second.enter_context(replaced({(module, "function"): lambda real: lambda: "second"}))
        first.close()
        assert module.function() == "second"
        second.close()
    assert module.function() == "old function"


def test_a_function_that_somebody_kept_is_the_old_one_afterwards_and_new_again_next_time(module):
    with replaced(replacements(module)):
        kept = module.function
    assert kept() == "old function"
    with replaced({(module, "function"): lambda real: lambda: "newer"}):
        assert kept() == "newer"


# ------------------------------------------------------------------ threads


def in_thread():
    """Return whether memlab was asked in a thread that starts now."""
    found = []
    thread = threading.Thread(target=lambda: found.append(asked()))
    thread.start()
    thread.join()
    return found[0]


def test_threads_that_start_inside_work_for_the_one_that_asked(elsewhere):
    start = threading.Thread.start
    with scope():
        assert in_thread()
        assert not elsewhere(in_thread)
    assert not in_thread()
    assert threading.Thread.start is start


def test_a_pools_task_works_for_the_thread_that_submits_it():
    with ThreadPoolExecutor(1) as before:
        assert not before.submit(asked).result()
        with scope(), ThreadPoolExecutor(1) as during:
            assert before.submit(asked).result()
            assert during.submit(asked).result()
        assert not before.submit(asked).result()


def test_autograds_own_threads_work_for_the_thread_that_asked():
    """A deep chain of backward passes inside backward passes continues in another thread."""
    found = set()

    class Deep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, depth):
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            found.add((threading.get_ident(), asked()))
            if ctx.depth:
                with torch.enable_grad():
                    Deep.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).sum().backward()
            return gradient, None

    with scope():
        Deep.apply(torch.ones(1, requires_grad=True), 80).sum().backward()
    assert len(found) > 1
    assert all(was_asked for _, was_asked in found)


def test_another_thread_waits_until_the_scope_ends(elsewhere):
    order, asks = [], threading.Event()

    def ask():
        asks.set()
        with scope():
            order.append("second")

    def start():
        thread = threading.Thread(target=ask)
        thread.start()
        return thread

    with scope():
        thread = elsewhere(start)
        asks.wait()
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_measurement_in_a_thread_of_a_measured_step_is_refused():
    refused = []

    def measure():
        try:
            with measurement():
                pass
        except RuntimeError as error:
            refused.append(str(error))

    with measurement():
        thread = threading.Thread(target=measure)
        thread.start()
        thread.join()
        with measurement():  # its own thread may
            pass
    assert refused == [
        "a measurement is running in the thread that this one works for; measure in one of the "
        "two threads, or after the running measurement"
    ]


# ------------------------------------------------------------------ kernels

aten = torch.ops.aten
KERNELS = {
    (aten.linear.default, "AutogradCPU"): lambda keys, x, weight, bias=None: x * 0,
    (aten.exp.default, "AutocastCPU"): lambda keys, x: aten.log.default(x),  # none before
    (aten.mm.default, "AutocastCPU"): lambda keys, x, y: x * 0,  # torch has a rule of its own
}


def results():
    x = torch.full((2, 2), 3.0)
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, x).sum().item(), x.exp().sum().item(), x.mm(x).sum().item()


def test_kernels_are_registered_for_the_thread_that_asked_alone(elsewhere):
    before = results()
    with registered(KERNELS):
        during = results()
        assert elsewhere(results) == before
    assert during[0] == during[2] == 0
    assert during[1] == pytest.approx(4 * torch.log(torch.tensor(3.0)).item(), rel=1e-6)
    assert results() == before


def test_pythons_dispatcher_forgets_a_kernel_that_is_gone():
    """torch.compile traces with it; autograd recorded nothing where it still called the kernel."""
    from torch._dispatch.python import enable_python_dispatcher

    aten.linear.default._dispatch_cache.clear()  # as in a new process
    x = torch.ones(2, 2, requires_grad=True)
    kernels = {(aten.linear.default, "AutogradCPU"): lambda keys, *args: args[0] * 0}
    with registered(kernels), enable_python_dispatcher():
        assert not F.linear(x, x).any()
    with enable_python_dispatcher():
        F.linear(x, x).sum().backward()
    assert x.grad is not None
