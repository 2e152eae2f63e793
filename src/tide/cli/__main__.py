"""The entry point of `python -m tide.cli`."""

from tide.cli import main

raise SystemExit(main())
