"""The devices of this machine, their names and their memory."""

import os
import platform

import torch


def devices_present() -> list[str]:
    """Return the device types that torch can use here: the CPU, then the accelerator if any."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def name_of(device: torch.device) -> str:
    """Return the device's name."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"{threads} thread{'s' * (threads != 1)}"
    if device.type == "mps":
        return f"Apple {platform.machine()}"
    return getattr(torch, device.type).get_device_name(device)


def memory_of(device: torch.device) -> tuple[int, int] | None:
    """Return (free, total) bytes, or None if the system does not report them.

    The CPU's free memory excludes caches, even ones that the system could drop.
    """
    try:
        if device.type != "cpu":
            return torch.accelerator.get_memory_info(device)
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError, RuntimeError):  # not every system reports them
        return None
