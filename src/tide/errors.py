"""The errors that TIDE raises.

Each is also a builtin error, and names what was got, what is allowed and what to do.
"""


class TideError(Exception):
    """Base class of every error that TIDE raises on purpose."""


class UnsupportedModelError(TideError, ValueError):
    """The model cannot be run by depth ranges, or not in its present state."""


class UnsupportedCacheError(TideError, TypeError):
    """The key/value cache is of a type that cannot hold sequences at different depths."""


class SelfCheckError(TideError, RuntimeError):
    """Range-running did not reproduce the model's own forward pass."""


class RangeError(TideError, ValueError):
    """A run was given layers, tokens or states that do not fit together."""


class ConfigError(TideError, ValueError):
    """A setting has a value that is not allowed, or is not a setting."""


class ArtifactError(TideError, ValueError):
    """An artifact cannot be read, is damaged, or was made for another model."""


class StorageError(TideError, OSError):
    """A file cannot be written: the disk is full, or may not be written."""


class CertificateError(TideError, ValueError):
    """No certificate covers the risk that is wanted."""


class UnsupportedGenerationError(TideError, ValueError):
    """`generate` was given an option that decoding by depth does not take."""


class NumericsError(TideError, RuntimeError):
    """The model's logits are no numbers to draw a token from."""


class DataError(TideError, ValueError):
    """Calibration data cannot be had, or is not what it should be."""


class MissingPackageError(TideError, ImportError):
    """A feature needs a package that is not installed."""
