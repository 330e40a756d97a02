"""The bundle that Flower wants of every run: a name and no code, the same bytes on every host, known by digest."""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import dataclass

from fedveil.errors import FedveilError

_PROJECT = """\
[project]
name = "fedveil-federation"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedveil"

[tool.flwr.app.components]
serverapp = "fedveil.flower:nothing"
clientapp = "fedveil.flower:nothing"
"""


class ForeignBundleError(FedveilError):
    """A task is of a run that the coordinator did not start."""


@dataclass(frozen=True)
class Bundle:
    """A Flower app bundle.

    Attributes:
        content: its bytes.
    """

    content: bytes

    @classmethod
    def build(cls) -> Bundle:
        """Return fedveil's own: two names of nothing, for who would start it; the coordinator plays its runs itself."""
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(
                zipfile.ZipInfo("pyproject.toml"), _PROJECT
            )  # without a time: always the same bytes
        return cls(content.getvalue())

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal digits, as Flower names it."""
        return hashlib.sha256(self.content).hexdigest()

    def check(self, content: bytes) -> None:
        """Return if these are the bytes of this bundle.

        Raises:
            ForeignBundleError: they are others.
        """
        found = Bundle(content).digest
        if found != self.digest:
            raise ForeignBundleError(
                f"a task brings the app {found[:16]}, not fedveil's own ({self.digest[:16]}); it is not run"
            )
