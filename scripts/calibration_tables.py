"""The tables of the docs that report assessment and calibration, each from a result file."""

from __future__ import annotations

from results import MODELS, conditions, percent, read, table, times


def assess() -> str:
    found = [read(f"assess_{name}") for name in MODELS]
    rows = [
        (f["conditions"]["model"], f["n_layers"],
         next(k + 1 for k, share in enumerate(f["agreement"]) if share >= 0.5),
         percent(f["agreement"][-2]),
         f"{percent(min(f['without'][2:-2]))} to {percent(max(f['without'][2:-2]))}",
         ", ".join(str(layer + 1) for layer in f["checkpoints"]), times(f["ceiling"]),
         f"{f['costs']['head'] / f['costs']['layer']:.1f}", f["tokens"])
        for f in found
    ]  # fmt: skip
    head = ("model", "layers", "depth of 50 % agreement", "agreement one layer before the end",
            "agreement with one layer removed", "suggested checkpoints",
            "speed-up ceiling without training", "LM-head cost (layers)", "tokens")  # fmt: skip
    shared = {name: value for name, value in found[0]["conditions"].items() if name != "model"}
    return table(head, rows) + conditions(shared)


def heads() -> str:
    found = read("depth_smollm2")["heads"]
    rows = [
        (layer + 1, percent(affine), percent(identity))
        for layer, affine, identity in zip(
            found["layers"], found["agreement"], found["identity"], strict=True
        )
    ]
    covered = percent(found["coverage"])
    note = f"\n\nThe reduced vocabulary holds {covered} of the tokens that the full model predicts."
    head = ("after layers", "affine head agrees", "identity head agrees")
    return table(head, rows) + note


# Gates of the table: without a router, today's first stage, and the candidates'.
GATES = ("top probability", "router, then confidence model", "candidates, then confidence model")


def gates() -> str:
    rows = []
    found = [row for row in read("depth_smollm2")["gates"] if row["head"] == "affine"]
    for row in (row for row in found if row["gate"] in GATES):
        cells = [
            f"{percent(at['exit_rate'])} (error {percent(at['error_rate'])})"
            for at in (row[risk] for risk in ("0.01", "0.02", "0.05"))
        ]
        reads = percent(row["0.02"]["read_rate"], 0)
        rows.append((row["layer"] + 1, row["gate"], f"{row['auc']:.3f}", *cells, reads))
    head = ("after layers", "gate", "AUC", "exit rate at 1 % error", "at 2 % error",
            "at 5 % error", "reads the head at 2 %")  # fmt: skip
    return table(head, rows)


def exits() -> str:
    rows = []
    for risk, options in read("depth_smollm2")["exits"].items():
        for at in options:
            after = ", ".join(str(layer + 1) for layer in at["layers"])
            rows.append(
                (f"{float(risk):.0%}", after, percent(at["exit_rate"]), percent(at["error_rate"]),
                 percent(at["depth_saved"]), f"{at['speedup']:.3f}", "yes" if at["best"] else "")
            )  # fmt: skip
    head = ("risk", "exits after layers", "exit rate", "error rate", "depth saved",
            "expected speed-up", "chosen")  # fmt: skip
    return table(head, rows)


def stages() -> str:
    found = read("depth_smollm2")
    # A stage that takes no time was resumed after its end.
    rows = [
        (stage, seconds, found["peak_mb"][stage])
        for stage, seconds in found["seconds"].items()
        if seconds
    ]
    head = ("stage", "seconds", "peak memory so far, MB")
    return table(head, rows) + conditions(
        {**found["conditions"], "documents": found["documents"], "tokens": found["tokens"]}
    )


def other_models() -> str:
    rows = []
    found = read("calibration_gemma3_270m")
    fitted = found["heads"]
    for layer, affine, identity in zip(
        fitted["layers"], fitted["agreement"], fitted["identity"], strict=True
    ):
        rows.append(
            (found["conditions"]["model"], layer + 1, percent(affine), percent(identity),
             found["tokens"]["fit"], f"{sum(found['seconds'].values()):.0f}")
        )  # fmt: skip
    head = ("model", "after layers", "affine head agrees", "identity head agrees",
            "tokens fitted on", "total seconds")  # fmt: skip
    return table(head, rows)


def self_drafts() -> str:
    document = read("self_drafts")
    found = document["results"]
    lossless = next(row for row in found["measured"] if row["method"] == "lossless")
    rows = [
        (way["way"], f"{way['layers_drafting']} of {found['layers']}", way["layers_kept"],
         percent(way["right"]), way["tokens_of_a_pass"], times(way["speedup"]),
         times(way["limit"]))
        for way in found["ways"]
    ]  # fmt: skip
    rows.append(
        ("mode `lossless`, measured, median of prompts", "none", "", "", "",
         times(lossless["per_prompt_speedup"]["p50"]), "")
    )  # fmt: skip
    head = ("drafted by", "layers of a draft", "states taken over from", "accepted",
            "tokens of a deep pass", "speed-up", "at most")  # fmt: skip
    return table(head, rows) + conditions(document["conditions"])


def prefill() -> str:
    document = read("prefill")
    rows = [
        (f"{row['prompt']:,}", row["thresholds"], f"{row['seconds']:.2f} s",
         times(row["speedup"]), percent(1 - row["depth"]), percent(row["disagreement"]),
         f"{row['prompts_that_differ']} of {document['conditions']['prompts']}")
        for row in document["results"]
    ]  # fmt: skip
    head = ("tokens of the prompt", "threshold scale", "time", "speed-up", "depth saved",
            "of the next tokens, differ", "prompts after which one differs")  # fmt: skip
    return table(head, rows) + conditions(document["conditions"])


def replay() -> str:
    document = read("replay")
    modes = {"lossless": "lossless", "exit": "exits alone", "both": "exits and drafts"}
    rows = [
        (found["batch"], shown, times(found["expected"][mode]), times(found["measured"][mode]),
         f"{found['ratio'][mode]:.2f}")
        for found in document["results"] for mode, shown in modes.items()
    ]  # fmt: skip
    head = ("batch", "mode", "expected", "measured", "expected / measured")
    return table(head, rows) + conditions(document["conditions"])
