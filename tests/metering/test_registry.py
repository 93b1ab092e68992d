"""Records and numbers of storages."""

import torch

from memlab.internals.replacing import replaced
from memlab.metering.registry import Registry


def test_numbers_are_never_reused_though_addresses_are():
    registry, numbers = Registry(), set()
    for _ in range(100):
        numbers.add(registry.add(torch.zeros(256), None).number)
    assert len(numbers) == 100


def test_a_storage_is_found_through_any_of_its_tensors():
    registry, x = Registry(), torch.zeros(4, 4)
    record = registry.add(x, None)
    assert registry.find(x[1:].t()) is record
    assert registry.find(x.clone()) is None


def test_a_death_notifies_listeners_and_removes_the_record():
    registry, told = Registry(), []
    listener = lambda record, change: told.append((record.number, change))  # noqa: E731
    registry.listen(listener)
    x = torch.zeros(256)
    record = registry.add(x, None)
    assert record.alive
    del x
    registry.unlisten(listener)
    assert told == [(record.number, -1024)]
    assert not record.alive
    assert registry.alive() == []


def test_a_storage_can_continue_another():
    registry = Registry()
    old, new = torch.zeros(256), torch.ones(256)
    first, second = registry.add(old, None), registry.add(new, None)
    del old
    registry.continue_as(first, second)
    assert registry.find(new) is first
    assert first.alive


def test_resizing_is_noticed_only_while_it_is_replaced():
    registry, told = Registry(), []
    x = torch.zeros(4)
    registry.add(x, None)
    listener = lambda record, change: told.append(change)  # noqa: E731
    registry.listen(listener)
    with replaced(registry.replacements()):
        x.untyped_storage().resize_(64)
    x.untyped_storage().resize_(16)
    assert told == [48]
    assert "resize_" not in vars(torch.UntypedStorage)


def test_the_first_category_in_order_wins():
    record = Registry().add(torch.zeros(4), None)
    for category in ("activations", "gradients", "inputs"):
        record.mark(category)
    assert record.category == "gradients"


def test_an_event_is_plain_data():
    record = Registry().add(torch.zeros(2, 3, dtype=torch.bfloat16), None)
    record.phase, record.operator = "forward", torch.ops.aten.mm.default
    event = record.event(12, "forward")
    assert event[:1] + event[2:] == (
        12,
        "forward_temporaries",
        "aten.mm.default",
        "",
        "forward",
        "bfloat16",
        (2, 3),
        None,
        0,
    )
