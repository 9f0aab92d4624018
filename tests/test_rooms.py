"""The house has rooms: a folder holds what a person can keep in mind, and the doors between the
rooms of a package are few and lead one way."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path

import grimp
import pytest

from tests.test_house_rules import PRODUCT, ROOT

MODULES_MAX = 14
"""In one folder, its `__init__` and `__main__` not counted."""
DOORS_MAX = {"domain": 36, "adapters": 23, "gpu_runners": 18, "projections": 16, "api": 18}
"""Pairs of rooms of a package of which one imports the other. A room is a module of the package
itself or one of its folders."""


@cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PRODUCT, cache_dir=None)


@pytest.mark.parametrize("package", DOORS_MAX)
def test_few_doors_lead_from_room_to_room(package: str) -> None:
    rooms = graph().find_children(package)
    room_of = {module: room for room in rooms for module in {room, *graph().find_descendants(room)}}

    doors = {
        (room, room_of[imported])
        for module, room in room_of.items()
        for imported in graph().find_modules_directly_imported_by(module)
        if room_of.get(imported, room) != room
    }

    assert len(doors) <= DOORS_MAX[package], "\n".join(f"{a} -> {b}" for a, b in sorted(doors))


def test_no_folder_holds_more_modules_than_one_can_keep_in_mind() -> None:
    folders: defaultdict[Path, list[str]] = defaultdict(list)
    for package in PRODUCT:
        for path in (ROOT / package).rglob("*.py"):
            if not path.stem.startswith("__"):
                folders[path.parent].append(path.name)

    crowded = {str(folder): names for folder, names in folders.items() if len(names) > MODULES_MAX}

    assert not crowded
