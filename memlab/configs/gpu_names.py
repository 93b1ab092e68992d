"""Find a GPU by any spelling that people and drivers use, and suggest one for a typo.

    find_gpu("NVIDIA GeForce RTX 4090")    the rtx4090, as for "4090" or "RTX 4090"
    gpus_called("rtx4060ti")               two: it is sold with 8 and with 16 GB
    nearest_gpus("rtx4091")                ["rtx4090"]

A suggestion never has more memory than the typed name: among equally near names, the GPUs with the
least memory count, and a size in the typed text is an upper limit.
"""

import re
from functools import cache

from memlab.configs.gpus import GPUS, Gpu

LIST_HINT = "`memlab plan --gpu list` prints all GPUs"
_MOST_SUGGESTIONS = 6
_SMALLEST_GB = min(gpu.advertised_gb for gpu in GPUS.values())

# Words in the names that drivers and torch print which do not distinguish these GPUs.
_FILLER_WORDS = frozenset(
    {
        *("nvidia", "geforce", "tesla", "quadro", "jetson", "agx", "generation", "edition"),
        *("workstation", "blackwell", "amd", "radeon", "instinct", "intel", "arc", "graphics"),
        *("data", "center", "apple", "gpu", "gb"),
        *("sxm", "sxm2", "sxm4", "sxm5", "sxm6", "ac", "hbm2", "hbm2e", "hbm3", "hbm3e"),
    }
)
_SYNONYMS = {"mobile": "laptop", "notebook": "laptop"}
_TYPED_SIZE = re.compile(r"[\s_-](\d{1,3})\s*(?:gi?b)?\s*$", re.IGNORECASE)


def find_gpu(name: str) -> Gpu | None:
    """Find a GPU by any spelling of its name; None if it is unknown or ambiguous."""
    found = gpus_called(name)
    return found[0] if len(found) == 1 else None


def gpu_named(name: str) -> Gpu:
    """Find a GPU by any spelling: "rtx4090", "NVIDIA GeForce RTX 4090", "4090".

    Raises ValueError for an unknown or ambiguous GPU, with the nearest known ones.
    """
    if gpu := find_gpu(name):
        return gpu
    remedy = did_you_mean(name) or "give its memory, such as 24GiB;"
    raise ValueError(ambiguous(name) or f"got unknown GPU {name!r}; {remedy} {LIST_HINT}")


def ambiguous(text: str) -> str | None:
    """Ask which GPU is meant if the name has several; None otherwise."""
    gpus = gpus_called(text)
    if len(gpus) < 2:
        return None
    sizes = _listed(sorted({f"{gpu.advertised_gb}" for gpu in gpus}, key=int))
    names = _listed([gpu.name for gpu in sorted(gpus, key=lambda gpu: gpu.total_bytes)])
    return f"got {text!r}, which has {sizes} GB; give one of {names}"


def did_you_mean(name: str) -> str:
    """Ask whether one of the nearest GPUs is meant; "" if none is near."""
    near = nearest_gpus(name)
    return f"did you mean {' or '.join(near)}?" if near else ""


def _listed(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def gpus_called(name: str) -> tuple[Gpu, ...]:
    """Return the GPUs that a spelling stands for: several if the memory size is missing."""
    return _spellings().get(_normalized(name), ())


def nearest_gpus(name: str) -> list[str]:
    """Return the names of the GPUs that a partial or misspelled name may mean."""
    wanted = _normalized(name)
    if not re.match(r"[a-z]|\d{4}", wanted):  # nothing, or a number of bytes
        return []
    near = _near(wanted, _allowed(name))
    if near:
        least = min(gpu.total_bytes for gpu in near)
        return [gpu.name for gpu in near if gpu.total_bytes == least][:_MOST_SUGGESTIONS]
    partial = _partial(wanted, _allowed(name)) if len(wanted) > 2 else []
    return [gpu.name for gpu in sorted(partial, key=lambda gpu: gpu.total_bytes)]


def _allowed(name: str) -> dict[str, tuple[Gpu, ...]]:
    """Return the spellings of the GPUs with no more memory than the name says, if it does."""
    size = _TYPED_SIZE.search(name)
    if size is None or int(size[1]) < _SMALLEST_GB:
        return _spellings()
    return {
        known: allowed
        for known, gpus in _spellings().items()
        if (allowed := tuple(gpu for gpu in gpus if gpu.advertised_gb <= int(size[1])))
    }


def _near(wanted: str, spellings: dict[str, tuple[Gpu, ...]]) -> list[Gpu]:
    """Return the GPUs whose spellings are one typo away; of a long name, two if none is."""
    limit = 1 if len(wanted) < 8 else 2
    letters = frozenset(wanted)
    distances = {
        known: typos(wanted, known)
        for known in spellings
        if abs(len(wanted) - len(known)) <= limit
        and len(letters.symmetric_difference(known)) <= 2 * limit  # a typo changes two at most
    }
    least = min(distances.values(), default=limit + 1)
    if least > limit:
        return []
    near = (gpu for known, far in distances.items() if far == least for gpu in spellings[known])
    return list(dict.fromkeys(near))


def _partial(wanted: str, spellings: dict[str, tuple[Gpu, ...]]) -> list[Gpu]:
    """Return some of the GPUs whose spellings begin with a text."""
    longer = (gpu for known, gpus in spellings.items() if known.startswith(wanted) for gpu in gpus)
    return list(dict.fromkeys(longer))[:_MOST_SUGGESTIONS]


def typos(typed: str, meant: str) -> int:
    """Return how many typos turn one text into the other: a missing, added,
    wrong, or swapped with the next one (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(meant) + 1))
    for i, got in enumerate(typed, 1):
        last, before, row = before, row, [i]
        for j, wanted in enumerate(meant, 1):
            costs = [before[j] + 1, row[j - 1] + 1, before[j - 1] + (got != wanted)]
            if i > 1 and j > 1 and got == meant[j - 2] and typed[i - 2] == wanted:
                costs.append(last[j - 2] + 1)
            row.append(min(costs))
    return row[-1]


def _normalized(name: str) -> str:
    """Return the name in lower case, without separators, filler words and "GB"."""
    words = re.split(r"[\s_-]+", re.sub(r"\((r|tm)\)", "", name.lower()))
    kept = (_SYNONYMS.get(word, word) for word in words if word not in _FILLER_WORDS)
    return "".join(re.sub(r"([0-9])gi?b$", r"\1", word) for word in kept)


@cache
def _spellings() -> dict[str, tuple[Gpu, ...]]:
    """Return the GPUs of each normalized spelling. A GPU's own name means that GPU alone."""
    found: dict[str, list[Gpu]] = {}
    for gpu in GPUS.values():
        names = {_normalized(gpu.family), _normalized(gpu.full_name)}
        for spelling in names | {_short(name, gpu) for name in names}:
            found.setdefault(spelling, []).append(gpu)
    for gpu in GPUS.values():
        name = _normalized(gpu.name)
        found |= {_short(name, gpu): [gpu], name: [gpu]}
    return {spelling: tuple(gpus) for spelling, gpus in found.items()}


def _short(name: str, gpu: Gpu) -> str:
    """Return "4090" for "rtx4090"; only consumer cards are called by their number."""
    is_consumer = "GeForce" in gpu.full_name or "Radeon RX" in gpu.full_name
    return re.sub(r"^[rg]tx|^rx", "", name) if is_consumer else name
