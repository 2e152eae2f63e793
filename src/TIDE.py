"""The published spelling: `import TIDE` is `import tide`."""

from typing import Any

import tide
from tide import __all__ as __all__
from tide import __version__ as __version__


def __getattr__(name: str) -> Any:
    return getattr(tide, name)
