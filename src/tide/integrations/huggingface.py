"""Entry points of `model.generate`: a decoder to hand it, and what an artifact's folder runs.

Both lead to the loop of the engine. What `generate` prepares, it prepares as ever.
"""

from __future__ import annotations

import copy
import inspect
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, proxy

from torch import Tensor

from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.errors import ArtifactError
from tide.exits import files
from tide.exits.artifact import Artifact
from tide.generation import bind_stop_strings, refuse_options
from tide.stats import ExitStats

# What an engine takes beside the model and the artifact.
_OPTIONS = [*inspect.signature(TIDE).parameters][2:]


class Decoder:
    """A decoding loop for `model.generate(custom_generate=...)`; `tide.decoder` makes one.

    Keeps an engine for each model that it has decoded, as long as the model lives. Threads may
    share it.

    Attributes:
        last_stats: what the last call did; None before the first.
        streamer: gets the tokens; None for none.
    """

    def __init__(
        self,
        artifact: str | Path | Artifact | None = None,
        config: TIDEConfig | None = None,
        *,
        streamer: Any = None,
        **options: Any,
    ) -> None:
        inspect.signature(TIDE).bind(None, artifact, config, **options)  # a wrong name raises now
        loaded = artifact is None or isinstance(artifact, Artifact)
        self._artifact = artifact if loaded else Artifact.from_pretrained(artifact)  # type: ignore
        self._options = {"config": config, **options}
        self._engines: WeakKeyDictionary[Any, tuple[TIDE, Any]] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self.streamer = streamer
        self.last_stats: ExitStats | None = None

    def with_streamer(self, streamer: Any) -> Decoder:
        """The same decoder, engines included, for a call that streams.

        transformers hands a decoding loop no streamer, so it must come this way. Do not pass it to
        `generate` as well: it would get the prompt twice.
        """
        other = copy.copy(self)
        other.streamer = streamer
        return other

    def engine(self, model: Any) -> TIDE:
        """The engine of a model, with circuit breaker and certificate; made when first needed."""
        place = (model.device, model.dtype)  # a model that was moved needs its exits elsewhere
        with self._lock:
            engine, known = self._engines.get(model, (None, None))
            if engine is None or known != place:
                # The engine must not keep its model alive: it goes when its owner lets go of it.
                engine = TIDE(proxy(model), self._artifact, **self._options)
                self._engines[model] = (engine, place)
            return engine

    def __call__(self, model: Any, input_ids: Tensor, **prepared: Any) -> Any:
        """What `generate` calls once all is prepared."""
        engine = self.engine(model)
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        with engine.runner.lock:  # so that the statistics are of this call
            output = engine.decode(model, input_ids, streamer=self.streamer, **prepared)
            self.last_stats = engine.last_stats
        return output


def decoder(
    artifact: str | Path | Artifact | None = None,
    config: TIDEConfig | None = None,
    *,
    streamer: Any = None,
    **options: Any,
) -> Decoder:
    """Make a decoding loop that `model.generate` takes.

    ```python
    decoder = tide.decoder("router")
    output = model.generate(input_ids, max_new_tokens=128, custom_generate=decoder)
    print(decoder.last_stats.summary())
    ```

    The tokens are those of `tide.TIDE(model, "router").generate`. Make it once and use it for many
    calls: the first call with a model proves that it can be run by depth, and drafts and the drift
    monitor learn from call to call.

    Stop strings and streamers cannot come in through `generate`: transformers keeps tokenizer and
    streamer from every custom loop. Pass `stopping_criteria=[StopStringCriteria(tokenizer,
    strings)]`, and the streamer here or to `decoder.with_streamer`.

    Args:
        artifact: a folder, a file, a hub id or an `Artifact`; None for context drafts only.
        config: settings; without it, mode is "lossless", or "auto" if a risk is given.
        streamer: transformers' streamer, for all calls.
        options: what else `tide.TIDE` takes: `risk`, `on_drift`, `threshold_scale` and so on.
    """
    return Decoder(artifact, config, streamer=streamer, **options)


def generate(inputs: Tensor | None = None, *, model: Any, artifact: str = "", **kwargs: Any) -> Any:
    """What `model.generate(custom_generate="FOLDER", trust_remote_code=True)` runs.

    Takes what `model.generate` takes, the options of `tide.TIDE` (`risk=0.02`) and `revision`. Also
    found by `from_pretrained(trust_remote_code=True)` where the artifact lies in the model's own
    folder; there it stands in the place of `model.generate`.

    Args:
        inputs: the prompts.
        model: to decode with.
        artifact: folder or hub id, which the artifact's own `custom_generate` folder gives.
    """
    if kwargs.get("custom_generate") is not None:  # in its place, and told to use another loop
        return type(model).generate(model, inputs, **kwargs)
    refuse_options(kwargs)
    source = _find(artifact, model)
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    header = Path(source, files.HEADER)
    made = header.stat().st_mtime_ns if header.exists() else None
    loop = _shared(source, kwargs.pop("revision", None), made, **options)
    loop = loop.with_streamer(kwargs.pop("streamer", None))
    kwargs = bind_stop_strings(kwargs, model.generation_config)
    return type(model).generate(model, inputs, **{**kwargs, "custom_generate": loop})


def _find(artifact: str, model: Any) -> str:
    """Where the artifact is: as its folder was written, or in the model's own folder."""
    name = str(model.config._name_or_path)
    for folder in (artifact, name):
        if folder and Path(folder, files.HEADER).exists():
            return folder
    if artifact and not Path(artifact).is_absolute():
        return artifact  # a hub id
    raise ArtifactError(
        f"There is no artifact at {artifact or name!r}: its folder was moved since it was written. "
        "Pass artifact='FOLDER' to generate, or write it again: "
        "Artifact.load(FOLDER).save_pretrained(FOLDER)."
    )


@lru_cache(maxsize=8)
def _shared(source: str, revision: str | None, made: int | None, **options: Any) -> Decoder:
    """One decoder for like calls, or each would prove the model anew.

    Args:
        made: when a local artifact was written: one that was certified since is another.
    """
    return Decoder(Artifact.from_pretrained(source, revision=revision), **options)
