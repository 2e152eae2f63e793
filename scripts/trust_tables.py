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
    disk = found["full_disk"]
    sizes = ", ".join(f"{size:,}" for size in disk["full_at_bytes"])
    note = (
        f"\n\nCalibrations on a disk that is full at {sizes} bytes of a file: named in "
        f"{disk['named']}, and the same result in {disk['same_result_after']} when run again with "
        "space."
    )
    return table(head, rows) + note + conditions(found["conditions"])


def long_context() -> str:
    found = read("long_context")
    by_length: dict[int, dict[str, dict[str, float]]] = {}
    for row in found["results"]:
        by_length.setdefault(row["context"], {})[row["method"]] = row
    rows = [
        (
            f"{length:,}", name, f"{of['ms_per_token']:.2f} ms",
            f"{of['ms_per_token'] / some['HF generate']['ms_per_token']:.2f}",
            f"{of['peak_mb']:.0f} MB", of["rows_of_logits"], f"{of['entries_of_mask']:,}",
        )
        for length, some in by_length.items()
        for name, of in some.items()
    ]  # fmt: skip
    head = ("context", "method", "time per token", "of HF generate's", "peak memory",
            "most rows of logits", "most entries of a mask")  # fmt: skip
    return table(head, rows) + conditions(found["conditions"])
