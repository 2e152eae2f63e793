"""`TIDEConfig`: every published setting under its published name, and our own beside them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from tide.errors import ConfigError

MODES = ("lossless", "exit", "off", "auto")
EXIT_STRATEGIES = ("affine", "identity")
KV_CACHE_STRATEGIES = ("deferred", "propagate", "zero_pad")
MOST_NODES = 64  # of a draft tree: its mask is one number of as many bits
DRAFT_SOURCES = ("context", "table", "exit", "recycled", "cross-request")
_DEFAULT_DRAFTS = DRAFT_SOURCES[:-1]


@dataclass(frozen=True)
class TIDEConfig:
    """Settings of calibration and of the engine; checked when made.

    The first ten are the published ones. Two of their defaults differ from what was published,
    because the published ones were measured to be worse: `exit_strategy` was "identity",
    `kv_cache_strategy` was "zero_pad".

    Attributes:
        exit_threshold: confidence at a checkpoint from which a token exits there, in mode "exit";
            None for the thresholds that calibration chose.
        min_layers: no token exits before it has passed this many layers.
        checkpoint_interval: a checkpoint every so many layers.
        calibration_samples: texts used by calibration.
        calibration_dataset: Hugging Face data set that they are taken from.
        convergence_threshold: cosine similarity that counts as converged, for calibration with
            `label="cosine"`.
        router_bottleneck_dim: hidden size of a router.
        exit_strategy: what turns a middle state into a token: "affine" or "identity".
        kv_cache_strategy: KV of skipped layers: "deferred" (exact, computed later), "propagate"
            (from the state in which the token exited) or "zero_pad" (as published).
        compaction_threshold: share of prompt tokens that must have exited before the rest are
            compacted (`prefill_exit`).
        mode: "exit", "lossless", "off", or "auto": the fastest of lossless and exit on this device.
        max_pending: most tokens of a sequence that may wait for a deep pass when a step ends.
        drafts: draft sources: "context" (n-grams of the sequence itself), "table" (of the
            artifact), "exit" (the exit heads, where no other source has a draft), "recycled" (in
            trees, what full depth lately predicted after the same tokens) and, not by
            default, "cross-request" (n-grams of answers in earlier calls of the engine).
        max_draft: most tokens that are drafted one after the other.
        max_tree: most nodes of a draft tree; 0 to draft chains only.
        share_recycled: let all sequences and calls of an engine draft from the same recycled
            predictions. False if users must not learn what others were told by how fast they are
            served. How often drafts are accepted, and what passes cost, is shared in any case.
        prefill_exit: let prompt tokens exit too.
        audit_tail: when a sequence ends, run a last deep pass so that every exited token was
            audited.
    """

    exit_threshold: float | None = 0.85
    min_layers: int = 8
    checkpoint_interval: int = 4
    calibration_samples: int = 2000
    calibration_dataset: str = "wikitext"
    convergence_threshold: float = 0.98
    router_bottleneck_dim: int = 128
    exit_strategy: str = "affine"
    kv_cache_strategy: str = "deferred"
    compaction_threshold: float = 0.25
    mode: str = "exit"
    max_pending: int = 16
    drafts: tuple[str, ...] = _DEFAULT_DRAFTS
    max_draft: int = 10
    max_tree: int = MOST_NODES
    share_recycled: bool = True
    prefill_exit: bool = False
    audit_tail: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafts", tuple(self.drafts))
        # A threshold above 1 is allowed: it turns exits off, and nothing else.
        threshold = self.exit_threshold
        _check(threshold is None or threshold >= 0, "exit_threshold", threshold, "at least 0")
        for name in ("convergence_threshold", "compaction_threshold"):
            value = getattr(self, name)
            _check(0 <= value <= 1, name, value, "between 0 and 1")
        for name in (
            "checkpoint_interval", "calibration_samples", "router_bottleneck_dim", "max_pending",
        ):  # fmt: skip
            value = getattr(self, name)
            _check(isinstance(value, int) and value >= 1, name, value, "a whole number from 1")
        for name in ("min_layers", "max_draft"):
            value = getattr(self, name)
            _check(isinstance(value, int) and value >= 0, name, value, "a whole number from 0")
        nodes = self.max_tree
        _check(nodes in range(MOST_NODES + 1), "max_tree", nodes, f"between 0 and {MOST_NODES}")
        for name, allowed in (
            ("mode", MODES),
            ("exit_strategy", EXIT_STRATEGIES),
            ("kv_cache_strategy", KV_CACHE_STRATEGIES),
        ):
            value = getattr(self, name)
            _check(value in allowed, name, value, "one of " + ", ".join(allowed))
        unknown = [source for source in self.drafts if source not in DRAFT_SOURCES]
        _check(not unknown, "drafts", self.drafts, "any of " + ", ".join(DRAFT_SOURCES))
        if self.mode == "lossless" and self.kv_cache_strategy != "deferred":
            raise ConfigError(
                f"mode='lossless' needs the exact KV of kv_cache_strategy='deferred'; got "
                f"{self.kv_cache_strategy!r}. Use mode='exit' with it, or omit it."
            )
        if self.prefill_exit and self.kv_cache_strategy != "propagate":
            raise ConfigError(
                "prefill_exit=True lets prompt tokens exit for good, so it needs "
                f"kv_cache_strategy='propagate'; got {self.kv_cache_strategy!r}."
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TIDEConfig:
        """Make a config from JSON values; a key that is not a setting raises."""
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key[:40], known, n=1)
                suggestion = f" Did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"TIDEConfig has no setting {key!r}.{suggestion} It has {known}.")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "drafts": list(self.drafts)}

    def with_(self, **changes: Any) -> TIDEConfig:
        """A copy with some settings changed."""
        return replace(self, **changes)


def _check(ok: bool, name: str, value: Any, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"TIDEConfig.{name} is {value!r}; it must be {allowed}.")
