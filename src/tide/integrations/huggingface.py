"""Gives the doors of `model.generate`: a decoder to hand it, and what an artifact's folder runs.

Both lead to the loop of the engine. What `generate` prepares, it prepares as ever.
"""

from __future__ import annotations

import inspect
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, proxy

from torch import Tensor

from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.exits import files
from tide.exits.artifact import Artifact
from tide.generation import bind_stop_strings, generate_call, refuse_options
from tide.stats import ExitStats

# What an engine takes beside the model and the artifact.
_OPTIONS = [*inspect.signature(TIDE).parameters][2:]


class Decoder:
    """A decoding loop for `model.generate(custom_generate=...)`; `tide.decoder` makes one.

    Keeps an engine for each model that it has decoded, as long as the model lives. Threads may
    share it.

    Attributes:
        last_stats: what the last call did; None before the first.
    """

    def __init__(
        self,
        artifact: str | Path | Artifact | None = None,
        config: TIDEConfig | None = None,
        **options: Any,
    ) -> None:
        inspect.signature(TIDE).bind(None, artifact, config, **options)  # a wrong name raises now
        loaded = artifact is None or isinstance(artifact, Artifact)
        self._artifact = artifact if loaded else Artifact.from_pretrained(artifact)  # type: ignore
        self._options = {"config": config, **options}
        self._engines: WeakKeyDictionary[Any, tuple[TIDE, Any]] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self.last_stats: ExitStats | None = None

    def engine(self, model: Any) -> TIDE:
        """The engine of a model: its `guard` and `certificate`, say. Made when first asked for."""
        place = (model.device, model.dtype)  # a model that was moved needs its exits elsewhere
        with self._lock:
            engine, known = self._engines.get(model, (None, None))
            if engine is None or known != place:
                engine = TIDE(model, self._artifact, **self._options)
                # The parts know nothing of the whole. So once these two references are weak, the
                # model goes when its owner lets go of it, and the engine with it.
                engine.model = engine.runner.model = proxy(model)
                self._engines[model] = (engine, place)
            return engine

    def __call__(self, model: Any, input_ids: Tensor, **prepared: Any) -> Any:
        """What `generate` calls once all is prepared."""
        call = generate_call()
        refuse_options({**call, "custom_generate": None})
        engine = self.engine(model)
        with engine.runner.lock:  # so that the statistics are of this call
            output = engine.decode(model, input_ids, streamer=call.get("streamer"), **prepared)
            self.last_stats = engine.last_stats
        return output


def decoder(
    artifact: str | Path | Artifact | None = None,
    config: TIDEConfig | None = None,
    **options: Any,
) -> Decoder:
    """Make a decoding loop that `model.generate` takes.

    ```python
    decoder = tide.decoder("router")
    output = model.generate(input_ids, max_new_tokens=128, custom_generate=decoder)
    print(decoder.last_stats.summary())
    ```

    The tokens are those of `tide.TIDE(model, "router").generate`. Make it once and use it for many
    calls: the first call with a model proves that it can be run by depth, and drafts and the watch
    learn from call to call.

    Stop strings cannot come in by this door: transformers keeps the tokenizer from every loop, and
    says that it is missing. Pass `stopping_criteria=[StopStringCriteria(tokenizer, strings)]`.

    Args:
        artifact: a folder, a file, a hub id or an `Artifact`; None for context drafts only.
        config: settings; without it, mode is "lossless", or "exit" if a risk is given.
        options: what else `tide.TIDE` takes: `risk`, `on_drift`, `boldness` and so on.
    """
    return Decoder(artifact, config, **options)


def generate(inputs: Tensor | None = None, *, model: Any, **kwargs: Any) -> Any:
    """What `model.generate(custom_generate="FOLDER", trust_remote_code=True)` runs.

    Takes what `model.generate` takes, the options of `tide.TIDE` (`risk=0.02`) and `revision`. Also
    found by `from_pretrained(trust_remote_code=True)` where the artifact lies in the model's own
    folder; there it stands in the place of `model.generate`.
    """
    if kwargs.get("custom_generate") is not None:  # in its place, and asked for another loop
        return type(model).generate(model, inputs, **kwargs)
    asked = generate_call().get("custom_generate")
    source = asked if isinstance(asked, str) else model.config._name_or_path
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    header = Path(source, files.HEADER)
    made = header.stat().st_mtime_ns if header.exists() else None
    loop = _shared(source, kwargs.pop("revision", None), made, **options)
    kwargs = bind_stop_strings(kwargs, model.generation_config)
    return type(model).generate(model, inputs, **{**kwargs, "custom_generate": loop})


@lru_cache(maxsize=8)
def _shared(source: str, revision: str | None, made: int | None, **options: Any) -> Decoder:
    """One decoder for like calls, or each would prove the model anew.

    Args:
        made: when a local artifact was written: one that was certified since is another.
    """
    return Decoder(Artifact.from_pretrained(source, revision=revision), **options)
