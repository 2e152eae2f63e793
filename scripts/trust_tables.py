"""The tables of the docs on hostile files and faults, each from a result file."""

from __future__ import annotations

from results import conditions, read, table


def hostile() -> str:
    found = read("hostile")
    rows = [
        (
            name, f"{of['cases']:,}", f"{of['loaded']:,}", f"{of['refused']:,}", of["faults"],
            f"{of['most_seconds']:.2f} s", f"{of['most_megabytes']} MB",
        )
        for name, of in found["surfaces"].items()
    ]  # fmt: skip
    head = ("changed", "cases", "valid", "refused", "anything else", "longest, processor time",
            "most memory")  # fmt: skip
    return table(head, rows) + conditions(found["conditions"])


def faults() -> str:
    found = read("faults")
    rows = [
        (
            f"`tide {name}`", of["kills"], *(of["found_after_kill"].get(what, 0) for what in
            ("none", "old", "new")), of["same_result_after"],
        )
        for name, of in found["results"].items()
    ]  # fmt: skip
    head = ("killed", "kills", "found: none", "the old artifact", "the new artifact",
            "same result when run again")  # fmt: skip
    return table(head, rows) + conditions(found["conditions"])
