"""What a release says of itself: the list of all that it needs, with versions."""

from __future__ import annotations

import json
import re
import runpy
from importlib import metadata
from pathlib import Path
from urllib.parse import quote

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "sbom"


def test_the_bill_of_materials_lists_all_that_is_needed() -> None:
    """Every package that fedveil or one of these needs, with its version here; the same bytes every time."""
    pytest.importorskip("cyclonedx", reason="pip-audit, which brings the library, is not installed")
    made = runpy.run_path(str(SCRIPT))["document"]
    plain, federated = made(()), made(("federation",))
    assert plain == made(())
    document = json.loads(plain)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    versions = {one["name"]: one["version"] for one in document["components"]}
    own = [line for line in metadata.requires("fedveil") or () if ";" not in line]
    needed = {re.split(r"[^A-Za-z0-9._-]", line)[0].lower().replace("_", "-") for line in own}
    assert len(needed) > 8
    assert needed <= set(versions)
    assert versions["numpy"] == metadata.version("numpy")
    assert {one["purl"] for one in document["components"]} == {
        f"pkg:pypi/{name}@{quote(version)}" for name, version in versions.items()
    }
    reached = {one["ref"] for one in document["dependencies"]}
    assert {one["purl"] for one in document["components"]} < reached
    assert "h11" not in versions
    assert "h11" in {one["name"] for one in json.loads(federated)["components"]}
