"""How much memory this process may still use: the machine's, and that of its control groups.

Page cache counts as free here, as it does in MemAvailable: it is given up when somebody needs the memory.
Linux only; elsewhere the answer is None (unknown), and callers then set no limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

FIT_SHARE = 0.875  # the rest lets the training process grow within an epoch
_FILES = {  # limit, usage, keys of memory.stat that are page cache; by version of the control groups
    "cgroup2": ("memory.max", "memory.current", ("active_file", "inactive_file")),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
}


def available(proc: Path = Path("/proc")) -> int | None:
    """Return the bytes that can be filled without swapping or reaching a limit.

    Parameters
    ----------
    proc : Path
        Where procfs is mounted.

    Returns
    -------
    int or None
        The smallest of MemAvailable and the room in every memory control group above this process
        (version 1 or 2); None where none of them can be read.
    """
    rooms = [_machine_room(proc), *map(_group_room, memory_groups(proc))]
    return min((room for room in rooms if room is not None), default=None)


def fits(size: int, room: int | None) -> bool:
    """Tell whether `size` bytes of a file stay in the page cache, with `room` bytes available (None: unknown)."""
    return room is None or size <= room * FIT_SHARE


def memory_groups(proc: Path = Path("/proc")) -> Iterator[tuple[str, Path]]:
    """Yield (file system type, directory) of each control group that may limit the memory of this process.

    In a container without its own namespace, /proc/self/cgroup names a path of the host that isn't
    there under the mount: then the mount itself is the container's group.
    """
    own = _own_groups(proc)
    for kind, mount in _mounts(proc):
        path = own.get(kind)
        if path is None:
            continue
        group = mount / path.lstrip("/")
        yield kind, mount
        while group != mount and mount in group.parents:
            if group.is_dir():
                yield kind, group
            group = group.parent


def _machine_room(proc: Path) -> int | None:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _own_groups(proc: Path) -> dict[str, str]:
    """Return {file system type: path of this process in it}, of the hierarchies that can limit memory."""
    found = {}
    for line in _lines(proc / "self/cgroup"):  # "4:memory:/a/b", or "0::/a/b" for version 2
        number, controllers, path = line.split(":", 2)
        if number == "0":
            found["cgroup2"] = path
        elif "memory" in controllers.split(","):
            found["cgroup"] = path
    return found


def _mounts(proc: Path) -> Iterator[tuple[str, Path]]:
    for line in _lines(proc / "self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            yield kind, Path(before.split()[4])


def _group_room(group: tuple[str, Path]) -> int | None:
    kind, directory = group
    limit_file, usage_file, cache_keys = _FILES[kind]
    limit, usage = _number(directory / limit_file), _number(directory / usage_file)
    if limit is None or usage is None:
        return None
    stat = dict(line.split() for line in _lines(directory / "memory.stat"))
    return max(0, limit - usage + sum(int(stat.get(key, 0)) for key in cache_keys))


def _number(path: Path) -> int | None:
    text = next(iter(_lines(path)), "")
    return int(text) if text.isdecimal() else None  # "max": no limit


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
