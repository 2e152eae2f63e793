"""Steps without drafts, sampled as vLLM samples them where no speculation is configured.

Relies on vLLM internals.
"""

from __future__ import annotations

from typing import Any


def sample_undrafted_directly() -> None:
    """Let vLLM's rejection sampler hand steps without drafts to the sampler; once for a process.

    With speculation configured, vLLM sends every step through it. For the drafts that there may be
    it copies the logits of all requests, twice: `requests x vocabulary` numbers.
    """
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    sampler: Any = RejectionSampler
    reject = sampler.forward
    if hasattr(sampler, "_tide_samples_directly"):
        return

    def forward(
        self: Any, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any
    ) -> Any:
        if metadata.max_spec_len or self.synthetic_mode:
            return reject(self, metadata, draft_probs, logits, sampling_metadata)
        # Without drafts, there are logits for one token of each request, in their order.
        return self.sampler(
            logits=logits, sampling_metadata=sampling_metadata, predict_bonus_token=True
        )

    sampler.forward, sampler._tide_samples_directly = forward, True
