"""TIDE's public names, each imported on first use so that `import tide` stays cheap.

See https://arxiv.org/abs/2603.21365 for the published system whose interface is kept.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tide.calibration.assess import assess as assess
    from tide.calibration.pipeline import calibrate as calibrate
    from tide.certification import certify as certify
    from tide.config import TIDEConfig as TIDEConfig
    from tide.engine import TIDE as TIDE
    from tide.integrations.huggingface import decoder as decoder
    from tide.models.attach import attach as attach
    from tide.stats import ExitStats as ExitStats

__version__ = "0.1.0"

# Public name -> the module that defines it.
_HOME = {
    "TIDE": "tide.engine",
    "TIDEConfig": "tide.config",
    "ExitStats": "tide.stats",
    "assess": "tide.calibration.assess",
    "attach": "tide.models.attach",
    "calibrate": "tide.calibration.pipeline",
    "certify": "tide.certification",
    "decoder": "tide.integrations.huggingface",
}

__all__ = [
    "TIDE",
    "ExitStats",
    "TIDEConfig",
    "assess",
    "attach",
    "calibrate",
    "certify",
    "decoder",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module 'tide' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    found = getattr(import_module(_HOME[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
