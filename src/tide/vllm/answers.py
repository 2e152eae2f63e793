"""Gives the answers that calibration collects states along, by vLLM: for models that are large.

vLLM answers many prompts at once far faster than `generate`; the states are then collected along
the answers with transformers, which reads each text in one pass. What is sampled depends on vLLM's
own seed, so a collection that was interrupted goes on with other draws than it would have had.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tide.calibration.collect import process
from tide.errors import ConfigError
from tide.vllm import require_version


class VllmAnswers:
    """Asks vLLM.

    Args:
        model: a hub id or a folder.
        dtype: as the states are collected.
        seed: of the sampling.
    """

    def __init__(self, model: str, dtype: str, seed: int = 0) -> None:
        require_version()
        if process()[1] > 1:
            raise ConfigError(
                "vLLM spreads over devices by itself; calibrate with --engine vllm in one process."
            )
        from vllm import LLM

        # Compiling for a CPU takes longer than it saves here.
        eager = not torch.accelerator.is_available()
        # The model is loaded twice, once by each engine.
        self._llm = LLM(
            model, dtype=dtype, seed=seed, enforce_eager=eager, gpu_memory_utilization=0.45
        )

    def __call__(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float
    ) -> list[list[int]]:
        """Answers as token ids, end-of-text token included."""
        from vllm import SamplingParams

        wanted = SamplingParams(temperature=temperature, max_tokens=new_tokens)
        out = self._llm.generate(
            [{"prompt_token_ids": list(ids)} for ids in prompts], wanted, use_tqdm=False
        )
        return [list(answer.outputs[0].token_ids) for answer in out]
