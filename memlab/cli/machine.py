"""What this machine is: its devices, their names and their memory."""

import os
import platform

import torch


def devices_present() -> list[str]:
    """The kinds of devices that torch can use here: the CPU, and the accelerator last."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def name_of(device: torch.device) -> str:
    """What the device is called, as far as it says."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"{threads} thread{'s' * (threads != 1)}"
    if device.type == "mps":
        return f"Apple {platform.machine()}"
    return getattr(torch, device.type).get_device_name(device)


def memory_of(device: torch.device) -> tuple[int, int] | None:
    """(free, total) bytes; None where nothing tells.

    The CPU's free memory is what nothing uses at all, not even as a cache that could be dropped.
    """
    try:
        if device.type != "cpu":
            return torch.accelerator.get_memory_info(device)
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError, RuntimeError):  # not every system and torch tells
        return None
