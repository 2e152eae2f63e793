"""Build and check a release from a clean export of the commit; tag it if told to.

    python scripts/release.py --url URL          # build, check, do not tag
    python scripts/release.py --url URL --tag

URL is where the repository is public. The README's links become absolute with it, since relative
ones lead nowhere on the package index. Uploads nothing; see RELEASING.md.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import release_check

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?!https?:|#)([^)\s]+)\)")


def absolute(readme: str, url: str, ref: str) -> str:
    """A README whose links lead to the repository at `ref`, those of pictures to raw files."""

    def link(found: re.Match[str]) -> str:
        where = "raw" if found[1] else "blob"
        return f"{found[1]}{found[2]}{url.rstrip('/')}/{where}/{ref}/{found[3]})"

    return LINK.sub(link, readme)


def with_urls(pyproject: str, url: str) -> str:
    """The project's settings with its addresses."""
    base = url.rstrip("/")
    urls = (
        f'[project.urls]\nHomepage = "{base}"\nIssues = "{base}/issues"\n'
        f'Changelog = "{base}/blob/main/CHANGELOG.md"\n\n'
    )
    return pyproject.replace("[project.scripts]\n", urls + "[project.scripts]\n", 1)


def faults(version: str, changelog: str, citation: str) -> list[str]:
    """What keeps a version from being released."""
    found = []
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        found.append(f"CHANGELOG.md has no dated entry `## {version} (YYYY-MM-DD)`.")
    if not re.search(rf"^version: {re.escape(version)}$", citation, re.MULTILINE):
        found.append(f"CITATION.cff is not of version {version}.")
    return found


def git(*args: str) -> str:
    return subprocess.run(
        ["git", *args], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def build(url: str | None, tag: str) -> None:
    """Build an export of the commit into dist/, and check it."""
    with tempfile.TemporaryDirectory() as scratch:
        archive, folder = Path(scratch) / "export.tar", Path(scratch) / "tide"
        git("archive", "--output", str(archive), "HEAD")
        shutil.unpack_archive(archive, folder)
        if url:
            readme, settings = folder / "README.md", folder / "pyproject.toml"
            readme.write_text(absolute(readme.read_text(), url, tag))
            settings.write_text(with_urls(settings.read_text(), url))
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        release_check.check_contents(*release_check.build(ROOT / "dist", folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="where the repository is public (default: keep links as is)")
    parser.add_argument("--tag", action="store_true", help="tag the commit (default: dry run)")
    args = parser.parse_args()
    source = (ROOT / "src" / "tide" / "__init__.py").read_text()
    found_version = re.search(r'^__version__ = "(.*)"$', source, re.MULTILINE)
    assert found_version is not None
    version = found_version[1]
    wrong = faults(
        version, (ROOT / "CHANGELOG.md").read_text(), (ROOT / "CITATION.cff").read_text()
    )
    if git("status", "--porcelain"):
        wrong.append("Some changes are not committed.")
    if args.tag and not args.url:
        wrong.append("A release needs --url: without it the README's links lead nowhere.")
    for fault in wrong:
        print(fault)
    if args.tag and wrong:
        raise SystemExit(1)
    build(args.url, f"v{version}")
    if args.tag:
        git("tag", "-a", f"v{version}", "-m", f"TIDE {version}")
        print(f"Tagged v{version}. Next: git push --tags, twine upload dist/*")
    else:
        print(f"Dry run: built and checked, not tagged. To be fixed before a tag: {len(wrong)}.")


if __name__ == "__main__":
    main()
