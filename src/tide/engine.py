"""Gives the engine: a model, an artifact, and `generate` with per-token depth."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode

from tide.config import TIDEConfig
from tide.decode.choose import Chooser
from tide.decode.drafts import ContextNGrams, ContinuationTable, DraftLength, DraftSource
from tide.decode.exits import Exits
from tide.decode.loop import DepthDecoder
from tide.decode.prefill import prefill
from tide.decode.rows import Row
from tide.errors import ConfigError, UnsupportedGenerationError
from tide.exits.artifact import Artifact, Checkpoint
from tide.exits.heads import Readout
from tide.exits.policy import Gate, GatePolicy, Policy
from tide.models.attach import attach
from tide.models.fingerprint import fingerprint
from tide.stats import ExitStats

_PLAIN_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class TIDE:
    """A frozen causal language model that spends less depth on easy tokens.

    ```python
    engine = TIDE(model, "router")                                     # lossless
    engine = TIDE(model, "router", config=TIDEConfig(exit_threshold=0.85))   # early exit
    output = engine.generate(input_ids, max_new_tokens=128)
    print(engine.last_stats.summary())
    ```

    Args:
        model: an `AutoModelForCausalLM` in evaluation mode; never changed, except inside a call.
        router_path: an artifact: a folder, a `.safetensors` or a `.pt` file, or an `Artifact`.
            None for lossless decoding with context drafts only, which needs no calibration.
        config: settings; without it, mode is "lossless".
        policy: who leaves where; by default the routers and thresholds of the artifact.
        allow_mismatch: use an artifact that was made for another model.
        check: prove on attach that range-running equals the model; see `tide.attach`.

    Attributes:
        last_stats: what the last call did.
    """

    def __init__(
        self,
        model: Any,
        router_path: str | Path | Artifact | None = None,
        config: TIDEConfig | None = None,
        *,
        policy: Policy | None = None,
        allow_mismatch: bool = False,
        check: bool = True,
    ) -> None:
        self.model = model
        self.config = config or TIDEConfig(mode="lossless")
        self.runner = attach(model, check=check)
        parts = self.runner.parts
        if router_path is None:
            self.artifact = Artifact(fingerprint(model, parts), self.runner.config.hidden_size)
        else:
            loaded = isinstance(router_path, Artifact)
            self.artifact = router_path if loaded else Artifact.load(router_path)  # type: ignore
            self.artifact.require(fingerprint(model, parts), force=allow_mismatch)
        self._exits = self._make_exits(policy)
        self._table = ContinuationTable(self.artifact.table) if self.artifact.table else None
        self._lengths = DraftLength(self.config.max_draft)
        self._lock = threading.RLock()
        self.last_stats = ExitStats(self.runner.n_layers)

    def generate(self, inputs: Tensor | None = None, **kwargs: Any) -> Any:
        """Generate as `model.generate` does, and with all that it takes.

        Greedy and sampling, logits processors, stopping criteria and strings, streamers,
        left-padded batches and `return_dict_in_generate` work as they do there. Beam search,
        assisted generation and a cache of your own are refused.

        Raises:
            UnsupportedGenerationError: naming what was asked for and what to do instead.
        """
        for name in ("assistant_model", "prompt_lookup_num_tokens", "past_key_values"):
            if kwargs.get(name) is not None:
                raise UnsupportedGenerationError(
                    f"engine.generate does not take {name}: TIDE drafts, verifies and caches by "
                    "itself. Leave it out, or call model.generate."
                )
        if kwargs.get("custom_generate") is not None:
            raise UnsupportedGenerationError(
                "engine.generate is itself a custom_generate. Call model.generate for another one."
            )
        streamer = kwargs.get("streamer")
        # A callable decoding loop is handed neither the streamer nor the tokenizer.
        kwargs = self._with_stop_strings(kwargs)

        def loop(model: Any, input_ids: Tensor, **prepared: Any) -> Any:
            return self._decode(input_ids, streamer, **prepared)

        with self._lock:
            return self.model.generate(inputs, custom_generate=loop, **kwargs)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits of every token, `[rows, tokens, vocabulary]`, with per-token exit.

        In mode "exit", a token that leaves is read where it leaves, and the layers above only get
        its K and V; the last token of each row goes to full depth. In other modes the logits are
        the model's own.
        """
        valid = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        stats = ExitStats(self.runner.n_layers)
        with self._lock, self.runner:
            if self.config.mode != "exit":
                with torch.no_grad():
                    return self.model(input_ids, attention_mask=attention_mask).logits
            if any(checkpoint.head.tail_layers for checkpoint in self._exits.checkpoints):
                raise UnsupportedGenerationError(
                    "engine(input_ids) cannot read tail heads, which finish tokens one by one. "
                    "Use engine.generate, or heads of another exit_strategy."
                )
            self.runner.counts.reset()
            done = prefill(
                self.runner,
                self._exits,
                self.config,
                self.runner.new_cache(len(input_ids)),
                input_ids,
                valid.bool(),
                range(len(input_ids)),
                with_logits=True,
            )
            assert done.logits is not None
            for depth in done.depths[valid.bool()].tolist():
                if depth < self.runner.n_layers:
                    stats.exit_at(depth - 1)
                else:
                    stats.full_depth()
            self._count(stats, self.runner.n_layers)
        return done.logits

    def _count(self, stats: ExitStats, layers_full: int) -> None:
        counts = self.runner.counts
        stats.layers_run, stats.tokens_run = sum(counts.calls), sum(counts.tokens)
        stats.layers_full = layers_full
        self.last_stats = stats

    def _decode(
        self,
        input_ids: Tensor,
        streamer: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        """The decode loop that `model.generate` calls with everything prepared."""
        _refuse_modes(generation_config, model_kwargs)
        mask = model_kwargs.get("attention_mask")
        rows = _rows(input_ids, mask, generation_config.max_length)
        chooser = Chooser(
            rows, logits_processor, stopping_criteria, sample=bool(generation_config.do_sample)
        )
        stats = ExitStats(self.runner.n_layers)
        self.runner.counts.reset()
        output = _Output(rows, generation_config, streamer)
        with self.runner:
            decoder = DepthDecoder(
                self.runner,
                self._exits,
                self.config,
                rows,
                chooser,
                [self._sources() for _ in rows],
                self._lengths,
                stats,
                output.stream,
            )
            decoder.decode()
        stats.depths = [row.depths for row in rows]
        stats.scores = [row.scores for row in rows]
        self._count(stats, self.runner.n_layers * max(len(row.new_tokens) for row in rows))
        return output.finish(input_ids)

    def _sources(self) -> list[DraftSource]:
        """Draft sources of one row, in order.

        None where tokens stop for good: a token on top of a guess could not, before it is known
        whether the guess is right.
        """
        deferred = self.config.kv_cache_strategy == "deferred"
        if self.config.mode == "off" or not self.config.max_draft or not deferred:
            return []
        made: dict[str, DraftSource | None] = {"context": ContextNGrams(), "table": self._table}
        return [source for name in self.config.drafts if (source := made.get(name)) is not None]

    def _make_exits(self, policy: Policy | None) -> Exits:
        parts, depth = self.runner.parts, self.runner.n_layers
        checkpoints: list[Checkpoint] = []
        if self.config.mode != "off":
            checkpoints = [
                c for c in self.artifact.checkpoints if c.layer + 1 >= self.config.min_layers
            ]
        _check_checkpoints(checkpoints, depth)
        parameter = next(parts.norm.parameters())
        for checkpoint in checkpoints:
            checkpoint.head.to(parameter.device, parameter.dtype)
            if checkpoint.router is not None:
                checkpoint.router.to(parameter.device)
        readout = Readout(parts.norm, parts.head, self.runner.config, self.artifact.vocabulary)
        if policy is None:
            gates = [self._gate(checkpoint) for checkpoint in checkpoints]
            policy = GatePolicy([c.router for c in checkpoints], gates)
        return Exits(checkpoints, readout, policy)

    def _gate(self, checkpoint: Checkpoint) -> Gate:
        """The thresholds of the artifact; where it has none, `exit_threshold` for the router."""
        gate = checkpoint.gate
        if gate.router is not None or gate.top_probability is not None:
            return gate
        if checkpoint.router is not None:
            return Gate(router=self.config.exit_threshold)
        return Gate(top_probability=self.config.exit_threshold)

    def _with_stop_strings(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Turn `stop_strings` and `tokenizer` into a criterion, as `generate` itself would."""
        kwargs = dict(kwargs)
        tokenizer = kwargs.pop("tokenizer", None)
        config = kwargs.get("generation_config") or self.model.generation_config
        strings = kwargs.pop("stop_strings", None) or getattr(config, "stop_strings", None)
        if strings is None:
            return kwargs
        if tokenizer is None:
            raise UnsupportedGenerationError("stop_strings needs tokenizer=... beside it.")
        if getattr(config, "stop_strings", None) is not None:
            kwargs["generation_config"] = GenerationConfig.from_dict(
                {**config.to_dict(), "stop_strings": None}
            )
        criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
        criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
        return {**kwargs, "stopping_criteria": criteria}


class _Output:
    """Streams settled tokens, and puts rows together as `generate` returns them."""

    def __init__(self, rows: list[Row], config: GenerationConfig, streamer: Any) -> None:
        self.rows, self.config, self.streamer = rows, config, streamer
        self._streamed = 0
        pad = getattr(config, "_pad_token_tensor", None)
        self._pad = 0 if pad is None else int(pad)

    def stream(self) -> None:
        """Hand out every column that all unfinished rows have reached."""
        if self.streamer is None:
            return
        open_rows = [len(row.new_tokens) for row in self.rows if not row.finished]
        ready = min(open_rows, default=max(len(row.new_tokens) for row in self.rows))
        for column in range(self._streamed, ready):
            self.streamer.put(torch.tensor([self._token(row, column) for row in self.rows]))
        self._streamed = max(self._streamed, ready)

    def finish(self, input_ids: Tensor) -> Any:
        """The sequences, prompt included, with padding behind rows that ended early."""
        if self.streamer is not None:
            self.streamer.end()
        length = max(len(row.new_tokens) for row in self.rows)
        new = [[self._token(row, column) for column in range(length)] for row in self.rows]
        sequences = torch.cat([input_ids, torch.tensor(new).to(input_ids)], dim=1)
        if self.config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    def _token(self, row: Row, column: int) -> int:
        tokens = row.new_tokens
        return tokens[column] if column < len(tokens) else self._pad


def _rows(input_ids: Tensor, mask: Tensor | None, max_length: int) -> list[Row]:
    """Rows of a left-padded batch."""
    rows = []
    for index, ids in enumerate(input_ids.cpu()):
        padding = 0 if mask is None else int((mask[index] == 0).sum())
        if mask is not None and not bool((mask[index, padding:] != 0).all()):
            raise UnsupportedGenerationError(
                f"Row {index} is not padded on the left. Set tokenizer.padding_side = 'left'."
            )
        context = torch.zeros(max_length, dtype=torch.long)
        context[: len(ids)] = ids
        tokens = ids[padding:].tolist()
        rows.append(Row(index, context, padding, tokens, len(tokens), len(tokens)))
    return rows


def _check_checkpoints(checkpoints: list[Checkpoint], depth: int) -> None:
    layers = [c.layer for c in checkpoints]
    if layers != sorted(set(layers)) or any(not 0 <= layer < depth - 1 for layer in layers):
        raise ConfigError(
            f"Checkpoints after layers {layers}; they must be ascending and before the last of "
            f"{depth} layers."
        )
    tails = {c.head.tail_layers for c in checkpoints}
    if len(tails) > 1 or any(c.layer + 1 > depth - c.head.tail_layers for c in checkpoints):
        raise ConfigError(
            f"Tail heads over {sorted(tails)} layers at checkpoints {layers}; all heads must "
            "finish through the same last layers, which lie above every checkpoint."
        )


def _refuse_modes(config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    mode = config.get_generation_mode()
    if mode not in _PLAIN_MODES:
        raise UnsupportedGenerationError(
            f"{mode.value} is not decoded by depth; TIDE does greedy search and sampling. "
            "Set num_beams=1 and leave out the other options, or call model.generate."
        )
    for name in ("output_attentions", "output_hidden_states", "output_scores", "output_logits"):
        if getattr(config, name, False) and config.return_dict_in_generate:
            raise UnsupportedGenerationError(
                f"{name}=True is not available when layers are skipped. Leave it out, or call "
                "model.generate."
            )
    if getattr(config, "guidance_scale", None) not in (None, 1.0):
        raise UnsupportedGenerationError(
            "guidance_scale runs the model a second time for every token. Leave it out."
        )
    if model_kwargs.get("inputs_embeds") is not None:
        raise UnsupportedGenerationError("TIDE needs token ids; got inputs_embeds.")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise UnsupportedGenerationError(
            "TIDE cannot continue from a cache that another loop has filled. Pass the whole prompt."
        )
