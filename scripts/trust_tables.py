"""The tables of the docs on load, hostile files and faults, each from a result file."""

from __future__ import annotations

from collections import Counter
from typing import Any

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


def long_context(name: str = "long_context") -> str:
    found = read(name)
    by_length: dict[int, dict[str, dict[str, float]]] = {}
    for row in found["results"]:
        by_length.setdefault(row["context"], {})[row["method"]] = row
    rows = [
        (
            f"{length:,}", name, f"{of['ms_per_token']:.2f} ms",
            "{:.2f} to {:.2f}".format(*of["ms_per_token_range"]),
            f"{of['ms_per_token'] / some['HF generate']['ms_per_token']:.2f}",
            f"{of['peak_mb']:.0f} MB", of["rows_of_logits"], f"{of['entries_of_mask']:,}",
        )
        for length, some in by_length.items()
        for name, of in some.items()
    ]  # fmt: skip
    head = ("context", "method", "time per token", "range", "of HF generate's", "peak memory",
            "most tokens with logits at once", "most entries of a mask")  # fmt: skip
    return table(head, rows) + conditions(found["conditions"])


def _memory(of: dict[str, Any]) -> str:
    if "mb_per_1000" not in of:
        return "too few samples"
    return (
        f"{of['mb_after_warm_up']:,} MB after the warm-up, {of['mb_at_the_end']:,} MB at the end: "
        f"{of['mb_per_1000']:+.2f} \u00b1 {of['standard_error']:.2f} MB for each 1,000"
    )


def _counts(of: dict[str, int]) -> list[tuple[str, str]]:
    return [(what, f"{count:,}") for what, count in sorted(of.items(), key=lambda pair: -pair[1])]


def soak_threads() -> str:
    document = read("soak_threads")
    found = document["results"]
    rows = [
        ("calls", f"{found['finished']:,} of {found['calls']:,}"),
        *_counts(found["outcomes"]),
        ("different calls", found["distinct"]),
        ("of these, alone, unlike `model.generate`", found["solo_runs_that_differ_from_generate"]),
        ("memory", _memory(found["memory"])),
    ]
    return table(("calls from threads", ""), rows) + conditions(document["conditions"])


def soak_serve(name: str = "soak_serve") -> str:
    document = read(name)
    found = document["results"]
    server = found["server"]
    fits = server["fits_the_clients_counts"]
    rows = [
        ("requests", f"{sum(found['outcomes'].values()):,} of {found['requests']:,}"),
        *_counts(found["outcomes"]),
        ("different where two tokens are as likely", found["near_ties_among_different"]),
        ("tokens, by the server", f"{server['tokens']:,.0f}"),
        ("drafted, accepted", f"{server['drafted']:,.0f}, {server['accepted']:,.0f}"),
        ("metrics that fit the clients' counts", f"{sum(fits.values())} of {len(fits)}"),
        ("memory of all processes", _memory(found["memory"])),
    ]
    return table(("requests to `tide serve`", ""), rows) + conditions(document["conditions"])


def soak_memory() -> str:
    """What the processes of a server grow by, ours and vLLM's own."""
    documents = {"`tide serve`": read("soak_memory"), "vLLM's own": read("soak_memory_stock")}
    rows = []
    for name, document in documents.items():
        of = document["results"]["memory"]
        by = Counter[str]()
        for process, slope in of["mb_per_1000_by_process"].items():
            by[process.rsplit(" ", 1)[0]] += slope
        each = ", ".join(f"{process} {slope:+.2f}" for process, slope in by.items())
        rows.append((name, f"{document['results']['requests']:,}", _memory(of), each))
    head = ("server", "requests", "memory of all processes", "by process")
    shared = {
        k: v for k, v in document["conditions"].items() if k not in ("stock", "seconds_to_start")
    }
    return table(head, rows) + conditions(shared)


def server_faults(name: str) -> str:
    document = read(name)
    found = document["results"]
    rows = [
        (
            what, of["kills"], ", ".join(sorted(of["exit_codes"])), of["left"],
            of["same_answers_after"],
        )
        for what, of in found["killed"].items()
    ]  # fmt: skip
    head = ("killed", "kills", "exit codes of `tide serve`", "processes that remained",
            "same answers after a restart")  # fmt: skip
    end = found["told_to_end"]
    note = (
        f"\n\nWhat became of the requests at the kills: {_listed(found['requests_under_way'])}. "
        f"Told to end by SIGTERM with `--shutdown-timeout`: {_listed(end['requests'])}, exit code "
        f"{end['exit_code']}, processes that remained: {end['left']}."
    )
    return table(head, rows) + note + conditions(document["conditions"])


def _listed(of: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in sorted(of.items()))
