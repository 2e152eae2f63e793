"""The table of the docs that computes what exits would give on GPUs, from bytes and measured rates.

At batch 1 a step takes as long as reading its weights. A layer that runs is read once, however many
tokens wait for it, so a step reads the layers below its exit, the gates on the way, and either the
head or the exit head.
"""

from __future__ import annotations

from typing import NamedTuple

from results import percent, read, table, times
from tree_tables import GPUS

BYTES = 2  # of a parameter in bf16
CANDIDATES, REDUCED, BOTTLENECK = 130, 8192, 128  # tokens of a prefilter and an exit head; a router


class Shape(NamedTuple):
    """The sizes of a model, and over how many GPUs its weights are spread."""

    layers: int
    hidden: int
    intermediate: int
    kv: int
    vocabulary: int
    gpus: int = 1

    def layer(self) -> float:
        """Bytes of a layer."""
        attention = self.hidden * (2 * self.hidden + 2 * self.kv)
        return BYTES * (attention + 3 * self.hidden * self.intermediate)

    def head(self) -> float:
        """Bytes of the head."""
        return BYTES * self.hidden * self.vocabulary

    def declined(self) -> float:
        """Bytes of a gate that says no: the router, and the head's rows of the candidates."""
        return BYTES * self.hidden * (BOTTLENECK + CANDIDATES)

    def confirmed(self) -> float:
        """Bytes of a gate that says yes: also an affine exit head on the reduced vocabulary."""
        return self.declined() + BYTES * self.hidden * (self.hidden + REDUCED)


# From their configurations on the hub.
SHAPES = {
    "Llama-3.1-8B": Shape(32, 4096, 14336, 1024, 128256),
    "Llama-3.1-70B on 8 GPUs": Shape(80, 8192, 28672, 1024, 128256, gpus=8),
}


def exits() -> str:
    # Those that save most; what calibration has chosen is the fastest with drafts on a CPU.
    chosen = max(read("depth_smollm2")["exits"]["0.02"], key=lambda at: at["depth_saved"])
    checkpoints, rate = len(chosen["layers"]), chosen["exit_rate"]
    lines = []
    for name, shape in SHAPES.items():
        full = shape.layers * shape.layer() + shape.head()
        left = (1 - chosen["depth_saved"]) * shape.layers * shape.layer()
        gates = checkpoints * shape.declined() + rate * (shape.confirmed() - shape.declined())
        exiting = left + gates + (1 - rate) * shape.head()
        for gpu, (bandwidth, _) in GPUS.items():
            lines.append(
                (name, gpu, f"{1e3 * full / shape.gpus / bandwidth:.2f}",
                 f"{shape.declined() / shape.layer():.3f}",
                 f"{shape.confirmed() / shape.layer():.2f}",
                 f"{shape.head() / shape.layer():.1f}", times(full / exiting))
            )  # fmt: skip
    head = ("model", "GPU", "full depth, ms a step", "a gate in layers, token continues",
            "token exits", "the head, in layers", "exits alone")  # fmt: skip
    note = (
        f"\n\n*Computed, not measured: exit rate {percent(rate)}, depth saved "
        f"{percent(chosen['depth_saved'])} with {checkpoints} checkpoints, of the exits that saved "
        "most depth of SmolLM2-135M at 2 %.*"
    )
    return table(head, lines) + note
